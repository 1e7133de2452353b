"""One rank fails in work that all ranks do together, in which others wait for it: nobody waits for
the time limit, and the rank is named.
"""

from __future__ import annotations

import tempfile
import time

import pytest
import torch
from torch import nn

from ddpkit import Part
from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import get_rank, sum_over_ranks
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import DdpkitError
from tests.recipes import QUIET, Regression, points

DATA = points(8)
SECONDS = 20.0


class Adapted(nn.Module):
    """Has a base that is frozen."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__()
        self.base = nn.Linear(3, 5).double()
        self.top = nn.Linear(5, 1).double()
        self.base.requires_grad_(False)

    def forward(self, rows):
        return self.top(self.base(rows))


class Saving(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_checkpoint()


def train(folder, epochs=1, net=None, cls=Saving, parts=(), **options):
    net = net or Adapted()
    counter = EpochCounter(epochs)
    brain = cls(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={**QUIET, **options},
        checkpointer=Checkpointer(folder, {"net": net, "counter": counter}, trained_only=["net"]),
        parts=parts,
    )
    brain.fit(counter, DATA)


def failing_soon(folder, failing, *inputs):
    """Return the seconds in which this rank ends, and its error."""
    begun = time.monotonic()
    error = None
    try:
        failing(folder, *inputs)
    except (DdpkitError, MemoryError, ValueError) as found:
        error = f"{type(found).__name__}: {found}"
    finally:
        tempfile.tempdir = None
    return time.monotonic() - begun, error


def without_room_for_a_copy(folder):
    """The base of a module that is divided is compared in a collective, which this rank does not
    come to.
    """
    train(folder, strategy="fsdp")
    if get_rank():
        tempfile.tempdir = str(folder / "is not there")
    train(folder, 2, strategy="fsdp", ckpt_load="broadcast")


def out_of_memory(*_):
    raise MemoryError("planted")


def without_memory_for_first_weights(folder):
    """Rank 0 waits for what this rank has to say of its copy."""
    net = Adapted()
    if get_rank():
        net.register_load_state_dict_pre_hook(out_of_memory)
    torch.save(Adapted().state_dict(), folder / f"weights-{get_rank()}.pt")
    weights = folder / "weights-0.pt"
    train(folder / "run", net=net, init_from=weights, ckpt_load="broadcast")


class Sums(Part):
    """Adds up something as fit begins, and fails before the second time on one rank."""

    def on_fit_start(self, brain):
        sum_over_ranks([1.0])
        if brain.rank:
            raise ValueError("planted")
        sum_over_ranks([1.0])


def in_a_part(folder):
    train(folder, parts=[Sums()])


class SumsInLoader(Saving):
    """Adds up something where its loader is made, and fails before the second time on one rank."""

    def make_dataloader(self, dataset, stage, **loader_kwargs):
        Sums().on_fit_start(self)
        return super().make_dataloader(dataset, stage, **loader_kwargs)


def in_a_loader(folder):
    train(folder, cls=SumsInLoader)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("failing", "words"),
    [
        (without_room_for_a_copy, "is not there"),
        (without_memory_for_first_weights, "MemoryError: planted"),
        # a rank that has failed waits some seconds for the others to come
        pytest.param(in_a_part, "ValueError: planted", marks=pytest.mark.slow),
        pytest.param(in_a_loader, "ValueError: planted", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_those_that_wait_for_it(ranks, tmp_path, failing, words):
    (of_main, told), (own, error) = ranks.run(
        failing_soon, tmp_path, failing, world_size=2, timeout=20
    )
    assert max(of_main, own) < SECONDS
    assert words in error
    assert "rank 1" in told
    assert words in told
