"""Rows of the start-up block on the run's settings, and the layout of a row in lines of 80
columns.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from ddpkit.comm import data_facts
from ddpkit.dataloader import plan_of
from ddpkit.distributed import get_world_size
from ddpkit.logger import shown_path
from ddpkit.object_store import is_url
from ddpkit.run.learning_rates import rates_row
from ddpkit.train_logger import log_places
from ddpkit.training import length_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ddpkit.training import BatchSizes, RunLength

COLUMNS = 80
NAME_COLUMNS = 10
LEAST_SHARE = 3  # of a line that ends after a part of a sentence
MOST_SHOWN = 4
_INDENT = " " * (NAME_COLUMNS + 3)
_PIECE = re.compile(r"[^/]*/|[^/]+")  # of a path


# ------------------------------------------------------------------------------------------- layout


def row_lines(name: str, value: str) -> list[str]:
    """Lay a row out in lines of at most 80 columns.

    A line ends after a part of a sentence where it can, else after a word. A word that is longer
    than a line, as a path may be, is broken at its slashes, or else anywhere.

    Args:
        name: of the row.
        value: in words.

    Returns:
        The lines; all but the first are indented.

    Example:
        >>> row_lines("start", "from scratch")
        ['  start      from scratch']
    """
    width = COLUMNS - len(_INDENT)
    lines = [""]
    for word in value.split(" "):
        for piece, joint in _pieces(word, width):
            joined = lines[-1] + joint + piece if lines[-1] else piece
            if len(joined) <= width:
                lines[-1] = joined
                continue
            lines[-1], moved = _parted(lines[-1], width)
            begun = f"{moved}{joint}{piece}" if moved else piece
            lines += [begun] if len(begun) <= width else [moved, piece]
    return [f"  {name:<{NAME_COLUMNS}} {lines[0]}", *(_INDENT + line for line in lines[1:])]


def _parted(line: str, width: int) -> tuple[str, str]:
    """Part a line after its last part of a sentence, unless little would be left of it."""
    end = max(f"{line} ".rfind(mark) for mark in (": ", "; ")) + 1
    return (line[:end], line[end + 1 :]) if end > width // LEAST_SHARE else (line, "")


def _pieces(word: str, width: int) -> Iterator[tuple[str, str]]:
    """Yield the parts of a word that fit into a line, each with what joins it to the one before."""
    if len(word) <= width:
        yield word, " "
        return
    joint = " "
    for piece in _PIECE.findall(word):
        for start in range(0, len(piece), width):
            yield piece[start : start + width], joint
            joint = ""


# --------------------------------------------------------------------------------------------- rows


def given_batch_size(train_set: Any, loader_kwargs: Mapping[str, Any]) -> int | None:
    """Return the ``batch_size`` that a recipe has given for the training; None: it has given none.

    Args:
        train_set: dataset, or ready-made loader.
        loader_kwargs: of the loader.

    Example:
        >>> given_batch_size([1, 2], {"batch_size": 2}), given_batch_size([1, 2], {})
        (2, None)
    """
    is_ready = isinstance(train_set, DataLoader)
    size = train_set.batch_size if is_ready else loader_kwargs.get("batch_size")
    return size if isinstance(size, int) else None


def batch_row(sizes: BatchSizes, given: int | None, global_batch_size: int | None) -> str:
    """Return what a step is made of, and a ``batch_size`` that does not count.

    Args:
        sizes: of the training.
        given: ``batch_size`` of the training loader, as a recipe has given it; None: it has given
            none.
        global_batch_size: the option, which takes its place.

    Example:
        >>> from ddpkit.data import Division
        >>> from ddpkit.training import BatchSizes
        >>> sizes = BatchSizes(Division(), (8, 8), 1, 8, 4, 32)
        >>> batch_row(sizes, 16, 8).partition("; batch_size")[2]
        '=16 is not used, as global_batch_size=8 decides'
    """
    if given is None or global_batch_size is None or sizes.per_process == (given, given):
        return str(sizes)
    decides = f"as global_batch_size={global_batch_size} decides"
    return f"{sizes}; batch_size={given} is not used, {decides}"


def epochs_row(length: RunLength, limit: int | None) -> str:
    """Return how many epochs and optimizer steps the call of ``fit`` has in all.

    Args:
        length: of the call.
        limit: the option ``optimizer_step_limit``.

    Example:
        >>> from ddpkit.training import RunLength
        >>> epochs_row(RunLength(10, 30, 300), None), epochs_row(RunLength(), None)
        ('10 in all, 300 optimizer steps', 'an unknown number')
    """
    if length.epochs is None and length.total_steps is None:
        return "an unknown number"
    epochs = "an unknown number" if length.epochs is None else f"{length.epochs} in all"
    if length.total_steps is None:
        return epochs
    steps = f"{length.total_steps} optimizer step{'' if length.total_steps == 1 else 's'}"
    at_most = " at most (--optimizer_step_limit)" if limit == length.total_steps else ""
    return f"{epochs}, {steps}{at_most}"


def evaluation_set_row(loader: Any) -> str:
    """Return how large a set is that is evaluated, and how many of its rows each process has.

    Args:
        loader: of this rank.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> evaluation_set_row(shard(range(5), Sharding(0, 2), batch_size=2))
        '5 samples, 2 to 3 per process in 2 batches of 2'
    """
    length = length_of(loader)
    if length is None:
        return "a stream"
    facts = data_facts("test", loader, length, sharded=False)
    samples = facts.get("test samples")
    size = facts.get("test batch size")
    batches = f"{length} batch{'' if length == 1 else 'es'}" + (
        "" if size is None else f" of {size}"
    )
    rows = _rows_per_process(loader)
    if samples is None:
        return f"{batches} per process"
    where = f", {rows} per process" if rows else ""
    return f"{samples} sample{'' if samples == '1' else 's'}{where} in {batches}"


def _rows_per_process(loader: Any) -> str:
    """Return how many rows of a set each process evaluates; nothing where there is one process, or
    no plan.
    """
    sampler = plan_of(loader)
    plan = getattr(sampler, "plan", None)
    if sampler is None or plan is None:
        return ""
    processes = plan.world_size // sampler.shards
    if processes == 1:
        return "all" if get_world_size() > 1 else ""
    most, least = (
        _rows_of(plan, dataclasses.replace(sampler.division, rank=rank).mine)
        for rank in (0, processes - 1)
    )
    return str(most) if most == least else f"{least} to {most}"


def _rows_of(plan: Any, own: range) -> int:
    """Return how many samples of an epoch some shards have; full global batches are all alike."""
    in_full = range(plan.micro_batches if plan.full_batches else 0)
    rest = range(plan.full_batches, len(plan))
    first, last = (
        sum(stop - start for number in numbers for start, stop in _shares(plan, number, own))
        for numbers in (in_full, rest)
    )
    return int(first * (plan.full_batches // plan.micro_batches) + last)


def _shares(
    plan: Any,
    number: int,
    ranks: Iterable[int],
) -> Iterator[tuple[int, int]]:
    return (plan.share(number, rank) for rank in ranks)


def optimizers_row(
    optimizers: Mapping[str, Any],
    begun: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    """Return the optimizers and their learning rates.

    Args:
        optimizers: by name.
        begun: by name, settings of their groups with which the run began; what is missing is not
            known.

    Example:
        >>> import torch
        >>> groups = [
        ...     {"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.01, 0.1)
        ... ]
        >>> optimizers_row({"opt_class": torch.optim.SGD(groups)}, {})
        'SGD, lr 0.1, 0.01'
    """
    shown = []
    for name, optimizer in optimizers.items():
        rates = rates_row(optimizer, begun.get(name, ()))
        words = type(optimizer).__name__ + (f", {rates}" if rates else "")
        shown.append(words if len(optimizers) == 1 else f"{name}: {words}")
    left = len(shown) - MOST_SHOWN
    return "; ".join(shown if left <= 0 else [*shown[:MOST_SHOWN], f"and {left} more"])


def logs_row(train_logger: Any) -> str:
    """Return where the run writes its log, its metrics and its statistics.

    Args:
        train_logger: of the recipe, or None.

    Returns:
        Files by folder; nothing where no file is written.

    Ranks: local; what the main process writes.

    Example:
        >>> from ddpkit.train_logger import FileTrainLogger
        >>> logs_row(FileTrainLogger("results/train_log.txt"))
        'metrics.jsonl and train_log.txt in results'
    """
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.FileHandler)
    ]
    files = [handler.baseFilename for handler in handlers if handler.baseFilename != os.devnull]
    folders: dict[str, list[str]] = {}
    for path in dict.fromkeys(map(shown_path, [*files, *log_places(train_logger)])):
        folder, _, name = path.rpartition("/")  # a path, or a URL
        folder = folder or ("/" if path.startswith("/") else ".")
        folders.setdefault(folder, []).append(name)
    return "; ".join(f"{_and(names)} in {folder}" for folder, names in folders.items())


def mirror_row(folder: Path | None) -> str:
    """Return which folder of this machine stands for a folder of checkpoints in an object store.

    Args:
        folder: of the checkpoints; None: there is none.

    Returns:
        Nothing where the folder is a folder of a disk.

    Ranks: local.

    Example:
        >>> mirror_row(None)
        ''
    """
    url = "" if folder is None else shown_path(folder)
    return f"{folder} stands for {url} on this machine" if is_url(url) else ""


def _and(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
