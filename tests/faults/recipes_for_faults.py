"""The recipes that are killed: small, with all that a checkpoint must hold, and told in a diary as
they happen.

Also a script, for launchers: ``python -m tests.faults.recipes_for_faults FOLDER SETTING [KILL
...]`` runs one rank; the n-th kill is for the n-th attempt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from ddpkit.brain import Brain
from ddpkit.checkpointing import storage
from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import get_rank, get_world_size, if_main_process
from ddpkit.epoch_loop import EpochCounter, EpochCounterWithStopper
from ddpkit.seed import rng_state, seed_everything
from ddpkit.types import Stage

from .campaign_moments import (
    BATCH_START,
    FORWARD,
    SAVED,
    STEPPED,
    STEPPING,
    TRAIN,
    TRAIN_END,
    TRAIN_START,
    VALID,
    VALID_END,
    Diary,
    Kill,
    Trigger,
)

WIDTH = 6
BATCH_SIZES = {1: 8, 2: 4, 3: 3}
EPOCHS = 3


@dataclass(frozen=True)
class Variant:
    """What makes one recipe different from the plain one."""

    dropout: float = 0.0
    noise: bool = False
    workers: int = 0
    factor: int = 1
    precision: str = "fp32"
    optimizers: int = 1
    freezing: bool = False
    scheduler: bool = False
    stopper: bool = False
    batchnorm: bool = False
    stream: str = ""
    double: bool = False
    size: int = 49  # the last step of an epoch has one sample: of two ranks, the second repeats one


_ALL = {
    "dropout": 0.3, "noise": True, "factor": 3, "precision": "bf16", "optimizers": 2,
    "scheduler": True,
    "stopper": True, "batchnorm": True, "size": 53,
}  # fmt: skip
VARIANTS = {
    "plain": Variant(),
    "dropout": Variant(dropout=0.3),
    "noise": Variant(noise=True),
    "augmentation": Variant(workers=2),
    "accumulation": Variant(factor=3),
    "bf16": Variant(precision="bf16"),
    "two optimizers": Variant(optimizers=2),
    "frozen optimizer": Variant(optimizers=2, freezing=True),
    "scheduler": Variant(scheduler=True),
    "early stopping": Variant(stopper=True),
    "batchnorm": Variant(batchnorm=True, size=53),
    "stream": Variant(stream="dataset"),
    "stream in workers": Variant(stream="dataset", workers=2),
    "loader with state": Variant(stream="loader"),
    "all": Variant(**_ALL, workers=2),
    "all, stream": Variant(**_ALL, stream="dataset"),
}
# What may go on with another number of processes: nothing in it is random per rank.
DOUBLE = {
    "double": Variant(double=True),
    "double accumulation": Variant(double=True, factor=2, scheduler=True),
}
# Goes on with another number of processes and ends with the same bits: with --virtual_ranks.
# whose shards may have a single sample
_NO_NORM = {name: one for name, one in _ALL.items() if name != "batchnorm"}
VIRTUAL = {
    "virtual ranks": Variant(**_NO_NORM, workers=2),
    "virtual ranks, stream": Variant(**{**_NO_NORM, "factor": 1}, stream="dataset"),
}


@dataclass(frozen=True)
class Setting:
    """One command line.

    Attributes:
        variant: a key of VARIANTS.
        world_size: number of ranks.
        saver: who saves at the end of an epoch: "all" ranks, or "main" alone.
        interval: the option ``ckpt_interval_steps``.
        options: more run options.
        batch_size: of one process; 0 chooses one by the number of ranks.
    """

    variant: str = "plain"
    world_size: int = 1
    saver: str = "all"
    interval: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    batch_size: int = 0

    @property
    def recipe(self) -> Variant:
        return {**VARIANTS, **DOUBLE, **VIRTUAL}[self.variant]


# --------------------------------------------------------------------------------------------- data


def _numbers(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin() + 0.1 * torch.randn(
        size,
        1,
        generator=generator,
    )


class Points(Dataset):
    """(inputs, target, number); with ``augment`` the inputs are shaken by all three generators."""

    def __init__(self, size: int, seed: int, *, augment: bool = False) -> None:
        self.inputs, self.targets = _numbers(size, seed)
        self.augment = augment

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        inputs = self.inputs[index]
        return (shaken(inputs) if self.augment else inputs), self.targets[index], index


class Stream(IterableDataset):
    """The same from a stream that shuffles in a buffer, and can say and be told where it is.

    Told that it is at its end it yields nothing, once.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.points = Points(size, seed)
        self.epoch = self.position = 0
        self.numbers = random.Random()
        self.buffer: list[int] = []
        self.goes_on = False
        self.read = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        if not self.goes_on:
            self.position = 0
            self.buffer = []
            self.numbers.seed(self.epoch)
        self.goes_on = False
        while self.position < len(self.points) or self.buffer:
            while self.position < len(self.points) and len(self.buffer) < 10:
                self.buffer.append(self.position)
                self.position += 1
                self.read += 1
            yield self.points[self.buffer.pop(self.numbers.randrange(len(self.buffer)))]

    def state_dict(self):
        version, words, gauss = self.numbers.getstate()
        return {
            "position": self.position, "buffer": list(self.buffer), "numbers": [version,
            list(words), gauss],
            "epoch": self.epoch,
        }  # fmt: skip

    def load_state_dict(self, state):
        version, words, gauss = state["numbers"]
        self.numbers.setstate((version, tuple(words), gauss))
        self.position = state["position"]
        self.buffer = list(state["buffer"])
        self.epoch = state["epoch"]
        self.goes_on = True


