"""On several processes an evaluation drops no sample either."""

from __future__ import annotations

import pytest

from tests.contract.test_evaluation_drops_nothing import FORMS, evaluate, expected

SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form != "dataset"]


@pytest.mark.costly
@pytest.mark.parametrize("form", ["dataset", *SLOW])
def test_drop_last_leaves_no_sample_out_of_an_evaluation_on_several_processes(ranks, form):
    loss, outputs = expected()
    for world in (2, 3):
        for found in ranks.run(evaluate, form, world_size=world):
            assert found == (pytest.approx(loss), pytest.approx(outputs), world)
