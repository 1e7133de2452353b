"""The recipe of the drawn trainings, and how it runs on a rank: through, and from what a kill has
left.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import BatchSampler, IterableDataset

import ddpkit
from ddpkit.checkpoints import (
    Checkpointer,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from ddpkit.distributed import get_rank, if_main_process
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError, DataError
from tests.model.training import REFERENCE, SEED, Training, rate_after, rows_of, sampled

NET_SEED = 5
FIRST_OF_VALIDATION = 101
OF_A_LAUNCHER = ("RANK", "LOCAL_", "WORLD_", "GROUP_", "MASTER_", "TORCHELASTIC_")


class Rows(torch.utils.data.Dataset):
    """Samples: a number, inputs, a target, and how many tokens count."""

    def __init__(self, first, samples):
        self.rows = list(zip(range(samples), *rows_of(first, samples), strict=True))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


class Stream(IterableDataset):
    """The samples one after the other; ddpkit divides them by counting."""

    def __init__(self, samples, first=0, step=1):
        self.samples = samples
        self.rows = Rows(0, samples).rows[first::step]

    def __iter__(self):
        return iter(self.rows)


class DividedStream(Stream):
    """A stream that divides itself."""

    num_shards = 12

    def shard(self, num_shards, index):
        return DividedStream(self.samples, index, num_shards)


@register_checkpoint_hooks
class Moment:
    """Does what stands for a kill, once, when the run has come to the moment of it.

    As a recoverable of its own it is there in the middle of a save, too.
    """

    def __init__(self, training: Training, act):
        self.wanted = (training.killed, training.killed_at)
        self.act = act
        self.counts = dict.fromkeys(("batch", "step", "save", "epoch", "saved"), 0)

    def come(self, kind):
        self.counts[kind] += 1
        if self.act is not None and self.wanted == (kind, self.counts[kind]):
            self.act()

    @mark_as_saver
    def save(self, path):
        Path(path).write_text("a file of a checkpoint that is being saved", encoding="utf-8")
        self.come("save")

    @mark_as_loader
    def load(self, path, end_of_epoch):
        """Has nothing to load."""


class Fitter(ddpkit.Brain):
    """Writes down which samples every step has, and what is reported."""

    def on_fit_start(self):
        super().on_fit_start()
        self.epoch = 0
        self.seen = {}
        self.reported = []

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch
        if stage is ddpkit.Stage.TRAIN and epoch == 2 and self.training.thaws:
            self.raw_modules.net.upper[0].requires_grad_(True)

    def compute_forward(self, batch, stage):
        if stage is ddpkit.Stage.TRAIN:
            self.moment.come("batch")
            if self.progress.window.count:  # what is repeated to keep step counts nothing
                place = (self.epoch, self.optimizer_step)
                self.seen.setdefault(place, []).extend(batch[0].tolist())
        return self.modules.net(batch[1])

    def compute_objectives(self, predictions, batch, stage):
        losses = (predictions - batch[2]).square().squeeze(1)
        if self.training.counts_tokens:
            return (losses * batch[3]).sum(), batch[3].sum()
        return losses.mean()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step:
            self.moment.come("step")

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.reported.append((stage.name, epoch, stage_loss))
        if stage is ddpkit.Stage.VALID:
            self.moment.come("epoch")
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})
            self.moment.come("saved")


class OwnFitBatch(Fitter):
    """Has a ``fit_batch`` of its own, as the page on it shows."""

    def fit_batch(self, batch):
        with self.training_ctx:
            outputs = self.compute_forward(batch, ddpkit.Stage.TRAIN)
            loss = self.compute_objectives(outputs, batch, ddpkit.Stage.TRAIN)
        self.backward(loss)
        should_step = self.should_step
        if should_step:
            self.optimizers_step()
        self.on_fit_batch_end(batch, outputs, loss, should_step)
        return (loss[0].detach(), loss[1]) if isinstance(loss, tuple) else loss.detach()


def two_optimizers(self):
    net = self.raw_modules.net
    self.optimizers_dict = {
        "lower": self.opt_class(net.lower.parameters()),
        "upper": self.opt_class(net.upper.parameters()),
    }
    self.checkpointer.add_recoverables(self.optimizers_dict)


class TwoOptimizers(Fitter):
    init_optimizers = two_optimizers


class OwnFitBatchOfTwoOptimizers(OwnFitBatch):
    init_optimizers = two_optimizers


RECIPES = {
    (False, 1): Fitter,
    (True, 1): OwnFitBatch,
    (False, 2): TwoOptimizers,
    (True, 2): OwnFitBatchOfTwoOptimizers,
}


# -------------------------------------------------------------------------------- parts of a recipe


def make_net(training: Training) -> nn.Module:
    torch.manual_seed(NET_SEED)
    # No bias before BatchNorm: its gradient is rounding alone, which Adam would blow up.
    lower = [nn.Linear(3, 4, bias=not training.norm)]
    if training.norm:
        lower.append(nn.BatchNorm1d(4))
    upper = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    if training.frozen:
        upper[0].requires_grad_(False)
    parts = {"lower": nn.Sequential(*lower), "tanh": nn.Tanh(), "upper": upper}
    return nn.Sequential(OrderedDict(parts)).double()


def make_optimizer(training: Training, parameters):
    if training.adam:
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def by_rate(optimizer, total_steps):
    return LambdaLR(optimizer, rate_after(total_steps))


SCHEDULES = {
    None: None,
    "step": by_rate,
    "epoch": by_rate,
    "plateau": functools.partial(ReduceLROnPlateau, patience=0, threshold=0.5),
}


def options_of(training: Training, strategy: str) -> dict:
    return {
        "device": "cpu",
        "noprogressbar": True,
        "hang_warning": 0,
        "ckpt_async": training.saves_in_background,
        "ckpt_load": "broadcast" if training.sends_checkpoints else "all",
        "strategy": strategy,
        "virtual_ranks": training.virtual_ranks,
        "grad_accumulation_factor": training.factor,
        "global_batch_size": training.whole,
        "micro_batch_size": training.micro,
        "loss_weighting": training.weighting,
        "max_grad_norm": training.max_norm,
        "ema_decay": training.ema_decay,
        "evaluate_ema": training.evaluates_average,
        "scheduler_every": "step" if training.schedule in {None, "step"} else "epoch",
        "optimizer_step_limit": training.step_limit,
        "lr_scaling": "linear" if training.scales_rate else "none",
        "reference_batch_size": REFERENCE if training.scales_rate else None,
        "shard_evaluation": training.shard_evaluation,
        "ckpt_interval_steps": training.save_every,
    }


def data_of(training: Training):
    """Return the training set, and the arguments of its loader."""
    size = {} if training.whole else {"batch_size": training.batch}
    rows = Rows(0, training.samples)
    if training.data == "stream":
        return Stream(training.samples), size
    if training.data == "divided stream":
        return DividedStream(training.samples), size
    if training.data == "sampler":
        return rows, size | {"sampler": sampled(training.samples), "drop_last": training.drop_last}
    if training.data == "batches":
        return rows, {"batch_sampler": BatchSampler(range(training.samples), training.batch, False)}
    return rows, size | {"shuffle": training.shuffle, "drop_last": training.drop_last}


# ------------------------------------------------------------------------------------ on every rank


def train(training: Training, folder: str, strategy: str, act=None) -> dict | str:
    """Train to the end, from what there is in a folder; return what came of it on this rank.

    Args:
        training: described.
        folder: of checkpoints.
        strategy: how several ranks train.
        act: called on this rank at the moment of the kill; or None.
    """
    ddpkit.seed_everything(SEED, verbose=False)
    net = make_net(training)
    with torch.no_grad():
        for one in (*net.parameters(), *net.buffers()):
            one.add_(get_rank() or 0)  # a run begins with what rank 0 has
    counter = EpochCounter(training.epochs)
    moment = Moment(training, act)
    recoverables = {"net": net, "counter": counter, "moment": moment}
    brain = RECIPES[training.own_fit_batch, training.optimizers](
        {"net": net},
        lambda parameters: make_optimizer(training, parameters),
        None,
        options_of(training, strategy),
        Checkpointer(folder, recoverables),
        SCHEDULES[training.schedule],
    )
    brain.training = training
    brain.moment = moment
    data, loader = data_of(training)
    others = Rows(FIRST_OF_VALIDATION, training.validation)
    validation = {"batch_size": 2}
    try:
        brain.fit(counter, data, others, train_loader_kwargs=loader, valid_loader_kwargs=validation)
    except (DataError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return facts_of(brain)


def facts_of(brain) -> dict:
    average = None if brain.ema is None else whole_state(brain.ema)
    state = brain.raw_modules.net.state_dict()
    optimizers = brain.optimizers_dict or {"optimizer": brain.optimizer}
    return {
        "steps": brain.optimizer_step,
        "reported": brain.reported,
        "seen": brain.seen,
        "weights": {name: whole(value) for name, value in state.items()},
        "average": average,
        "rates": [group["lr"] for one in optimizers.values() for group in one.param_groups],
    }


def whole(tensor):
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def whole_state(average):
    state = average.state_dict()
    return {
        name.removeprefix("net."): whole(value)
        for name, value in state.items()
        if name.startswith("net.")
    }


def through(training: Training, folder: str, copy: str) -> dict | str:
    """Train from the beginning to the end; at the moment of the kill the folder is copied."""
    if training.world == 1 and training.strategy == "auto":
        leave_the_launcher()
    return train(training, folder, training.strategy, lambda: copy_folder(folder, copy))


def again(training: Training, folder: str) -> dict | str:
    """Go on from what a kill has left."""
    if training.world_after == 1 and training.strategy_after == "auto":
        leave_the_launcher()
    return train(training, folder, training.strategy_after)


def copy_folder(folder: str, copy: str) -> None:
    """Keep what a kill at this moment would leave."""
    while if_main_process():
        try:
            shutil.copytree(folder, copy, symlinks=True)
        except OSError:  # a thread that saves has renamed something meanwhile
            shutil.rmtree(copy)
        else:
            return


def leave_the_launcher() -> None:
    """Be a process that nobody has launched; the pool of ranks puts its environment back."""
    for name in [name for name in os.environ if name.startswith(OF_A_LAUNCHER)]:
        del os.environ[name]
