"""Contexts of parts around ``fit``: how they nest, and what goes through them."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import pytest

from ddpkit import Part
from ddpkit.errors import ConfigError
from ddpkit.optim import RateFactor
from ddpkit.options import RUN_OPTIONS
from ddpkit.parts.own import ORDER, own_parts
from ddpkit.run_opts import RunOptions
from tests.recipes import Regression, make, points

DATA = points(4)
ONE = {"train_loader_kwargs": {"batch_size": 2}}


class Around(Part):
    """Notes when ``fit`` begins and ends, and whether Python collects garbage then."""

    def __init__(self, name="Around", told=None):
        self.name = name
        self.told = [] if told is None else told

    @contextlib.contextmanager
    def around_fit(self, brain):
        self.told.append(f"{self.name} enters, {gc.isenabled()}")
        try:
            yield
        finally:
            self.told.append(f"{self.name} leaves, {gc.isenabled()}")

    def on_fit_start(self, brain):
        self.told.append(f"{self.name} starts, {gc.isenabled()}")


class Fails(Regression):
    def compute_objectives(self, predictions, batch, stage):
        raise KeyError("the recipe fails")


class Broken(Part):
    """Has a context that raises, or ends exceptions."""

    def __init__(self, at):
        self.at = at

    @contextlib.contextmanager
    def around_fit(self, brain):
        if self.at == "enter":
            raise ValueError("it breaks")
        with contextlib.suppress(KeyError if self.at == "ends it" else ()):
            yield
        if self.at == "leave":
            raise ValueError("it breaks")


@pytest.mark.costly
def test_contexts_nest_in_the_order_of_the_parts_and_those_of_options_are_inside():
    told = []
    brain = make(hparams={"parts": [Around("a", told), Around("b", told)]}, gc_interval=2)
    brain.fit([1], DATA, **ONE)
    assert told == [
        "a enters, True",
        "b enters, True",
        "a starts, False",
        "b starts, False",
        "b leaves, True",
        "a leaves, True",
    ]


def test_a_context_is_left_where_the_recipe_fails_and_the_failure_is_not_the_parts():
    part = Around()
    with pytest.raises(KeyError, match="the recipe fails") as raised:
        make(Fails, hparams={"parts": [part]}).fit([1], DATA, **ONE)
    assert part.told[-1] == "Around leaves, True"
    assert not getattr(raised.value, "__notes__", [])


def test_a_context_cannot_end_the_failure_of_a_run():
    with pytest.raises(KeyError, match="the recipe fails"):
        make(Fails, hparams={"parts": [Broken("ends it")]}).fit([1], DATA, **ONE)


@pytest.mark.parametrize("at", ["enter", "leave"])
def test_a_context_that_breaks_is_named(at):
    with pytest.raises(ValueError, match="it breaks") as raised:
        make(hparams={"parts": [Broken(at)]}).fit([1], DATA, **ONE)
    assert "Broken.around_fit" in str(vars(raised.value))


def test_what_is_no_context_is_refused():
    part = Around()
    part.around_fit = lambda brain: 3
    with pytest.raises(ConfigError, match=r"Around\.around_fit returned 3, which is no context"):
        make(hparams={"parts": [part]}).fit([1], DATA, **ONE)


def context(**options):
    return SimpleNamespace(options=RunOptions(**options), rate_factor=RateFactor(), device="cpu")


def test_a_part_of_the_library_comes_by_an_option_that_is_not_its_default():
    assert own_parts(context()) == []
    for option, module, name in [(one, *part) for options, *part in ORDER for one in options]:
        row = RUN_OPTIONS[option]
        value = {bool: True, int: 7}[type(row.default)] if not row.choices else row.choices[-1]
        parts = own_parts(context(**{option: value}))
        assert (module, name) in [(type(part).__module__, part.name) for part in parts]


@pytest.mark.slow
def test_options_are_asked_at_each_call_of_fit():
    brain = make(hparams={"parts": [part := Around()]})
    brain.fit([1], DATA, **ONE)
    brain.run_opts["gc_interval"] = 2
    brain.fit([1, 2], DATA, **ONE)
    assert part.told[1::3] == ["Around starts, True", "Around starts, False"]
    assert gc.isenabled()
