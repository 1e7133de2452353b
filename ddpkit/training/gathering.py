"""Every sample's results once, in dataset order, on every rank.

A rank knows from the sampling plan which samples it has seen, so that nothing needs to be written
down while a stage runs: how many batches there were is enough. Only when results are gathered is
the plan asked for their indices.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from ddpkit.base import kind_of, map_values, reads_device
from ddpkit.data import StreamShard, inner_loader, is_sharded, nested_samplers
from ddpkit.dataloader import plan_of
from ddpkit.distributed import gather_objects, get_rank, require_all_ranks
from ddpkit.errors import ConfigError, DataError
from ddpkit.training.sample_indices import require_in_order, stream_places
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


MOST_SHOWN = 8
COLUMN = "column"
REPEATS = "is divided by a DistributedSampler, which repeats samples"


def is_divided(loader: Any, *, unknown: bool = False) -> bool:
    """Say whether each rank's loader yields a part of the data only.

    Args:
        loader: any.
        unknown: the answer where the loader does not tell.

    Ranks: local; alike on every rank.

    Example:
        >>> is_divided([1, 2])
        False
    """
    inner = inner_loader(loader)
    if (plan := plan_of(inner)) is not None:
        return plan.world_size > 1
    dataset = getattr(inner, "dataset", None)
    if isinstance(dataset, StreamShard):
        return dataset.division.world_size > 1 or is_sharded(dataset.whole)
    if is_sharded(inner) or is_sharded(dataset):
        return True
    parts = [
        sampler.num_replicas
        for sampler in nested_samplers(inner)
        if isinstance(sampler, DistributedSampler)
    ]
    return max(parts) > 1 if parts else unknown


@dataclass(eq=False)
class StageBatches:
    """Which batches of a loader this rank has read in a stage.

    Attributes:
        stage: TRAIN, VALID or TEST.
        loader: this rank's.
        divided: whether each rank has seen a part only.
        first: batches of the epoch done before this run began (after a resume).
        last: batches done in the end; None while the stage runs.
        sizes: samples of each batch of an evaluation.
        stream: the feed of a training over a stream; else None.
        samples_before: of this rank's, done before this run began.
        of_stream: of such a training: samples, and further ones of batches that were repeated at
            its end.

    Ranks: local.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> from ddpkit.types import Stage
        >>> loader = shard(range(5), Sharding(1, 2), batch_size=2)
        >>> seen = StageBatches(Stage.TEST, loader, divided=True)
        >>> seen.close(2)
        >>> [indices for _, indices, is_repeated in seen.batches() if not is_repeated]
        [[2, 3]]
    """

    stage: Stage
    loader: Any
    divided: bool
    first: int = 0
    last: int | None = None
    sizes: list[int] = field(default_factory=list)
    stream: Any = field(default=None, repr=False)
    samples_before: int = 0
    of_stream: tuple[int, int] | None = None
    _plan: Any = field(default=None, repr=False)

    def close(self, last: int, samples: float = 0) -> None:
        """End the stage: take hold of the plan of its epoch, before a later epoch changes it.

        Args:
            last: batches of the epoch done by now.
            samples: of this rank, of the epoch.
        """
        self.last = last
        if self.stream is not None:
            self.of_stream = int(samples - self.samples_before), self.stream.repeated
            self.stream = None
        self._plan = copy.copy(plan_of(self.loader))  # None of nominal epochs

    @property
    def is_known(self) -> bool:
        """Whether the loader tells which samples it has yielded; a stream does not, nor do nominal
        epochs.
        """
        return self._plan is not None

    def batches(self) -> Iterator[tuple[int, list[Any], bool]]:
        """Yield, for every batch seen: its number among those of all ranks, its samples' indices,
        and whether it was repeated to keep step.
        """
        plan = self._plan
        last = self.last or 0
        plan.skip = self.first
        for number, (slot, indices) in enumerate(zip(range(self.first, last), plan, strict=False)):
            turn, shard = divmod(number, plan.shards)
            place = turn * plan.division.number + plan.mine[shard]
            yield place, indices, plan.keep_step and plan.count(slot) == 0


# --------------------------------------------------------------------------------- one batch's rows


def row_count(value: Any) -> int | None:
    """Return the number of samples in a batch of results, along the first dimension; None if it has
    none.

    Args:
        value: a tensor, an array or a list; a tuple or a dict of such, all of one length.

    Ranks: local.

    Example:
        >>> (
        ...     row_count({"ids": ["a", "b"], "scores": torch.zeros(2, 5)}),
        ...     row_count(torch.tensor(1.0)),
        ... )
        (2, None)
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return int(value.shape[0]) if value.ndim else None
    if isinstance(value, list):
        return len(value)
    if isinstance(value, (tuple, dict)):
        counts = {
            row_count(entry) for entry in (value.values() if isinstance(value, dict) else value)
        }
        return counts.pop() if len(counts) == 1 else None
    return None


