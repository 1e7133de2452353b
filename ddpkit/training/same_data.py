"""Whether all ranks read the same data, each its part of it."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from ddpkit.comm import require_agreement
from ddpkit.data import (
    FEW_ITEMS,
    MOST_ITEMS,
    StreamLoader,
    inner_loader,
    nested_samplers,
    require_alike,
    selection_facts,
)
from ddpkit.dataloader import plan_of, spread_samples
from ddpkit.distributed import get_world_size
from ddpkit.training.passed_through import PassedThrough
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def require_same_draw(loader: Any) -> None:
    """Make sure that a user's sampler or a stream's shuffle is the same on all ranks, where each
    takes its part.

    Raises:
        RankMismatchError: it is not. On every rank.

    Ranks: collective.
    """
    plan = plan_of(loader)
    inner = inner_loader(loader)
    facts = plan.drawn_words() if plan is not None and plan.world_size > 1 else {}
    if isinstance(inner, StreamLoader):
        facts = inner.drawn_words()
    if facts:
        require_agreement(facts)


def selected_facts(name: str, loader: Any) -> dict[str, str]:
    """Describe which samples a planned loader's dataset selects, and a sampler where its draw is
    divided.

    Args:
        name: such as ``"train"``.
        loader: of this rank, or None.

    Returns:
        One entry per selection; none for a loader that a recipe has divided by itself.

    Ranks: local.

    Example:
        >>> selected_facts("train", [1, 2])
        {}
    """
    inner = inner_loader(loader)
    plan = plan_of(inner)
    if plan is None:
        return {}
    facts = selection_facts(name, inner.dataset)
    if plan.world_size > 1 and not isinstance(plan.source, int):
        for sampler in nested_samplers(plan.source):
            facts |= selection_facts(name, sampler)
    return facts


def compare_samples(name: str, loader: Any) -> None:
    """Make sure that all ranks hold the same dataset, where each is given its part of it: by a few
    samples.

    Args:
        name: such as ``"train"``.
        loader: of this rank, or None.

    Raises:
        RankMismatchError: they do not. On every rank.

    Ranks: collective.
    """
    inner = inner_loader(loader)
    plan = plan_of(inner)
    if plan is None or plan.world_size == 1:
        return

    def read_again() -> Any:
        found = spread_samples(inner, MOST_ITEMS, readings=2)
        return None if found is None else found[1]

    require_alike(
        # one of the few may be broken
        spread_samples(inner, FEW_ITEMS) or spread_samples(inner, 1),
        read_again,
        f"{name}: the ranks do not hold the same data, and each would be given one part in "
        f"{plan.world_size} of it: the samples of {type(inner.dataset).__name__} differ, and most "
        "would be lost in silence. Let every rank load all files, in the same order (sort a list "
        "of files), and seed what is random, such as a split. If each rank shall keep files of "
        "its own, give a DataLoader of them with `loader.is_sharded = True`",
        f"some samples of {name}",
    )


def compared(loader: Any, stage: Stage) -> Iterable[Any]:
    """Return an iterable over a loader's batches that compares the ranks' data after the first
    batch.

    Args:
        loader: of this rank.
        stage: for the message.

    Returns:
        The loader itself, unless it is a stream or a loader of batches that every rank reads whole.

    Ranks: local; to take the first batch is then collective.

    Example:
        >>> compared([1, 2], Stage.TEST)
        [1, 2]
    """
    inner = inner_loader(loader)
    if isinstance(inner, StreamLoader) and inner.is_dealt:
        return PassedThrough(loader, functools.partial(_checked, inner, stage))
    batches: Iterable[Any] = loader
    return batches


def _checked(inner: StreamLoader, stage: Stage, batches: Iterator[Any]) -> Iterator[Any]:
    first = list(itertools.islice(batches, 1))
    kind, items = ("loader", "batches") if inner.of_batches else ("dataset", "items")
    require_alike(
        inner.first,
        lambda: None,
        f"{stage.name}: the ranks do not read the same {items}, and each would keep one in "
        f"{get_world_size()} of {type(inner.whole).__name__}: samples would be lost in silence. "
        f"If it divides itself over the ranks, set `is_sharded = True` on the {kind}. If it is "
        "random, seed it: draw from Python's, numpy's or torch's global generator, which are "
        "seeded alike on all ranks while it is read. If it lists files, sort them",
        f"the first {items} of {stage.name}",
    )
    yield from first
    yield from batches
