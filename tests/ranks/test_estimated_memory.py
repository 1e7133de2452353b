"""What an estimate says of each strategy is what ranks really take, within a tenth."""

from __future__ import annotations

import pytest

from tests.memory_truth import estimated, row_of, true_peak

CASES = {
    "ddp": {},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp by blocks": {"strategy": "fsdp", "fsdp_blocks": ["Block"]},
    "local_sgd": {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 1},
    "virtual_ranks": {"virtual_ranks": 4},
    "virtual_ranks, one each": {"virtual_ranks": 2},
    "virtual_ranks+zero1": {"virtual_ranks": 4, "strategy": "zero1"},
    "ddp accumulates": {"grad_accumulation_factor": 2, "ema_decay": 0.9},
    "ddp copies": {"gradient_as_bucket_view": False},
}
WITHIN = 0.1


@pytest.mark.slow
@pytest.mark.in_each_check(5)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_step_is_as_estimated(ranks, tmp_path, case):
    options = CASES[case]
    truth = max(ranks.run(true_peak, options, world_size=2))
    assumed = {name: options[name] for name in options if name == "virtual_ranks"}
    rehearsed = {name: value for name, value in options.items() if name not in assumed}
    found = estimated(tmp_path, assumed=assumed, **rehearsed)
    peak = row_of(found, case.partition(" ")[0].rstrip(","), 2).peak()
    assert peak == pytest.approx(truth, rel=WITHIN)
