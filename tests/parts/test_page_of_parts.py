"""The part with a state in docs/how-to/parts.md does what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpkit.epoch_loop import EpochCounter
from tests.recipes import Regression, make, points

PAGE = Path(__file__).parents[2] / "docs/how-to/parts.md"
STEPS = 4  # of an epoch


class Saving(Regression):
    """Saves after each validation."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage.name == "VALID":
            self.checkpointer.save_checkpoint()


def part_of_page():
    """Return the class of the page, made of the block that begins with its file's name."""
    _, _, rest = PAGE.read_text().partition("```py\n# flat.py\n")
    names = {}
    exec(rest.partition("```")[0], names)
    return names["StopWhereFlat"]


def fit_twice(folder, part):
    """Make two calls of fit, as one script; return why each ends, and after how many steps."""
    counters = {"first": EpochCounter(3), "second": EpochCounter(2)}
    net_and_parts = {"cls": lambda *args: Saving(*args, parts=[part])}
    brain = make(**net_and_parts, folder=folder, recoverables=counters)
    results = [
        brain.fit(counter, points(4 * STEPS), points(4), train_loader_kwargs={"batch_size": 4})
        for counter in counters.values()
    ]
    return [(result.reason, result.optimizer_steps) for result in results]


def test_a_training_that_the_part_of_the_page_has_stopped_stays_so_after_a_restart(tmp_path):
    stops = part_of_page()
    wanted = [("early_stop", STEPS), ("early_stop", 2 * STEPS)]
    assert fit_twice(tmp_path, stops(limit=1e9, steps=STEPS)) == wanted
    again = fit_twice(tmp_path, stops(limit=1e9, steps=STEPS))
    assert [steps for _, steps in again] == [STEPS, 2 * STEPS]


@pytest.mark.costly
def test_a_training_whose_gradients_are_long_goes_on(tmp_path):
    stops = part_of_page()
    assert fit_twice(tmp_path, stops(limit=0.0)) == [("epochs", 3 * STEPS), ("epochs", 5 * STEPS)]
