"""Options that change a run's numbers, and how they differ from a checkpoint's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.options import NUMBERS, OPTIONS, STRATEGY

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMPARED = [
    option
    for option in OPTIONS
    if option.changes_numbers or (option.changes_numbers is None and option.group in NUMBERS)
]

#: Options that change a run's numbers, except options that follow from the number of processes.
TELLING = tuple(option.name for option in _COMPARED)

# Of these a checkpoint of an earlier version lacks some.
_BEFORE = {option.name: option.default for option in _COMPARED if option.group == STRATEGY}


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
    before = {**_BEFORE, **before}
    changed = [
        name for name in TELLING if name in before and name in now and before[name] != now[name]
    ]
    # auto is on
    if before["sync_batchnorm"] is not False and now.get("sync_batchnorm") is not False:
        changed = [name for name in changed if name != "sync_batchnorm"]
    return [f"{name}={now[name]!r}, before {before[name]!r}" for name in changed]
