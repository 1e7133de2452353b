"""Real ranks: results and predictions are those of one process, whatever the division; and nobody
waits for ever.
"""

from __future__ import annotations

import math
import re
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from ddpkit import distributed
from ddpkit.dataloader import Sharding, shard
from ddpkit.distributed import gather_objects, object_gathering, run_on_main
from ddpkit.errors import ConfigError, DataError, LaunchError
from ddpkit.training import StageBatches
from ddpkit.types import Stage
from tests.launching import PATIENCE
from tests.recipes import Regression, linear, make, points, world_size

WORLDS = [1, 3, pytest.param(2, marks=pytest.mark.slow)]


def numbered(size):
    return [(inputs, targets, index) for index, (inputs, targets) in enumerate(points(size))]


class Collect(Regression):
    """Collects one result of every form per sample, in every stage, and gathers them at its end."""

    def compute_objectives(self, predictions, batch, stage):
        indices = batch[2].tolist()
        self.ids += [f"id{index}" for index in indices]
        self.ragged += [torch.arange(index % 4) + index for index in indices]
        self.facts += [{"index": index, "length": torch.tensor(index)} for index in indices]
        self.rows.append(torch.stack([batch[2], batch[2] ** 2], dim=1))
        return super().compute_objectives(predictions, batch, stage)

    def on_stage_start(self, stage, epoch=None):
        self.ids = []
        self.ragged = []
        self.facts = []
        self.rows = []

    def collected(self):
        rows = torch.cat(self.rows) if self.rows else []
        array = [] if isinstance(rows, list) else rows.double().numpy()
        return {
            "ids": self.ids,
            "pair": (self.ragged, self.facts),
            "rows": rows,
            "array": array,
            "batches": self.rows,
        }

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.results = getattr(self, "results", [])
        self.results.append((stage.name, stage_loss, self.gather(self.collected())))


def expected(indices):
    """What Collect gathers of these samples, in this order."""
    return {
        "ids": [f"id{index}" for index in indices],
        "pair": (
            [torch.arange(index % 4) + index for index in indices],
            [{"index": index, "length": torch.tensor(index)} for index in indices],
        ),
        "rows": torch.tensor([[index, index**2] for index in indices]),
        "array": np.array([[index, index**2] for index in indices], dtype=float),
        "batches": [torch.tensor([index, index**2]) for index in indices],
    }


def assert_results(found, indices):
    wanted = expected(indices)
    assert found["ids"] == wanted["ids"]
    assert isinstance(found["rows"], torch.Tensor)
    assert isinstance(found["array"], np.ndarray)
    torch.testing.assert_close(found["rows"], wanted["rows"], rtol=0, atol=0)
    np.testing.assert_array_equal(found["array"], wanted["array"])
    ragged, facts = found["pair"]
    for one, other in zip(ragged, wanted["pair"][0], strict=True):
        assert torch.equal(one, other)
    assert facts == wanted["pair"][1]
    assert [row.reshape(-1).tolist() for row in found["batches"]] == [
        row.tolist() for row in wanted["batches"]
    ]


def evaluate(size, shard, kwargs):
    brain = make(Collect, shard_evaluation=shard)
    brain.evaluate(numbered(size), test_loader_kwargs=kwargs)
    return brain.results


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_every_sample_once_in_dataset_order_on_every_rank(ranks, world, shard):
    for size in sorted({1, max(world - 1, 1), world, world + 1, 17}):
        for kwargs in ({"batch_size": 2}, {"batch_size": 3, "shuffle": True}):
            for [(stage, loss, found)] in ranks.run(
                evaluate,
                size,
                shard,
                kwargs,
                world_size=world,
            ):
                assert stage == "TEST"
                assert math.isfinite(loss)
                assert_results(found, range(size))


@pytest.mark.slow
def test_four_ranks_of_which_some_have_nothing(ranks):
    for size in (1, 3, 5):
        for [(_, _, found)] in ranks.run(evaluate, size, True, {"batch_size": 2}, world_size=4):
            assert_results(found, range(size))


