"""Batches that pass through a generator on their way from the loader to the step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.control import start_loading
from ddpkit.training.feed import Feed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpkit.training.stream_feed import StreamFeed
    from ddpkit.training.window import Window


@dataclass(eq=False)
class FeedThrough:
    """A feed whose batches pass through something that follows the steps.

    Attributes:
        inner: yields this rank's micro-batches.
        batches: yields what ``inner.batches`` does, for a window.

    Ranks: as the inner feed.

    Example:
        >>> from ddpkit.training import Window
        >>> feed = Feed(loader="abc", length=3)
        >>> list(
        ...     FeedThrough(feed, lambda window: map(str.upper, feed.batches(window))).batches(
        ...         Window()
        ...     )
        ... )
        ['A', 'B', 'C']
    """

    inner: Feed | StreamFeed
    batches: Callable[[Window], Iterator[Any]]

    @property
    def length(self) -> int | None:
        """The number of micro-batches of this rank in an epoch, or None."""
        return self.inner.length

    @property
    def factor(self) -> int:
        """The number of micro-batches in an optimizer step."""
        return self.inner.factor


class PassedThrough:
    """A loader whose batches pass through a generator, each time it is iterated.

    Args:
        loader: started when the iteration begins, not with the first batch.
        through: takes the iterator, yields batches.

    Ranks: local.

    Example:
        >>> list(PassedThrough("ab", lambda batches: map(str.upper, batches)))
        ['A', 'B']
    """

    num_workers = 0  # of its own: without it every pass would be prepared for a fork

    def __init__(
        self,
        loader: Iterable[Any],
        through: Callable[[Iterator[Any]], Iterator[Any]],
    ) -> None:
        self.loader = loader
        self.through = through

    def __iter__(self) -> Iterator[Any]:
        return self.through(start_loading(self.loader))


def first_of(loader: Iterable[Any], number: int | None) -> PassedThrough:
    """Return the first batches of a loader; all where no number is given.

    Ranks: local.
    """
    return PassedThrough(loader, lambda batches: itertools.islice(batches, number))


def cuda_graph_steps(batches: Iterator[Any]) -> Iterator[Any]:
    """Tell torch before each batch that a step begins, in which CUDA graphs may overwrite the
    outputs of the last one.

    Untold, each call of a compiled module is a step of its own, and one module could not use the
    output of another.

    Ranks: local.

    Source: https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
    """
    for batch in batches:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        yield batch
