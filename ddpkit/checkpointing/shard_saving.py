"""One save in shards: each rank writes its own and tells the main process, which commits.

The ranks tell each other over the store, not by a collective: they may write in threads, while the
training goes on, and a rank that dies keeps nobody waiting.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpkit.base import POSITION, explained, host_name, waits_for_ranks
from ddpkit.checkpointing.async_save import WITHOUT_COPY
from ddpkit.checkpointing.checkpoint import SUFFIX
from ddpkit.checkpointing.hooks import write_loadable
from ddpkit.checkpointing.shard_files import ShardReport, shard_path, sharded_file
from ddpkit.checkpointing.shard_writing import (
    LOOK_SECONDS,
    NOT_SHARED,
    await_path,
    from_text,
    to_text,
    write_shards,
)
from ddpkit.checkpointing.storage import digest_of_pieces
from ddpkit.comm import get_runtime
from ddpkit.control import EXIT_DELAY
from ddpkit.distributed import exchange, get_rank, get_world_size, run_on_main
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from ddpkit.base import FailureReport
    from ddpkit.checkpointing.async_save import BackgroundSave
    from ddpkit.checkpointing.shard_states import ShardedState

logger = get_logger(__name__)

SHORTEST_NAP_SECONDS = 0.01
LONGEST_NAP_SECONDS = 0.2
WARN_SECONDS = 60.0  # of a wait for another rank
# for the shards of all others together, once a rank has failed; exits wait for 25
FAILED_SECONDS = 15.0
TROUBLE_SECONDS = 1.0  # of a wait, after which the heartbeat watches the rank that is awaited
CONNECTION_SECONDS = 1.0  # between two looks at the connection to that rank
WRITTEN = "wrote "
FAILED = "failed "
ENDED = (
    "it has ended and has not told that its shard of the checkpoint is written. Look for the "
    "reason in its output."
)
GIVEN_UP = "rank 0 has given the checkpoint up: {}"
LOST = "the connection to the store is lost, over which the ranks tell that shards are written: {}"


def require_shared_folder(folder: Path, words: str = NOT_SHARED) -> None:
    """Find out whether every rank sees what the main process makes in a folder.

    Args:
        folder: of checkpoints.
        words: of the error, as of :func:`~ddpkit.checkpointing.shard_writing.await_path`.

    Raises:
        ConfigError: a rank does not.

    Ranks: collective.
    """
    name = run_on_main(_make_probe, args=(folder,))
    if not name:
        return
    failures = exchange(_failure_to_see(folder / name, words), site="shared folder")
    run_on_main((folder / name).unlink, kwargs={"missing_ok": True})
    for rank, failure in enumerate(failures):
        if failure:
            raise ConfigError(f"rank {rank}: {failure}")


def _make_probe(folder: Path) -> str:
    try:
        handle, path = tempfile.mkstemp(prefix=".shared-", dir=folder)
    except OSError:  # what --ckpt_errors says of it, the first save does
        return ""
    os.close(handle)
    return os.path.basename(path)  # noqa: PTH119 -- of a text


def _failure_to_see(path: Path, words: str) -> str:
    try:
        await_path(path, words)
    except CheckpointError as error:
        return str(error)
    return ""


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
            try:
                rows = copy(rows)
            except MemoryError as error:
                logger.warning_once(WITHOUT_COPY, error)
                self.write_and_tell(staging, rows)
                return
            background.start(final, functools.partial(self.write_and_tell, staging, rows))
        except BaseException as error:  # the main process waits for a word of this rank
            _tell(staging, f"{FAILED}{type(error).__name__}: {error}")
            raise

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
            _tell(staging, text)

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

    def give_up(
        self,
        staging: Path,
        error: BaseException,
    ) -> None:
        """Tell the other ranks that the main process will never finish the save, before the
        directory goes: they look for it no longer.

        Args:
            staging: the directory.
            error: why.
        """
        is_said = isinstance(error, CheckpointError)
        text = str(error) if is_said else f"{type(error).__name__}: {error}"
        get_runtime().report.note(_end_name(staging), text)

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
        runtime = get_runtime()
        wait = NoteWait(runtime.report, runtime.check_connection)
        for rank in range(get_world_size()):
            try:
                if rank == get_rank():
                    reports.append(self._write(staging, rows))
                    continue
                text = wait.of(_note_name(staging, rank), rank)
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
            return write_shards(
                staging,
                rows,
                first_rows,
                get_rank() or 0,
                get_world_size(),
                functools.partial(_require_main, staging),
            )


def _require_main(staging: Path) -> None:
    """Make sure that the main process still goes on with a save.

    Raises:
        CheckpointError: it does not.
    """
    report = get_runtime().report
    text = report.noted(_end_name(staging))
    if text is not None:
        raise CheckpointError(GIVEN_UP.format(text))
    # this process may end only after its write: it must not wait for what never comes
    failure = report.first_failure()
    if failure is not None:
        raise CheckpointError(failure.summary())
    if report.store_is_lost:
        raise CheckpointError(LOST.format(report.lost_by))
    if report.departed([0]):
        raise CheckpointError(GIVEN_UP.format("it has ended"))


def _tell(staging: Path, text: str) -> None:
    """Tell the main process how this rank's shards stand."""
    get_runtime().report.note(_note_name(staging, get_rank() or 0), text)