class StatefulLoader:
    """A loader of the user's own: it divides the data itself, by ranks, and is saved and loaded
    itself, per rank.

    As torchdata's does, it tells "all is yielded" from "the end was seen", after which it begins
    again.
    """

    is_sharded = True

    def __init__(self, size: int, seed: int, batch_size: int) -> None:
        self.points = Points(size, seed)
        self.batch_size = batch_size
        self.epoch = self.position = 0
        self.goes_on = self.is_over = False

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(len(self.points)))
        random.Random(self.epoch).shuffle(order)
        own = order[get_rank() or 0 :: get_world_size()]
        if not self.goes_on or self.is_over:
            self.position = 0
        self.goes_on = self.is_over = False
        while self.position < len(own):
            indices = own[self.position : self.position + self.batch_size]
            self.position += len(indices)
            yield torch.utils.data.default_collate([self.points[index] for index in indices])
        self.is_over = True

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position, "is_over": self.is_over}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.is_over = state["is_over"]
        self.goes_on = True


def shaken(inputs: torch.Tensor) -> torch.Tensor:
    """Draw from torch's, numpy's and Python's global streams."""
    legacy = float(np.random.randn())  # noqa: NPY002 -- the global stream is what recipes draw from
    return inputs * (1 + 0.2 * random.random()) + 0.1 * legacy + 0.1 * torch.randn(inputs.shape)


# --------------------------------------------------------------------------------------- the recipe