def evaluate_with(kind, shard):
    drawn = [4, 1, 4, 0, 6, 2, 4]
    kwargs = {
        "sampler": {"sampler": drawn, "batch_size": 2},
        "batches": {"batch_sampler": [[5, 0, 3], [1], [5, 2], [4]]},
        "dropped": {"batch_size": 2, "drop_last": True},
        "workers": {"batch_size": 2, "num_workers": 2, "shuffle": True},
    }[kind]
    return evaluate(7, shard, kwargs)


@pytest.mark.corner
@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize(
    ("kind", "indices"),
    [("sampler", [0, 1, 2, 4, 4, 4, 6]), ("batches", [0, 1, 2, 3, 4, 5, 5])],
)
def test_what_a_users_sampler_draws(ranks, kind, indices, shard):
    for [(_, _, found)] in ranks.run(evaluate_with, kind, shard):
        assert_results(found, indices)


@pytest.mark.costly
def test_workers_change_nothing(ranks):
    for [(_, _, found)] in ranks.run(evaluate_with, "workers", True):
        assert_results(found, range(7))


@pytest.mark.parametrize("shard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_evaluation_drops_nothing(ranks, shard):
    for [(_, _, found)] in ranks.run(evaluate_with, "dropped", shard):
        assert_results(found, range(7))


def in_drawn_order():
    """Which of a sample's several draws comes first: number the results as they are computed."""

    class Numbered(Collect):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            self.found = self.gather(
                [(name, self.rank, place) for place, name in enumerate(self.ids)]
            )

    brain = make(Numbered, shard_evaluation=True)
    brain.evaluate(numbered(5), test_loader_kwargs={"sampler": [3, 1, 3, 2, 3, 0], "batch_size": 2})
    return brain.found


def test_a_sample_drawn_twice_comes_in_the_order_of_the_batches(ranks):
    first, second = ranks.run(in_drawn_order)
    # global batches [3, 1 | 3, 2] and [3 | 0]: rank and place of each
    assert (
        first
        == second
        == [
            ("id0", 1, 2),
            ("id1", 0, 1),
            ("id2", 1, 1),
            ("id3", 0, 0),
            ("id3", 1, 0),
            ("id3", 0, 2),
        ]
    )


def train(size, options, kwargs):
    brain = make(Collect, shard_evaluation=True, **options)
    brain.fit(
        [1, 2],
        numbered(size),
        numbered(5),
        train_loader_kwargs=kwargs,
        valid_loader_kwargs={"batch_size": 2},
    )
    return brain.results


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", WORLDS)
def test_training_leaves_out_what_was_repeated_to_keep_step(ranks, world):
    for size, options, kwargs, indices in (
        (7, {}, {"batch_size": 2, "shuffle": True}, range(7)),
        (7, {"global_batch_size": 3, "grad_accumulation_factor": 2}, {"shuffle": True}, range(7)),
        (7, {"debug": True, "debug_batches": 1}, {"batch_size": 1}, range(world)),
    ):
        for results in ranks.run(train, size, options, kwargs, world_size=world):
            assert [name for name, _, _ in results] == ["TRAIN", "VALID"] * 2
            for name, _, found in results:
                shown = min(5, 2 * world) if options.get("debug") else 5
                assert_results(found, indices if name == "TRAIN" else range(shown))


class CollectOwn(Collect):
    """Leaves out of its lists what counts nothing, as the page on the same answer tells."""

    def compute_objectives(self, predictions, batch, stage):
        before = {name: list(getattr(self, name)) for name in ("ids", "ragged", "facts", "rows")}
        loss = super().compute_objectives(predictions, batch, stage)
        if stage.name == "TRAIN" and self.progress.window.count == 0:
            vars(self).update(before)
        return loss


def train_leaving_out(size, options, kwargs):
    brain = make(CollectOwn, **options)
    brain.fit([1, 2], numbered(size), train_loader_kwargs=kwargs)
    return brain.results


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", WORLDS)
def test_a_recipe_may_leave_out_of_its_lists_what_was_repeated_to_keep_step(ranks, world):
    for size, options, kwargs in (
        (7, {}, {"batch_size": 2, "shuffle": True}),
        (7, {"global_batch_size": 3, "grad_accumulation_factor": 2}, {"shuffle": True}),
        (1, {}, {"batch_size": 1}),  # of two ranks one has nothing at all
        (7, {}, {"batch_sampler": [[0, 1], [2, 3, 4], [5], [6]]}),
    ):
        for results in ranks.run(train_leaving_out, size, options, kwargs, world_size=world):
            assert [name for name, _, _ in results] == ["TRAIN"] * 2
            for _, _, found in results:
                assert_results(found, range(size))


class CollectEverywhereOwn(CollectOwn):
    """Asks the same question in every stage."""

    def compute_objectives(self, predictions, batch, stage):
        count = len(self.ids)
        loss = Collect.compute_objectives(self, predictions, batch, stage)
        if self.progress.window.count == 0:
            for name in ("ids", "ragged", "facts"):
                del getattr(self, name)[count:]
            self.rows.pop()
        return loss


def validate_leaving_out(size):
    brain = make(CollectEverywhereOwn, shard_evaluation=True)
    kwargs = {"batch_size": 1}
    brain.fit(
        [1, 2],
        numbered(size),
        numbered(size),
        train_loader_kwargs=kwargs,
        valid_loader_kwargs=kwargs,
    )
    brain.evaluate(numbered(size), test_loader_kwargs=kwargs)
    return brain.results


@pytest.mark.corner
@pytest.mark.parametrize("world", WORLDS)
def test_an_evaluation_repeats_nothing_whatever_the_last_training_batch_was(ranks, world):
    # 7: some rank has one less
    for results in ranks.run(validate_leaving_out, 7, world_size=world):
        assert [name for name, _, _ in results] == [*["TRAIN", "VALID"] * 2, "TEST"]
        for _, _, found in results:
            assert_results(found, range(7))


# ---------------------------------------------------------------------------------- what goes wrong


MISTAKES = {
    "short": lambda ids: ids[:-1],
    "none": lambda ids: None,
    "forms": lambda ids: {"ids": ids},
    "pickle": lambda ids: [lambda: None for _ in ids],
}


class Failing(Collect):
    problem = ""

    def evaluate_batch(self, batch, stage):
        loss = super().evaluate_batch(batch, stage)
        if self.problem == "batch":
            self.gather(self.ids)
        return loss

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if self.rank == 1 and self.problem in MISTAKES:
            self.ids = MISTAKES[self.problem](self.ids)
        if self.problem == "main":
            run_on_main(self.gather, args=[self.ids])
        self.gather(self.ids)


def outcome(function, *args, **kwargs):
    """Return what a call raises, in words, and after how long."""
    started = time.monotonic()
    with pytest.raises(Exception) as caught:
        function(*args, **kwargs)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def failing(problem):
    brain = make(Failing, shard_evaluation=True)
    brain.problem = problem
    kwargs = {
        "batch_size": 2,
        **({"num_workers": 2, "in_order": False} if problem == "in_order" else {}),
    }
    return outcome(brain.evaluate, numbered(5), test_loader_kwargs=kwargs)


@pytest.mark.corner
@pytest.mark.parametrize(
    ("problem", "kinds", "text"),
    [
        (
            "short",
            ["DataError"] * 2,
            r"rank 0: 3 entries for 3 samples in 2 batches; rank 1: 1 entries for 2 samples in 1",
        ),
        ("none", ["ConfigError"] * 2, r"rank 1: a NoneType is given"),
        ("forms", ["DataError"] * 2, r"rank 0: 'column'; rank 1: \{'ids': 'column'\}"),
        ("main", ["LaunchError", "MainProcessError"], r"gather was called inside main-only code"),
        ("in_order", ["ConfigError"] * 2, r"in_order=False"),
    ],
)
def test_a_mistake_is_an_error_on_every_rank(ranks, problem, kinds, text):
    outcomes = ranks.run(failing, problem)
    assert [kind for kind, _, _ in outcomes] == kinds
    for _, message, seconds in outcomes:
        assert re.search(text, message), message
        assert seconds < 20 * PATIENCE


def test_what_does_not_pickle_ends_every_rank(ranks):
    (kind, message, _), (kind_there, message_there, _) = ranks.run(failing, "pickle")
    assert kind == "RankFailedError"
    assert "rank 1" in message
    assert "pickle" in message_there.lower() or "lambda" in message_there, (
        kind_there,
        message_there,
    )


def test_in_a_batch_hook_it_is_refused(ranks):
    for kind, message, seconds in ranks.run(failing, "batch"):
        assert kind == "ConfigError", message
        assert "while the stage TEST runs" in message
        assert seconds < 20 * PATIENCE
    kind, message, _ = failing("batch")  # in one process as well
    assert (kind, "while the stage TEST runs" in message) == ("ConfigError", True)


def divided_by_hand():
    data = numbered(5)
    sampler = DistributedSampler(data, shuffle=False)
    brain = make(Collect)
    with pytest.raises(ConfigError, match="DistributedSampler, which repeats samples"):
        brain.evaluate(DataLoader(data, batch_size=2, sampler=sampler))
    with pytest.raises(ConfigError, match="before any stage"):
        make(Collect).gather([])
    return True


def test_a_distributed_sampler_is_refused(ranks):
    assert ranks.run(divided_by_hand) == [True, True]


class Numbers(IterableDataset):
    def __init__(self, size, divides):
        self.data = numbered(size)
        if divides:
            self.shard = self._shard
            self.num_shards = 100

    def _shard(self, number, index):
        return iter(self.data[index::number])

    def __iter__(self):
        return iter(self.data)


def evaluate_stream(size, shard, divides, workers):
    brain = make(Collect, shard_evaluation=shard)

    def ids(stage, stage_loss, epoch=None):
        brain.found = brain.gather(brain.ids)

    brain.on_stage_end = ids
    brain.evaluate(
        Numbers(size, divides),
        test_loader_kwargs={"batch_size": 2, "num_workers": workers},
    )
    return brain.found


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("shard", [True, False])
def test_a_stream_comes_in_its_own_order_or_rank_by_rank(ranks, shard):
    for size in (1, 5):
        whole = [f"id{index}" for index in range(size)]
        for found in ranks.run(evaluate_stream, size, shard, False, 0):
            assert found == whole
        for found in ranks.run(evaluate_stream, size, shard, True, 0):
            assert found == ([*whole[::2], *whole[1::2]] if shard else whole)


@pytest.mark.costly
def test_a_stream_that_workers_read_comes_in_its_own_order(ranks):
    for found in ranks.run(evaluate_stream, 11, True, False, 2):
        assert found == [f"id{index}" for index in range(11)]


def evaluate_stream_by_batch(size, divides, workers):
    brain = make(Collect, shard_evaluation=True)
    brain.on_stage_end = lambda stage, stage_loss, epoch=None: None
    brain.evaluate(
        Numbers(size, divides),
        test_loader_kwargs={"batch_size": 3, "num_workers": workers},
    )
    alone = brain.gather(brain.rows)
    both = brain.gather({"ids": brain.ids, "rows": brain.rows})
    indices, other = ([int(row.reshape(-1)[0]) for row in rows] for rows in (alone, both["rows"]))
    return indices == other, both["ids"] == [f"id{index}" for index in indices], indices


@pytest.mark.corner
@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 0), (7, 0), (11, 0), (11, 2)])
def test_what_is_given_for_each_batch_of_a_stream_comes_in_its_order_too(ranks, size, workers):
    expected = (True, True, [*range(size)])
    assert ranks.run(evaluate_stream_by_batch, size, False, workers) == [expected] * 2
    assert evaluate_stream_by_batch(size, False, workers) == expected


