"""Recognise handwritten digits with a small convolutional network.

    python train.py hparams.yaml                                        one process
    torchrun --standalone --nproc_per_node=2 train.py hparams.yaml      two

Both train the same network, up to rounding. hparams.yaml says what is trained, this file how.
"""

import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ddpkit
from ddpkit.distributed import get_world_size
from ddpkit.metrics import Accuracy


class DigitBrain(ddpkit.Brain):
    """Says what a batch computes. Every method here is called on every process, with that process's
    data.
    """

    def compute_forward(self, batch, stage):
        images, _ = batch
        return self.modules.net(images.to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        labels = batch[1].to(self.device)
        if stage is not ddpkit.Stage.TRAIN:
            self.accuracy.update(predictions, labels)
        return F.cross_entropy(predictions, labels)

    def on_stage_start(self, stage, epoch=None):
        self.accuracy = Accuracy()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        # stage_loss is the mean over all processes already, the same number on each.
        if stage is ddpkit.Stage.TRAIN:
            self.train_stats = {"loss": stage_loss}
            return
        # The accuracy has counted this process's part only, and adds up the counts of all processes
        # here. So all of them have to come here: not under `if ddpkit.if_main_process():`.
        stats = {"loss": stage_loss, "error": self.accuracy.error()}
        if stage is ddpkit.Stage.VALID:
            self.hparams.train_logger.log_stats(
                {"epoch": epoch},
                self.train_stats,
                valid_stats=stats,
            )
            # Keeps two checkpoints: the newest, to go on from, and the one with the smallest error,
            # to test.
            self.checkpointer.save_and_keep_only(meta=stats, min_keys=["error"])
        else:
            self.test_error = stats["error"]
            self.hparams.train_logger.log_stats(
                {"epoch": self.hparams.epoch_counter.current},
                test_stats=stats,
            )


def prepare_digits(data_file, split_seed, valid_size, test_size):
    """Write the digits, split into train, valid and test, where every process can read them."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ddpkit.MissingExtraError(
            "The digits come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    digits = load_digits()
    # (1797, 1, 8, 8), 0 to 1
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    # A generator of its own: the split must not depend on what has drawn random numbers before.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split_seed))
    test, valid, train = order.split([test_size, valid_size, len(order) - test_size - valid_size])
    parts = {"train": train, "valid": valid, "test": test}
    new_file = Path(f"{data_file}.new")
    torch.save({name: (images[part], labels[part]) for name, part in parts.items()}, new_file)
    new_file.replace(data_file)  # a file that has its final name is complete


def main():
    started = time.monotonic()
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    # Joins the processes that torchrun started. Under plain python there is nothing to join.
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    # The main process prepares the data; the others wait for it, however long it takes.
    settings = ("data_file", "split_seed", "valid_size", "test_size")
    ddpkit.run_on_main(prepare_digits, kwargs={name: hparams[name] for name in settings})
    parts = torch.load(hparams["data_file"], weights_only=True)
    data = {name: TensorDataset(images, labels) for name, (images, labels) in parts.items()}

    brain = DigitBrain(
        modules=hparams["modules"],
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=hparams["checkpointer"],
    )
    evaluation = {"batch_size": hparams["evaluation_batch_size"]}
    brain.fit(
        hparams["epoch_counter"],
        data["train"],
        data["valid"],
        # the option global_batch_size says how many samples make a step
        train_loader_kwargs={"shuffle": True},
        valid_loader_kwargs=evaluation,
    )
    brain.evaluate(data["test"], min_key="error", test_loader_kwargs=evaluation)

    if ddpkit.if_main_process():
        tested = len(data["test"])
        right = tested - round(brain.test_error * tested)
        processes = get_world_size()
        print(
            f"test accuracy {100 * right / tested:.1f} % ({right} of {tested}), "
            f"{processes} process{'es' if processes > 1 else ''}, "
            f"{time.monotonic() - started:.0f} s; run directory {hparams['output_folder']}"
        )


if __name__ == "__main__":
    main()