def rows_of(value: Any) -> list[Any]:
    """Split a batch of results into one result per sample.

    Args:
        value: an output with a :func:`row_count`.

    Returns:
        One entry per sample; of a tuple or a dict of columns, a tuple or a dict each.

    Ranks: local.

    Example:
        >>> rows_of({"ids": ["a", "b"], "scores": torch.tensor([1, 2])})
        [{'ids': 'a', 'scores': tensor(1)}, {'ids': 'b', 'scores': tensor(2)}]
    """
    if isinstance(value, Tensor):
        return list(value.unbind())
    if isinstance(value, tuple):
        return list(zip(*(rows_of(row) for row in value), strict=True))
    if isinstance(value, dict):
        return [dict(zip(value, row, strict=True)) for row in rows_of(tuple(value.values()))]
    return list(value)


@reads_device
def on_cpu(value: Any) -> Any:
    """Return a result with copies of its tensors, detached and on the CPU; none is a view of a
    larger one.

    Args:
        value: a tensor, or lists, tuples and dicts with tensors somewhere in them; anything else is
            left as it is.

    Ranks: local.

    Example:
        >>> on_cpu([torch.ones(1, requires_grad=True), "a"])
        [tensor([1.]), 'a']
    """
    return map_values(
        value,
        lambda value: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value,
    )


# ------------------------------------------------------------------------------------ what was seen


@dataclass(eq=False)
class _Rows:
    """The samples of the batches that a rank has seen.

    Attributes:
        indices: in the dataset; for samples without a number, or of a stream, zeros.
        numbers: of the batch, for each sample.
        counted: False for a sample that was repeated to keep step.
        sizes: of each batch.
        counted_sizes: of each batch, without samples that were repeated to keep step.
        has_indices: whether ``indices`` are indices into the dataset.
    """

    indices: NDArray[np.int64]
    numbers: NDArray[np.int64]
    counted: NDArray[np.bool_]
    sizes: list[int] = field(default_factory=list)
    counted_sizes: list[int] = field(default_factory=list)
    has_indices: bool = True


def _rows_seen(seen: StageBatches) -> _Rows:
    batches = list(seen.batches())
    sizes = [len(indices) for _, indices, _ in batches]
    flat = [index for _, indices, _ in batches for index in indices]
    try:
        places = np.array([operator.index(index) for index in flat], dtype=np.int64)
        has_indices = True
    except (TypeError, OverflowError):  # a dataset that is indexed by names
        places = np.zeros(len(flat), dtype=np.int64)
        has_indices = False
    numbers = np.repeat(
        np.array([number for number, _, _ in batches], dtype=np.int64),
        sizes,
    )
    counted = np.repeat(
        np.array([not is_repeated for _, _, is_repeated in batches], dtype=np.bool_),
        sizes,
    )
    counted_sizes = [len(indices) for _, indices, is_repeated in batches if not is_repeated]
    return _Rows(places, numbers, counted, sizes, counted_sizes, has_indices)


