"""Tell malignant from benign tumours by 30 measurements of each.

    python train.py hparams.yaml                                        one process
    torchrun --standalone --nproc_per_node=2 train.py hparams.yaml      two

The table is scikit-learn's breast cancer data, 569 rows. Training stops when the validation gets no
better, and the best checkpoint is tested.
"""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

import ddpkit


class Table(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].to(self.device)).squeeze(1)

    def compute_objectives(self, predictions, batch, stage):
        labels = batch[1].to(self.device)
        right = (predictions > 0) == (labels > 0.5)
        self.log("error", (~right).sum(), count=len(labels))
        return binary_cross_entropy_with_logits(predictions, labels)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        stats = {"loss": stage_loss, "error": self.logged["error"]}
        logger = self.hparams.train_logger
        if stage is ddpkit.Stage.TRAIN:
            self.train_stats = stats
        elif stage is ddpkit.Stage.VALID:
            logger.log_stats({"epoch": epoch}, self.train_stats, stats)
            self.checkpointer.save_and_keep_only(meta=stats, min_keys=["loss"])
        else:
            logger.log_stats({"epoch": self.hparams.epoch_counter.current}, test_stats=stats)
            self.test_error = stats["error"]


def read_table(split_seed):
    """Return the rows for training, validation and test, each column with mean 0 and spread 1 in
    the training rows.
    """
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError as error:
        raise ddpkit.MissingExtraError(
            "The table comes with scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    table = load_breast_cancer()
    rows = torch.tensor(table.data, dtype=torch.float32)
    labels = torch.tensor(table.target, dtype=torch.float32)
    # a generator of its own: the split must not depend on what has drawn before
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(split_seed))
    parts = order.split([341, 114, 114])
    train = rows[parts[0]]
    # of the training rows alone: the others must tell nothing before they are asked
    rows = (rows - train.mean(0)) / train.std(0)
    return [TensorDataset(rows[part], labels[part]) for part in parts]


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    # a table is small: every process reads all of it
    train, valid, test = read_table(hparams["split_seed"])
    brain = Table(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    evaluation = {"batch_size": 57}
    brain.fit(
        hparams["epoch_counter"],
        train,
        valid,
        train_loader_kwargs={"shuffle": True},
        valid_loader_kwargs=evaluation,
    )
    # before the evaluation, which goes back to the best checkpoint
    ended = hparams["epoch_counter"].current
    best = hparams["early_stopping"].best_epoch
    brain.evaluate(test, min_key="loss", test_loader_kwargs=evaluation)
    if ddpkit.if_main_process():
        wrong = round(brain.test_error * len(test))
        print(f"training ended after epoch {ended}; the best was epoch {best}")
        print(f"{wrong} of {len(test)} rows of the test are told wrong")


if __name__ == "__main__":
    main()
