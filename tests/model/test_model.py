"""Drawn trainings, on real ranks, come to what a plain loop of torch says; also those that were
killed.

A few that are written down, and in the slower runs sixty that are drawn. ``make model`` goes on for
as long as one likes.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
import torch

from tests.cells import some_of
from tests.launching import Run, torchrun
from tests.model import shrinking
from tests.model.by_hand import run
from tests.model.comparing import compare, complaints_of, what_the_plain_loop_says
from tests.model.drawing import CHOICES, draw, is_allowed, smaller_ones
from tests.model.training import FIELDS, MOMENTS, Training

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("launched.py")
SEED = 29  # of the draws of the slower runs
DRAWS = 30  # in each of so many parts
PARTS = 7

WRITTEN_DOWN = {
    "tokens of three ranks in short windows, on two after a kill": Training(
        world=3,
        samples=13,
        epochs=2,
        batch=1,
        factor=2,
        shuffle=True,
        counts_tokens=True,
        max_norm=0.1,
        scales_rate=True,
        validation=3,
        save_every=1,
        killed="step",
        killed_at=3,
        world_after=2,
    ),
    "batch norm and averaged weights, killed in a save": Training(
        world=2,
        samples=23,
        epochs=2,
        factor=2,
        shuffle=True,
        norm=True,
        adam=True,
        max_norm=0.5,
        ema_decay=0.7,
        evaluates_average=True,
        schedule="step",
        validation=4,
        shard_evaluation=True,
        save_every=2,
        killed="save",
        killed_at=3,
        world_after=2,
    ),
    "uneven global batches, on three ranks after a kill": Training(
        world=2,
        samples=19,
        epochs=2,
        whole=7,
        micro=2,
        shuffle=True,
        schedule="epoch",
        ema_decay=0.7,
        validation=3,
        shard_evaluation=True,
        save_every=2,
        saves_in_background=True,
        killed="batch",
        killed_at=4,
        world_after=3,
    ),
    "zero1 with two optimizers, and DDP after a kill": Training(
        world=2,
        samples=11,
        epochs=2,
        optimizers=2,
        adam=True,
        frozen=True,
        max_norm=0.1,
        strategy="zero1",
        save_every=2,
        killed="batch",
        killed_at=6,
        world_after=2,
    ),
    "fsdp with a layer that thaws, killed between two epochs": Training(
        world=2,
        samples=9,
        epochs=3,
        factor=3,
        shuffle=True,
        adam=True,
        frozen=True,
        thaws=True,
        max_norm=0.1,
        ema_decay=0.7,
        schedule="plateau",
        strategy="fsdp",
        sends_checkpoints=True,
        killed="saved",
        killed_at=2,
        world_after=2,
        strategy_after="fsdp",
    ),
    "virtual ranks, on another number of ranks after a kill": Training(
        world=3,
        samples=23,
        epochs=2,
        whole=8,
        shuffle=True,
        weighting="batches",
        virtual_ranks=6,
        max_norm=0.1,
        validation=4,
        shard_evaluation=True,
        save_every=1,
        killed="step",
        killed_at=2,
        world_after=2,
    ),
    "a stream, a fit_batch of the recipe and a limit of steps": Training(
        world=2,
        samples=17,
        epochs=2,
        factor=2,
        data="stream",
        own_fit_batch=True,
        step_limit=6,
        schedule="step",
        save_every=2,
        killed="batch",
        killed_at=4,
        world_after=2,
    ),
    "a stream that divides itself": Training(
        world=2,
        samples=11,
        factor=2,
        data="divided stream",
        counts_tokens=True,
        max_norm=0.1,
    ),
    "one process, killed before it has validated": Training(
        samples=14,
        epochs=2,
        factor=3,
        shuffle=True,
        norm=True,
        adam=True,
        own_fit_batch=True,
        max_norm=0.5,
        ema_decay=0.7,
        schedule="step",
        save_every=3,
        killed="epoch",
    ),
    "a sampler whose last batch is dropped": Training(
        world=2,
        samples=11,
        data="sampler",
        drop_last=True,
        weighting="batches",
    ),
    "the batches of a recipe": Training(world=2, samples=11, data="batches", factor=2),
    "no samples": Training(world=2, samples=0),
}
# Those of `make test`: each strategy once, and what alone catches a planted fault.
QUICK = (
    "tokens of three ranks in short windows, on two after a kill",
    "batch norm and averaged weights, killed in a save",
    "zero1 with two optimizers, and DDP after a kill",
    "fsdp with a layer that thaws, killed between two epochs",
    "virtual ranks, on another number of ranks after a kill",
    "a stream that divides itself",
    "no samples",
)


@pytest.mark.costly
@pytest.mark.parametrize("name", some_of(WRITTEN_DOWN, QUICK, pytest.mark.slow))
def test_a_training_comes_to_what_a_plain_loop_says(ranks, name):
    training = WRITTEN_DOWN[name]
    assert is_allowed(training)
    said = complaints_of(training, ranks)
    assert not said, "\n".join([str(training), *said])


@pytest.mark.slow
@pytest.mark.parametrize("part", some_of(range(PARTS), range(1)))
def test_drawn_trainings_come_to_what_a_plain_loop_says(ranks, part):
    for number in range(part * DRAWS, (part + 1) * DRAWS):
        training = draw(SEED, number)
        said = complaints_of(training, ranks)
        assert not said, shrinking.report_of(training, said, ranks)


# --------------------------------------------------------------------------- a kill that is a kill


def launch(training, folder, name, strategy, world, dying=""):
    results = folder / name
    results.mkdir()
    words = (str(training), str(folder / "save"), str(results), strategy, dying)
    command = torchrun(world, str(SCRIPT), *words)
    done = Run(command, folder, {"PYTHONPATH": str(ROOT)}, name=f"{name}-log", warm=True).wait(60)
    return done, [torch.load(one) for one in sorted(results.glob("rank*.pt"))]


def launched(number):
    """Return a drawn training that is killed: on several ranks, before and after."""
    draws = (draw(SEED, one) for one in itertools.count(1000 * number))
    return next(
        one
        for one in draws
        if min(one.world, one.world_after) > 1
        and one.killed in {"batch", "step", "save"}
        and (one.save_every or one.killed == "save")
        and len(what_the_plain_loop_says(one)) > 1
        and one.samples > 8
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", some_of(range(4), range(2)))
@pytest.mark.parametrize("dying", ["0", "0 1 2"])
def test_a_launched_run_goes_on_after_a_signal_that_nobody_hears(tmp_path, number, dying):
    training = launched(number)
    killed, _ = launch(training, tmp_path, "killed", training.strategy, training.world, dying)
    has_saved = any((tmp_path / "save").glob("CKPT*"))
    done, found = launch(training, tmp_path, "after", training.strategy_after, training.world_after)
    assert done.code == 0, done.tail()
    expected = what_the_plain_loop_says(training)
    if killed.code and has_saved:
        said = compare(found, expected, has_saved=has_saved)
        assert not said, "\n".join([str(training), *said])


# ------------------------------------------------------------------------------------ its own parts


def test_every_value_is_drawn_and_every_draw_is_allowed():
    drawn = [draw(1, number) for number in range(400)]
    assert drawn[7] == draw(1, 7)
    for field in FIELDS:
        values = {getattr(one, field.name) for one in drawn}
        assert values == set(CHOICES[field.name]), field.name
    assert {one.killed for one in drawn} == {None, *MOMENTS}
    assert all(is_allowed(one) for one in drawn)


def test_a_failing_training_is_made_as_simple_as_it_can_be(monkeypatch):
    def complain(training, ranks):
        return ["wrong"] if training.samples >= 7 and training.max_norm else []

    monkeypatch.setattr(shrinking, "complaints_of", complain)
    failing = WRITTEN_DOWN["batch norm and averaged weights, killed in a save"]
    assert shrinking.smallest(failing, None) == (Training(samples=7, max_norm=0.5), ["wrong"])
    assert all(is_allowed(one) for one in smaller_ones(Training(samples=9)))


def test_a_failing_training_is_printed_as_a_script(monkeypatch):
    training = WRITTEN_DOWN["uneven global batches, on three ranks after a kill"]
    text = shrinking.script_of(training)
    names = {}
    exec(compile(ast.parse(text), "failing.py", "exec"), names)
    assert names["TRAINING"] == training
    assert names["run"] is run
    assert f"--nproc_per_node={training.world} failing.py" in text
