"""Streams and loaders of batches on real ranks with real workers: the same answer, and an end that
all reach.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.base import POSITION
from ddpkit.dataloader import LoopedLoader
from ddpkit.distributed import start_sum_over_ranks, sum_over_ranks
from ddpkit.errors import RunStopped
from ddpkit.run import evaluation_stops
from ddpkit.types import Stage
from tests.rank_pool import RankPoolError
from tests.recipes import Regression, make, points, seen_in, sgd, weights, world_size
from tests.run.test_stage_runner import Host, evaluate

CLOSE = {"rtol": 0, "atol": 1e-10}
JOINED = 12


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            msg=lambda text, name=name: f"{name}: {text}",
            **CLOSE,
        )


def numbers(losses):
    return [loss for _, _, loss in losses]


class Counted(Regression):
    """Remembers of the batches what they count, which is nothing where one is repeated to keep
    step.
    """

    def compute_forward(self, batch, stage):
        outputs = super().compute_forward(batch, stage)
        if stage.name == "TRAIN":
            self.trained_on[-1] = self.trained_on[-1][: self.progress.window.count]
        return outputs


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


# ---------------------------------------------------------------- a rank without a share of a batch


class Trunk(nn.Module):
    """Each sample goes through the head that it names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.heads = nn.ModuleList(nn.Linear(3, 1).double() for _ in range(2))

    def forward(self, inputs):
        outputs = torch.zeros(len(inputs), 1, dtype=torch.float64)
        for number, head in enumerate(self.heads):
            chosen = (inputs[:, 0] > FAR) == bool(number)
            if chosen.any():
                outputs[chosen] = head(inputs[chosen])
        return outputs


FAR = 5.0  # an input beyond it names the second head


def with_a_far_end(size, far=1):
    """The last samples name the second head, all others the first."""
    data = points(size)
    return data[:-far] + [
        (inputs.index_fill(0, torch.tensor(0), 2 * FAR), target) for inputs, target in data[-far:]
    ]


def train_two_heads(how, num_workers=0):
    """Train where a step's samples are twelve, and the last step's is one: no rank but the first
    has it.
    """
    given = {"global_batch_size": 12}
    if how == "batches":
        given = {"grad_accumulation_factor": 6 // world_size()}
    brain = make_with_heads(**given)
    data = with_a_far_end(25)
    if how == "batches":
        brain.fit([1, 2], Batches(with_a_far_end(13)))  # seven of them
    else:
        brain.fit(
            [1, 2],
            data if how == "map" else Stream(data),
            train_loader_kwargs={"num_workers": num_workers},
        )
    return weights(brain), brain.losses, brain.optimizer_step


def make_with_heads(**given):
    """Make a Brain whose optimizer moves what has a gradient of zero, and not what has none."""
    adam = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    return make(net=Trunk(), opt=adam, find_unused_parameters=dist.is_initialized(), **given)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    ("how", "num_workers"),
    [("map", 0), ("stream", 0), ("stream", 1), ("stream", 2), ("batches", 0)],
)
@pytest.mark.parametrize("world", [2, 1, 3])
def test_parameters_that_nobody_used_stay_where_they_are_though_a_rank_has_no_share(
    ranks,
    world,
    how,
    num_workers,
):
    expected, losses, steps = train_two_heads(how)
    for found, reported, steps_there in ranks.run(
        train_two_heads,
        how,
        num_workers,
        world_size=world,
    ):
        assert_close(found, expected)
        assert numbers(reported) == pytest.approx(numbers(losses), abs=1e-10)
        assert steps_there == steps == {"batches": 4}.get(how, 6)


# ---------------------------------------------------------------------------------- the same answer

# a rest of one, no rest, a rest of five; a short window
CASES = [(25, 1), (25, 3), (36, 1), (41, 3)]
FEW = [(25, 1), (41, 3)]  # with workers, which are started anew for each pass


