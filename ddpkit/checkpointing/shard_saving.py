"""One save in shards: each rank writes its own and tells the main process, which commits.

The ranks tell each other over the store, not by a collective: they may write in threads, while the
training goes on, and a rank that dies keeps nobody waiting.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpkit.base import POSITION, host_name, waits_for_ranks
from ddpkit.checkpointing.async_save import WITHOUT_COPY
from ddpkit.checkpointing.checkpoint import SUFFIX
from ddpkit.checkpointing.hooks import write_loadable
from ddpkit.checkpointing.shard_files import ShardReport, shard_path, sharded_file
from ddpkit.checkpointing.shard_writing import (
    NOT_SHARED,
    await_path,
    from_text,
    to_text,
    write_shards,
)
from ddpkit.checkpointing.storage import digest_of_pieces
from ddpkit.comm import get_runtime
from ddpkit.control import EXIT_DELAY
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from ddpkit.base import FailureReport
    from ddpkit.checkpointing.async_save import BackgroundSave
    from ddpkit.checkpointing.shard_states import ShardedState

logger = get_logger(__name__)

NAP_SECONDS = 0.01
WARN_SECONDS = 60.0  # of a wait for another rank
FAILED_SECONDS = 15.0  # for the shards of the others, once a rank has failed; exits wait for 25
WRITTEN = "wrote "
FAILED = "failed "
ENDED = (
    "it has ended and has not told that its shard of the checkpoint is written. Look for the "
    "reason in its output."
)
LOST = "the connection to the store is lost, over which the ranks tell that shards are written: {}"


@dataclass(frozen=True, eq=False)
class ShardSaving:
    """What this rank does in a save in shards.

    Attributes:
        states: what it has of each state, by recoverable.

    Ranks: every rank has its own.
    """

    states: Mapping[str, ShardedState]

    def rows(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's rows, by recoverable and by name."""
        return {name: state.rows for name, state in self.states.items()}

    def skeletons(self) -> dict[str, Any]:
        """Return the states without what is in shards, by recoverable."""
        return {name: state.skeleton for name, state in self.states.items()}

    def write(
        self,
        staging: Path,
        final: Path,
        background: BackgroundSave,
        copy: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None,
    ) -> None:
        """Write the shards of a rank that is not the main process; in a thread if they can be
        copied.

        Args:
            staging: the directory.
            final: the name that it gets.
            background: has no work.
            copy: copies states; None: training waits.
        """
        rows: Mapping[str, Any] = self.rows()
        if copy is None:
            self.write_and_tell(staging, rows)
            return
        try:
            rows = copy(rows)
        except MemoryError as error:
            logger.warning_once(WITHOUT_COPY, error)
            self.write_and_tell(staging, rows)
        else:
            background.start(final, functools.partial(self.write_and_tell, staging, rows))

    def write_and_tell(
        self,
        staging: Path,
        rows: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> None:
        """Write the shards of a rank that is not the main process, and tell that one; may run in a
        thread. An error is told, and raised there.

        Args:
            staging: the directory.
            rows: as of :meth:`rows`, or a copy.
        """
        text = f"{FAILED}it was stopped"
        try:
            text = WRITTEN + to_text(self._write(staging, rows))
        except Exception as error:  # noqa: BLE001 -- the main process raises it
            text = f"{FAILED}{error}"
        finally:
            get_runtime().report.note(_note_name(staging, get_rank() or 0), text)

    def finish(
        self,
        staging: Path,
        skeletons: Mapping[str, Any],
        rows: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> dict[Path, str]:
        """Write the main process's own shards, wait for those of the others, and write what says
        where all of it stands.

        Args:
            staging: the directory.
            skeletons: as of :meth:`skeletons`, or a copy.
            rows: as of :meth:`rows`, or a copy.

        Returns:
            The digests of all of these files, by path.

        Raises:
            CheckpointError: a rank could not write, has failed, or is gone; it is named.
        """
        reports, failures = self._reports(staging, rows)
        if failures:
            raise CheckpointError("; ".join(failures))
        count = get_world_size()
        digests = {}
        for name, skeleton in skeletons.items():
            path = staging / f"{name}{SUFFIX}"
            own = [report[name] for report in reports]
            for number, report in enumerate(own):
                shard = shard_path(path, number, count)
                await_path(shard, NOT_SHARED, report.size)
                digests[shard] = digest_of_pieces(report.pieces)
            digests[path] = write_loadable(sharded_file(skeleton, own), path)
        return digests

    def _reports(
        self,
        staging: Path,
        rows: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> tuple[list[dict[str, ShardReport]], list[str]]:
        """Return what all ranks tell, and the words of those that failed; nobody writes any more
        then.
        """
        reports = []
        failures = []
        report = get_runtime().report
        for rank in range(get_world_size()):
            try:
                if rank == get_rank():
                    reports.append(self._write(staging, rows))
                    continue
                text = await_note(report, _note_name(staging, rank), rank)
            except CheckpointError as error:
                text = f"{FAILED}{error}"
            if text.startswith(FAILED):
                failures.append(f"rank {rank}: {text.removeprefix(FAILED)}")
            else:
                reports.append(from_text(text.removeprefix(WRITTEN)))
        return reports, failures

    def _write(
        self,
        staging: Path,
        rows: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> dict[str, ShardReport]:
        first_rows = {name: state.first_rows for name, state in self.states.items()}
        with EXIT_DELAY.held(), POSITION.no_limit():
            return write_shards(staging, rows, first_rows, get_rank() or 0, get_world_size())


def _note_name(staging: Path, rank: int) -> str:
    return f"shards/{staging.name}/{rank}"


@waits_for_ranks
def await_note(report: FailureReport, name: str, rank: int) -> str:
    """Wait for what another rank notes in the store; take it out.

    Args:
        report: of the process group.
        name: of the note.
        rank: that notes it.

    Raises:
        CheckpointError: the rank has ended without it, or is not heard of any more after a failure.

    Ranks: local.
    """
    begin = time.monotonic()
    failed_since = None
    while (text := report.noted(name)) is None:
        now = time.monotonic()
        if report.store_is_lost:
            raise CheckpointError(LOST.format(report.lost_by))
        if rank in report.departed() and report.noted(name) is None:
            raise CheckpointError(ENDED)
        failure = report.first_failure()
        failed_since = None if failure is None else failed_since or now
        if failure is not None and now - (failed_since or now) > FAILED_SECONDS:
            raise CheckpointError(f"{ENDED} {failure.summary()}")
        if now - begin > WARN_SECONDS:
            logger.warning_once(
                "rank %d on %s has waited %.0f s for the shard of rank %d.",
                report.rank,
                host_name(),
                WARN_SECONDS,
                rank,
            )
        time.sleep(NAP_SECONDS)
    report.forget(name)
    return text
