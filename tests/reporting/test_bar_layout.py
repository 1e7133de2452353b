"""What a bar shows in how many columns."""

from __future__ import annotations

import pytest
from tqdm import tqdm

from ddpkit.reporting.bar_layout import BarFacts, fitting_format

ALL = BarFacts(loss="0.1234", rate="0.00123", speed="4.42k", left="run 1:12:34 left")
METER = {"initial": 0, "elapsed": 83.0, "prefix": "epoch 12 of 100 train"}


def line(columns, facts=ALL, **meter):
    given = {**METER, "n": 140, "total": 300, **meter, "ncols": columns}
    return tqdm.format_meter(**{**given, "bar_format": fitting_format(facts, given)})


@pytest.mark.parametrize("total", [300, None])
@pytest.mark.parametrize(
    "facts",
    [
        ALL,
        ALL._replace(left=""),
        ALL._replace(rate=""),
        ALL._replace(data_wait="data wait 23 %"),
        BarFacts(),
        BarFacts(loss="nan"),
    ],
    ids=str,
)
def test_no_line_is_wider_than_the_terminal_and_more_room_never_shows_less(total, facts):
    before = 0
    for columns in range(1, 160):
        shown = line(columns, facts, total=total)
        assert len(shown) <= columns
        words = [part for part in ("loss=", "lr=", "left") if part in shown]
        assert len(words) >= before
        before = len(words)
    assert before == sum(map(bool, (facts.loss, facts.rate, facts.left)))


def test_80_columns_have_room_for_the_epoch_the_loss_the_rate_and_the_time_of_the_run():
    shown = line(80)
    for words in (
        "epoch 12 of 100 train",
        "140/300",
        "loss=0.1234",
        "lr=0.00123",
        "run 1:12:34 left",
    ):
        assert words in shown
    assert "|" not in shown
    few = line(80, ALL._replace(rate="0.002", left="run 12:34 left"), prefix="epoch 3 of 10 train")
    assert "|" in few
    assert few.endswith("140/300 [run 12:34 left, loss=0.1234, lr=0.002]")


def test_with_room_for_all_the_time_of_the_stage_is_shown_too():
    shown = line(130)
    assert shown.endswith(
        "[01:23<01:34, loss=0.1234, lr=0.00123, samples/s=4.42k, run 1:12:34 left]"
    )


def test_a_name_with_braces_is_shown_as_it_is():
    assert line(12, prefix="{epoch} 1 of 9") == "{epoch} 1 of"


def test_where_the_width_is_not_known_all_is_shown():
    shown = line(None)
    assert "lr=0.00123" in shown
    assert "samples/s=4.42k" in shown


def test_the_wait_for_data_is_the_first_to_be_left_out():
    waits = ALL._replace(data_wait="data wait 23 %")
    shown = line(150, waits)
    assert shown.endswith(
        "[01:23<01:34, loss=0.1234, lr=0.00123, samples/s=4.42k, data wait 23 %, run 1:12:34 left]"
    )
    needed = next(columns for columns in range(1, 160) if "data wait" in line(columns, waits))
    assert line(needed - 1, waits) == line(needed - 1)
    assert "samples/s" in line(needed - 1)
