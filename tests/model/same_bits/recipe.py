"""The recipe of the drawn trainings whose bits are compared, as it runs on a rank."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, Dataset, IterableDataset

import ddpkit
from ddpkit.base import temporarily
from ddpkit.checkpoints import Checkpointer
from ddpkit.comm import ordered_sum
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from tests.model.recipe import SCHEDULES, Moment, leave_the_launcher
from tests.model.same_bits.described import DIVIDING, STRATEGIES, VIRTUAL_RANKS, Moments, Recipe
from tests.model.training import SEED, sampled

FEATURES = 5
SMALL = 256  # bytes
WIDTH = 7  # is no multiple of a number of processes: of 8 one has no row of a weight
SHARDS_OF_A_STREAM = 12
FIRST_OF_VALIDATION = 101


# ------------------------------------------------------------------------------------ data


def rows_of(samples: int, first: int = 0) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs, a target and the number of tokens of each sample."""
    draw = torch.Generator().manual_seed(first)
    inputs = torch.randn(samples, FEATURES, generator=draw)
    targets = inputs.sum(1, keepdim=True).tanh()
    tokens = torch.arange(1, samples + 1) % 4
    return list(zip(inputs, targets, tokens, strict=True))


class Rows(Dataset):
    """Samples, with noise when they are read."""

    def __init__(self, rows, *, is_noisy=False):
        self.rows = rows
        self.is_noisy = is_noisy

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        inputs, *others = self.rows[number]
        return [inputs + 0.1 * torch.randn(()) if self.is_noisy else inputs, *others]


class Stream(IterableDataset):
    """The samples one after the other; ddpkit divides them by counting."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class DividedStream(Stream):
    """A stream that divides itself."""

    num_shards = SHARDS_OF_A_STREAM

    def shard(self, num_shards, index):
        return DividedStream(self.rows[index::num_shards])


def data_of(recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """Return the training set, and the arguments of its loader."""
    # without a size of one's own, that of a global batch is what counts
    size = {} if recipe.whole else {"batch_size": recipe.batch}
    rows = rows_of(recipe.samples)
    if recipe.data == "stream":
        return Stream(rows), size
    if recipe.data == "divided stream":
        return DividedStream(rows), size
    data = Rows(rows, is_noisy=recipe.noisy_data)
    if recipe.data == "batches":
        return data, {"batch_sampler": BatchSampler(range(len(rows)), recipe.batch, False)}
    if recipe.data == "sampler":
        return data, size | {"sampler": sampled(len(rows)), "drop_last": recipe.drop_last}
    return data, size | {"shuffle": recipe.shuffle, "drop_last": recipe.drop_last}


# ------------------------------------------------------------------------------------ the model


class Block(nn.Sequential):
    """What FSDP2 may gather by itself, and what may be computed again."""


class Net(nn.Module):
    """Two blocks between layers of its own."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        norms = {
            None: nn.Identity,
            "layer": functools.partial(nn.LayerNorm, WIDTH),
            "batch": functools.partial(nn.BatchNorm1d, WIDTH),
        }
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.Sequential(
            *(
                Block(
                    nn.Linear(WIDTH, WIDTH),
                    norms[recipe.norm](),
                    nn.Tanh(),
                    nn.Dropout(recipe.dropout),
                    nn.Linear(WIDTH, WIDTH),
                )
                for _ in "ab"
            )
        )
        self.before_last = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        if recipe.tied == "inside":
            self.last.weight = self.before_last.weight
        if recipe.frozen:
            self.blocks[1].requires_grad_(False)
        if recipe.unused:
            self.unused = nn.Linear(WIDTH, 2)

    def forward(self, inputs):
        inside = self.blocks(self.first(inputs).tanh())
        return self.last(self.before_last(inside).tanh())