def train_all(num_workers, shard_evaluation, *, cases=CASES, drop_last=False):
    """Train on streams of all lengths, with all factors; validate and test on streams, too."""
    found = []
    for size, factor in cases:
        data = points(size)
        brain = make(
            Counted,
            grad_accumulation_factor=factor,
            shard_evaluation=shard_evaluation,
            opt=sgd(momentum=0.9),
            max_grad_norm=0.5,
        )
        batch_size = JOINED // world_size()
        train = {"batch_size": batch_size, "drop_last": drop_last, "num_workers": num_workers}
        valid = {"batch_size": 5, "num_workers": num_workers}
        brain.fit(
            [1, 2],
            Stream(data),
            Stream(data[:17]),
            train_loader_kwargs=train,
            valid_loader_kwargs=valid,
        )
        test = brain.evaluate(
            Stream(data[:7]),
            test_loader_kwargs={"batch_size": 2, "num_workers": num_workers},
        )
        seen = seen_in(data, brain.trained_on)
        found.append((weights(brain), brain.losses, brain.optimizer_step, test, seen))
    return found


AT_LENGTH = [
    (1, 2, FEW),
    (2, 1, FEW),
    (3, 0, CASES),
    (3, 2, FEW),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "num_workers", "cases"),
    [(2, 2, FEW), *AT_LENGTH],
)
def test_the_same_weights_and_losses_on_any_number_of_ranks_and_workers(
    ranks,
    world,
    num_workers,
    cases,
):
    shard_evaluation = num_workers != 1
    expected = train_all(0, shard_evaluation=False, cases=cases)
    train = functools.partial(train_all, cases=cases)
    found = ranks.run(train, num_workers, shard_evaluation, world_size=world)
    for case, (size, factor) in enumerate(cases):
        whole, losses, steps, test, seen = expected[case]
        batches = math.ceil(size / JOINED)
        assert steps == 2 * math.ceil(batches / factor)
        for own in found:
            assert_close(own[case][0], whole)
            assert numbers(own[case][1]) == pytest.approx(numbers(losses), abs=1e-10)
            assert own[case][1:4] == found[0][case][1:4], "the ranks report the same"
            assert own[case][2] == steps
            assert own[case][3] == pytest.approx(test, abs=1e-10)
        for number, batch in enumerate(seen):
            together = [item for own in found for item in own[case][4][number]]
            assert sorted(together) == sorted(batch), (
                "the same items in every global batch, each once"
            )


def train_dropping(num_workers, cases):
    return train_all(num_workers, shard_evaluation=True, cases=cases, drop_last=True)


@pytest.mark.slow
def test_an_incomplete_global_batch_is_dropped_alike(ranks):
    expected = train_dropping(0, FEW)
    for own in ranks.run(train_dropping, 2, FEW):
        for (size, factor), mine, alone in zip(FEW, own, expected, strict=True):
            assert_close(mine[0], alone[0])
            assert mine[2] == alone[2] == 2 * math.ceil(size // JOINED / factor)
            assert numbers(mine[1]) == pytest.approx(numbers(alone[1]), abs=1e-10)


# -------------------------------------------------------------------------------------- uneven ends


def train_two_heads_on_parts(sizes, factor):
    """The last batches of the longer parts name the second head: those of the shorter have ended by
    then.
    """
    brain = make_with_heads(grad_accumulation_factor=factor)
    far = sum(size - min(sizes) for size in sizes)
    brain.fit(
        [1, 2],
        Uneven(with_a_far_end(sum(sizes), far), sizes),
        train_loader_kwargs={"batch_size": 2},
    )
    return weights(brain), brain.losses


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("sizes", "factor"), [([4, 9], 1), ([4, 14], 3), ([4, 4, 8], 1)])
def test_parameters_that_nobody_used_stay_where_they_are_though_a_ranks_part_has_ended(
    ranks,
    sizes,
    factor,
):
    positions = iter(range(sum(sizes)))
    parts = [list(itertools.islice(positions, size)) for size in sizes]
    joined = [
        [place for own in parts for place in own[start : start + 2]]
        for start in range(0, max(sizes), 2)
    ]
    brain = make_with_heads(grad_accumulation_factor=factor)
    data = with_a_far_end(sum(sizes), sum(size - min(sizes) for size in sizes))
    brain.fit([1, 2], data, train_loader_kwargs={"batch_sampler": joined})
    for found, losses in ranks.run(train_two_heads_on_parts, sizes, factor, world_size=len(sizes)):
        assert_close(found, weights(brain))
        assert numbers(losses) == pytest.approx(numbers(brain.losses), abs=1e-10)


