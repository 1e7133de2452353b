"""Sums whose bits do not depend on which ranks hold which parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ddpkit.base import temporarily
from ddpkit.comm import OrderedSum, TreeSum, add_tensors, control_group, ordered_sum
from ddpkit.data import Division

SHAPES = [
    ((3, 5), torch.float32),
    ((7,), torch.float64),
    ((1,), torch.bfloat16),
    ((), torch.float32),
    ((0,), torch.int64),
]


def part(number):
    """Values of very different sizes, so that another order of additions has other bits; some
    tensors are missing.
    """
    draw = torch.Generator().manual_seed(number)
    found = [
        (torch.randn(shape, generator=draw) * 10 ** torch.randn(shape, generator=draw)).to(dtype)
        for shape, dtype in SHAPES
    ]
    return [*found, -torch.zeros(2) if number == 1 else None, None]


LIKE = [
    *(torch.zeros(shape, dtype=dtype) for shape, dtype in SHAPES),
    torch.zeros(2),
    torch.zeros(3),
]


class Elsewhere(torch.Tensor):
    """Says that it is on a GPU."""

    is_cpu = False


def add_up(parts, bucket_bytes=40, whole_bytes=0, *, elsewhere=False, in_turns=False):
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tree = TreeSum(add_tensors)
    for number in Division(rank, world_size, parts, in_turns).mine:
        tree.push(number, part(number))
    like = [one.as_subclass(Elsewhere) for one in LIKE] if elsewhere else LIKE
    total = OrderedSum(like, parts, bucket_bytes, whole_bytes, in_turns=in_turns)
    return [
        None
        if one is None
        else (list(one.shape), one.dtype, one.reshape(-1).view(torch.uint8).tolist())
        for one in total.over_ranks(tree)
    ]


@pytest.mark.corner
@pytest.mark.parametrize("whole_bytes", [0, 2**20], ids=["in chunks", "whole"])
@pytest.mark.parametrize(
    ("parts", "world_size"),
    [
        (2, 2),
        (8, 2),
        (6, 2),
        (3, 3),
        (6, 3),
        (12, 3),
        (21, 3),
        (8, 4),
        pytest.param(8, 8, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_on_any_number_of_ranks(ranks, parts, world_size, whole_bytes):
    alone = add_up(parts)
    assert alone[-2] is not None
    assert alone[-1] is None, "no part has that tensor"
    for found in ranks.run(add_up, parts, 40, whole_bytes, world_size=world_size):
        assert found == alone


def long_part(number):
    draw = torch.Generator().manual_seed(number)
    sizes = {torch.float32: 301, torch.float64: 50}
    return [torch.randn(size, generator=draw).to(dtype) for dtype, size in sizes.items()]


def add_up_long_rows(parts, bucket_bytes, most_paired=8):
    """Rows of which each rank adds up a chunk; those of the other tests are too short for that."""
    with temporarily(ordered_sum, MOST_PAIRED=most_paired):
        return sums_of_long_rows(parts, bucket_bytes)


def sums_of_long_rows(parts, bucket_bytes):
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tree = TreeSum(add_tensors)
    for number in Division(rank, world_size, parts, in_turns=False).mine:
        tree.push(number, long_part(number))
    like = [torch.zeros_like(one) for one in long_part(0)]
    return [one.tolist() for one in OrderedSum(like, parts, bucket_bytes, 0).over_ranks(tree)]


@pytest.mark.parametrize("bucket_bytes", [500, 2**20])
@pytest.mark.parametrize(("parts", "world_size"), [(2, 2), (6, 2), (6, 3), (8, 4)])
def test_each_rank_adds_up_a_chunk_of_long_rows(ranks, parts, world_size, bucket_bytes):
    """In pairs of messages, and by collectives as between many ranks."""
    alone = add_up_long_rows(parts, bucket_bytes)
    for most in (8, 1):
        found = ranks.run(add_up_long_rows, parts, bucket_bytes, most, world_size=world_size)
        assert found == [alone] * world_size


def add_up_in_turns(parts, whole_bytes):
    return add_up(parts, whole_bytes=whole_bytes, in_turns=True)


@pytest.mark.corner
@pytest.mark.parametrize("whole_bytes", [0, 2**20], ids=["in chunks", "whole"])
@pytest.mark.parametrize(("parts", "world_size"), [(2, 2), (8, 2), (6, 3), (12, 3)])
def test_the_same_bits_where_the_ranks_take_parts_in_turns(ranks, parts, world_size, whole_bytes):
    expected = [add_up(parts)] * world_size
    assert ranks.run(add_up_in_turns, parts, whole_bytes, world_size=world_size) == expected


def count_collectives(parts, whole_bytes):
    names = ("all_reduce", "all_to_all_single", "all_gather", "batch_isend_irecv")
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            call = getattr(dist, name)
            patch.setattr(
                dist,
                name,
                lambda *args, _call=call, **options: (made.append(1), _call(*args, **options))[1],
            )
        add_up(parts, 2**20, whole_bytes)
    return len(made)


def test_what_is_small_goes_in_one_message(ranks):
    kinds = len({dtype for shape, dtype in SHAPES if 0 not in shape})  # else nothing is sent
    assert ranks.run(count_collectives, 8, 2**20, world_size=2) == [1, 1]
    # what is left beside the message: two tensors of float32, in one row
    assert ranks.run(count_collectives, 8, 2**9, world_size=2) == [1 + 2] * 2
    assert ranks.run(count_collectives, 8, 0, world_size=2) == [1 + 2 * kinds] * 2


def add_up_on_gpus(parts):
    groups = []
    reduce = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist,
            "all_reduce",
            lambda *args, group=None: (groups.append(group), reduce(*args, group=group)),
        )
        found = add_up(parts, whole_bytes=2**20, elsewhere=True)
    return found, groups == [control_group()]


def test_what_is_there_is_agreed_on_without_a_gpu(ranks):
    for found, is_on_the_cpu in ranks.run(add_up_on_gpus, 8, world_size=2):
        assert found == add_up(8)
        assert is_on_the_cpu


def test_the_order_matters_for_these_numbers():
    in_a_row = part(0)[:4]
    for number in range(1, 8):
        add_tensors(in_a_row, part(number)[:4])
    assert in_a_row[0].reshape(-1).view(torch.uint8).tolist() != add_up(8)[0][2]


def test_the_size_of_what_is_sent_at_once_changes_nothing(ranks):
    assert ranks.run(add_up, 6, 2**20, world_size=2)[0] == add_up(6)


def test_the_sum_is_the_sum():
    for one, kind in zip(add_up(5)[:2], (torch.float32, torch.float64), strict=True):
        shape, dtype, data = one
        found = torch.tensor(data, dtype=torch.uint8).view(dtype).view(shape)
        place = 0 if kind is torch.float32 else 1
        expected = sum(part(number)[place].double() for number in range(5))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
