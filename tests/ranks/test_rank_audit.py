"""``audit_every`` on several ranks: who is wrong is named, and the step is not taken."""

from __future__ import annotations

import functools

import pytest
import torch

from ddpkit.distributed import from_next_rank, get_rank
from ddpkit.distributed.next_rank import FIRST_BYTES
from tests.parts.planted_audits import STILL, Audited, Flip, is_caught, train


def ended_with(ranks, flip, world_size, **options):
    run = functools.partial(train, flip, virtual_ranks=world_size, **options)
    return ranks.run(run, world_size=world_size)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("flip", "world_size", "words"),
    [
        (Flip(1, 2, 1), 2, "it did not give its own bits once more, and the other process did"),
        (Flip(0, 1, 4), 3, "Computed again there, it was right"),
        (Flip(2, 2, always=True), 3, "Computed again there, it was wrong in the same way"),
    ],
    ids=["once, of two", "once, of three", "always, of three"],
)
def test_a_flipped_bit_is_caught_before_the_step(ranks, flip, world_size, words):
    ended = ended_with(ranks, flip, world_size)
    assert is_caught(flip, ended), ended
    assert words in ended[0].words
    assert f"virtual rank {flip.rank} in optimizer step {flip.step}" in ended[0].words
    assert len({one.words for one in ended}) == 1


@pytest.mark.costly
def test_of_two_that_each_give_their_own_bits_none_is_named(ranks):
    ended = ended_with(ranks, Flip(1, 2, always=True), 2)
    assert "rank 0 (host" in ended[0].words
    assert "and rank 1 (host" in ended[0].words
    assert "nothing tells which one is wrong" in ended[0].words
    assert [one.steps for one in ended] == [1, 1]


class OtherWeights(Audited):
    """One rank has a weight that was changed behind its back."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if get_rank() == 1 and self.optimizer_step == 1:
            with torch.no_grad():
                self.modules.head.weight[0, 0] += 2**-20
        super().on_fit_batch_end(batch, outputs, loss, should_step)


@pytest.mark.costly
def test_weights_that_are_not_those_of_the_others_are_told(ranks):
    ended = ended_with(ranks, None, 3, kind=OtherWeights)
    assert "audit_every: rank 1 (host" in ended[0].words
    assert "Its weights are not those of the others; the first that differs is head.weight" in (
        ended[0].words
    )


@pytest.mark.costly
@pytest.mark.parametrize("options", STILL, ids=map(str, range(len(STILL))))
def test_nothing_is_found_where_nothing_is_wrong(ranks, options):
    ended = ranks.run(functools.partial(train, epochs=2, **options))
    assert [one.words for one in ended] == ["", ""]
    assert ended[0].audits == ended[0].steps > 1


def passed_on(sizes):
    return from_next_rank(bytes([get_rank()]) * sizes[get_rank()])


@pytest.mark.parametrize("size", [FIRST_BYTES - 1, FIRST_BYTES, 3 * FIRST_BYTES])
def test_bytes_of_the_next_rank(ranks, size):
    sizes = [3, size, 0]
    found = ranks.run(functools.partial(passed_on, sizes), world_size=3)
    assert found == [b"\1" * size, b"", b"\0" * 3]