def _rows_of(seen: StageBatches, columns: list[Any]) -> _Rows:
    if seen.is_known:
        return _rows_seen(seen)
    if seen.of_stream is not None:
        return _rows_of_training(seen, columns, *seen.of_stream)
    return _rows_given(seen, columns)


def _rows_given(seen: StageBatches, columns: list[Any]) -> _Rows:
    """Take the samples of a stream that are given as seen: in its order where it was dealt out,
    else rank by rank.
    """
    by_batch = any(
        isinstance(column, list) and [row_count(entry) for entry in column] == seen.sizes
        for column in columns
    )
    size = sum(seen.sizes) if by_batch else len(columns[0]) if columns else 0
    places = stream_places(seen.loader, 0, size)
    everything = np.ones(size, dtype=np.bool_)
    numbers = np.full(
        size,
        (get_rank() or 0) if seen.divided and places is None else 0,
        dtype=np.int64,
    )
    indices = numbers if places is None else places
    return _Rows(
        indices,
        numbers,
        everything,
        seen.sizes,
        seen.sizes,
        has_indices=places is not None,
    )


def _rows_of_training(
    seen: StageBatches,
    columns: list[Any],
    samples: int,
    repeated: int,
) -> _Rows:
    """Take the samples of a training stream: at its end a rank may have repeated its last batch."""
    size = samples + repeated
    places = stream_places(seen.loader, 0, size)
    counted = np.arange(size) < samples
    numbers = np.full(
        size,
        (get_rank() or 0) if seen.divided and places is None else 0,
        dtype=np.int64,
    )
    indices = numbers if places is None else places
    rows = _Rows(indices, numbers, counted, has_indices=places is not None)
    for column in columns:
        sizes = [row_count(entry) for entry in column] if isinstance(column, list) else [None]
        ends = np.cumsum([0, *[size or 0 for size in sizes]]).tolist()
        if None not in sizes and samples in ends and ends[-1] in {samples, size}:
            rows.counted_sizes = cast("list[int]", sizes[: ends.index(samples)])
            rows.sizes = cast("list[int]", sizes)
    return rows


# ---------------------------------------------------------------------------------------- gathering


@dataclass(eq=False)
class _Part:
    """What one rank gives: columns of results, what holds them together or is wrong with them, and
    its samples.
    """

    columns: list[Any]
    skeleton: Any
    problem: str | None
    rows: _Rows

    @property
    def count(self) -> int:
        """The number of samples that count."""
        return int(self.rows.counted.sum())


def gather_results(seen: StageBatches, results: Any) -> Any:
    """Give every rank all ranks' results of a stage, each sample's once, in dataset order.

    Args:
        seen: the stage.
        results: as for :meth:`ddpkit.brain.Brain.gather`.

    Returns:
        Of the form of ``results``, with the entries of all ranks.

    Raises:
        ConfigError: the stage still runs, ``results`` has another form, or the samples seen are
            unknown.
        DataError: not one entry per sample. On every rank.

    Ranks: collective if the stage was divided, else local.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> from ddpkit.types import Stage
        >>> from torch.utils.data import SequentialSampler
        >>> seen = StageBatches(
        ...     Stage.TEST,
        ...     shard(range(3), Sharding(), sampler=[2, 0, 1], batch_size=2),
        ...     divided=False,
        ... )
        >>> seen.close(2)
        >>> gather_results(seen, ["two", "zero", "one"])
        ['zero', 'one', 'two']
    """
    _check_seen(seen)

    def own() -> _Part:
        columns, skeleton, problem = _columns(results)
        rows = _rows_of(seen, columns)
        columns = [on_cpu(column) for column in columns]
        return _Part(
            [_pack(column) for column in columns] if seen.divided else columns,
            skeleton,
            problem,
            rows,
        )

    if seen.divided:
        require_all_ranks("gather")
    parts = gather_objects(own) if seen.divided else [own()]
    for part in parts:
        part.columns = [_unpacked(column) for column in part.columns]
    by_batch = _agreed_forms(parts)
    holders = [part for part in parts if part.count]
    return _joined(holders, by_batch) if holders else on_cpu(results)


