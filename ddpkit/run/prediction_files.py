"""The outputs of a prediction: kept in memory, or written batch by batch by each rank.

Each rank writes its rows into a file of its own, in a folder for what is not complete. When all
ranks have written all, the main process merges these files into one, or each rank gives its own
the final name. So a file with its final name is complete, and a prediction that was killed leaves
none.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

from ddpkit.base import POSITION, this_place, writing
from ddpkit.checkpointing import require_shared_folder
from ddpkit.distributed import exchange, get_rank, get_world_size, run_on_main
from ddpkit.errors import ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.mirror import mirror_holding
from ddpkit.row_files import SortedWriter, merge_files, rename_synced
from ddpkit.training import SampleIndices, gather_results

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddpkit.row_files import Columns
    from ddpkit.run.prediction_path import PredictionPath
    from ddpkit.training import StageBatches

logger = get_logger(__name__)

NOT_SHARED = (
    "{}: rank {} has written its part to {}, which the main process does not see. Give a folder "
    "that all machines share; or a path with *, by which each process keeps its own file."
)
NOT_THERE = (
    "{}, which the main process has made, is not there on {}{}. The main process joins what all "
    "ranks write into one file, so all machines must share the folder: give one on a file system "
    "that they share. Or give a path with *, by which each process keeps its own file."
)
OF_MIRRORS = (
    "{}: each of the {} machines has a folder of its own that mirrors the store, and what the "
    "others write there would be lost. Give a path on a file system that all machines share. Or "
    "leave output out: then the outputs of all ranks are returned."
)
UNEQUAL = (
    "{}: the outputs of rank {} do not go into one file with those of the ranks before it: {}. "
    "Return the same entries for every sample, of types that go together."
)


class OutputsInMemory:
    """Keeps the outputs of this rank's samples, and gathers those of all.

    Args:
        stage_batches: of the prediction.

    Ranks: collective at the end.
    """

    def __init__(self, stage_batches: StageBatches) -> None:
        self.stage_batches = stage_batches
        self.outputs: list[Any] = []

    @property
    def count(self) -> int:
        """Outputs so far."""
        return len(self.outputs)

    def add(self, rows: list[Any]) -> None:
        """Keep the outputs of a batch."""
        self.outputs += rows

    def finish(self) -> list[Any]:
        """Return the outputs of all ranks, in the order of the dataset."""
        found: list[Any] = gather_results(self.stage_batches, self.outputs)
        return found


class OutputFiles:
    """Writes the outputs of this rank's samples, and makes the final files with the other ranks.

    Args:
        target: where they are written.
        stage_batches: of the prediction.

    Ranks: collective, but for :meth:`add`.
    """

    def __init__(self, target: PredictionPath, stage_batches: StageBatches) -> None:
        self.target = target
        divided = stage_batches.divided
        self._indices = SampleIndices(stage_batches.loader, divided=divided)
        self._rank = get_rank() or 0
        # of data that is not divided, each rank has all outputs
        self._world = get_world_size() if divided else 1
        self._writes = divided or self._rank == 0
        self._own = target.scratch / f"rank-{self._rank:05d}"
        self._form = target.form(has_index=self._indices.are_known)
        self._writer = SortedWriter(self._form, self._own)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Return a context in which outputs are written; what is not complete goes at its end."""
        self._refuse_mirrors()
        run_on_main(self._clear)  # of a prediction that was killed
        try:
            if self._world > 1 and self.target.is_joined:
                require_shared_folder(self.target.scratch, NOT_THERE)
            with writing(self.target.words):
                # of an earlier prediction, on a disk that the main process lacks
                shutil.rmtree(self._own, ignore_errors=True)
                self._own.mkdir(parents=True)
            with self._writer:
                yield
        finally:
            shutil.rmtree(self._own, ignore_errors=True)
            with contextlib.suppress(OSError):  # others still have files there
                self.target.scratch.rmdir()

    def _refuse_mirrors(self) -> None:
        """Refuse a folder that each machine has for itself.

        Raises:
            ConfigError: it is so. On every rank.
        """
        if self._world == 1 or mirror_holding(self.target.path) is None:
            return
        machines = set(exchange(this_place(), site="machines"))
        if len(machines) > 1:
            raise ConfigError(OF_MIRRORS.format(self.target.words, len(machines)))

    @property
    def count(self) -> int:
        """Outputs of this rank so far."""
        return self._writer.count

    def add(self, rows: list[Any]) -> None:
        """Write the outputs of a batch."""
        indices = self._indices.next(len(rows))
        if self._writes:
            with writing(self.target.words):
                self._writer.add(indices, rows)

    def finish(self) -> list[Any]:
        """Make the final files, once all ranks have written all; return their paths."""
        with POSITION.at("writing predictions"), POSITION.no_limit():
            found = exchange((self.count, self._form.columns()), site="predict, columns")
            self._take_columns([columns for _, columns in found])
            part = None
            if self._writes:
                with writing(self.target.words):
                    part = self._writer.finish()
            parts = exchange(part, site="predict, written")[: self._world]
            paths = self._join(parts) if self.target.is_joined else self._rename(part)
        total = sum(count for count, _ in found[: self._world])
        logger.info("predict: %d outputs in %s.", total, self.target.path)
        return paths

    def _clear(self) -> None:
        with writing(self.target.words):
            shutil.rmtree(self.target.scratch, ignore_errors=True)
            self.target.scratch.mkdir(parents=True, exist_ok=True)

    def _take_columns(self, columns: list[Columns | None]) -> None:
        """Write the columns that the rows of all ranks need."""
        agreed = None
        for rank, own in enumerate(columns):
            if own is None:  # no sample, or rows that need not be alike
                continue
            try:
                agreed = own if agreed is None else agreed.joined(own)
            except (TypeError, ValueError) as error:
                raise DataError(UNEQUAL.format(self.target.words, rank, error)) from error
        if agreed is not None:
            self._form.adopt(agreed)

    def _join(self, parts: list[Path | None]) -> list[Any]:
        run_on_main(self._merge, [parts])
        return [self.target.path]

    def _merge(self, parts: list[Path]) -> None:
        """Make one file of the files of all ranks; on the main process."""
        for rank, part in enumerate(parts):
            if not part.exists():
                raise ConfigError(NOT_SHARED.format(self.target.words, rank, part))
        with writing(self.target.words):
            merged = parts[0]
            if len(parts) > 1:
                merged = self.target.scratch / "joined"
                merge_files(self._form, parts, merged)
            rename_synced(merged, self.target.path)

    def _rename(self, part: Path | None) -> list[Any]:
        """Give this rank's file its final name, and take away those of other numbers of ranks."""
        final = None
        if part is not None:
            final = self.target.of_rank(self._rank, self._world)
            with writing(self.target.words):
                rename_synced(part, final)
        paths = exchange(final, site="predict, renamed")[: self._world]
        run_on_main(self._remove_others)  # last: a kill before it loses nothing
        return paths

    def _remove_others(self) -> None:
        with writing(self.target.words):
            for path in self.target.others(self._world):
                logger.info("%s of an earlier prediction is replaced.", path)
                path.unlink()
