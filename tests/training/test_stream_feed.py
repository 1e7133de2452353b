"""Batches whose number nobody knows: ranks that end together, samples that weigh the same, sums
that nobody awaits.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ddpkit.errors import DataError
from ddpkit.training.feed import Feed
from ddpkit.training.stream_feed import StreamFeed
from ddpkit.training.window import Window
from tests.training.feeds import drain, windows_of

FAST = settings(max_examples=80, deadline=None, derandomize=True, database=None)
SIZES = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=7), min_size=1, max_size=4)


class Ranks:
    """Threads that stand for ranks and add up lists of numbers."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.brought = []
        self.changed = threading.Condition()

    def start_sum(self):
        """What one rank adds up with; its n-th call belongs with everybody's n-th."""
        calls = itertools.count()

        def start(values):
            call = next(calls)
            with self.changed:
                while len(self.brought) <= call:
                    self.brought.append([])
                self.brought[call].append(values)
                self.changed.notify_all()

            def finish():
                with self.changed:
                    assert self.changed.wait_for(
                        lambda: len(self.brought[call]) == self.world_size,
                        timeout=60,
                    )
                return [sum(numbers) for numbers in zip(*self.brought[call], strict=True)]

            return finish

        return start

    def run(self, streams, factor=1, **options):
        """What each rank's feed yields."""

        def one(stream):
            return drain(
                StreamFeed(
                    iter(stream),
                    factor=factor,
                    world_size=self.world_size,
                    start_sum=self.start_sum(),
                    **options,
                )
            )

        with ThreadPoolExecutor(self.world_size) as pool:
            found = list(pool.map(one, streams))
        assert {len(calls) for calls in self.brought} == {self.world_size}, (
            "all ranks have made the same sums"
        )
        return found


def batches_of(sizes):
    """For each rank, batches of the given sizes, all of different numbers."""
    numbers = itertools.count()
    return [[list(itertools.islice(numbers, size)) for size in rank] for rank in sizes]


def weights_of(ranks):
    """For each window: for each micro-batch, the ranks' weights in what the optimizer steps on."""
    for together in zip(*map(windows_of, ranks), strict=True):
        correction = together[0][-1].correction
        assert {rank[-1].correction for rank in together} == {correction}, (
            "every rank corrects alike"
        )
        yield [
            [(step.count, step.scale * correction / len(together)) for step in steps]
            for steps in zip(*together, strict=True)
        ]


@pytest.mark.costly
@FAST
@given(sizes=SIZES, factor=st.integers(1, 4))
def test_streams_of_different_lengths_end_together_and_lose_nothing(sizes, factor):
    streams = batches_of(sizes)
    ranks = Ranks(len(sizes)).run(streams, factor)
    longest = max(map(len, streams))
    for steps, stream in zip(ranks, streams, strict=True):
        assert [batch for batch, *_ in steps] == stream + [stream[-1]] * (longest - len(stream))
        assert [count for _, count, *_ in steps] == [len(batch) for batch in stream] + [0] * (
            longest - len(stream)
        )
        assert [step.closes for step in steps] == [
            (number + 1) % factor == 0 or number == longest - 1 for number in range(longest)
        ]
        assert [step.weight for step in steps] == [step.count for step in steps], (
            "in the loss of the epoch, too"
        )
    for window in weights_of(ranks):
        samples = sum(count for steps in window for count, _ in steps)
        for count, weight in itertools.chain.from_iterable(window):
            assert weight == pytest.approx(count / samples), "every sample weighs the same"


@pytest.mark.costly
@FAST
@given(sizes=SIZES, factor=st.integers(1, 4))
def test_every_global_batch_weighs_the_same_if_asked(sizes, factor):
    ranks = Ranks(len(sizes)).run(batches_of(sizes), factor, weighting="batches")
    for window in weights_of(ranks):
        for steps in window:
            assert sum(weight for _, weight in steps) == pytest.approx(1 / len(window))
            samples = sum(count for count, _ in steps)
            for count, weight in steps:
                assert weight == pytest.approx(count / samples / len(window))


@pytest.mark.costly
@FAST
@given(sizes=SIZES, factor=st.integers(1, 4))
def test_every_batch_of_the_data_weighs_the_same_if_asked(sizes, factor):
    ranks = Ranks(len(sizes)).run(
        batches_of(sizes),
        factor,
        weighting="batches",
        whole_batches=True,
    )
    for window in weights_of(ranks):
        present = [weight for steps in window for count, weight in steps if count]
        assert present == pytest.approx([1 / len(present)] * len(present))
        assert not any(weight for steps in window for count, weight in steps if not count)


@pytest.mark.parametrize("weighting", ["samples", "batches"])
@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize(("world_size", "size"), [(1, 5), (2, 3), (3, 7)])
def test_equal_batches_need_no_correction(world_size, size, factor, weighting):
    """To the last bit, so that nothing is multiplied where nothing is to be weighed."""
    streams = batches_of([[size] * (2 * factor)] * world_size)
    for steps in Ranks(world_size).run(streams, factor, weighting=weighting):
        assert {step.correction for step in steps} == {1.0}
        assert {step.scale for step in steps} == {1 / factor}


