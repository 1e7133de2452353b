"""The samples that a rehearsal works on: what every pretended rank gets in a window, and the joined batch of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.dataloader import LoopedLoader, plan_of, set_epoch
from ddpkit.errors import ConfigError
from ddpkit.rehearsal import Share
from ddpkit.sampler import PlannedBatchSampler, index_number
from ddpkit.seed import MAX_SEED, RngState, stream_seed


@dataclass
class ParityWindow:
    """One optimizer step of the pretended ranks, and the same step of one process.

    Attributes:
        number: which of the epoch, counted from 0.
        first: micro-batches of a rank before it.
        ranks: what each rank works on.
        joined: what one process works on: the ranks' batches, each joined into one; or one after the other, where
            they cannot be joined.
        indices: of the samples of the first micro-batch, over all ranks.
        batches: indices of the samples of each micro-batch of one process.

    Ranks: local.

    Example:
        >>> share = Share([lambda: None], [2], [4], [0.5], [1.0])
        >>> ParityWindow(0, 0, [share, share], share, [0, 1, 2, 3]).is_even
        True
    """

    number: int
    first: int
    ranks: list[Share]
    joined: Share
    indices: list[Any]
    batches: list[list[Any]] = field(default_factory=list)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many samples."""
        return all(rank.counts == self.ranks[0].counts for rank in self.ranks)

    @property
    def samples(self) -> int:
        """Samples over all ranks."""
        return sum(sum(rank.counts) for rank in self.ranks)


