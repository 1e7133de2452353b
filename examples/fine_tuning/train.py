"""A network that knows the digits 0 to 4 learns 5 to 9 from a hundred samples.

    python train.py hparams.yaml                                        one process
    torchrun --standalone --nproc_per_node=2 train.py hparams.yaml      two

First the new head is trained on the frozen trunk, then both, the trunk with a smaller learning
rate.
"""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ddpkit
from ddpkit.metrics import Accuracy


class FineTuning(ddpkit.Brain):
    def init_optimizers(self):
        groups = [
            {"params": list(self.modules.head.parameters()), "lr": self.hparams.head_lr},
            {"params": list(self.modules.trunk.parameters()), "lr": self.hparams.trunk_lr},
        ]
        self.optimizer = self.opt_class(groups)
        self.optimizers_dict = {"opt_class": self.optimizer}
        self.checkpointer.add_recoverable("optimizer", self.optimizer)

    def on_stage_start(self, stage, epoch=None):
        self.accuracy = Accuracy()
        if stage is ddpkit.Stage.TRAIN:
            # DDP and the average follow. A parameter without a gradient is left as it is by the
            # optimizer.
            self.modules.trunk.requires_grad_(epoch > self.hparams.frozen_epochs)

    def compute_forward(self, batch, stage):
        return self.modules.head(self.modules.trunk(batch[0].to(self.device)))

    def compute_objectives(self, predictions, batch, stage):
        labels = batch[1].to(self.device)
        self.accuracy.update(predictions, labels)
        return cross_entropy(predictions, labels)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        stats = {"loss": stage_loss, "error": self.accuracy.error()}
        if stage is ddpkit.Stage.TRAIN:
            self.train_stats = stats
        elif stage is ddpkit.Stage.VALID:
            self.hparams.train_logger.log_stats({"epoch": epoch}, self.train_stats, stats)
            # before the save, which has the counter in it
            self.hparams.epoch_counter.update_metric(stats["error"])
            self.checkpointer.save_and_keep_only(meta=stats, min_keys=["error"])
        else:
            self.hparams.train_logger.log_stats(
                {"epoch": self.hparams.epoch_counter.current},
                test_stats=stats,
            )
            self.test_error = stats["error"]


def digits(kinds):
    """Return the images of some digits, shape (size, 1, 8, 8), and their labels from 0, in an order
    drawn once.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ddpkit.MissingExtraError(
            "The digits come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = images[order]
    labels = labels[order]
    chosen = torch.isin(labels, torch.tensor(kinds))
    return images[chosen], labels[chosen] - min(kinds)


def pretrain(trunk, file):
    """Train the trunk on the digits 0 to 4 and write it to a file: in life somebody else has done
    that.
    """
    if Path(file).exists():
        return
    images, labels = digits(range(5))
    net = torch.nn.Sequential(trunk, torch.nn.Linear(144, 5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    for _ in range(5):
        for batch in torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split(
            50
        ):
            optimizer.zero_grad()
            cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
    new_file = Path(f"{file}.new")
    torch.save(trunk.state_dict(), new_file)
    new_file.replace(file)  # a file that has its final name is complete


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    # the others wait
    ddpkit.run_on_main(pretrain, args=[hparams["trunk"], hparams["pretrained_file"]])
    hparams["trunk"].load_state_dict(torch.load(hparams["pretrained_file"], weights_only=True))
    hparams["trunk"].requires_grad_(False)
    images, labels = digits(range(5, 10))
    train, valid, test = (
        TensorDataset(images[part], labels[part])
        for part in (slice(100), slice(100, 300), slice(300, None))
    )

    brain = FineTuning(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    evaluation = {"batch_size": 100}
    brain.fit(
        hparams["epoch_counter"],
        train,
        valid,
        train_loader_kwargs={"shuffle": True},
        valid_loader_kwargs=evaluation,
    )
    ended = hparams["epoch_counter"].current
    best = hparams["epoch_counter"].best_limit
    brain.evaluate(test, min_key="error", test_loader_kwargs=evaluation)
    if ddpkit.if_main_process():
        print(f"training ended after epoch {ended}; the best was epoch {best}")
        print(f"test accuracy {100 * (1 - brain.test_error):.1f} %, from {len(train)} samples")


if __name__ == "__main__":
    main()