class Uneven(IterableDataset):
    """Is divided already: every rank has as many items as it is told."""

    is_sharded = True

    def __init__(self, data, sizes):
        start = sum(sizes[: rank()])
        self.data = data[start : start + sizes[rank()]]

    def __iter__(self):
        return iter(self.data)


def train_uneven(sizes, batch_size, factor, weighting, how):
    data = points(sum(sizes))
    brain = make(
        Counted,
        grad_accumulation_factor=factor,
        loss_weighting=weighting,
        opt=sgd(momentum=0.9),
    )
    stream = Uneven(data, sizes)
    if how == "loader":
        loader = DataLoader(stream.data, batch_size)
        loader.is_sharded = True
        brain.fit([1, 2], loader)
    else:
        brain.fit([1, 2], stream, train_loader_kwargs={"batch_size": batch_size})
    items = [item for batch in seen_in(data, brain.trained_on) for item in batch]
    return weights(brain), brain.losses, brain.optimizer_step, items


def train_joined(sizes, batch_size, factor):
    """The same in one process: each batch holds what all ranks have at a time."""
    positions = iter(range(sum(sizes)))
    ranks = [list(itertools.islice(positions, size)) for size in sizes]
    joined = [
        [position for own in ranks for position in own[start : start + batch_size]]
        for start in range(0, max(sizes), batch_size)
    ]
    data = points(sum(sizes))
    brain = make(grad_accumulation_factor=factor, opt=sgd(momentum=0.9))
    brain.fit([1, 2], data, train_loader_kwargs={"batch_sampler": joined})
    return weights(brain), brain.losses, brain.optimizer_step


def check_uneven(ranks, sizes, batch_size, factor, how="stream"):
    expected, losses, steps = train_joined(sizes, batch_size, factor)
    results = ranks.run(
        train_uneven,
        sizes,
        batch_size,
        factor,
        "samples",
        how,
        world_size=len(sizes),
    )
    seen = Counter()
    for found, reported, steps_there, items in results:
        assert_close(found, expected)
        assert numbers(reported) == pytest.approx(numbers(losses), abs=1e-10)
        assert steps_there == steps
        seen.update(items)
    assert seen == Counter(2 * list(range(sum(sizes)))), "every item once an epoch"


@pytest.mark.costly
@pytest.mark.parametrize("factor", [1, 3])
def test_ranks_with_three_and_four_batches(ranks, factor):
    """Rank 1's fourth batch is not averaged with rank 0's first of the next epoch, and nobody
    hangs.
    """
    check_uneven(ranks, [6, 8], 2, factor)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("how", ["stream", "loader"])
@pytest.mark.parametrize(
    ("sizes", "factor"),
    [([1, 60], 1), ([40, 2], 3), ([3, 1, 31], 2), ([5, 17, 2], 1)],
)
def test_a_stream_that_is_much_longer_on_one_rank(ranks, sizes, factor, how):
    check_uneven(ranks, sizes, 2, factor, how)


@pytest.mark.costly
def test_every_global_batch_weighs_the_same_if_asked(ranks):
    """Equal on all ranks, and not what samples would weigh."""
    by_batches = ranks.run(train_uneven, [5, 8], 2, 3, "batches", "stream")
    by_samples = ranks.run(train_uneven, [5, 8], 2, 3, "samples", "stream")
    assert_close(by_batches[1][0], by_batches[0][0])
    assert not torch.equal(by_batches[0][0]["net.weight"], by_samples[0][0]["net.weight"])


class Files(IterableDataset):
    """Three files of different lengths, in the manner of Hugging Face's datasets."""

    def __init__(self, files):
        self.files = files
        self.num_shards = len(files)

    def shard(self, num_shards, index):
        return Files(self.files[index::num_shards])

    def __iter__(self):
        return itertools.chain.from_iterable(self.files)


