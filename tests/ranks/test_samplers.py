"""Samplers and batch samplers that a recipe gives, dealt out to real ranks."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader

from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import distributed_loader_specifics, make_dataloader
from ddpkit.distributed import get_rank
from ddpkit.epoch_loop import EpochCounter
from ddpkit.sampler import (
    BalancingDataSampler,
    ConcatDatasetBatchSampler,
    DistributedSamplerWrapper,
    DynamicBatchSampler,
    ReproducibleRandomSampler,
    ReproducibleWeightedRandomSampler,
)
from ddpkit.seed import seed_everything
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Mortal, linear, make, points, sgd, weights

NUMBER = 23
LENGTHS = [1.0 + (7 * k) % 11 for k in range(NUMBER)]
EPOCHS = (1, 2, 3)


def dynamic(seed=None, **options):
    return DynamicBatchSampler(LENGTHS, 24.0, 4, lengths_list=LENGTHS, seed=seed, **options)


SAMPLERS = {
    "random": lambda seed: ReproducibleRandomSampler(range(NUMBER), seed),
    "weighted": lambda seed: ReproducibleWeightedRandomSampler(
        [1.0, 3.0] * 11 + [2.0],
        17,
        True,
        seed,
    ),
    "balancing": lambda seed: BalancingDataSampler(
        [{"y": k % 5 == 0} for k in range(NUMBER)],
        "y",
        seed=seed,
    ),
    "no replacement": lambda seed: ReproducibleWeightedRandomSampler(
        [1.0] * NUMBER,
        NUMBER,
        False,
        seed,
    ),
}
BATCH_SAMPLERS = {
    "dynamic": dynamic,
    "dynamic, ascending": lambda seed: dynamic(seed, batch_ordering="ascending"),
    "dynamic, drop_last": lambda seed: dynamic(seed, drop_last=True),
    "concat": lambda seed: ConcatDatasetBatchSampler(
        [ReproducibleRandomSampler(range(9), seed), ReproducibleRandomSampler(range(14), seed)],
        [1, 2],
    ),
    "of batches": lambda seed: BatchSampler(
        ReproducibleRandomSampler(range(NUMBER), seed),
        3,
        drop_last=False,
    ),
    "of one batch": lambda seed: BatchSampler(
        ReproducibleRandomSampler(range(2), seed),
        2,
        drop_last=False,
    ),
}
WHOLE = {"random", "no replacement", "dynamic", "dynamic, ascending", "of batches"}


def numbered(number=NUMBER):
    return [(row, target, torch.tensor(k)) for k, (row, target) in enumerate(points(number))]


class Noting(Mortal):
    """Notes the indices of every batch that counts; dies where it is told to."""

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN:
            self.epoch = epoch
            self.noted = {**getattr(self, "noted", {}), epoch: []}

    def on_fit_batch_start(self, batch, should_step):
        super().on_fit_batch_start(batch, should_step)
        if self.progress.window.count:
            self.noted[self.epoch].append(batch[2].tolist())


def fit(kind, seed, hparams=None, factor=1, **options):
    """Train on what a sampler gives; return, per epoch, this rank's batches of indices, and the
    weights.
    """
    brain = make(Noting, hparams=hparams, grad_accumulation_factor=factor)
    if kind in SAMPLERS:
        options = {"sampler": SAMPLERS[kind](seed), "batch_size": 2, **options}
    else:
        options = {"batch_sampler": BATCH_SAMPLERS[kind](seed), **options}
    brain.fit(EPOCHS, numbered(), train_loader_kwargs=options)
    return brain.noted, weights(brain)


def drawn_alone(kind, seed, epoch):
    """What the sampler yields by itself in an epoch."""
    sampler = {**SAMPLERS, **BATCH_SAMPLERS}[kind](seed)
    inner = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
    inner.set_epoch(epoch)
    return list(sampler)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def joined(results, epoch):
    """The batches of all ranks, in the order in which they were trained on."""
    rounds = itertools.zip_longest(*(noted[epoch] for noted, _ in results), fillvalue=[])
    return [[batch for batch in one if batch] for one in rounds]


# ----------------------------------------------------------------------------------------- coverage


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_is_dealt_out_as_it_draws(ranks, kind, world):
    """Each index as often as the sampler draws it, in its order; alike whatever the number of
    ranks.
    """
    results = ranks.run(fit, kind, 4, world_size=world)
    for epoch in EPOCHS:
        assert flat(flat(joined(results, epoch))) == drawn_alone(kind, 4, epoch)
        if kind in WHOLE:
            assert sorted(flat(flat(joined(results, epoch)))) == list(range(NUMBER))
    assert drawn_alone(kind, 4, 1) != drawn_alone(kind, 4, 2)
    assert drawn_alone(kind, 4, 2) != drawn_alone(kind, 5, 1)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("kind", BATCH_SAMPLERS)
def test_a_batch_sampler_is_dealt_out_as_it_draws(ranks, kind, world):
    results = ranks.run(fit, kind, 4, world_size=world)
    for epoch in EPOCHS:
        expected = drawn_alone(kind, 4, epoch)
        assert flat(joined(results, epoch)) == expected, "its batches, in its order"
        assert [len(one) for one in joined(results, epoch)[:-1]] == [world] * (
            -(-len(expected) // world) - 1
        )
        if kind in WHOLE:
            assert sorted(flat(expected)) == list(range(NUMBER))
    if kind != "of one batch":
        assert drawn_alone(kind, 4, 1) != drawn_alone(kind, 4, 2)
        assert drawn_alone(kind, 4, 2) != drawn_alone(kind, 5, 1)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["dynamic", "concat", "weighted"])
def test_ranks_and_accumulation_come_to_the_same_weights(ranks, kind, world):
    """Windows of as many batches in one process are the steps of as many ranks: each sample weighs
    the same.
    """
    [(_, expected)] = ranks.run(fit, kind, 4, None, world, world_size=1)
    for _, found in ranks.run(fit, kind, 4, world_size=world):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


def follow_the_experiment(seed):
    seed_everything(seed, verbose=False)
    return fit("dynamic", None)[0]


@pytest.mark.slow
def test_without_a_seed_of_its_own_a_sampler_follows_the_experiment(ranks):
    first, again, other = (ranks.run(follow_the_experiment, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(flat(flat(noted[1] for noted in other))) == list(range(NUMBER))


# ---------------------------------------------------------------------------------------- drop_last


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("kind", ["random", "weighted", "dynamic", "of batches"])
def test_drop_last_is_honoured(ranks, kind, world):
    """Of a sampler an incomplete batch of all ranks is left out, of a batch sampler a round without
    one for each.
    """
    results = ranks.run(fit_drop_last, kind, world_size=world)
    for epoch in EPOCHS:
        drawn = drawn_alone(kind, 4, epoch)
        whole = 2 * world if kind in SAMPLERS else world
        kept = drawn[: len(drawn) // whole * whole]
        found = flat(joined(results, epoch))
        assert (flat(found) if kind in SAMPLERS else found) == kept
        assert len({len(noted[epoch]) for noted, _ in results}) == 1


def fit_drop_last(kind):
    return fit(kind, 4, drop_last=True)


# ------------------------------------------------------------------------------------------ sorting


def fit_sorting(kind, sorting):
    return fit(kind, 4, {"sorting": sorting})


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("sorting", ["random", "ascending", "descending"])
@pytest.mark.parametrize("kind", ["random", "dynamic, ascending"])
def test_sorting_leaves_the_order_of_a_sampler_alone(ranks, kind, sorting):
    """Reshuffled, batches in ascending order would be in none."""
    for world in (1, 2):
        results = ranks.run(fit_sorting, kind, sorting, world_size=world)
        found = flat(joined(results, 2))
        assert (flat(found) if kind in SAMPLERS else found) == drawn_alone(kind, 4, 2)


def fit_sorted_data(sorting):
    seed_everything(3, verbose=False)
    brain = make(Noting, hparams={"sorting": sorting})
    brain.fit(EPOCHS, numbered(), train_loader_kwargs={"batch_size": 2, "shuffle": True})
    return brain.noted, None


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [1, 3, pytest.param(2, marks=pytest.mark.slow)])
def test_sorting_decides_where_there_is_no_sampler(ranks, world):
    for sorting in ("ascending", "descending"):
        results = ranks.run(fit_sorted_data, sorting, world_size=world)
        assert flat(flat(joined(results, 1))) == list(range(NUMBER)), "the data are sorted already"
    results = ranks.run(fit_sorted_data, "random", world_size=world)
    orders = [flat(flat(joined(results, epoch))) for epoch in EPOCHS]
    assert all(sorted(order) == list(range(NUMBER)) for order in orders)
    assert len(set(map(tuple, orders))) == 3


# ------------------------------------------------------------------------------------------- resume


def run(folder, kind, dies_at=None, seed=7):
    counter = EpochCounter(3)
    net = linear(seed=seed)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Noting(
        {"net": net},
        sgd(momentum=0.9),
        None,
        {**QUIET, "ckpt_interval_steps": 1},
        checkpointer,
    )
    brain.dies_at = dies_at
    name = "sampler" if kind in SAMPLERS else "batch_sampler"
    kwargs = {
        name: {**SAMPLERS, **BATCH_SAMPLERS}[kind](4),
        **({"batch_size": 2} if kind in SAMPLERS else {}),
    }
    if dies_at is None:
        brain.fit(counter, numbered(), train_loader_kwargs=kwargs)
    else:
        with pytest.raises(Killed):
            brain.fit(counter, numbered(), train_loader_kwargs=kwargs)
    return brain.noted, weights(brain)


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("kind", ["random", "weighted", "dynamic", "concat"])
def test_a_run_is_continued_in_the_middle_of_an_epoch(ranks, tmp_path, kind, world):
    whole = ranks.run(run, tmp_path / "whole", kind, world_size=world)
    killed = ranks.run(run, tmp_path / "killed", kind, (2, 2), world_size=world)
    resumed = ranks.run(run, tmp_path / "killed", kind, None, 8, world_size=world)
    for before, after, through in zip(killed, resumed, whole, strict=True):
        assert before[0][1] == through[0][1]
        assert before[0][2] + after[0][2] == through[0][2], (
            "each batch of the epoch once, none twice"
        )
        assert after[0][3] == through[0][3]
        for name, value in through[1].items():
            assert torch.equal(after[1][name], value), name


# ------------------------------------------------------------------------------ divided by the user


def fit_wrapped(number, shuffle, of_batches):
    brain = make(Noting)
    inner = ReproducibleRandomSampler(range(number), 4)
    if of_batches:
        batches = DistributedSamplerWrapper(
            BatchSampler(inner, 2, drop_last=False),
            shuffle=shuffle,
        )
        kwargs = {"batch_sampler": batches}
    else:
        kwargs = {"sampler": DistributedSamplerWrapper(inner, shuffle=shuffle), "batch_size": 2}
    brain.fit(EPOCHS, numbered(number), train_loader_kwargs=kwargs)
    return brain.noted, None


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("of_batches", [True, False])
def test_a_wrapped_sampler_is_not_divided_again(ranks, world, shuffle, of_batches):
    results = ranks.run(fit_wrapped, 12, shuffle, of_batches, world_size=world)
    found = [flat(flat(joined(results, epoch))) for epoch in EPOCHS]
    assert all(sorted(one) == list(range(12)) for one in found)
    assert len(set(map(tuple, found))) == 3, "it was told the epochs"
    results = ranks.run(fit_wrapped, 13, shuffle, False, world_size=world)
    repeated = -(-13 // world) * world - 13
    counts = Counter(flat(flat(joined(results, 1))))
    assert set(counts) == set(range(13))
    assert sum(counts.values()) - 13 == repeated, (
        "every rank the same number, as DistributedSampler has it"
    )


def share_through_arguments(kind):
    """A loader that a recipe makes itself, with the arguments that divide; then the Brain's own
    division of it.
    """
    kwargs = {
        "plain": {"batch_size": 2, "shuffle": True},
        "sampler": {"batch_size": 2, "sampler": SAMPLERS["random"](4)},
        "batch_sampler": {"batch_sampler": dynamic(4)},
        "whole batches": {"batch_size": None},
    }[kind]
    before = dict(kwargs)
    divided = distributed_loader_specifics(True, None, numbered(), {**kwargs, "num_workers": 0})
    assert kwargs == before
    found = []
    for make_one in (DataLoader, make_dataloader):
        loader = make_one(numbered(), **divided)
        found.append([torch.atleast_1d(batch[2]).tolist() for batch in loader])
    assert found[0] == found[1]
    if kind == "whole batches":  # which the data of these tests are not
        return found[0], None, None
    brain = make(Noting)
    ready = make(Noting)
    brain.fit([1], numbered(), train_loader_kwargs=divided)
    ready.fit([1], make_dataloader(numbered(), **divided))
    return found[0], brain.noted[1], ready.noted[1]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("kind", ["plain", "sampler", "batch_sampler", "whole batches"])
def test_distributed_loader_specifics_divide_once(ranks, kind, world):
    results = ranks.run(share_through_arguments, kind, world_size=world)
    drawn = flat(flat(share for share, _, _ in results))
    assert set(drawn) == set(range(NUMBER))
    if kind != "whole batches":
        for way in (1, 2):
            assert sorted(flat(flat(result[way] for result in results))) == list(range(NUMBER))


def fit_concat_of_datasets():
    data = ConcatDataset([numbered()[:9], numbered()[9:]])
    brain = make(Noting)
    brain.fit(EPOCHS, data, train_loader_kwargs={"batch_sampler": BATCH_SAMPLERS["concat"](None)})
    return brain.noted, None


@pytest.mark.costly
def test_concat_batches_hold_some_of_every_part(ranks):
    for noted, _ in ranks.run(fit_concat_of_datasets):
        for batch in flat(noted.values()):
            assert [index < 9 for index in batch] == [True, False, False]


class OfItsOwn:
    """Draws from a generator that nobody can seed: other numbers on every rank."""

    def __init__(self, rank):
        self.random = random.Random(rank)

    def __iter__(self):
        return iter(self.random.sample(range(12), 12))

    def __len__(self):
        return 12


class ForItsRank(OfItsOwn):
    is_sharded = True

    def __iter__(self):
        return iter(range(get_rank() or 0, 12, 2))

    def __len__(self):
        return 6


def fit_own(kind):
    brain = make()
    brain.fit([1], points(12), train_loader_kwargs={"sampler": kind(get_rank()), "batch_size": 2})
    return brain.optimizer_step


def test_a_sampler_that_draws_otherwise_on_every_rank_is_told_of(ranks):
    outcomes = ranks.outcomes(fit_own, OfItsOwn, world_size=2)
    for outcome in outcomes:
        assert outcome.error_type == "RankMismatchError"
        assert (
            "draw of OfItsOwn for epoch 1 (its randomness must follow from a seed" in outcome.error
        )


def test_a_sampler_that_says_it_draws_for_its_rank_is_left_alone(ranks):
    assert ranks.run(fit_own, ForItsRank, world_size=2) == [3, 3]
