"""Which learning rate a curve suggests, and which curves suggest none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddpkit.see.lr_find.command import report
from ddpkit.see.lr_find.curve import LrCurve, smoothed, suggest

RATES = [1e-6 * 10 ** (7 * place / 99) for place in range(100)]


def fall_at(rate, noise=0.0, from_=2.0, to=0.5):
    """Losses that fall from one level to another around a rate, as a bend in the logarithm."""
    draws = np.random.default_rng(3).standard_normal(len(RATES))
    return [
        to + (from_ - to) / (1 + (own / rate) ** 1.5) + noise * draw
        for own, draw in zip(RATES, draws, strict=True)
    ]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_where_the_loss_falls_fastest(noise):
    found = suggest(RATES, fall_at(1e-3, noise))
    assert found.rate == pytest.approx(1e-3, rel=0.6)
    assert found.rate == RATES[found.position]
    assert "falls fastest" in found.why


def test_what_follows_the_lowest_loss_does_not_count():
    losses = fall_at(1e-3)[:70]
    losses += [losses[-1] * 1.3**step for step in range(1, 16)]  # it explodes,
    losses += [losses[-1] * 0.5**step for step in range(1, 4)]  # and falls steeply by chance
    found = suggest(RATES, losses)
    assert found.rate == pytest.approx(1e-3, rel=0.6)
    assert found.position < found.lowest < 75


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([], "only 0 of the steps have a finite loss"),
        (fall_at(1e-3)[:19], "only 19 of the steps have a finite loss"),
        ([2.0] * 100, "falls at any rate"),
        ([2.0 * 1.02**place for place in range(100)], "the loss does not fall at any rate"),
        (fall_at(1e-3, noise=0.5, to=1.98), "which chance can do"),
        (fall_at(1e-7), "falls fastest at the first rates"),
    ],
)
def test_a_curve_that_shows_no_rate_suggests_none(losses, why):
    found = suggest(RATES, losses)
    assert found.rate is None
    assert why in found.why


def test_negative_losses_are_losses():
    shifted = [loss - 10.0 for loss in fall_at(1e-3)]
    assert suggest(RATES, shifted).rate == suggest(RATES, fall_at(1e-3)).rate


def test_smoothing_moves_nothing():
    step = [1.0] * 50 + [0.0] * 50
    assert smoothed(step)[49] + smoothed(step)[50] == pytest.approx(1.0)
    assert smoothed([3.0]) == [3.0]


def test_the_table_marks_what_it_says(tmp_path):
    curve = LrCurve("train.py", RATES, fall_at(1e-3), "all tried", 2)
    text = report(curve)
    lines = text.splitlines()
    assert lines[0] == "train.py, 100 steps on 2 processes."
    (steepest,) = [line for line in lines if "<- steepest" in line]
    (lowest,) = [line for line in lines if "<- lowest" in line]
    assert float(steepest.split()[0]) == pytest.approx(curve.suggestion.rate, rel=0.01)
    assert "#" in steepest
    assert float(lowest.split()[1]) == pytest.approx(0.5, abs=0.01)
    assert lines[-1].startswith(f"Learning rate {curve.suggestion.rate:.1e}: ")


def test_the_table_of_a_curve_without_a_rate():
    text = report(LrCurve("train.py", [1e-6], [2.0], "not finite", 1))
    assert text.splitlines()[0] == "train.py, 1 step on 1 process."
    assert "a loss that is not finite" in text
    assert "No learning rate is suggested: only 1 of the steps have a finite loss" in text
    assert report(LrCurve("train.py", [], [], "not finite", 1)).count("\n") == 3


@pytest.mark.slow
def test_the_plot_is_drawn_and_is_the_same_each_time(tmp_path):
    from ddpkit.see.lr_find.plot import draw

    curve = LrCurve("train.py", RATES, fall_at(1e-3), "all tried", 1)
    for name in ("a.svg", "b.svg"):
        draw(curve, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    draw(LrCurve("train.py", [1e-6], [2.0], "not finite", 1), tmp_path / "c.svg")


def test_values_of_the_file_are_those_of_the_curve():
    values = LrCurve("train.py", RATES, fall_at(1e-3), "all tried", 1).as_dict()
    assert values["suggestion"] == suggest(RATES, fall_at(1e-3)).rate
    assert [point["learning_rate"] for point in values["points"]] == RATES
    assert math.isclose(values["points"][0]["loss"], fall_at(1e-3)[0])
