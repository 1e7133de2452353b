"""Three ways through the rooms are short: a batch, a save and a resume pass few modules, and no two in turns.

Counted are the modules of the package whose functions run: what a reader meets who follows the calls. Of a resume,
those that a start from scratch does not call.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

import ddpkit
from ddpkit.base import PROCESS
from ddpkit.checkpointing import BackgroundSave
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from tests.contract.recipes import QUIET, Regression, linear, points, sgd

PACKAGE = str(Path(ddpkit.__file__).parent)
LOADING = {"batch_size": 2, "shuffle": True}
SAVED = {"brain", "epoch_loop", "dataloader", "run.rank_state"}


class Way:
    """The modules of the package that run in a context, and those that call each other in turns."""

    def __init__(self):
        self.functions, self.turns = Counter(), set()

    def follow(self, frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            self.functions[name[len(PACKAGE) + 1 : -3].replace("/", "."), frame.f_code.co_name] += 1
            stack = []
            while frame is not None and len(stack) < 4:
                name = frame.f_code.co_filename
                if name.startswith(PACKAGE) and stack[-1:] != [name]:
                    stack.append(name)
                frame = frame.f_back
            if len(stack) == 4 and stack[:2] == stack[2:]:
                self.turns.add(" and ".join(sorted(Path(one).stem for one in stack[:2])))

    @contextlib.contextmanager
    def followed(self):
        """Follow this thread, and those that it starts."""
        threading.setprofile(self.follow)
        sys.setprofile(self.follow)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @property
    def modules(self):
        return {module for module, _ in self.functions}

    def __str__(self):
        return f"{len(self.modules)} modules: {', '.join(sorted(self.modules))}; in turns: {sorted(self.turns)}"


class Followed(Regression):
    """Follows from one batch to the next, a save, or from ``fit`` to the first batch."""

    way = what = None

    def fit_batch(self, batch):
        if self.what == "resume":
            sys.setprofile(None)
        if self.what == "batch":
            sys.setprofile(self.way.follow if self.step == 4 else None)
        return super().fit_batch(batch)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        with self.way.followed() if self.what == "save" else contextlib.nullcontext():
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])
            self.checkpointer.wait()


def follow(folder, what, epochs=1, **options):
    net, counter = linear(), EpochCounter(epochs)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Followed({"net": net}, sgd(), None, {**QUIET, "ckpt_async": False, **options}, checkpointer)
    brain.what, brain.way = what, Way()
    with brain.way.followed() if what == "resume" else contextlib.nullcontext():
        brain.fit(counter, points(12), train_loader_kwargs=LOADING)
    return brain.way


def check(way, most):
    assert len(way.modules) <= most, str(way)
    assert not way.turns, str(way)


@pytest.fixture(autouse=True)
def what_others_have_left_is_collected_before(monkeypatch):
    BackgroundSave.threads.clear()  # whose ends a start would wait for
    monkeypatch.setattr(PROCESS, "report", None)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_batch(tmp_path):
    check(follow(tmp_path, "batch"), 14)


def test_a_resume(tmp_path):
    """The file of the Brain is read once, to choose the start, which hands it to the hook that loads.

    The way of a resume is what a fresh start does not call. What both call, from ``fit`` to the first batch, is the
    whole start of a run: comparing ranks, options, loader, sampler, random streams, optimizers, the start-up block.
    """
    follow(tmp_path / "begun", None)
    resumed, fresh = (follow(tmp_path / name, "resume", epochs=2) for name in ("begun", "new"))
    assert resumed.functions["run.state", "read_brain_file"] == 1
    check(resumed, 30)
    check(fresh, 29)
    for function in fresh.functions:
        del resumed.functions[function]
    check(resumed, 15)


class Interrupted(Regression):
    """Saves after every epoch; ends before the step ``dies_at``."""

    dies_at = None

    def on_stage_start(self, stage, epoch=None):
        if self.optimizer_step == self.dies_at:
            raise KeyboardInterrupt

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_checkpoint()


def two_fits(folder, dies_at=None):
    net, counters = linear(), {"first": EpochCounter(1), "second": EpochCounter(3)}
    brain = Interrupted({"net": net}, sgd(), None, QUIET, Checkpointer(folder, {"net": net, **counters}))
    brain.dies_at, way = dies_at, Way()
    with way.followed(), pytest.raises(KeyboardInterrupt) if dies_at else contextlib.nullcontext():
        for counter in counters.values():
            brain.fit(counter, points(12), train_loader_kwargs=LOADING)
    return brain, way


def test_a_resume_in_the_second_of_two_calls_reads_each_checkpoint_once(tmp_path):
    """The first call finds a checkpoint of the second, which goes on with what the first has read."""
    two_fits(tmp_path, dies_at=18)
    assert len(Checkpointer(tmp_path).list_checkpoints()) == 3
    brain, way = two_fits(tmp_path)
    assert brain.optimizer_step == 24
    assert way.functions["run.state", "read_brain_file"] == 3


def save_of_rank_0(folder, is_async):
    BackgroundSave.threads.clear()  # those of other tests of this process
    # The first save of a process loads YAML, by way of the lazy names of the package.
    follow(folder / "before", "save", ckpt_async=is_async)
    gc.collect()
    way = follow(folder / "then", "save", ckpt_async=is_async)
    return way if dist.get_rank() == 0 else None


@pytest.mark.parametrize(
    "is_async", [pytest.param(True, marks=pytest.mark.slow), False], ids=["in the background", "at once"]
)
def test_a_save_of_three_ranks(ranks, tmp_path, is_async):
    """With what is saved: the Brain, the counter, the loader, and what each rank has of its own; with its thread."""
    way = ranks.run(save_of_rank_0, tmp_path, is_async, world_size=3)[0]
    assert way.modules >= SAVED
    check(way, 22)
