"""A recipe that logs, is killed in the middle of an epoch, and goes on."""

from __future__ import annotations

from pathlib import Path

from ddpkit.epoch_loop import EpochCounter
from tests.recipes import Killed, Regression, make, points, world_size

EPOCHS = 3
STEPS = 4  # of an epoch
ENDS = [STEPS, 2 * STEPS, 3 * STEPS]  # optimizer steps at the end of each epoch
KILLED = 8  # optimizer steps of the killed run, which logs the second epoch; it goes on from 7
NEWEST = 11  # optimizer steps of the last checkpoint, which a test is made with


class Logged(Regression):
    """Logs values of batches and of epochs; may be killed before a step."""

    dies_at = None

    def compute_objectives(self, predictions, batch, stage):
        if stage.name == "TRAIN" and self.optimizer_step == self.dies_at:
            raise Killed
        loss = super().compute_objectives(predictions, batch, stage)
        self.log("error", loss)
        return loss

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage.name == "TRAIN":
            self.train_loss = stage_loss
            return
        if stage.name == "TEST":
            self.hparams.train_logger.log_stats({}, test_stats={"loss": stage_loss})
            return
        stats = {"train_stats": {"loss": self.train_loss}, "valid_stats": {"loss": stage_loss}}
        self.hparams.train_logger.log_stats({"epoch": epoch}, **stats)


class SavesFirst(Logged):
    """Saves at the end of an epoch, and logs after that: a run that goes on does not repeat it."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage.name == "VALID":
            self.checkpointer.save_checkpoint()
        super().on_stage_end(stage, stage_loss, epoch)


def train(
    folder,
    train_logger,
    dies_at=None,
    *,
    is_tested=False,
    epochs=EPOCHS,
    save_every=3,
    recipe=Logged,
):
    """Train as a script does, with a checkpoint in each epoch after its third step, or at another.

    Returns:
        The Brain; None if it was killed.
    """
    counter = EpochCounter(epochs)
    brain = make(
        recipe,
        hparams={"train_logger": train_logger},
        folder=Path(folder) / "save",
        recoverables={"counter": counter},
        ckpt_interval_steps=save_every,
    )
    brain.dies_at = dies_at
    size = {"batch_size": 16 // world_size()}
    try:
        brain.fit(counter, points(16 * STEPS), points(16, seed=6), train_loader_kwargs=size)
    except Killed:
        return None
    if is_tested:
        brain.evaluate(points(8, seed=8))
    return brain
