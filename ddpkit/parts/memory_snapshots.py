"""A snapshot of who has allocated what, where a step runs out of memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import replacing, require_writable
from ddpkit.compat import record_memory_history, stop_memory_history, write_memory_history
from ddpkit.distributed import get_rank, run_on_main
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger, shown_path
from ddpkit.parts.own import OwnPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from ddpkit.training import RunContext

logger = get_logger(__name__)

NO_HISTORY = (
    "memory_snapshot_on_oom=True: torch does not record who allocates memory on %s. If it runs "
    "out, a summary is logged, and no snapshot written."
)
SNAPSHOT = (
    "Memory snapshot of rank %d: %s\nDrop it on https://pytorch.org/memory_viz to see who "
    "allocated what."
)
NOT_WRITTEN = "The memory snapshot of rank %d cannot be written: %s."


class MemorySnapshots(OwnPart):
    """Has torch record allocations while a call of ``fit`` runs. A rank that runs out of memory
    writes its own.

    Args:
        device: of this rank.
        warns: whether to say so where torch does not record on this device.

    Ranks: all; each records itself.

    Example:
        >>> MemorySnapshots("cpu", warns=True).name
        'MemorySnapshots'
    """

    def __init__(self, device: str, *, warns: bool) -> None:
        self.device = device
        self.warns = warns
        self.folder: Path | None = None  # None: nothing is recorded

    @classmethod
    def of_run(cls, context: RunContext) -> Self:
        """Make it; a profile alone has a trace where there is no record."""
        return cls(context.device, warns=context.options["memory_snapshot_on_oom"])

    @contextlib.contextmanager
    def around_fit(self, brain: Any) -> Iterator[None]:
        """Record allocations."""
        if not record_memory_history(self.device):
            if self.warns:
                logger.warning_once(NO_HISTORY, self.device)
            yield
            return
        self.folder = Path(_output_folder(brain)) / "profiler_logs"
        try:
            yield
        finally:
            self.folder = None
            stop_memory_history(self.device)

    def on_fit_start(self, brain: Any) -> None:
        """Refuse, on every rank, a folder that cannot be written.

        Args:
            brain: of the recipe.

        Raises:
            ConfigError: it cannot.
        """
        folder = _output_folder(brain)

        def look() -> ConfigError | None:
            try:
                require_writable(f"the folder of the profile {folder!r}", folder)
            except ConfigError as error:
                return error
            return None

        error = run_on_main(look)
        if error is not None:
            raise error

    def on_out_of_memory(self, error: BaseException) -> None:
        """Write the snapshot, if there is a record."""
        if self.folder is None:
            return
        rank = get_rank() or 0
        path = self.folder / f"oom_rank{rank}.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as unfinished:
                write_memory_history(self.device, unfinished)
        # the error of the step is what the user has to see
        except (OSError, RuntimeError) as problem:
            logger.warning(NOT_WRITTEN, rank, problem, main_process_only=False)
        else:
            logger.warning(SNAPSHOT, rank, shown_path(path), main_process_only=False)


def _output_folder(brain: Any) -> str:
    return getattr(brain.hparams, "output_folder", "results")
