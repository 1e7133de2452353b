"""Optimizer steps that the ranks look at one step later; on CPUs, whose fused kernels skip by
themselves too.
"""

from __future__ import annotations

import pytest

from ddpkit import optim
from ddpkit.distributed import if_main_process
from ddpkit.errors import NonFiniteLossError
from ddpkit.optim import making
from tests.training.test_late_steps import KINDS, Looking, data, fit, told

LOCAL_SGD = {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 2, "local_sgd_start": 2}
CASES = {
    "ddp": {},
    "looked at": {"kind": Looking, "grad_accumulation_factor": 2},
    "zero1": {"strategy": "zero1"},
    "virtual ranks": {"virtual_ranks": 4},
    "powersgd": {"ddp_comm_hook": "powersgd"},
    "local sgd": LOCAL_SGD,
}
AT_ONCE = {"zero1", "powersgd", "local sgd"}


def case(name):
    """Train with and without; say whether all is the same, and whether any step was left open."""
    found = []
    samples = data((1, 5)) + data((2,))
    for kinds in ((), ("cpu",)):
        with pytest.MonkeyPatch.context() as patch:
            for module in (optim, making):
                patch.setattr(module, "GPUS", kinds)
            brain = fit(KINDS["AdamW"], samples, **CASES[name])
            found.append(told(brain) if name != "zero1" else told_of_zero1(brain))
    return found[0] == found[1], any(brain.open), brain.progress.nonfinite


def told_of_zero1(brain):
    return [one.detach().tolist() for one in brain.modules.parameters()], brain.ends


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("name", CASES)
def test_the_same_on_two_ranks(ranks, name):
    for is_same, was_open, skipped in ranks.run(case, name, world_size=2):
        assert is_same
        assert was_open is (name not in AT_ONCE)
        assert skipped


def give_up():
    """Have rank 0 alone look at the step that is one too many, and say in which batch each rank
    ends.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (optim, making):
            patch.setattr(module, "GPUS", ("cpu",))
        with pytest.raises(NonFiniteLossError) as caught:
            fit(KINDS["SGD"], data((4, 5)), kind=LookingOnMain, nonfinite_patience=0)
    return str(caught.value)


class LookingOnMain(Looking):
    @property
    def looks(self):
        return if_main_process()


@pytest.mark.costly
def test_ranks_give_up_alike_where_one_of_them_looks(ranks):
    words = ranks.run(give_up, world_size=2)
    assert words[0] == words[1]
    assert "epoch 1, batch 3, after optimizer step 2" in words[0]
