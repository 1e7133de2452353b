"""How far a run is, in numbers, for the record of what has ended it."""

from __future__ import annotations

from typing import Any

from ddpkit.base.rank import stage_of

#: Attribute of an exception: how far the run was when the exception left ``fit`` or ``evaluate``.
COUNTERS = "_ddpkit_counters"


def counters_of(progress: Any) -> dict[str, Any]:
    """Return how far a run is. It waits for no GPU, which may be the reason of the end.

    Args:
        progress: a :class:`~ddpkit.training.progress.Progress`, or None.

    Returns:
        ``stage``, ``epoch``, ``step`` (batches of the stage) and ``optimizer_step``; empty without a run. A step of
        which the GPU has not told yet whether it was made is not counted.

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
    values = vars(progress)
    set_aside = values.get("_aside", {})  # while the result of a step is open
    steps = values.get("optimizer_step", set_aside.get("optimizer_step"))
    return {
        "stage": stage_of(progress),
        "epoch": progress.epoch,
        "step": progress.step,
        "optimizer_step": steps,
    }