def train_files(num_workers):
    data = points(30)
    brain = make(Counted)
    stream = Files([data[:2], data[2:17], data[17:30]])
    brain.fit([1], stream, train_loader_kwargs={"batch_size": 2, "num_workers": num_workers})
    return (
        [item for batch in seen_in(data, brain.trained_on) for item in batch],
        weights(brain),
        brain.losses,
    )


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("world", "num_workers"), [(2, 0), (3, 1), (2, 2)])
def test_files_are_shared_out_or_counted(ranks, world, num_workers):
    """With 2 x 2 processes there are too few of them."""
    results = ranks.run(train_files, num_workers, world_size=world)
    assert sorted(itertools.chain.from_iterable(own for own, *_ in results)) == list(range(30))
    for _, found, losses in results:
        assert_close(found, results[0][1])
        assert losses == results[0][2]


# ------------------------------------------------------------------------------- loaders of batches


class Batches:
    """A loader of one's own, with batches of 1, 2 and 3 samples."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        start = 0
        size = 1
        while start < len(self.data):
            rows = self.data[start : start + size]
            yield tuple(torch.stack(part) for part in zip(*rows, strict=True))
            start = start + size
            size = size % 3 + 1


def train_on_batches(number, windows, weighting):
    data = points(number)
    brain = make(
        grad_accumulation_factor=windows // world_size(),
        loss_weighting=weighting,
        opt=sgd(momentum=0.9),
    )
    brain.fit([1, 2], Batches(data), Batches(data[:7]))
    return weights(brain), brain.losses, brain.optimizer_step, brain.evaluate(Batches(data[:9]))


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("weighting", ["samples", "batches"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("number", [23, 36])
def test_a_loader_of_ones_own_is_dealt_out(ranks, number, world, weighting):
    """Six batches an optimizer step, whoever works on them."""
    expected, losses, steps, test = train_on_batches(number, 6, weighting)
    for found, reported, steps_there, test_there in ranks.run(
        train_on_batches,
        number,
        6,
        weighting,
        world_size=world,
    ):
        assert_close(found, expected)
        assert steps_there == steps
        assert [loss for name, _, loss in reported if name == "VALID"] == pytest.approx(
            [loss for name, _, loss in losses if name == "VALID"],
            abs=1e-10,
        )
        assert test_there == pytest.approx(test, abs=1e-10)
        assert numbers(reported) == pytest.approx(numbers(losses), abs=1e-10)


def train_looped():
    data = points(24)
    brain = make(hparams={"sorting": "ascending"})
    brain.fit([1, 2], LoopedLoader(Batches(data), 3 if world_size() == 2 else 6))
    brain.fit([3], Batches(data[:7]))
    return [item for batch in seen_in(data, brain.trained_on) for item in batch]


@pytest.mark.costly
def test_a_looped_loader_of_ones_own_is_dealt_out(ranks):
    """And one that comes in an order of its own is not asked to be sorted."""
    parts = ranks.run(train_looped, world_size=2)
    assert sorted(parts[0] + parts[1]) == sorted(train_looped()) == sorted([*range(24), *range(7)])


class OnceOnly:
    """Batches of a class that does not start anew in ``__iter__``, which nobody can know
    beforehand.
    """

    def __init__(self):
        batch = tuple(torch.stack(part) for part in zip(*points(4), strict=True))
        self.batches = iter([batch] * 4)

    def __iter__(self):
        return self.batches


def train_once_only():
    make().fit([1, 2], OnceOnly())


def test_a_loader_that_cannot_be_read_again_ends_all_ranks(ranks):
    with pytest.raises(RankPoolError) as caught:
        ranks.run(train_once_only, timeout=100)
    for outcome in caught.value.outcomes:
        assert outcome.error_type == "DataError"
        assert "yields nothing when it is iterated again" in outcome.error


# ------------------------------------------------------------------------------------ the agreement


class Confers(Regression):
    """Makes a sum of its own at every step, while those of the feed are under way."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.sums = [*getattr(self, "sums", []), sum_over_ranks([float(rank())])[0]]


def stop_in_the_middle():
    data = points(40)
    brain = make(Confers, optimizer_step_limit=3, grad_accumulation_factor=2)
    kwargs = {"batch_size": 1}
    brain.fit([1, 2], Stream(data), train_loader_kwargs=kwargs)
    loss = brain.evaluate(Stream(data), test_loader_kwargs=kwargs)
    again = make(Confers)
    again.fit([1], Stream(data), train_loader_kwargs=kwargs)
    return brain.optimizer_step, set(brain.sums), loss, again.optimizer_step, set(again.sums)


