"""The loops with a stub for the Brain: windows and their weights, syncs, stopping, messages."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ddpkit.control import PeriodicSync, Requests, SyncReport
from ddpkit.data.dealt_batches import DealtBatchSampler
from ddpkit.data.planned_batches import PlannedBatchSampler
from ddpkit.dataloader import LoopedLoader, Sharding, shard
from ddpkit.errors import BatchError, DataError, NonFiniteLossError
from ddpkit.training.feed import Feed
from ddpkit.training.loop import evaluate_epoch, train_epoch
from ddpkit.training.loss_errors import loss_problem
from ddpkit.training.losses import backward, one_number
from ddpkit.training.progress import Progress
from ddpkit.training.stream_feed import StreamFeed
from ddpkit.training.window import Window
from ddpkit.types import Stage
from tests.training.feeds import drain, windows_of

FAST = settings(max_examples=120, deadline=None, derandomize=True, database=None)


# ---------------------------------------------------------------------------- windows, known length


@pytest.mark.costly
@FAST
@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    factor=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_weights_of_a_window(size, batch_size, world_size, factor, drop_last):
    """Over the ranks' average, the weights of a window add up to one, each in proportion to its
    samples.
    """
    plans = [
        PlannedBatchSampler(size, batch_size, rank, world_size, drop_last=drop_last)
        for rank in range(world_size)
    ]
    length = len(plans[0])
    ranks = [drain(Feed(plan, length, plan, factor, world_size)) for plan in plans]
    assert {len(steps) for steps in ranks} == {length}
    closes = [[step.closes for step in steps] for steps in ranks]
    expected_closes = [
        (number + 1) % factor == 0 or number == length - 1 for number in range(length)
    ]
    assert closes == [expected_closes] * world_size
    for together in zip(*map(windows_of, ranks), strict=True):
        parts = [part for rank in together for part in rank]
        samples = sum(part.count for part in parts)
        assert sum(part.scale for part in parts) / world_size == pytest.approx(1.0)
        for part in parts:
            assert part.scale == part.count * world_size / samples
            assert part.correction == 1.0
            assert len(part.batch) == max(part.count, 1)


def test_a_looped_loader_that_goes_on_weighs_its_batches_by_their_own_samples(tmp_path):
    """Batches of 4, 4, 2 and 4 samples, of which two are done."""

    def looped():
        return LoopedLoader(shard(range(10), Sharding(), batch_size=4), 4)

    first = looped()
    saved = tmp_path / "looped.ckpt"
    for _ in zip(range(2), first, strict=False):
        pass
    first.save(saved)
    again = looped()
    again.load(saved, end_of_epoch=False)
    assert [(len(step.batch), step.count) for step in drain(Feed(again, 4, again, start=2))] == [
        (2, 2),
        (4, 4),
    ]
    assert again.step == 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 49])
def test_equal_batches_weigh_exactly_one(world_size, batch_size):
    """So that no loss is multiplied where nothing is to be weighed: the bits are those of the bare
    loop.
    """
    plan = PlannedBatchSampler(batch_size * world_size * 5, batch_size, 0, world_size)
    assert {step.scale for step in drain(Feed(plan, 5, plan, 1, world_size))} == {1.0}
    assert {step.scale for step in drain(Feed("abcd", 4, factor=4, world_size=world_size))} == {
        0.25
    }


@pytest.mark.slow
@FAST
@given(
    size=st.integers(1, 30),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 3),
    factor=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9),
    dealt=st.booleans(),
)
def test_gradients_are_those_of_the_mean_over_all_samples(
    size,
    batch_size,
    world_size,
    factor,
    sizes,
    dealt,
):
    """What every rank back-propagates, averaged over the ranks, is the gradient of one big
    batch.
    """
    if dealt:
        numbers = iter(range(100))
        batches = [list(itertools.islice(numbers, one)) for one in sizes]
        plans = [DealtBatchSampler(batches, rank, world_size) for rank in range(world_size)]
        samples = sum(sizes)
    else:
        plans = [
            PlannedBatchSampler(size, batch_size, rank, world_size) for rank in range(world_size)
        ]
        samples = size
    data = torch.linspace(-1, 2, samples, dtype=torch.float64)
    order = []
    gradients = []
    for rank, plan in enumerate(plans):
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        mine = []
        for step in drain(Feed(plan, len(plan), plan, factor, world_size)):
            loss = (torch.sin(weight * data[step.batch]) ** 2).mean()
            (loss * step.scale).backward()
            order.append((len(mine), rank, step.batch[: step.count]))
            if step.closes:
                mine.append(weight.grad / world_size)
                weight.grad = None
        gradients.append(mine)
    for number, parts in enumerate(zip(*gradients, strict=True)):
        joined = [index for where, _, batch in order if where == number for index in batch]
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        (torch.sin(weight * data[joined]) ** 2).mean().backward()
        torch.testing.assert_close(sum(parts), weight.grad, rtol=1e-12, atol=1e-14)
    assert sorted(index for _, _, batch in order for index in batch) == list(range(samples))


def test_a_feed_that_goes_on_in_the_midst_of_an_epoch():
    """The plan's numbers are those of the uninterrupted epoch; the loader has left out what was
    done.
    """
    plan = PlannedBatchSampler(19, 2)
    whole = drain(Feed(plan, len(plan), plan, factor=4))
    for start in range(11):
        plan.skip = start
        rest = drain(Feed(plan, len(plan), plan, factor=4, start=start))
        if start % 4 == 0:
            assert rest == whole[start:]
        assert [step.closes for step in rest] == [step.closes for step in whole[start:]]
        for window in windows_of(rest):
            assert sum(step.scale for step in window) == pytest.approx(1.0), (
                "also of a window cut in two"
            )
    assert drain(Feed([], 10, start=12)) == [], "the data has become less"


def test_a_shorter_length_than_the_loaders():
    """As in debugging: the short window at the end is closed, and weighs what it holds."""
    plan = PlannedBatchSampler(100, 2)
    steps = drain(Feed(plan, 5, plan, factor=3))
    assert [step.batch for step in steps] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [step.closes for step in steps] == [False, False, True, False, True]
    assert [step.scale for step in steps] == pytest.approx([1 / 3] * 3 + [1 / 2] * 2)


def test_no_batch_too_many_is_asked_for():
    asked = []

    def loader():
        for number in range(10):
            asked.append(number)
            yield number

    drain(Feed(loader(), 4))
    assert asked == [0, 1, 2, 3]


# ----------------------------------------------------------------------------------------- training


class Host:
    """Stands for the Brain: remembers what it was asked to do, and steps where a window closes."""

    def __init__(self, **progress):
        self.progress = Progress(**progress)
        self.seen = []

    def fit_batch(self, batch):
        progress = self.progress
        window = self.progress.window
        self.seen.append((batch, progress.step, window.closes))
        progress.optimizer_step += window.closes
        return torch.tensor(float(batch))

    def evaluate_batch(self, batch, stage):
        assert not torch.is_grad_enabled()
        self.seen.append((batch, self.progress.step, stage))
        return float(batch)


class Syncs:
    """A sync at given distances, which remembers."""

    def __init__(self, apart=3):
        self.apart = apart
        self.due = 1
        self.started = []
        self.calls = []

    def start(self, step):
        self.started.append(step)
        self.due = step + 1

    def __call__(self, step, loss_sum, count, samples, requests):
        assert samples == count, "in these tests every loss counts its samples"
        self.calls.append((step, loss_sum, samples, requests.main_seconds))
        self.due = step + self.apart
        return SyncReport(step, loss_sum / samples, int(samples), requests.main_seconds)


def one(number, batch):
    return 1


def run(host, feed, stop_at=math.inf, sync=None, **options):
    sync = sync or Syncs()
    reports = []
    train_epoch(host, feed, sync, reports.append, stop_at, **options)
    return sync, reports


def test_an_epoch():
    host = Host()
    windows = []
    sync, reports = run(
        host,
        Feed(range(10), 10, factor=2),
        on_window=lambda: windows.append(host.progress.step),
        tell=lambda: Requests(7.5),
    )
    assert [(batch, step) for batch, step, _ in host.seen] == [
        (number, number + 1) for number in range(10)
    ]
    assert host.progress.step == 10
    assert host.progress.optimizer_step == 5
    assert windows == [2, 4, 6, 8, 10]
    assert sync.started == [0]
    assert [call[0] for call in sync.calls] == [2, 6, 10], "syncs wait for the end of a window"
    assert sync.calls[0] == (2, 1.0, 2.0, 7.5)
    assert reports[-1] == SyncReport(10, 4.5, 10, 7.5)
    assert host.progress.meter.sums() == (45.0, 10.0, 0)


def test_losses_weigh_by_samples_and_fillers_weigh_nothing():
    plan = PlannedBatchSampler(5, 2, 1, 2)
    host = Host()
    run(host, Feed([4.0, 100.0], 2, plan, world_size=2))
    assert host.progress.meter.sums() == (8.0, 2.0, 0)


@pytest.mark.parametrize("stop_at", [0, 1, 3, 5, 99])
@pytest.mark.parametrize("length", [10, None])
def test_stopping_after_a_number_of_optimizer_steps(stop_at, length):
    host = Host()
    fetched = []
    loader = (fetched.append(number) or number for number in range(10))
    feed = StreamFeed(loader, factor=2) if length is None else Feed(loader, length, factor=2)
    run(host, feed, stop_at=stop_at)
    assert host.progress.optimizer_step == min(stop_at, 5)
    assert host.progress.step == min(2 * stop_at, 10)
    if length is not None:
        assert len(fetched) == host.progress.step, "no batch is fetched that is not used"


def test_a_limit_that_was_reached_before():
    host = Host(optimizer_step=7)
    run(host, Feed(range(4), 4), stop_at=7)
    assert host.seen == []


def test_an_epoch_that_goes_on():
    host = Host(step=6, optimizer_step=3)
    sync, _ = run(host, Feed(range(6, 10), 10, factor=2, start=6))
    assert sync.started == [6]
    assert [step for _, step, _ in host.seen] == [7, 8, 9, 10]
    assert [call[0] for call in sync.calls] == [8]
    assert host.progress.optimizer_step == 5


def test_what_the_loop_itself_does_per_step(monkeypatch):
    """Between syncs it asks nobody anything, and does not read a loss."""
    from ddpkit.metrics import LossMeter

    reads = []
    real = LossMeter.sums
    monkeypatch.setattr(LossMeter, "sums", lambda meter: reads.append(1) or real(meter))
    host = Host()
    sync, _ = run(host, Feed(range(200), 200), sync=Syncs(apart=100))
    assert len(sync.calls) == len(reads) == 2


def test_a_failing_host_leaves_the_position():
    class Failing(Host):
        def fit_batch(self, batch):
            if batch == 3:
                raise KeyError("lost")
            return super().fit_batch(batch)

    host = Failing()
    with pytest.raises(KeyError):
        run(host, Feed(range(10), 10))
    assert host.progress.step == 4, "the batch that failed"


def test_losses_of_overridden_hooks():
    """What an overridden ``fit_batch`` returns is kept for a while: not its graph, and nothing but
    a number.
    """
    attached = torch.ones(1, requires_grad=True) * 2

    class Overridden(Host):
        loss: object = attached

        def fit_batch(self, batch):
            return self.loss

        def evaluate_batch(self, batch, stage):
            return self.loss

    host = Overridden()
    run(host, Feed(range(2), 2), sync=Syncs(apart=100))
    assert not any(loss.requires_grad for loss, _ in host.progress.meter._means)
    assert host.progress.meter.sums() == (4.0, 2.0, 0)
    for loss, match in (
        (None, "a NoneType, not a tensor"),
        (torch.ones(3), r"a tensor of shape \(3,\), not one number"),
    ):
        Overridden.loss = loss
        with pytest.raises(BatchError, match=rf"^Overridden\.fit_batch returned {match}"):
            run(Overridden(), Feed(range(2), 2))
        with pytest.raises(BatchError, match=rf"^Overridden\.evaluate_batch returned {match}"):
            evaluate_epoch(Overridden(), range(2), Stage.TEST, Bar(), count=one, sync=Syncs())


# --------------------------------------------------------------------------------------- evaluation


class Bar:
    def __init__(self):
        self.shown = []

    def show(self, *numbers):
        self.shown.append(numbers)


def test_evaluation():
    host = Host()
    bar = Bar()
    evaluate_epoch(host, range(8), Stage.VALID, bar, count=one, sync=Syncs(apart=5))
    assert [(batch, step) for batch, step, _ in host.seen] == [
        (number, number + 1) for number in range(8)
    ]
    assert {stage for *_, stage in host.seen} == {Stage.VALID}
    assert host.progress.meter.sums() == (28.0, 8.0, 0)
    assert bar.shown == [(1, 0.0, 1), (6, 2.5, 6)]
    assert torch.is_grad_enabled()


def test_evaluation_weighs_by_samples_and_stops_at_a_limit():
    plan = PlannedBatchSampler(5, 2)
    host = Host()
    sync = PeriodicSync(list, 1, is_main=True)
    evaluate_epoch(
        host,
        [1.0, 2.0, 9.0],
        Stage.TEST,
        Bar(),
        count=lambda number, _: plan.count(number),
        sync=sync,
    )
    assert host.progress.meter.sums() == (2 + 4 + 9, 5.0, 0)
    host = Host()
    evaluate_epoch(host, range(3), Stage.TEST, Bar(), count=one, sync=sync)
    assert host.progress.step == 3


# -------------------------------------------------------------------------------- windows, progress


def test_what_waits_for_a_step():
    window = Window()
    assert window.num_deferred(1) == 0
    for step in (1, 2, 2, 3):
        window.defer(step)
    assert (window.num_deferred(3), window.num_deferred(4), window.num_deferred(2)) == (3, 0, 0)
    window.multiplier = 2.0
    assert window.stepped() == 2.0
    assert (window.num_deferred(3), window.multiplier) == (0, 1.0)
    window.defer(4)
    assert window.num_deferred(4) == 1
    window.defer(9)
    assert window.num_deferred(9) == 1, "what was not in a row is not of this window"


def test_progress_starts_anew():
    progress = Progress(epoch=2, step=5, optimizer_step=9)
    progress.meter.append(1.0, 1)
    progress.window.defer(5)
    progress.restart()
    assert (progress.step, progress.optimizer_step, progress.meter.sums()) == (0, 9, (0.0, 0.0, 0))
    assert progress.window == Window()


def test_skipped_steps_are_counted_until_patience_ends(caplog):
    progress = Progress(epoch=3, step=12, optimizer_step=40)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            progress.count_skipped(math.nan, patience=2)
    where = "epoch 3, batch 12, after optimizer step 40"
    assert (
        caplog.messages
        == [(f"The gradients are not finite (norm=nan); step skipped on all ranks: {where}.")] * 2
    )
    with pytest.raises(
        NonFiniteLossError,
        match=r"^3 steps of epoch 3 had gradients .*norm=inf; the last in "
        r"epoch 3, ba",
    ):
        progress.count_skipped(math.inf, patience=2)
    with pytest.raises(ValueError, match=r"nonfinite_patience=0\. All were skipped"):
        Progress().count_skipped(math.nan, patience=0)


# ----------------------------------------------------------------------------------------- messages


class Recipe:
    pass


NO_SCALER = None
BAD_LOSSES = [
    (3.0, r"returned a float, not a tensor: return the loss itself, without \.item\(\)"),
    (
        {"loss": torch.ones(())},
        ("returned a dict with the keys 'loss': return one loss, such as the sum"),
    ),
    ([torch.ones(())], "returned a list of 1: return the mean loss, or the tuple"),
    ("text", "returned a str, not a tensor"),
    (
        torch.ones(2, 3, requires_grad=True),
        (
            r"returned a tensor of shape \(2, 3\), not one "
            r"number: return its mean"
        ),
    ),
    (torch.ones(0, requires_grad=True), r"returned a tensor of shape \(0,\), not one number"),
    (
        torch.ones(()),
        (
            "returned a loss that does not require a gradient: it does not depend on a trainable "
            "parameter"
        ),
    ),
]


@pytest.mark.parametrize(
    "scaler",
    [NO_SCALER, torch.amp.GradScaler("cpu")],
    ids=["plain", "scaled"],
)
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(("loss", "match"), BAD_LOSSES)
def test_losses_that_cannot_be_trained_on(loss, match, scale, scaler):
    with pytest.raises(BatchError, match=rf"^Recipe\.compute_objectives {match}") as raised:
        backward(loss, scale, scaler, "Recipe")
    assert isinstance(raised.value, TypeError)
    assert raised.value.__cause__ is not None


def test_an_error_that_is_not_the_losss_stays_itself():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        backward(Broken.apply(torch.ones((), requires_grad=True)), 1.0, NO_SCALER, "Recipe")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_backward(shape):
    for scale, expected in ((1.0, 3.0), (0.25, 0.75), (0.0, 0.0)):
        weight = torch.ones(shape, requires_grad=True)
        backward(3 * weight, scale, NO_SCALER, "Recipe")
        assert weight.grad.item() == expected
    weight = torch.ones(shape, requires_grad=True)
    backward(3 * weight, 0.5, torch.amp.GradScaler("cpu", init_scale=8.0), "Recipe")
    assert weight.grad.item() == 12.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_has_the_bits_of_a_product(dtype):
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    for scale in (1 / 3, 0.125, 7 / 11, 1e-6):
        weight, other = (torch.ones(8, dtype=dtype, requires_grad=True) for _ in range(2))
        backward((inputs @ weight).sin().mean(), scale, NO_SCALER, "Recipe")
        ((inputs @ other).sin().mean() * scale).backward()
        assert torch.equal(weight.grad, other.grad)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_complex_loss_is_refused(scale):
    with pytest.raises(RuntimeError, match="real scalar outputs"):
        backward(
            torch.ones((), dtype=torch.complex64, requires_grad=True),
            scale,
            NO_SCALER,
            "Recipe",
        )


def test_losses_of_an_evaluation():
    loss = one_number(torch.ones(1, requires_grad=True), "Recipe")
    assert not loss.requires_grad
    assert one_number(2, "Recipe") == 2.0
    assert one_number(1.5, "Recipe") == 1.5
    for bad, match in (
        (None, "returned a NoneType"),
        (torch.ones(2), r"a tensor of shape \(2,\), not one number"),
        ([1.0], "returned a list"),
    ):
        with pytest.raises(BatchError, match=rf"^Recipe\.compute_objectives .*{match}|{match}"):
            one_number(bad, "Recipe")
    assert loss_problem(torch.ones((), requires_grad=True)) is None


def test_every_bad_loss_has_a_problem():
    problems = Counter(loss_problem(loss) for loss, _ in BAD_LOSSES)
    assert None not in problems


def test_a_loader_that_ends_early_is_an_error():
    """Without it an epoch would end there on this rank alone, and the others would wait."""
    with pytest.raises(
        DataError,
        match=r"^the training loader ended after 3 of 5 batches: its "
        r"length must be",
    ):
        drain(Feed(iter("abc"), 5))