def test_what_is_given_for_each_batch_of_a_stream_that_divides_itself_comes_rank_by_rank(ranks):
    assert (
        ranks.run(evaluate_stream_by_batch, 7, True, 0) == [(True, True, [0, 2, 4, 6, 1, 3, 5])] * 2
    )


class CollectInTraining(Collect):
    """Gathers in each training stage; keeps what it has found."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.gathered = [
            *getattr(self, "gathered", []),
            self.gather({"ids": self.ids, "rows": self.rows}),
        ]


def train_on_stream(size, divides=False, batch_size=2):
    brain = make(CollectInTraining)
    brain.fit([1, 2], Numbers(size, divides), train_loader_kwargs={"batch_size": batch_size})
    return [
        (found["ids"], [int(row.reshape(-1)[0]) for row in found["rows"]])
        for found in brain.gathered
    ]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("size", [8, pytest.param(9, marks=pytest.mark.slow), 13])
def test_a_stream_in_training_comes_in_its_own_order_without_what_was_repeated(ranks, size):
    expected = [([f"id{index}" for index in range(size)], [*range(size)])] * 2
    assert train_on_stream(size) == expected
    assert ranks.run(train_on_stream, size) == [expected] * 2


def test_a_stream_in_training_that_divides_itself_comes_rank_by_rank(ranks):
    order = [*range(0, 9, 2), *range(1, 9, 2)]
    expected = [([f"id{index}" for index in order], order)] * 2
    assert ranks.run(train_on_stream, 9, True) == [expected] * 2


def calls_of_an_undivided_evaluation():
    calls = []
    for name in ("all_gather", "broadcast"):
        real = getattr(dist, name)
        setattr(
            dist,
            name,
            lambda *args, name=name, real=real, **kwargs: (
                calls.append(name),
                real(*args, **kwargs),
            )[1],
        )
    real_exchange = distributed.exchange
    module = __import__("ddpkit.training.gathering", fromlist=["exchange"])
    module.exchange = lambda value: (calls.append("exchange"), real_exchange(value))[1]
    brain = make(Collect)
    brain.on_stage_end = lambda stage, stage_loss, epoch=None: None
    brain.evaluate(numbered(5), test_loader_kwargs={"batch_size": 2, "shuffle": True})
    calls.clear()
    try:
        brain.gather(brain.ids)
        if brain.rank == 0:
            brain.gather(brain.ids)  # one rank alone may
        return calls
    finally:
        module.exchange = real_exchange


def test_an_undivided_evaluation_needs_no_communication(ranks):
    assert ranks.run(calls_of_an_undivided_evaluation) == [[], []]


# ------------------------------------------------------------------------------------------ objects


def objects(sizes):
    mine = dist.get_rank()
    whole = gather_objects(
        lambda: [torch.full((sizes[mine],), float(mine)), {"rank": mine}, "x" * sizes[mine]]
    )
    return [(one[0].shape[0], float(one[0].sum()), one[1]["rank"], len(one[2])) for one in whole]


@pytest.mark.costly
def test_objects_of_any_size(ranks):
    sizes = [0, 3_000_000, 5]
    for found in ranks.run(objects, sizes, world_size=3):
        assert found == [(size, float(size * rank), rank, size) for rank, size in enumerate(sizes)]


def on_main_alone():
    if dist.get_rank() == 0:
        with (
            distributed.alone(),
            pytest.raises(LaunchError, match="gather_objects was called inside main-only code"),
        ):
            gather_objects(lambda: 1)
    return True


def test_main_alone_cannot_gather(ranks):
    assert ranks.run(on_main_alone) == [True, True]


def views():
    """Rows of a large batch travel without the batch."""
    large = torch.zeros(1000, 1000)
    sent = []
    real = object_gathering._gather_bytes
    object_gathering._gather_bytes = lambda data, **options: (
        sent.append(len(data)),
        real(data, **options),
    )[1]
    try:
        brain = make(Collect, shard_evaluation=True)
        brain.on_stage_end = lambda stage, stage_loss, epoch=None: None
        brain.evaluate(numbered(4), test_loader_kwargs={"batch_size": 2})
        brain.gather([large[0], large[1]])
        brain.gather([{"row": large[0]}, {"row": large[1]}])
        brain.gather(large[:2])
        brain.progress.stage_batches = StageBatches(
            Stage.TEST,
            shard(range(1000), Sharding(brain.rank, 2), batch_size=500),
            divided=True,
        )
        brain.progress.stage_batches.close(1)
        brain.gather([large[0, : index % 3] for index in range(500)])  # many small ones
    finally:
        object_gathering._gather_bytes = real
    return sent


def test_a_view_travels_alone(ranks):
    for sent in ranks.run(views):
        assert len(sent) == 4
        assert max(sent) < 30_000


# -------------------------------------------------------------------------------------- predictions


class Predicting(Collect):
    def on_stage_start(self, stage, epoch=None):
        raise AssertionError("predict calls no stage hooks")

    on_stage_end = on_stage_start

    def predict_batch(self, batch):
        assert not torch.is_grad_enabled()
        assert not self.modules.training
        outputs = self.modules.net(batch[0])
        indices = batch[2].tolist()
        return {"score": outputs, "more": ([f"id{index}" for index in indices], np.array(indices))}


def predict(size, cls, kwargs, stream=False):
    brain = make(cls, net=linear())
    data = Numbers(size, False) if stream else numbered(size)
    return brain.predict(data, loader_kwargs=kwargs)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "world",
    [1, 3, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 4))],
)
def test_predictions_are_those_of_one_process(ranks, world):
    for size in (1, 3, 17):
        whole = torch.stack([inputs for inputs, _, _ in numbered(size)])
        with torch.no_grad():
            scores = linear()(whole)
        for kwargs in ({"batch_size": 2}, {"batch_size": 3, "shuffle": True}):
            for outputs in ranks.run(predict, size, Predicting, kwargs, world_size=world):
                assert len(outputs) == size
                torch.testing.assert_close(torch.stack([one["score"] for one in outputs]), scores)
                assert [one["more"] for one in outputs] == [
                    (f"id{index}", index) for index in range(size)
                ]
        for outputs in ranks.run(predict, size, Collect, {"batch_size": 2}, world_size=world):
            torch.testing.assert_close(torch.stack(outputs), scores)


def test_predictions_of_a_stream_and_of_whole_batches(ranks):
    alone = predict(7, Predicting, {"batch_size": 2})
    for outputs in ranks.run(predict, 7, Predicting, {"batch_size": 2}, True):
        assert [one["more"] for one in outputs] == [one["more"] for one in alone]


class Batches:
    """A dataset whose items are batches."""

    def __len__(self):
        return 3

    def __getitem__(self, place):
        return [torch.stack([inputs for inputs, _ in points(2 + place)])]


def predict_batches():
    return [
        list(one.shape)
        for one in make(Collect).predict(Batches(), loader_kwargs={"batch_size": None})
    ]


def test_where_the_dataset_makes_the_batches_an_output_belongs_to_an_item(ranks):
    assert ranks.run(predict_batches) == [[[2, 1], [3, 1], [4, 1]]] * 2


def predict_own_part():
    """How many samples this rank has run."""
    brain = make(Collect)
    seen = []
    brain.predict_batch = lambda batch: (seen.append(len(batch[2])), batch[2])[1]
    found = brain.predict(numbered(9), loader_kwargs={"batch_size": 2})
    return sum(seen), found == list(range(9)) or [int(one) for one in found] == list(range(9))


def test_predictions_are_divided_without_being_told(ranks):
    assert ranks.run(predict_own_part, world_size=2) == [(5, True), (4, True)]


class Calibrating(Collect):
    """Looks at a whole set before it predicts."""

    def on_evaluate_start(self, max_key=None, min_key=None):
        self.looked_at = sum(
            len(batch[2]) for batch in self.make_dataloader(numbered(9), Stage.VALID, batch_size=2)
        )


def calibrate():
    brain = make(Calibrating)
    brain.predict(numbered(4), loader_kwargs={"batch_size": 2})
    return brain.looked_at


def test_a_loader_that_a_recipe_makes_before_it_predicts_is_not_divided(ranks):
    assert ranks.run(calibrate, world_size=2) == [9, 9]


def predict_wrongly(kind):
    brain = make(Collect)
    wrong = {
        "scalar": lambda batch: torch.tensor(1.0),
        "object": lambda batch: object(),
        "short": lambda batch: (
            {"a": torch.zeros(1, 3), "b": [0]} if len(batch[2]) > 1 else torch.zeros(1)
        ),
    }
    brain.predict_batch = wrong[kind]
    return outcome(brain.predict, numbered(3), loader_kwargs={"batch_size": 2})[:2]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("scalar", "a Tensor of shape ()"),
        ("object", "returned an object"),
        ("short", "returned a dict, not one output for each of its 2 sample"),
    ],
)
def test_an_output_that_cannot_be_divided(ranks, kind, text):
    (kind_here, message), (kind_there, message_there) = ranks.run(predict_wrongly, kind)
    assert kind_here == "BatchError"
    assert text in message
    assert "2 sample(s)" in message
    assert "predict_batch" in message
    assert kind_there == ("RankFailedError" if kind == "short" else "BatchError"), message_there


def predict_inside_fit(folder):
    class Inside(Collect):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.TRAIN:
                self.predict(numbered(2))

    with pytest.raises(ConfigError, match="inside fit"):
        make(Inside, folder=folder).fit([1], numbered(4), train_loader_kwargs={"batch_size": 2})
    return True


def test_predict_inside_fit(ranks, tmp_path):
    assert ranks.run(predict_inside_fit, tmp_path) == [True, True]


def after_training(folder):
    brain = make(Collect, folder=folder, shard_evaluation=True)
    data = numbered(8)
    brain.on_stage_end = lambda stage, stage_loss, epoch=None: (
        brain.checkpointer.save_checkpoint(meta={"loss": stage_loss})
        if stage is Stage.VALID
        else None
    )
    brain.fit([1, 2], data, data, train_loader_kwargs={"batch_size": 8 // world_size()})
    last = torch.stack(brain.predict(data[:5]))
    first = torch.stack(brain.predict(data[:5], max_key="loss"))
    ids = brain.gather(brain.ids)  # of the validation: predict has left nothing behind
    return last, first, ids


@pytest.mark.costly
def test_predict_recovers_the_checkpoint_that_is_asked_for(ranks, tmp_path):
    alone = after_training(tmp_path / "one")
    assert not torch.equal(alone[0], alone[1])
    for found in ranks.run(after_training, tmp_path / "two"):
        torch.testing.assert_close(found[0], alone[0])
        torch.testing.assert_close(found[1], alone[1])
        assert found[2] == alone[2] == [f"id{index}" for index in range(8)]


def dealt_sequentially():
    sampler = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    return [
        int(one)
        for one in make(Index).predict(numbered(5), loader_kwargs={"batch_sampler": sampler})
    ]


class Index(Collect):
    def predict_batch(self, batch):
        return batch[2]


@pytest.mark.costly
def test_predictions_with_a_batch_sampler(ranks):
    assert ranks.run(dealt_sequentially, world_size=2) == [list(range(5))] * 2


def raises_data_error():
    with pytest.raises(DataError):
        make(Collect).predict([])
    return True


def test_an_empty_set(ranks):
    assert ranks.run(raises_data_error) == [True, True]