def _note_name(staging: Path, rank: int) -> str:
    return f"shards/{staging.name}/{rank}"


def _end_name(staging: Path) -> str:
    return f"shards/{staging.name}/given up"


class NoteWait:
    """Waits for what the other ranks note in the store, one after the other.

    A rank that is stopped, or whose machine is dark, is found by the heartbeat, which watches the
    rank that is awaited (``--hang_timeout``); one that has ended, by its lost connection, too.

    Args:
        report: of the process group.
        check_connection: raises a RuntimeError if the connection to a rank is lost.

    Attributes:
        failed_since: since when a rank is known to have failed, for all of the waits; None: none.

    Ranks: local.
    """

    def __init__(
        self,
        report: FailureReport,
        check_connection: Callable[[int], object],
    ) -> None:
        self.report = report
        self.check_connection = check_connection
        self.failed_since: float | None = None

    @waits_for_ranks
    def of(self, name: str, rank: int) -> str:
        """Wait for a note; take it out.

        Args:
            name: of the note.
            rank: that notes it.

        Raises:
            CheckpointError: the rank has ended without it, or is not heard of any more.
        """
        report = self.report
        begin = next_question = time.monotonic()
        next_look = begin + CONNECTION_SECONDS
        nap = SHORTEST_NAP_SECONDS
        try:
            while (text := report.noted(name)) is None:
                now = time.monotonic()
                if report.store_is_lost:
                    raise CheckpointError(LOST.format(report.lost_by))
                if now >= next_question:
                    next_question = now + LOOK_SECONDS
                    self._require_alive(name, rank, now)
                if now >= next_look:
                    next_look = now + CONNECTION_SECONDS
                    self._look_at_connection(name, rank)
                if now - begin > TROUBLE_SECONDS:
                    # again each time: a call of the main thread may have reset it
                    report.awaited = rank
                if now - begin > WARN_SECONDS:
                    logger.warning_once(
                        "rank %d on %s has waited %.0f s for the shard of rank %d.",
                        report.rank,
                        host_name(),
                        WARN_SECONDS,
                        rank,
                    )
                time.sleep(nap)
                nap = min(nap * 1.5, LONGEST_NAP_SECONDS)
        finally:
            report.awaited = None
        report.forget(name)
        return text

    def _require_alive(self, name: str, rank: int, now: float) -> None:
        report = self.report
        has_departed = bool(report.departed([rank])) and report.noted(name) is None
        failure = report.first_failure()  # after that: the heartbeat tells a failure first
        if has_departed:
            is_known = failure is not None and failure.rank == rank
            raise CheckpointError(f"{ENDED} {failure.summary()}" if failure and is_known else ENDED)
        if failure is None:
            self.failed_since = None
            return
        self.failed_since = now if self.failed_since is None else self.failed_since
        if now - self.failed_since > FAILED_SECONDS:
            raise CheckpointError(f"{ENDED} {failure.summary()}")

    def _look_at_connection(self, name: str, rank: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # the training uses the connections; the heartbeat looks
        try:
            self.check_connection(rank)
        except RuntimeError as error:
            if self.report.noted(name) is None:  # else it has told, and ended
                raise CheckpointError(f"{ENDED} {explained(error, rank)}") from error
