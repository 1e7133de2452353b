"""Real ranks: equal to BatchNorm over the joined batch, to 1e-10 in float64."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.compat import all_groups, timeout_of
from ddpkit.errors import DataError
from ddpkit.metrics import counted_by
from ddpkit.syncbn import SyncBatchNorm, convert_sync_batchnorm
from tests.cuda_kernels import as_on_cuda

CLOSE = {"rtol": 0.0, "atol": 1e-10}
KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def parts_of(rows, rest, channels=3, steps=3):
    """Return the input and the loss weights of each step, whole and as the rows of each rank."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        shape = (sum(rows), channels, *rest)
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 100
        w = torch.randn(shape, generator=generator, dtype=torch.float64)
        yield x, w, x.split(rows), w.split(rows)


def counted(calls, name):
    real = getattr(dist, name)

    def call(*args, **kwargs):
        calls.append(name)
        return real(*args, **kwargs)

    return call


def against_joined(rows, rest, options):
    """Train both for three steps; return the largest difference found."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    joined = KINDS[len(rest) + 2](3, dtype=torch.float64, **options)
    if joined.affine:
        nn.init.normal_(joined.weight)
        nn.init.normal_(joined.bias)
    ours = convert_sync_batchnorm(copy.deepcopy(joined))
    assert type(ours) is SyncBatchNorm
    worst = 0.0

    @torch.no_grad()
    def compare(mine, reference):
        nonlocal worst
        torch.testing.assert_close(mine, reference, **CLOSE)
        worst = max(worst, float((mine - reference).abs().max()) if mine.numel() else 0.0)

    for x, w, xs, ws in parts_of(rows, rest):
        whole = x.clone().requires_grad_()
        mine = xs[rank].clone().requires_grad_()
        reference, output = joined(whole), ours(mine)
        (reference.square() * w).sum().backward()
        (output.square() * ws[rank]).sum().backward()
        compare(output, reference.split(rows)[rank])
        compare(mine.grad, whole.grad.split(rows)[rank])
        for name, parameter in joined.named_parameters():
            share = ours.get_parameter(name).grad.clone()
            dist.all_reduce(share)
            compare(share, parameter.grad)
        for name, buffer in joined.named_buffers():
            compare(ours.get_buffer(name), buffer)
        joined.zero_grad()
        ours.zero_grad()
    joined.eval()
    ours.eval()
    if joined.track_running_stats:
        compare(ours(xs[rank]), joined(x).split(rows)[rank])
    return worst


@pytest.mark.corner
@pytest.mark.parametrize("rest", [(), (4,), (4, 5), (2, 3, 2)], ids=["2d", "3d", "4d", "5d"])
@pytest.mark.parametrize("rows", [(4, 4), (5, 2), (7, 1), (6, 0), (0, 2)], ids=str)
def test_equals_batchnorm_over_the_joined_batch(ranks, rows, rest):
    assert max(ranks.run(against_joined, rows, rest, {})) <= 1e-10


@pytest.mark.costly
@pytest.mark.parametrize("rows", [(1, 1, 1), (3, 0, 2)], ids=str)
def test_on_three_ranks_with_one_row_each(ranks, rows):
    assert max(ranks.run(against_joined, rows, (), {}, world_size=3)) <= 1e-10


@pytest.mark.corner
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 1.0},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.5},
    ],
    ids=str,
)
def test_options(ranks, options):
    assert max(ranks.run(against_joined, (4, 1), (2,), options)) <= 1e-10


def against_joined_as_on_cuda(*args):
    with as_on_cuda():
        return against_joined(*args)


@pytest.mark.corner
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
@pytest.mark.parametrize("rows", [(4, 4), (7, 1), (0, 2)], ids=str)
def test_with_the_kernels_for_cuda_it_is_the_same(ranks, rows, options):
    assert max(ranks.run(against_joined_as_on_cuda, rows, (2,), options)) <= 1e-10


@contextlib.contextmanager
def messages():
    """Note the dtype and the size of what this rank sends."""
    sent = []

    def noted(name, place):
        real = getattr(dist, name)

        def call(*args, **kwargs):
            sent.append((name, str(args[place].dtype), args[place].numel()))
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with noted("all_gather", 1), noted("all_reduce", 0), noted("all_to_all_single", 1):
        yield sent


def without_rows(dtype, on_cuda, repeats):
    """Train a step in which rank 1 has no rows, or repeats some that count nothing; return what was
    sent, and errors.

    Under autocast a convolution gives rows in half precision, the parameters and statistics are in
    float32.
    """
    with as_on_cuda() if on_cuda else contextlib.nullcontext(), messages() as sent:
        torch.manual_seed(5)
        rows = torch.randn(4, 3, 2).to(dtype)
        joined = nn.BatchNorm1d(3)
        layer = convert_sync_batchnorm(nn.BatchNorm1d(3))
        whole = rows.to(torch.float32, copy=True).requires_grad_()
        has_none = dist.get_rank() == 1
        mine = (
            (rows if not has_none else rows[:2] if repeats else rows[:0]).clone().requires_grad_()
        )
        with (
            counted_by(SimpleNamespace(count=0))
            if has_none and repeats
            else contextlib.nullcontext()
        ):
            output = layer(mine)
        (output.float() * (0.0 if has_none else 1.0)).square().sum().backward()
        joined(whole).square().sum().backward()
    assert output.dtype == mine.grad.dtype == dtype
    assert output.shape == mine.shape
    torch.testing.assert_close(layer.running_mean, joined.running_mean)
    torch.testing.assert_close(layer.running_var, joined.running_var)
    if not has_none:
        torch.testing.assert_close(mine.grad.float(), whole.grad, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(layer.weight.grad, joined.weight.grad, rtol=2e-2, atol=2e-2)
    else:
        assert not mine.grad.any()
        assert not layer.weight.grad.any()
    return sent


@pytest.mark.costly
@pytest.mark.parametrize("repeats", [True, False], ids=["a repeated batch", "no rows"])
@pytest.mark.parametrize("on_cuda", [True, False], ids=["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_messages_of_all_ranks_are_alike_where_one_has_no_rows_in_half_precision(
    ranks,
    dtype,
    on_cuda,
    repeats,
):
    first, second = ranks.run(without_rows, dtype, on_cuda, repeats)
    assert first == second
    # two ranks over gloo exchange
    assert [name for name, _, _ in first] == ["all_to_all_single"] * 2


def exact_where_the_mean_is_large():
    layer = SyncBatchNorm(1)
    generator = torch.Generator().manual_seed(3)
    # sums of squares in float32 would be off by more than 1
    x = torch.randn(512, 1, generator=generator) + 4096.0
    layer(x[dist.get_rank() :: 2])
    return float(layer.running_var), float(0.9 + 0.1 * x.double().var())


def test_variance_does_not_cancel(ranks):
    for found, expected in ranks.run(exact_where_the_mean_is_large):
        assert found == pytest.approx(expected, rel=1e-5)


def half(dtype):
    torch.manual_seed(0)
    layer = SyncBatchNorm(3, dtype=torch.float32)
    x = (torch.randn(64, 3) + 30).to(dtype)
    mine = x[:40] if dist.get_rank() == 0 else x[40:]
    mine = mine.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(mine)
    output.float().square().sum().backward()
    reference = nn.BatchNorm1d(3)
    reference(x.float())
    torch.testing.assert_close(layer.running_mean, reference.running_mean)
    torch.testing.assert_close(layer.running_var, reference.running_var)
    return output.dtype, mine.grad.dtype, layer.weight.grad.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_have_float32_statistics(ranks, dtype):
    assert ranks.run(half, dtype) == [(dtype, dtype, torch.float32)] * 2


def too_small(rows, on_cuda):
    with as_on_cuda() if on_cuda else contextlib.nullcontext():
        layer = convert_sync_batchnorm(nn.BatchNorm1d(3))
        try:
            layer(torch.zeros(rows[dist.get_rank()], 3))
        except DataError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("on_cuda", [False, True], ids=["cpu", "cuda"])
def test_one_value_over_all_ranks_is_an_error_on_every_rank(ranks, on_cuda):
    for rank, message in enumerate(ranks.run(too_small, (1, 0), on_cuda)):
        assert (
            f"Expected more than 1 value per channel when training, got input size [{1 - rank}, 3]"
        ) in message
        assert "1 value over all 2 ranks" in message


def nothing_at_all():
    layer = SyncBatchNorm(3)
    x = torch.zeros(0, 3, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    return tuple(output.shape), layer.running_mean.tolist(), int(layer.num_batches_tracked)


def test_no_rows_anywhere(ranks):
    assert ranks.run(nothing_at_all) == [((0, 3), [0.0, 0.0, 0.0], 1)] * 2


def collectives():
    layer = convert_sync_batchnorm(nn.BatchNorm1d(3))
    calls = []
    names = ("all_gather", "all_reduce", "all_to_all_single", "broadcast", "barrier")
    real = {name: getattr(dist, name) for name in names}
    try:
        for name in names:
            setattr(dist, name, counted(calls, name))
        x = torch.randn(4, 3, requires_grad=True)
        layer(x).sum().backward()
        layer.eval()
        layer(x).sum().backward()
    finally:
        for name in names:
            setattr(dist, name, real[name])
    return calls


def test_one_collective_forward_one_backward_none_in_evaluation(ranks):
    assert ranks.run(collectives) == [["all_to_all_single"] * 2] * 2


def small_net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 2),
    ).double()


def train_under_ddp(bucket_mb):
    rank = dist.get_rank()
    rows = (5, 3)
    torch.manual_seed(2)
    joined = small_net()
    net = DDP(convert_sync_batchnorm(copy.deepcopy(joined)), bucket_cap_mb=bucket_mb)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (joined, net)]
    for _ in range(6):
        x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
        y = torch.randint(2, (8,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(joined(x), y).backward()
        # DDP averages over ranks; a rank's share of the mean over 8 rows is its sum / 8
        loss = nn.functional.cross_entropy(
            net(x.split(rows)[rank]),
            y.split(rows)[rank],
            reduction="sum",
        )
        (loss * 2 / 8).backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, value in joined.state_dict().items():
        torch.testing.assert_close(net.module.state_dict()[name], value, **CLOSE)


@pytest.mark.parametrize("bucket_mb", [25, 0.0001])
def test_ddp_on_cpu_trains_as_one_process_does(ranks, bucket_mb):
    ranks.run(train_under_ddp, bucket_mb)


class TwoPaths(nn.Module):
    """The ranks take different branches, and the branches' buckets stand before those of the norm
    layers.

    Parameters that a rank leaves out count as ready at once, so it starts their all-reduce before
    it comes to the norm layers; the other rank, which uses them, after. On one group this test
    aborts.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm1 = nn.BatchNorm1d(6)
        self.middle = nn.Linear(6, 6)
        self.norm2 = nn.BatchNorm1d(6)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, parts, lefts):
        chosen = [self.left if left else self.right for left in lefts]
        x = torch.cat(
            [branch(self.first(part)) for branch, part in zip(chosen, parts, strict=True)]
        )
        return self.last(self.norm2(self.middle(self.norm1(x))))


