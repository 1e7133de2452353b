"""A recipe's sampler, drawn whole for an epoch: alike on every rank."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, cast

import torch

from ddpkit.data.plan import nested_samplers
from ddpkit.errors import DataError
from ddpkit.seed import mix_key, own_randomness

if TYPE_CHECKING:
    from collections.abc import Iterable, Sized


MOST_DRAWN = 20_000_000  # a sampler that yields more, and has no len(), seems endless


def draw_alike(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """List what a sampler yields, its randomness fixed by (seed, epoch) and the caller's left as it
    was.

    Ranks: local; every rank gets the same.
    """
    key = mix_key(seed, epoch, 0xDEA1)
    generators = [getattr(inner, "generator", None) for inner in nested_samplers(sampler)]
    with own_randomness(
        key, [generator for generator in generators if isinstance(generator, torch.Generator)]
    ):
        most = MOST_DRAWN
        with contextlib.suppress(TypeError, NotImplementedError):
            most = max(most, 2 * len(cast("Sized", sampler)))
        drawn = list(itertools.islice(sampler, most + 1))
    name = type(sampler).__name__
    if len(drawn) > most:
        raise DataError(
            f"{name} seems to have no end: it has yielded {len(drawn):,} times. A sampler is "
            "drawn whole at the start of an epoch, to be divided. Let it end, or give it a len() "
            "if it is so long."
        )
    if not drawn:
        raise DataError(
            f"{name} yields nothing in epoch {epoch}: there is no data to train on. A generator "
            "can be iterated only once; pass an object whose `__iter__` starts again."
        )
    return drawn