@pytest.mark.costly
def test_a_pass_that_stops_early_leaves_nothing_behind(ranks):
    """What was under way then, and what is agreed on in between, is mixed up with nothing."""
    results = ranks.run(stop_in_the_middle, world_size=2)
    assert results[0] == results[1]
    assert results[0][:2] == (3, {1.0})
    assert results[0][3:] == (20, {1.0})


def sums_under_way():
    first = [start_sum_over_ranks([float(number), float(rank())]) for number in range(20)]
    between = sum_over_ranks([1.0])
    return [finish() for finish in reversed(first)], between


def test_sums_that_are_awaited_later(ranks):
    for sums, between in ranks.run(sums_under_way, world_size=3):
        assert sums == [[3.0 * number, 3.0] for number in reversed(range(20))]
        assert between == [3.0]


# ------------------------------------------------------------------------------------ asked to stop


class Asked(Host):
    """Takes its time over a batch; one rank is asked to stop once it has made so many steps, or all
    that it has.
    """

    def __init__(self, who, after):
        super().__init__()
        self.is_asked = rank() == who
        self.after = after
        self.sums = 0

    def evaluate_batch(self, batch, stage):
        time.sleep(0.005)
        return super().evaluate_batch(batch, stage)

    def cause(self):
        return "SIGTERM" if self.is_asked and self.progress.step >= self.after else ""

    def counted(self, values):
        self.sums += 1
        return sum_over_ranks(values)


def stop_an_evaluation(sizes, who, after=40):
    data = points(sum(sizes))
    host = Asked(who, min(after, sizes[who]))
    began = time.monotonic()
    evaluation_stops.sum_over_ranks = host.counted
    moves = POSITION.moves_seen
    try:
        loader = DataLoader(
            Uneven([torch.full((1,), float(number)) for number in range(len(data))], sizes)
        )
        loss = evaluate(host, loader, Stage.VALID, 1)
    except RunStopped as stopped:
        return stopped.cause, host.progress.step, host.sums, None
    finally:
        evaluation_stops.sum_over_ranks = sum_over_ranks
    return (
        "",
        host.progress.step,
        host.sums,
        (loss, POSITION.moves_seen - moves, time.monotonic() - began),
    )


@pytest.mark.corner
@pytest.mark.parametrize(
    ("sizes", "who"),
    [([700, 700], 1), ([700, 20], 0), ([700, 20], 1), ([700, 0], 1), ([20, 700, 30], 2)],
)
def test_a_stop_in_the_evaluation_of_a_stream_is_agreed_on(ranks, sizes, who):
    """Also if that rank, or another one, has no batch left: all raise, at one beat, and nobody goes
    on to the end.
    """
    results = ranks.run(stop_an_evaluation, sizes, who, world_size=len(sizes))
    assert [cause for cause, *_ in results] == ["SIGTERM"] * len(sizes)
    longest = [step for (_, step, *_), size in zip(results, sizes, strict=True) if size == 700]
    assert len(set(longest)) == 1, "at the same step, of those that make it"
    assert longest[0] < 700
    assert all(
        step == size for (_, step, *_), size in zip(results, sizes, strict=True) if size < 700
    )


@pytest.mark.costly
@pytest.mark.parametrize("sizes", [[120, 7], [0, 60], [25, 25]])
def test_an_evaluation_that_nobody_stops_takes_all_batches_and_confers_about_once_a_second(
    ranks,
    sizes,
):
    results = ranks.run(stop_an_evaluation, sizes, -1)
    assert [step for _, step, *_ in results] == sizes
    total = sum(sizes)
    assert {loss for *_, (loss, *_) in results} == {(total - 1) / 2}
    sums = {number for _, _, number, _ in results}
    assert len(sums) == 1
    seconds = max(taken for *_, (_, _, taken) in results)
    assert sums.pop() <= 11 + 2 * seconds, (
        "the first of them double their distance; the last is that of the loss"
    )
    waits = [moves for *_, (_, moves, _) in results]
    assert (max(waits) > 0) == (sizes[0] != sizes[1]), (
        "a rank that waits for others that move is not standing still"
    )