class Head(nn.Module):
    """Another entry of the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        return self.outer(self.inner(inputs).tanh())


def make_modules(recipe: Recipe) -> dict[str, nn.Module]:
    torch.manual_seed(SEED)
    net, head = Net(recipe), Head()
    if recipe.tied == "entries":
        head.inner.weight = net.last.weight
    with torch.no_grad():
        for one in (*net.parameters(), *head.parameters()):
            one.add_(int(os.environ.get("RANK", "0")))  # a run begins with what rank 0 has
    return {"net": net, "head": head}


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}


class Fitter(ddpkit.Brain):
    """Notes what is reported, and comes to the moments of a kill."""

    recipe: Recipe
    moment: Moment

    def on_fit_start(self):
        super().on_fit_start()
        self.reported = []

    def on_stage_start(self, stage, epoch=None):
        if stage is ddpkit.Stage.TRAIN and epoch == 2 and self.recipe.thaws:
            self.raw_modules.net.blocks[1].requires_grad_(True)

    def compute_forward(self, batch, stage):
        if stage is ddpkit.Stage.TRAIN:
            self.moment.come("batch")
        return self.modules.head(self.modules.net(batch[0]))

    def compute_objectives(self, predictions, batch, stage):
        losses = (predictions.float() - batch[1]).square().squeeze(1)
        if self.recipe.counts_tokens:
            return (losses * batch[2]).sum(), batch[2].sum()
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
    self.optimizers_dict = {
        f"optimizer of {name}": self.opt_class(module.parameters())
        for name, module in self.raw_modules.items()
    }
    self.checkpointer.add_recoverables(self.optimizers_dict)


class TwoOptimizers(Fitter):
    init_optimizers = two_optimizers


class OwnFitBatchOfTwoOptimizers(OwnFitBatch):
    init_optimizers = two_optimizers


BRAINS = {
    (False, 1): Fitter,
    (True, 1): OwnFitBatch,
    (False, 2): TwoOptimizers,
    (True, 2): OwnFitBatchOfTwoOptimizers,
}


def options_of(recipe: Recipe, strategy: str) -> dict[str, Any]:
    options = {
        "device": "cpu",
        "noprogressbar": True,
        "hang_warning": 0,
        "virtual_ranks": VIRTUAL_RANKS,
        "strategy": STRATEGIES[strategy],
        "ckpt_async": recipe.saves_in_background,
        "ckpt_load": "broadcast" if recipe.sends_checkpoints else "all",
        "ckpt_interval_steps": recipe.save_every,
        "grad_accumulation_factor": recipe.factor,
        "global_batch_size": recipe.whole,
        "micro_batch_size": recipe.micro,
        "loss_weighting": recipe.weighting,
        "precision": recipe.precision,
        "max_grad_norm": recipe.max_norm,
        "skip_nonfinite_grads": recipe.skips_nonfinite,
        "activation_checkpointing": ["Block"] if recipe.recomputes else None,
        "ema_decay": recipe.ema_decay,
        "evaluate_ema": recipe.evaluates_average,
        "scheduler_every": "epoch" if recipe.schedule == "epoch" else "step",
        "optimizer_step_limit": recipe.step_limit,
        "shard_evaluation": recipe.shard_evaluation,
    }
    if strategy in DIVIDING and recipe.saves_shards:
        options["ckpt_layout"] = "shards"
    if strategy == "fsdp":
        options["fsdp_blocks"] = ["Block"] if recipe.blocks else None
        options["fsdp_reshard_after_forward"] = not recipe.keeps_whole
    return options


# ------------------------------------------------------------------------------------ on every rank


def train(recipe: Recipe, folder: str, strategy: str, moments: Moments) -> dict[str, Any] | str:
    """Train to the end, or to a kill, from what there is in a folder.

    Args:
        recipe: described.
        folder: of checkpoints.
        strategy: by its name here.
        moments: of the kill of all ranks.

    Returns:
        What came of it on this rank; or the words of an error before the first batch.
    """
    if strategy == "single":
        leave_the_launcher()
    ddpkit.seed_everything(SEED, verbose=False)
    modules = make_modules(recipe)
    counter = EpochCounter(recipe.epochs)
    moment = Moment(moments, functools.partial(kill, ids_of_ranks()))
    brain = BRAINS[recipe.own_fit_batch, recipe.optimizers](
        modules,
        OPTIMIZERS[recipe.optimizer],
        None,
        options_of(recipe, strategy),
        Checkpointer(folder, {**modules, "counter": counter, "moment": moment}),
        SCHEDULES[recipe.schedule],
    )
    brain.recipe, brain.moment = recipe, moment
    data, loading = data_of(recipe)
    validation = Rows(rows_of(recipe.validation, FIRST_OF_VALIDATION))
    try:
        # so that sums of weights begin in the backward pass, as those of large ones do
        with temporarily(ordered_sum, PIECE_BYTES=SMALL, WHOLE_BYTES=SMALL):
            brain.fit(
                counter,
                data,
                validation,
                train_loader_kwargs=loading,
                valid_loader_kwargs={"batch_size": 2},
            )
    except ConfigError as error:
        if moment.counts["batch"]:
            raise
        return str(error)
    return {
        "digests": digests_of(brain),
        "reported": brain.reported,
        "steps": brain.optimizer_step,
        "counts": moment.counts,
    }


def ids_of_ranks() -> list[int]:
    """Return the ids of the processes of all ranks, this one's last."""
    own = os.getpid()
    if not dist.is_initialized():
        return [own]
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return [*(one for one in found if one != own), own]


def kill(processes: list[int]) -> None:
    """End processes so that none of them can do anything about it."""
    for process in processes:
        os.kill(process, signal.SIGKILL)


# ------------------------------------------------------------------------------------ digests


def digests_of(brain: Any) -> dict[str, str]:
    """Return SHA-256 of weights and buffers, of the optimizers' states, and of averages."""
    optimizers = brain.optimizers_dict or {"optimizer": brain.optimizer}
    states = {name: state_of(one, brain.raw_modules) for name, one in optimizers.items()}
    found = {"weights": brain.raw_modules.state_dict(), "optimizers": states}
    if brain.ema is not None:
        found["averages"] = brain.ema.state_dict()
    return {name: digest(values) for name, values in found.items()}


def state_of(optimizer: torch.optim.Optimizer, modules: nn.Module) -> dict[str, Any]:
    """Return the state of each parameter by its name, whichever rank has it; and the groups."""
    names = {parameter: name for name, parameter in modules.named_parameters()}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    own = {
        names[one]: {key: whole(value) for key, value in sorted(optimizer.state[one].items())}
        for one in parameters
        if one in optimizer.state
    }
    known = [own]
    if dist.is_initialized():
        known = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(known, own)
    merged: dict[str, Any] = {}
    for part in known:
        for name, state in part.items():
            if digest(merged.setdefault(name, state)) != digest(state):
                raise AssertionError(f"ranks have different states of {name}: {known}")
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"groups": groups, "state": dict(sorted(merged.items()))}


def whole(value: Any) -> Any:
    """Return a divided tensor whole."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def digest(values: Any) -> str:
    """Return SHA-256 of tensors, and of what else there is, in the order in which it is there."""
    hashed = hashlib.sha256()
    _add(hashed, values)
    return hashed.hexdigest()


def _add(hashed: Any, value: Any) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            hashed.update(f"{name}:".encode())
            _add(hashed, one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(hashed, one)
    elif torch.is_tensor(value):
        full = whole(value.detach()).contiguous()
        hashed.update(f"{full.dtype} {tuple(full.shape)}".encode())
        hashed.update(full.view(-1).view(torch.uint8).numpy().tobytes())
    else:
        hashed.update(repr(value).encode())
