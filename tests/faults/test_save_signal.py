"""A save that a signal asks for inside of an accumulation window of a recipe's own
``fit_batch``.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.launching import python, start_by_hand

RECIPE = str(Path(__file__).with_name("save_signal_recipe.py"))


def train(folder, way, processes, *words):
    """Run the recipe on some ranks; return how each ended, and what rank 0 wrote."""
    folder.mkdir(exist_ok=True)
    runs = start_by_hand(
        python(RECIPE, str(folder / "save"), way, *words),
        folder,
        processes,
        warm=True,
    )
    for run in runs:
        run.wait(120)
    return [run.code for run in runs], runs[0].out + runs[0].err


@pytest.mark.parametrize(
    ("way", "processes"),
    [("named", 1), ("named", 2), ("scale", 2), ("factor", 2)],
)
def test_a_save_signal_inside_a_window_of_an_own_fit_batch_resumes_bit_for_bit(
    tmp_path,
    way,
    processes,
):
    """The checkpoint waits for the end of a window, so that it lacks no gradient; then the run is
    killed.
    """
    codes, plain = train(tmp_path / "plain", way, processes)
    assert codes == [0] * processes, plain
    codes, killed = train(tmp_path / "asked", way, processes, "signal")
    assert -signal.SIGKILL in codes, killed
    assert "ends with" not in killed
    assert "inside of an optimizer step" not in killed
    codes, resumed = train(tmp_path / "asked", way, processes)
    assert codes == [0] * processes, resumed
    [(epoch, step)] = re.findall(r"begins at epoch (\d+), step (\d+)", resumed)[:1]
    assert (int(epoch), int(step) % 3) == (2, 0)
    assert int(step) > 5
    assert re.search("ends with (.*)", resumed)[1] == re.search("ends with (.*)", plain)[1]