class Recipe(Brain):
    """Tells its diary all it does, and its trigger where it is."""

    setting: Setting
    variant: Variant
    diary: Diary
    trigger: Trigger
    scheduler: Any = None
    plateau: Any = None

    def on_fit_start(self):
        self.trigger.start(ready=False)
        super().on_fit_start()
        self.trigger.start(ready=True)

    def init_optimizers(self):
        super().init_optimizers()
        if self.variant.optimizers == 2:
            self.optimizers_dict = {
                "encoder": torch.optim.Adam(self.modules["encoder"].parameters(), lr=0.02),
                "head": torch.optim.SGD(self.modules["head"].parameters(), lr=0.05, momentum=0.9),
            }
            del self.checkpointer.recoverables["optimizer"]
            for name, optimizer in self.optimizers_dict.items():
                self.checkpointer.add_recoverable(f"optimizer of {name}", optimizer)
        if self.variant.scheduler:
            first = next(iter(self.optimizers_dict.values()))
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.98)
            self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(first, factor=0.7, patience=0)
            self.checkpointer.add_recoverable("scheduler", self.scheduler)
            self.checkpointer.add_recoverable("plateau", self.plateau)

    def freeze_optimizers(self, optimizers):
        if self.variant.freezing and self.optimizer_step % 3:
            return {name: one for name, one in optimizers.items() if name != "head"}
        return optimizers

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch
        if stage is Stage.TRAIN:
            self.trigger.reach(epoch, TRAIN_START)

    def on_fit_batch_start(self, batch, should_step):
        self.trigger.reach(self.epoch, TRAIN, self.step, BATCH_START)

    def compute_forward(self, batch, stage):
        if stage is not Stage.TRAIN:
            self.trigger.reach(self.epoch, VALID, self.step)
        inputs = shaken(batch[0]) if self.variant.noise else batch[0]
        inputs = inputs.double() if self.variant.double else inputs
        return self.modules["head"](self.modules["encoder"](inputs))

    def compute_objectives(self, predictions, batch, stage):
        number_type = torch.float64 if self.variant.double else torch.float32
        loss = nn.functional.mse_loss(predictions.to(number_type), batch[1].to(number_type))
        numbers = (
            [] if stage is Stage.TRAIN and not self.progress.window.count else batch[2].tolist()
        )
        digest = zlib.crc32(batch[0].numpy().tobytes())
        self.diary.note(stage.name, self.epoch, self.step, numbers, digest, loss.item().hex())
        if stage is Stage.TRAIN:
            self.trigger.reach(self.epoch, TRAIN, self.step, FORWARD)
        return loss

    def optimizers_step(self):
        self.trigger.reach(self.epoch, TRAIN, self.step, STEPPING)
        super().optimizers_step()
        self.diary.note("step", self.optimizer_step, self.epoch)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.scheduler is not None and should_step:
            self.scheduler.step()
        self.trigger.reach(self.epoch, TRAIN, self.step, STEPPED)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.diary.note("stage", stage.name, epoch, float(stage_loss).hex())
        if stage is Stage.TRAIN:
            self.trigger.reach(epoch, TRAIN_END)
        if stage is not Stage.VALID:
            return
        self.trigger.reach(epoch, VALID_END)
        if self.plateau is not None:
            self.plateau.step(stage_loss)
        if self.variant.stopper:
            self.counter.update_metric(stage_loss + 0.1 * abs(epoch - 3))
        if self.setting.saver == "all" or if_main_process():
            self.checkpointer.save_and_keep_only(
                meta={"loss": stage_loss, "epoch": epoch},
                min_keys=["loss"],
                num_to_keep=2,
            )
        self.trigger.reach(epoch, SAVED)


def make_recipe(setting: Setting, folder: Path) -> Recipe:
    """Make everything anew from the seed, as a script does when it is started."""
    variant = setting.recipe
    seed_everything(1234, verbose=False)
    layers: list[nn.Module] = [nn.Linear(WIDTH, 12), nn.ReLU()]
    if variant.batchnorm:
        layers.insert(1, nn.BatchNorm1d(12))
    if variant.dropout:
        layers.append(nn.Dropout(variant.dropout))
    encoder = nn.Sequential(*layers)
    head = nn.Linear(12, 1)
    if variant.double:
        encoder = encoder.double()
        head = head.double()
    counter: Any = EpochCounter(EPOCHS)
    if variant.stopper:
        counter = EpochCounterWithStopper(6, limit_to_stop=1, limit_warmup=1, direction="min")
    parts = {"encoder": encoder, "head": head}
    recipe = Recipe(
        parts,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        None,
        {
            "device": "cpu", "noprogressbar": True, "grad_accumulation_factor": variant.factor,
            "precision": variant.precision, "ckpt_interval_steps": setting.interval,
            **dict(setting.options),
        },
        Checkpointer(folder / "save", {**parts, "counter": counter}),
    )  # fmt: skip
    recipe.setting = setting
    recipe.variant = variant
    recipe.counter = counter
    return recipe


def training_data(setting: Setting) -> tuple[Any, dict[str, Any]]:
    """Return what to train on, and the arguments of its loader."""
    variant = setting.recipe
    batch_size = setting.batch_size or BATCH_SIZES[setting.world_size]
    if variant.stream == "loader":
        return StatefulLoader(variant.size, 5, batch_size), {}
    arguments = {"batch_size": batch_size, "num_workers": variant.workers}
    if variant.stream:
        return Stream(variant.size, 5), arguments
    return Points(variant.size, 5, augment=variant.workers > 0), {**arguments, "shuffle": True}


