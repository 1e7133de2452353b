"""How far a run is, in numbers, for the record of what has ended it."""

from __future__ import annotations

from typing import Any

from ddpkit.base.position import stage_of

#: Attribute of an exception: how far the run was when the exception left ``fit`` or ``evaluate``.
COUNTERS = "_ddpkit_counters"


def counters_of(progress: Any) -> dict[str, Any]:
    """Return how far a run is. It waits for no GPU, which may be the reason of the end.

    Args:
        progress: a :class:`~ddpkit.training.progress.Progress`, or None.

    Returns:
        ``stage``, ``epoch``, ``step`` (batches of the stage) and ``optimizer_step``; empty without
        a run. A step that is pending on the GPU is not counted.

    Ranks: local; in any thread.

    Example:
        >>> from ddpkit.training import Progress
        >>> counters_of(Progress(epoch=2, step=3, optimizer_step=7))
        {'stage': '', 'epoch': 2, 'step': 3, 'optimizer_step': 7}
        >>> counters_of(None)
        {}
    """
    if progress is None:
        return {}
    return {
        "stage": stage_of(progress),
        "epoch": progress.epoch,
        "step": progress.step,
        "optimizer_step": progress.optimizer_step,
    }


def unwritten_skips(progress: Any) -> dict[str, Any]:
    """Return what the run's log does not say yet of skipped steps. It waits for no GPU.

    Args:
        progress: a :class:`~ddpkit.training.progress.Progress`, or None.

    Returns:
        The fields of the event ``skipped_steps``; empty where there is nothing new, or no run.

    Ranks: local; in any thread.

    Example:
        >>> from ddpkit.training.progress import Progress
        >>> unwritten_skips(Progress(nonfinite=3, skips_written=1))["count"]
        2
        >>> unwritten_skips(Progress())
        {}
    """
    if progress is None:
        return {}
    in_epoch = progress.nonfinite
    count = in_epoch - progress.skips_written
    if count <= 0:
        return {}
    return {
        "epoch": progress.epoch,
        "step": progress.step,
        "optimizer_step": progress.optimizer_step,
        "count": count,
        "in_epoch": in_epoch,
        "norm": progress.skipped_norm,
    }