@pytest.mark.slow
@FAST
@given(sizes=SIZES, factor=st.integers(1, 3))
def test_gradients_are_those_of_the_mean_over_all_samples(sizes, factor):
    streams = batches_of(sizes)
    data = torch.linspace(-1, 2, sum(map(sum, sizes)), dtype=torch.float64)
    gradients = []
    order = {}
    for steps in Ranks(len(sizes)).run(streams, factor):
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        mine = []
        for batch, count, _, scale, closes, correction in steps:
            (scale * (torch.sin(weight * data[batch]) ** 2).mean()).backward()
            order.setdefault(len(mine), []).extend(batch[:count])
            if closes:
                mine.append(weight.grad * correction / len(sizes))
                weight.grad = None
        gradients.append(mine)
    for number, parts in enumerate(zip(*gradients, strict=True)):
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        (torch.sin(weight * data[order[number]]) ** 2).mean().backward()
        torch.testing.assert_close(sum(parts), weight.grad, rtol=1e-12, atol=1e-14)
    assert sorted(itertools.chain.from_iterable(order.values())) == list(range(len(data)))


def test_the_correction_of_a_stream_does_not_outlive_it():
    window = Window()
    assert len(list(StreamFeed(iter("abc"), factor=2).batches(window))) == 3
    assert window.correction == 2.0
    assert len(list(Feed("ab", 2, factor=2).batches(window))) == 2
    assert window.correction == 1.0
    window.correction = 3.0
    next(StreamFeed(iter("abc"), factor=2).batches(window))
    assert window.correction == 1.0


@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 3], [2, 1, 0]])
def test_streams_with_nothing_for_a_rank(lengths):
    """All ranks say so, none is left waiting; also where the others go on in the midst of an
    epoch.
    """
    present = sum(map(bool, lengths))
    streams = [range(length) for length in lengths]
    for start in (0, 1):
        with pytest.raises(
            DataError,
            match=rf"gives a first batch to {present} of "
            rf"{len(lengths)} rank\(s\) only",
        ):
            Ranks(len(lengths)).run(streams, start=start, left_out=start)


@pytest.mark.parametrize("factor", [1, 2])
def test_a_stream_goes_on_by_leaving_out_what_was_done(factor):
    streams = batches_of([[2, 1, 3, 2, 1], [2, 2, 1]])
    whole = Ranks(2).run(streams, factor)
    for start in (2, 4):
        assert Ranks(2).run(streams, factor, start=start, left_out=start) == [
            steps[start:] for steps in whole
        ]
    assert Ranks(2).run(streams, factor, start=5, left_out=5) == [[], []]
    assert Ranks(2).run(streams, factor, start=9, left_out=9) == [[], []]


def test_a_window_that_goes_on_in_its_midst_ends_where_it_would_have():
    streams = batches_of([[1] * 7])
    steps = Ranks(1).run(streams, 3, start=1, left_out=1)[0]
    assert [step.closes for step in steps] == [False, True, False, False, True, True]


def test_a_batch_of_no_samples_weighs_nothing():
    steps = Ranks(1).run([[[], [1, 2], []]], 2)[0]
    assert [step.scale for step in steps] == [0.0, 0.5, 0.0]
    assert [step.correction for step in steps if step.closes] == [2.0, 1.0]
    steps = Ranks(1).run([[[], [1, 2]]], 2, weighting="batches")[0]
    assert [step.scale for step in steps] == [0.0, 0.5]
    assert steps[-1].correction == 2.0


def test_other_ways_to_count():
    steps = Ranks(2).run([["aa", "b"], ["cccc"]], size_of=lambda batch: 10 * len(batch))
    assert [step.count for step in steps[0]] == [20, 10]
    assert [step.count for step in steps[1]] == [40, 0]


@pytest.mark.parametrize(("factor", "ahead"), [(1, 1), (2, 2), (5, 2)])
def test_sums_are_started_before_a_batch_is_worked_on_and_awaited_after_it(factor, ahead):
    """And no more is read ahead than that takes."""
    events = []
    numbers = itertools.count()

    def start_sum(values):
        number = next(numbers)
        events.append(("start", number))

        def finish():
            events.append(("wait", number))
            return values

        return finish

    feed = StreamFeed(iter("abcdefgh"), factor=factor, start_sum=start_sum)
    for number, _ in enumerate(feed.batches(Window())):
        events.append(("work", number))
        if number + ahead <= 8:
            assert events.count(("start", number + ahead)) == 1
            assert ("start", number + ahead + 1) not in events, "not further ahead"
        if factor == 1:
            assert ("wait", number + 1) not in events
    for number in range(1, 9):
        before = events[: events.index(("wait", number))]
        assert ("work", number - ahead) in before or number < ahead, (
            "it was under way while a batch was worked on"
        )
    assert sum(event == "wait" for event, _ in events) == 9


def test_a_stream_that_is_over_is_not_asked_again():
    class Restarting:
        """Some iterators begin again."""

        def __init__(self):
            self.items = [iter("ab"), iter("cd")]

        def __iter__(self):
            return self

        def __next__(self):
            try:
                return next(self.items[0])
            except StopIteration:
                self.items.pop(0)
                raise

    steps = Ranks(2).run([Restarting(), "wxyz"])
    assert [step.batch for step in steps[0]] == ["a", "b", "b", "b"]
