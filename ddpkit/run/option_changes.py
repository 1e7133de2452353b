"""Options that change a run's numbers, and how they differ from a checkpoint's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.options import BATCHES, GRADIENTS, OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALIKE = {"optimizer_step_limit", "activation_checkpointing", "auto_micro_batch"}
_OTHERS = {
    "virtual_ranks",
    "ddp_comm_hook",
    "local_sgd_start",
    "local_sgd_period",
    "sync_batchnorm",
    "ema_decay",
}

#: Options that change a run's numbers, except options that follow from the number of processes.
TELLING = tuple(
    option.name
    for option in OPTIONS
    if (option.group in {BATCHES, GRADIENTS} or option.name in _OTHERS)
    and option.name
    not in {"grad_accumulation_factor", "global_batch_size", "micro_batch_size", *_ALIKE}
)


def changed_options(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
) -> list[str]:
    """List the options that change a run's numbers and differ from the checkpoint's.

    Args:
        before: options in the checkpoint; missing options count as equal.
        now: of the run.

    Returns:
        One text per option.

    Example:
        >>> changed_options({"precision": "bf16"}, {"precision": "fp32", "max_grad_norm": 5.0})
        ["precision='fp32', before 'bf16'"]
    """
    # A checkpoint of an earlier version does not have these.
    before = {"virtual_ranks": None, "ddp_comm_hook": None, "sync_batchnorm": None, **before}
    changed = [
        name for name in TELLING if name in before and name in now and before[name] != now[name]
    ]
    # auto is on
    if before["sync_batchnorm"] is not False and now.get("sync_batchnorm") is not False:
        changed = [name for name in changed if name != "sync_batchnorm"]
    return [f"{name}={now[name]!r}, before {before[name]!r}" for name in changed]