def train(setting: Setting, folder: Path, attempt: int, kill: Kill | None) -> None:
    """Run one rank of one attempt, from the start of the script to its last line."""
    rank = int(os.environ.get("RANK", "0"))
    diary = Diary(folder, rank, attempt)
    trigger = Trigger(folder, rank, diary, kill)
    watch_files(trigger)
    diary.note("begin")
    recipe = make_recipe(setting, folder)
    diary.note("joined")
    recipe.diary = diary
    recipe.trigger = trigger
    data, arguments = training_data(setting)
    recipe.fit(
        recipe.counter,
        data,
        Points(10, 6),
        train_loader_kwargs=arguments,
        valid_loader_kwargs={"batch_size": 4},
    )
    result = final_state(recipe)
    if setting.recipe.double and rank == 0:
        torch.save(recipe.raw_modules.state_dict(), folder / "weights.pt")
    result["test loss"] = float(
        recipe.evaluate(Points(9, 7), min_key="loss", test_loader_kwargs={"batch_size": 4})
    ).hex()
    part = folder / f"part.{attempt}.{rank}"
    part.write_text(json.dumps(result))
    part.rename(folder / f"result.{attempt}.{rank}")


def watch_files(trigger: Trigger) -> None:
    """Have every file operation of a save tell the trigger."""
    operations = storage.FILES
    for name in [name for name in dir(type(operations)) if not name.startswith("_")]:
        setattr(operations, name, _watched(getattr(operations, name), name, trigger))


def _watched(operation: Any, name: str, trigger: Trigger) -> Any:
    def watched(*args: Any, **kwargs: Any) -> Any:
        trigger.operate(name, done=False)
        result = operation(*args, **kwargs)
        trigger.operate(name, done=True)
        return result

    return watched


# ------------------------------------------------------------------------------------------ its end


def final_state(recipe: Recipe) -> dict[str, Any]:
    """Return all that must be the same to the last bit, flat and in plain values."""
    state = {
        "weights": {name: module.state_dict() for name, module in recipe.raw_modules.items()},
        "optimizer": {name: _state_of(one) for name, one in recipe.optimizers_dict.items()},
        "scheduler": [
            one.state_dict() for one in (recipe.scheduler, recipe.plateau) if one is not None
        ],
        "counter": [recipe.optimizer_step, recipe.counter.current]
        + [
            getattr(recipe.counter, name, None)
            for name in ("best_limit", "best_score", "should_stop")
        ],
        "random": rng_state(),
    }
    return flat(state)


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer knows on this rank, by number of the parameter."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "state": {number: optimizer.state.get(one, {}) for number, one in enumerate(parameters)},
        "groups": groups,
    }


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten containers; a tensor becomes its type, shape and bits."""
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value  # this rank's part
        bits = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {name: f"{value.dtype} {list(value.shape)} {hashlib.sha256(bits).hexdigest()}"}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {name: value.hex() if isinstance(value, float) else repr(value)}
    return {
        key: one
        for part, inner in items
        for key, one in flat(inner, f"{name}/{part}" if name else str(part)).items()
    }


def setting_of(text: str) -> Setting:
    """Read a setting from JSON."""
    facts = json.loads(text)
    return Setting(
        **{**facts, "options": tuple((name, value) for name, value in facts.get("options", ()))}
    )


def kill_of(text: str) -> Kill:
    """Read a kill from JSON."""
    facts = json.loads(text)
    return Kill(**{**facts, "at": tuple(facts.get("at", (0, 0, 0, 0)))})


def text_of(thing: Setting | Kill) -> str:
    """Write a setting or a kill as JSON, without what is the default anyhow."""
    default = type(thing)(**({"place": ""} if isinstance(thing, Kill) else {}))
    facts = dataclasses.asdict(thing)
    return json.dumps(
        {name: value for name, value in facts.items() if value != getattr(default, name)}
    )


if __name__ == "__main__":
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(
        os.environ.get("FIRST_ATTEMPT", "0")
    )
    kills = [kill_of(text) for text in sys.argv[3:]]
    train(
        setting_of(sys.argv[2]),
        Path(sys.argv[1]),
        number,
        kills[number] if number < len(kills) else None,
    )
