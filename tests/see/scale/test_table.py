"""The answer as a user reads it in a terminal of 80 columns."""

from __future__ import annotations

import pytest

from ddpkit.see.scale.summary import rows_of
from ddpkit.see.scale.table import WIDTH, report
from tests.see.scale.results import measured, result

SLICES = (
    result(1),
    result(1, ranks=[{"forward": 4.4}]),
    result(2, ranks=[{"exchange": 32.0}] * 2, exchanged_bytes=50_400_000),
    result(4, way="fsdp", ranks=[{"data": 1300.0}] * 4),
)


def answer(*slices, **more):
    return report(measured(*slices, **more), rows_of(slices))


def test_each_size_has_a_line_with_rate_speed_up_and_efficiency_in_words():
    assert answer(*SLICES).splitlines()[3:7] == [
        "                       samples/s   spread   speed-up    efficiency",
        "single, 1 process          3,478     ±1 %      1.00x",
        "ddp, 2 processes           2,115               0.61x      30 % bad",
        "fsdp, 4 processes            146               0.04x       1 % bad",
    ]


def test_an_efficiency_of_many_digits_does_not_touch_the_speed_up():
    text = answer(result(1, ranks=[{"forward": 400.0}]), result(2))
    assert "x  3055 % doubtful" in text


def test_each_size_has_a_line_with_the_phases_of_a_step():
    assert answer(*SLICES).splitlines()[8:12] == [
        "ms of a step    all   data   move  forward  backward  exchange  optimizer  other",
        "single x 1     13.8   0.10   0.10     4.40      8.00      0.00       1.00   0.20",
        "ddp x 2        45.4   0.10   0.10     4.00      8.00      32.0       1.00   0.20",
        "fsdp x 4       1313   1300   0.10     4.00      8.00      0.00       1.00   0.20",
    ]


@pytest.mark.parametrize("is_strong", [True, False])
def test_no_line_is_wider_than_a_terminal(is_strong):
    text = answer(
        *SLICES,
        is_strong=is_strong,
        failed={"zero1, 4 processes": "Traceback:\n" + "no memory " * 90},
    )
    assert max(map(len, text.splitlines())) <= WIDTH


def test_strong_and_weak_scaling_are_told_apart():
    fixed = (result(1), result(2, per_process=24.0))
    assert "Strong scaling: a step has 48 samples on any number of processes." in answer(
        *fixed,
        is_strong=True,
    )
    assert "Weak scaling: a step has 48 samples for each process" in answer(*SLICES)


def test_a_size_that_has_failed_is_named_with_the_last_line_that_it_said():
    text = answer(
        *SLICES,
        failed={"zero1, 4 processes": ("It said last:\nMemoryError: no more\n  ^^^^")},
    )
    assert "zero1, 4 processes: failed. MemoryError: no more" in text


def test_slices_that_differ_much_are_no_firm_ground():
    text = answer(result(1), result(1, ranks=[{"forward": 20.0}]), result(2))
    assert "The slices of single, 1 process differ much." in text
    assert "differ much" not in answer(*SLICES)


WAITS = [{"data": 20.0}] * 2


@pytest.mark.parametrize(
    ("recipe", "found", "words"),
    [
        ("train.py", result(1, ranks=WAITS[:1]), "doctor --recipe train.py`"),
        ("train.py h.yaml", result(2, ranks=WAITS), "doctor --nproc 2 --recipe train.py h.yaml`"),
        ("train.py --lr=1", result(2, ranks=WAITS, nodes=2), "doctor --recipe train.py -- --lr=1`"),
        (
            "train.py h.yaml --lr=1 --seed=2",
            result(2, ranks=WAITS),
            "doctor --nproc 2 --recipe train.py h.yaml -- --lr=1 --seed=2`",
        ),
    ],
)
def test_a_size_that_waits_for_data_is_told_the_command_that_measures_the_loader(
    recipe,
    found,
    words,
):
    slices = [found] if found.size == 1 else [result(1), found]
    assert words in " ".join(answer(*slices, recipe=recipe).split())


@pytest.mark.parametrize(
    ("recipe", "found"),
    [("train.py", result(2)), ("-m recipes.train", result(2, ranks=WAITS))],
)
def test_no_command_is_told_that_could_not_help(recipe, found):
    assert "doctor --nproc" not in answer(result(1), found, recipe=recipe)


def test_a_machine_that_is_busy_with_other_programs_is_told():
    text = " ".join(answer(result(1, core_waits=[0.4]), result(2)).split())
    assert "One process alone waited 40 % of the time for a core: other programs use them." in text
    assert "other programs" not in answer(*SLICES)


def test_the_median_of_the_slices_counts_and_not_the_best():
    fast, slow = (result(1, ranks=[{"forward": ms}]) for ms in (2.0, 40.0))
    [row] = rows_of([slow, fast, result(1)])
    assert row.rate == result(1).samples_per_second
    assert row.slice.phase("forward") == 0.004
