"""Two optimizers on several processes: as many steps as windows, with the limit, the schedule and
the average.
"""

from __future__ import annotations

import pytest

from tests.contract.test_steps_of_a_window import fit, gan


def train(limit):
    brain = gan(optimizer_step_limit=limit, ema_decay=0.5, grad_accumulation_factor=2)
    fit(brain, range(1, 6))
    return brain.total_steps, brain.optimizer_step, brain.numbers, brain.ema.updates


@pytest.mark.costly
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_optimizers_count_one_step_in_each_window_on_every_process(ranks, world):
    for found in ranks.run(train, 5, world_size=world):
        assert found == (5, 5, {"generator": 5, "discriminator": 5}, 5)