def different_graphs():
    rank = dist.get_rank()
    torch.manual_seed(4)
    joined = TwoPaths().double()
    net = convert_sync_batchnorm(copy.deepcopy(joined))
    net = DDP(net, find_unused_parameters=True, bucket_cap_mb=0.0001)
    for step in range(8):
        parts = torch.randn(8, 6, dtype=torch.float64).split(4)
        lefts = [step % 2 == 0, step % 2 == 1]
        joined.zero_grad()
        net.zero_grad()
        joined(parts, lefts).square().mean().backward()
        net(parts[rank : rank + 1], lefts[rank : rank + 1]).square().mean().backward()
        for name, parameter in joined.named_parameters():
            torch.testing.assert_close(net.module.get_parameter(name).grad, parameter.grad, **CLOSE)


@pytest.mark.costly
def test_statistics_never_mix_with_gradients_when_the_graphs_differ(ranks):
    ranks.run(different_graphs)


def groups():
    """Return how many groups were made, and whether the statistics wait as long as gradients do."""
    before = set(all_groups())
    for _ in range(2):
        net = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2), SyncBatchNorm(2)))
        x = torch.randn(4, 2)
        torch.testing.assert_close(copy.deepcopy(net)(x), net(x))
    [group] = set(all_groups()) - before
    return timeout_of(group) == timeout_of(dist.group.WORLD)


def test_one_group_of_its_own_for_all_models(ranks):
    assert ranks.run(groups) == [True] * 2


def group_gone(path):
    rank = dist.get_rank()
    layer = convert_sync_batchnorm(nn.BatchNorm1d(1, momentum=1.0))
    x = torch.tensor([[1.0], [3.0]]) + rank
    layer(x)
    dist.destroy_process_group()
    layer(x)  # alone: BatchNorm
    alone = float(layer.running_mean)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(path, 2))
    layer(x)
    return alone, float(layer.running_mean)


def test_after_another_group_has_started_the_statistics_are_its(ranks, tmp_path):
    assert ranks.run(group_gone, str(tmp_path / "store")) == [(2.0, 2.5), (3.0, 2.5)]
