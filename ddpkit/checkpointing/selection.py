"""Which checkpoints count, which is best, and which may be deleted."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddpkit.checkpointing.checkpoint import OWN_META, Checkpoint, as_number, ckpt_recency
from ddpkit.errors import ConfigError

ImportanceKey = Callable[[Checkpoint], Any]
Predicate = Callable[[Checkpoint], bool]


@dataclass(frozen=True, eq=False)
class Selection:
    """Which checkpoints count, and what makes one better than another; by default the newest is
    best.

    Attributes:
        importance_key: gives a checkpoint's importance; the greatest is best.
        max_key: a key of the meta whose greatest value is best. Checkpoints without it do not
            count.
        min_key: a key of the meta whose smallest value is best. Checkpoints without it do not
            count.
        ckpt_predicate: says whether a checkpoint counts.

    Raises:
        ConfigError: more than one kind of key is given.

    Example:
        >>> from pathlib import Path
        >>> Selection(min_key="loss").importance(Checkpoint(Path("CKPT+a"), {"loss": 2}, {}))
        -2.0
    """

    importance_key: ImportanceKey | None = None
    max_key: str | None = None
    min_key: str | None = None
    ckpt_predicate: Predicate | None = None

    def __post_init__(self) -> None:
        keys = ("importance_key", "max_key", "min_key")
        given = [name for name in keys if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} are given, but only one can decide which checkpoint is "
                "best."
            )

    def counts(self, checkpoint: Checkpoint) -> bool:
        """Say whether a checkpoint has the key and passes the predicate."""
        keys = {self.max_key, self.min_key} - {None}
        return keys <= checkpoint.meta.keys() and (
            self.ckpt_predicate is None or bool(self.ckpt_predicate(checkpoint))
        )

    def importance(self, checkpoint: Checkpoint) -> Any:
        """Return a value that is greater for a better checkpoint; None for the worst."""
        if self.max_key is not None:
            return as_number(checkpoint.meta[self.max_key])
        if self.min_key is not None:
            value = as_number(checkpoint.meta[self.min_key])
            return None if value is None else -value
        importance = (self.importance_key or ckpt_recency)(checkpoint)
        if isinstance(importance, (tuple, list)):
            return (
                None
                if any(isinstance(part, float) and math.isnan(part) for part in importance)
                else importance
            )
        return (
            as_number(importance) if isinstance(importance, (float, torch.Tensor)) else importance
        )


@dataclass(frozen=True, eq=False)
class Retention:
    """What a deletion leaves: the best few by each key, the newest, and whatever the predicate
    excludes.

    Attributes:
        num_to_keep: how many to keep for each key; 0 keeps none.
        importance_keys: functions of a checkpoint whose greatest values are best.
        max_keys: keys of the meta whose greatest values are best.
        min_keys: keys of the meta whose smallest values are best.
        ckpt_predicate: only checkpoints for which it is true may be deleted, or count as kept.
        keep_recent: True keeps the newest ``num_to_keep`` as well; a number greater than 0 keeps so
            many of the newest, whatever ``num_to_keep`` is and also where ``importance_keys`` name
            :func:`ckpt_recency`. With False or 0 the newest are kept only if ``importance_keys``
            say so.

    Raises:
        ConfigError: ``num_to_keep`` or ``keep_recent`` is negative or no whole number.

    Example:
        >>> retention = Retention(3, min_keys=("loss",), keep_recent=1)
        >>> [(selection.min_key, number) for selection, number in retention.selections()]
        [('loss', 3), (None, 1)]
    """

    num_to_keep: int
    importance_keys: Sequence[ImportanceKey] | None = ()
    max_keys: Sequence[str] | None = ()
    min_keys: Sequence[str] | None = ()
    ckpt_predicate: Predicate | None = None
    keep_recent: bool | int = False

    def __post_init__(self) -> None:
        _check_count("num_to_keep", self.num_to_keep, "0 keeps none")
        _check_count(
            "keep_recent",
            self.keep_recent,
            "True keeps the newest num_to_keep, a number so many, False none",
        )

    def selections(self) -> list[tuple[Selection, int]]:
        """Return one selection per key, and how many of the best it keeps."""
        newest = self.num_to_keep if self.keep_recent is True else self.keep_recent
        importance_keys = [
            key
            for key in self.importance_keys or ()
            if not (self.keep_recent and key is ckpt_recency)
        ]
        found = [
            *((Selection(importance_key=key), self.num_to_keep) for key in importance_keys),
            *((Selection(max_key=key), self.num_to_keep) for key in self.max_keys or ()),
            *((Selection(min_key=key), self.num_to_keep) for key in self.min_keys or ()),
            *([(Selection(importance_key=ckpt_recency), newest)] if self.keep_recent else []),
        ]
        return [
            (replace(search, ckpt_predicate=self.ckpt_predicate), number)
            for search, number in found
        ]


def _check_count(name: str, value: Any, words: str) -> None:
    if not isinstance(value, numbers.Integral) or int(value) < 0:
        raise ConfigError(f"{name}={value!r} must be a whole number >= 0: {words}.")


def ranked(checkpoints: Iterable[Checkpoint], selection: Selection) -> list[Checkpoint]:
    """Rank the checkpoints that count.

    Args:
        checkpoints: in any order.
        selection: which count, and what is better.

    Returns:
        The best first; among equals the newest first; values without a number (NaN) last.

    Example:
        >>> from pathlib import Path
        >>> metas = {"a": {"unixtime": 1, "loss": 3.0}, "b": {"unixtime": 2, "loss": float("nan")}}
        >>> saved = [Checkpoint(Path(name), meta, {}) for name, meta in metas.items()]
        >>> [checkpoint.path.name for checkpoint in ranked(saved, Selection(min_key="loss"))]
        ['a', 'b']
    """

    def order(checkpoint: Checkpoint) -> tuple[Any, ...]:
        value = selection.importance(checkpoint)
        newest = (ckpt_recency(checkpoint), checkpoint.path.name)
        return (0, 0, *newest) if value is None else (1, value, *newest)

    return sorted(
        filter(selection.counts, checkpoints),
        key=order,
        reverse=True,
    )


def words_of_keys(checkpoints: Iterable[Checkpoint], key: str) -> str:
    """Return a sentence or two that name the keys by which checkpoints can be ranked.

    Args:
        checkpoints: which there are.
        key: that none of them has; a key that is nearly the same is offered.

    Example:
        >>> from pathlib import Path
        >>> saved = Checkpoint(Path("CKPT+a"), {"unixtime": 1.0, "loss": 2.0, "who": "me"}, {})
        >>> words_of_keys([saved], "los")
        "The keys with numbers are: 'loss'. Did you mean 'loss'?"
    """
    keys = sorted(
        {
            name
            for checkpoint in checkpoints
            for name, value in checkpoint.meta.items()
            if name not in OWN_META and not isinstance(value, bool) and as_number(value) is not None
        }
    )
    if not keys:
        return "None has a key with a number."
    near = difflib.get_close_matches(key, keys, n=1)
    words = f"The keys with numbers are: {', '.join(map(repr, keys))}."
    return f"{words} Did you mean {near[0]!r}?" if near else words


def deletable(checkpoints: Sequence[Checkpoint], retention: Retention) -> list[Checkpoint]:
    """Return the checkpoints that may be deleted: ranked by some key, and protected by none.

    Args:
        checkpoints: in any order.
        retention: what to keep.

    Returns:
        What may be deleted.

    Example:
        >>> from pathlib import Path
        >>> two = [Checkpoint(Path(f"CKPT+{time}"), {"unixtime": time}, {}) for time in (1, 2)]
        >>> [checkpoint.path.name for checkpoint in deletable(two, Retention(1, [ckpt_recency]))]
        ['CKPT+1']
    """
    candidates: dict[Checkpoint, None] = {}
    protected: set[Checkpoint] = set()
    for selection, number in retention.selections():
        order = ranked(checkpoints, selection)
        candidates.update(dict.fromkeys(order))
        protected.update(order[:number])
    return [checkpoint for checkpoint in candidates if checkpoint not in protected]
