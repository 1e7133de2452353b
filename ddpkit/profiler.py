"""The torch profiler, set up for a training loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile, schedule

from ddpkit.compat import profile_events
from ddpkit.distributed import get_rank, get_world_size, if_main_process
from ddpkit.logger import get_logger, shown_path
from ddpkit.reporting import summary_of

logger = get_logger(__name__)

__all__ = ["prepare_profiler"]

WHERE = "Profile of %s: %s"
HOW_TO_OPEN = "Open it at https://ui.perfetto.dev, in chrome://tracing, or with TensorBoard."
OF_ALL = "Each of the %d processes has written a file beside it; the figures here are of rank 0."


def prepare_profiler(
    profile_warmup: int = 5,
    profile_steps: int = 5,
    logdir: str | Path = "tensorboard_logs",
) -> profile:
    """Make a profiler that warms up, records some steps once, and writes a trace.

    Enter it as a context, or call ``start()``; call ``step()`` after each training step; leave it,
    or call ``stop()``, at the end. The trace is written when the last recorded step ends:
    ``<logdir>/profiler_logs/rank<r>.<time>.pt.trace.json``, one file per rank, readable by
    ``chrome://tracing``, Perfetto and TensorBoard. The main process says where, how to open it, and
    which ten operations took most of its time. No extra package is needed to write it.

    Args:
        profile_warmup: steps before recording starts, during which the profiler runs and its
            overhead settles; >= 0 (torch warns at 0: the first recorded step is then slower than it
            should be).
        profile_steps: steps to record; >= 1. Each costs memory: some dozens are plenty.
        logdir: folder; ``profiler_logs`` is made inside it.

    Returns:
        A profiler, not yet started. It records shapes and Python stacks, on an accelerator too
        where it is there.

    Raises:
        AssertionError: of torch, for a negative warm-up, or no steps to record.

    Ranks: local; each rank profiles itself.

    Source: https://pytorch.org/docs/stable/profiler.html#torch.profiler.schedule.

    Example:
        >>> profiler = prepare_profiler(profile_warmup=1, profile_steps=2, logdir="results/run")
        >>> [profiler.schedule(step).name for step in range(4)]
        ['WARMUP', 'RECORD', 'RECORD_AND_SAVE', 'NONE']
    """
    return profile(  # of all that torch can record here: the CPU, and CUDA or another accelerator
        schedule=schedule(
            wait=0,
            warmup=profile_warmup,
            active=profile_steps,
            repeat=1,
        ),
        on_trace_ready=_trace_writer(Path(logdir) / "profiler_logs"),
        record_shapes=True,
        with_stack=True,
    )


def _trace_writer(folder: Path) -> Callable[[profile], None]:
    def write(profiler: profile) -> None:
        # TensorBoard finds the file by its name, as from torch.profiler.tensorboard_trace_handler.
        path = folder / f"rank{get_rank() or 0}.{time.time_ns()}.pt.trace.json"
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        if if_main_process():
            _tell(profiler, path)

    return write


def _tell(profiler: profile, path: Path) -> None:
    """Say where the trace is, how to open it, and what took most time."""
    summary = summary_of(profile_events(profiler))
    batches = f"{summary.batches} batches" if summary.batches > 1 else "1 batch"
    lines = [WHERE % (batches, shown_path(path)), HOW_TO_OPEN]
    if get_world_size() > 1:
        lines.append(OF_ALL % get_world_size())
    logger.announce("%s", "\n".join([*lines, *summary.lines()]))