def _check_seen(seen: StageBatches) -> None:
    if seen.last is None:
        raise ConfigError(
            f"gather was called while the stage {seen.stage.name} runs: ranks may have different "
            "numbers of batches. Collect the results batch by batch and call gather in "
            "on_stage_end, or after evaluate."
        )
    require_in_order("gather", seen.loader)
    foreign = any(
        isinstance(sampler, DistributedSampler) for sampler in nested_samplers(seen.loader)
    )
    is_untold = seen.stage is Stage.TRAIN and seen.of_stream is None
    if seen.divided and not seen.is_known and (is_untold or foreign):
        kind = REPEATS if foreign else _kind_of_untold(seen.loader)
        raise ConfigError(
            f"gather cannot know which results count once: the loader of {seen.stage.name} "
            f"{kind}. Give the dataset itself, or gather in a stage whose data is map-style."
        )


def _kind_of_untold(loader: Any) -> str:
    """Say in words why a training loader does not tell which samples its batches have."""
    inner = inner_loader(loader)
    if inner is not loader:
        return "is cut into nominal epochs, which begin and end anywhere in its data"
    if isinstance(getattr(inner, "dataset", None), StreamShard):
        return "is a stream of virtual ranks"
    return "divides itself over the processes, and does not tell which samples it yields"


def _columns(results: Any) -> tuple[list[Any], Any, str | None]:
    """Return the columns of some results, their container, and the problem with them, if any."""
    if isinstance(results, list) or (isinstance(results, (Tensor, np.ndarray)) and results.ndim):
        return [results], COLUMN, None
    if not isinstance(results, (dict, tuple)):
        shown = "a tensor without dimensions" if isinstance(results, Tensor) else kind_of(results)
        return [], None, f"{shown} is given, which has no entry per sample"
    found = [
        _columns(entry) for entry in (results.values() if isinstance(results, dict) else results)
    ]
    columns = [column for inner, _, _ in found for column in inner]
    skeletons = tuple(skeleton for _, skeleton, _ in found)
    problem = next((wrong for _, _, wrong in found if wrong), None)
    return (
        columns,
        dict(zip(results, skeletons, strict=True)) if isinstance(results, dict) else skeletons,
        problem,
    )


def _rebuilt(skeleton: Any, columns: Iterator[Any]) -> Any:
    if isinstance(skeleton, dict):
        return {key: _rebuilt(inner, columns) for key, inner in skeleton.items()}
    return (
        tuple(_rebuilt(inner, columns) for inner in skeleton)
        if isinstance(skeleton, tuple)
        else next(columns)
    )


def _forms(column: Any, rows: _Rows) -> set[str]:
    """Return whether the entries of a column may be one per sample, one per batch, or neither.

    What was repeated to keep step may be among them, or have been left out.
    """
    forms = {"sample"} if len(column) in {len(rows.numbers), int(rows.counted.sum())} else set()
    if isinstance(column, list) and len(column) in {len(rows.sizes), len(rows.counted_sizes)}:
        found = [row_count(entry) for entry in column]
        forms |= {"batch"} if found in (rows.sizes, rows.counted_sizes) else set()
    return forms