class ParityWindows:
    """Draws windows from the loaders that real ranks would have.

    Args:
        loaders: one per rank.
        factor: micro-batches per optimizer step.
        epoch: whose order is followed.

    Attributes:
        can_join: whether batches of several ranks can be joined into one; False where a recipe's batch sampler or its
            dataset makes whole batches.
        makes_batches: whether samples can be put together at will; False where the dataset makes whole batches.
        length: optimizer steps of the epoch.
        joined_factor: micro-batches per optimizer step of one process.

    Raises:
        ConfigError: the data comes in a way that cannot be rehearsed.

    Ranks: local.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> loaders = [shard(range(5), Sharding(rank, 2), batch_size=2) for rank in range(2)]
        >>> windows = ParityWindows(loaders, factor=1, epoch=1)
        >>> [(window.samples, window.joined.batches[0]().tolist()) for window in windows.draw(2)]
        [(4, [0, 1, 2, 3]), (1, [4])]
    """

    def __init__(self, loaders: Sequence[Any], factor: int, epoch: int) -> None:
        for loader in loaders:
            set_epoch(loader, epoch)
        self.is_weighed = not isinstance(loaders[0], LoopedLoader) or loaders[0].has_counts
        nominal = loaders[0].epoch_length if isinstance(loaders[0], LoopedLoader) else None
        self.loaders = [loader.loader if isinstance(loader, LoopedLoader) else loader for loader in loaders]
        self.plans = [_plan(loader) for loader in self.loaders]
        self.factor, self.epoch = factor, epoch
        self.makes_batches = self.loaders[0].batch_sampler is not None
        self.can_join = isinstance(self.plans[0], PlannedBatchSampler) and self.makes_batches
        self.joined_factor = factor if self.can_join else factor * len(loaders)
        batches = len(self.plans[0])
        self.batches = batches if nominal is None else min(batches, nominal)
        self.length = -(-self.batches // factor)

    def draw(self, number: int) -> list[ParityWindow]:
        """Draw some windows: the first ones, and the last one, which may be uneven.

        Args:
            number: how many at most.
        """
        chosen = sorted({*range(min(number - 1, self.length)), self.length - 1})
        return [self._window(one) for one in chosen]

    def batch_of(self, indices: Iterable[Any]) -> Any:
        """Load some samples and make a batch of them, with the same random augmentation each time."""
        loader, seed = self.loaders[0], self.plans[0].seed
        state = RngState.capture()
        try:
            samples = [
                _sample(loader.dataset, index, stream_seed(seed, self.epoch, index_number(index))) for index in indices
            ]
        finally:
            state.restore()
        if loader.batch_sampler is None:
            return loader.collate_fn(samples[0])
        return loader.collate_fn(samples)

    def _window(self, number: int) -> ParityWindow:
        places = range(number * self.factor, min((number + 1) * self.factor, self.batches))
        indices = [[_batch(plan, place) for place in places] for plan in self.plans]
        shares = [
            Share(
                batches=[partial(self.batch_of, batch) for batch in own],
                counts=[plan.count(place) for place in places],
                totals=[plan.total(place) for place in places],
                own_parts=[plan.part(place) for place in places],
                all_parts=[plan.parts(place) for place in places],
                is_weighed=self.is_weighed,
            )
            for plan, own in zip(self.plans, indices, strict=True)
        ]
        present = [
            [own[place] for own, share in zip(indices, shares, strict=True) if share.counts[place]]
            for place in range(len(places))
        ]
        joined = self._joined(present, shares)
        batches = [[index for batch in place for index in batch] for place in present]
        return ParityWindow(number, places[0], shares, joined, batches[0], batches)

    def small(self, window: ParityWindow) -> tuple[Share, Share]:
        """Take a few samples from each micro-batch of a window; batches must be of the kind that can be joined.

        Args:
            window: of these.

        Returns:
            What one process works on: as many micro-batches, of equal sizes; and one batch of the same samples.
        """
        size = min(2, *(len(batch) for batch in window.batches))
        apart = [batch[:size] for batch in window.batches]
        return self._alone(apart), self._alone([[index for batch in apart for index in batch]])

    def _alone(self, batches: list[list[Any]]) -> Share:
        """Return what one process works on."""
        counts, ones = [len(batch) for batch in batches], [1.0] * len(batches)
        return Share([partial(self.batch_of, batch) for batch in batches], counts, counts, ones, ones, self.is_weighed)

    def _joined(self, present: list[list[list[Any]]], shares: Sequence[Share]) -> Share:
        """Join the ranks' batches of each place, or line them up."""
        if self.can_join:
            batches = [[index for batch in place for index in batch] for place in present]
            counts = shares[0].totals
        else:
            batches = [batch for place in present for batch in place]
            places = range(len(present))
            counts = [share.counts[place] for place in places for share in shares if share.counts[place]]
        ones = [1.0] * len(batches)
        return Share([partial(self.batch_of, batch) for batch in batches], counts, counts, ones, ones, self.is_weighed)


def _plan(loader: Any) -> Any:
    """Return the plan of a loader, or say why there is none."""
    plan = plan_of(loader)
    if plan is not None:
        return plan
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):
        what = "an IterableDataset, which has no positions: nobody can say which of its items make up the joined batch"
    elif isinstance(loader, DataLoader):
        what = "a loader that has been divided already (by a DistributedSampler), or whose sampler is not ddpkit's"
    else:
        what = f"a {type(loader).__name__}, which only yields batches: their samples cannot be joined"
    raise ConfigError(
        f"check_parity cannot rehearse this training set: it is {what}. Rehearse with a map-style dataset (a list of a "
        "few of the samples will do), and let ddpkit divide it."
    )


def _batch(plan: Any, place: int) -> list[Any]:
    """Return the indices of a rank's batch."""
    plan.skip = place
    batch: list[Any] = next(iter(plan))
    return batch


def _sample(dataset: Any, index: Any, seed: int) -> Any:
    """Load one sample, with the global random streams seeded for it."""
    random.seed(seed)
    np.random.seed(seed & MAX_SEED)  # noqa: NPY002 -- the stream that users' datasets draw from
    torch.default_generator.manual_seed(seed >> 1)
    by_list = getattr(dataset, "__getitems__", None)
    return by_list([index])[0] if by_list is not None else dataset[index]