def _agreed_forms(parts: list[_Part]) -> list[bool]:
    """Say for every column whether its entries are batches; alike on all ranks, as are the errors.

    Raises:
        ConfigError: the results of some rank have no entries.
        DataError: the ranks' results do not fit together, or do not match the samples seen.
    """
    wrong = [f"rank {rank}: {part.problem}" for rank, part in enumerate(parts) if part.problem]
    if wrong:
        raise ConfigError(
            f"gather cannot use these results: {'; '.join(wrong[:MOST_SHOWN])}. Give a list, a "
            "tensor or an array with one entry per sample, or a dict or a tuple of such."
        )
    holders = [part for part in parts if part.count or any(map(len, part.columns))]
    if any(part.skeleton != holders[0].skeleton for part in holders):
        shown = "; ".join(
            f"rank {rank}: {part.skeleton!r}" for rank, part in enumerate(parts[:MOST_SHOWN])
        )
        raise DataError(
            f"gather was given results of different forms: {shown}. Give the same on every rank."
        )
    found = [
        set.intersection(
            *(_forms(column, part.rows) for column, part in zip(columns, holders, strict=True))
        )
        for columns in zip(*(part.columns for part in holders), strict=True)
    ]
    if not all(found):
        given = "; ".join(
            (
                f"rank {rank}: {'/'.join(map(str, sorted(set(map(len, part.columns))))) or 0} "
                f"entries for {part.count} samples in {len(part.rows.counted_sizes)} batches"
            )
            for rank, part in enumerate(parts[:MOST_SHOWN])
        )
        raise DataError(
            "gather needs one entry per sample that a rank has seen, or one per batch of as many "
            f"rows, and was given {given}. Collect in every batch, and start afresh in "
            "on_stage_start."
        )
    return ["sample" not in forms for forms in found]


@dataclass(eq=False)
class _Packed:
    """A list of tensors as one, which travels well."""

    flat: Tensor
    shapes: list[torch.Size]


def _pack(column: Any) -> Any:
    dtypes = (
        {getattr(entry, "dtype", None) for entry in column} if isinstance(column, list) else set()
    )
    if len(dtypes) != 1 or not isinstance(column[0], Tensor):
        return column
    return _Packed(
        torch.cat([entry.reshape(-1) for entry in column]),
        [entry.shape for entry in column],
    )


def _unpacked(column: Any) -> Any:
    if not isinstance(column, _Packed):
        return column
    pieces = torch.split(column.flat, [shape.numel() for shape in column.shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, column.shapes, strict=True)]


def _joined(parts: list[_Part], by_batch: list[bool]) -> Any:
    """Merge the ranks' results: sorted by index, and several results of one sample by batch
    number.
    """
    keys = [np.concatenate([part.rows.numbers[part.rows.counted] for part in parts])]
    if all(part.rows.has_indices for part in parts):
        keys.append(np.concatenate([part.rows.indices[part.rows.counted] for part in parts]))
    order = np.lexsort(keys)  # the last key decides first; equal rows keep their order by rank
    columns = (
        _in_order(
            [_counted(part.columns[number], is_batches, part.rows.counted) for part in parts],
            order,
        )
        for number, is_batches in enumerate(by_batch)
    )
    return _rebuilt(parts[0].skeleton, columns)


def _counted(column: Any, by_batch: bool, counted: NDArray[np.bool_]) -> Any:
    """Return the entries of a column that count, one per sample."""
    if by_batch:
        column = [row for batch in column for row in rows_of(batch)]
    if len(column) == counted.sum():  # nothing was repeated, or that was left out
        return column
    if isinstance(column, list):
        return [entry for entry, counts in zip(column, counted.tolist(), strict=True) if counts]
    return column[torch.from_numpy(counted)] if isinstance(column, Tensor) else column[counted]


def _in_order(pieces: list[Any], order: NDArray[np.int64]) -> Any:
    """Concatenate one column's pieces and sort the entries; a list if they do not fit in one
    tensor.
    """
    kinds = {
        (
            type(piece),
            tuple(piece.shape[1:]),
            piece.dtype,
        )
        if hasattr(piece, "dtype")
        else None
        for piece in pieces
    }
    if len(kinds) == 1 and isinstance(pieces[0], Tensor):
        return torch.cat(pieces)[torch.from_numpy(order)]
    if len(kinds) == 1 and isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces)[order]
    entries = [entry for piece in pieces for entry in rows_of(piece)]
    return [entries[index] for index in order]
