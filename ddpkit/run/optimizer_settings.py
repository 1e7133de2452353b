"""Settings of optimizers, compared with those that a checkpoint's run began with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.errors import CheckpointUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

OTHER_OPTIMIZER = (
    "{0}: the optimizer {1!r} was of the class {2}, and is now of the class {3}, which has other "
    "settings and cannot go on with its state. Go on with {2}. --resume_with_new=optimizer goes "
    "on with {3}, without that state. Or begin anew from the weights "
    "alone: give --init_from={0}, and --resume=never or another experiment folder."
)


def optimizer_settings(optimizers: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the class and the settings of every parameter group, in plain values.

    With a schedule they have ``initial_lr``, the rate that the script has given: a schedule may
    have changed ``lr``.

    Args:
        optimizers: by name.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> [
        ...     (one["class"], one["lr"], one["momentum"])
        ...     for one in optimizer_settings({"sgd": sgd})["sgd"]
        ... ]
        [('SGD', 0.5, 0)]
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for name, optimizer in optimizers.items():
        known = [*getattr(optimizer, "defaults", {"lr"}), "initial_lr"]
        kind = {"class": type(optimizer).__name__}
        groups = [
            {key: group[key] for key in known if key in group}
            for group in getattr(optimizer, "param_groups", [])
        ]
        text = json.dumps(
            [kind | group for group in groups],
            default=lambda value: getattr(value, "tolist", str)(),
        )
        found[name] = json.loads(text)
    return found


def changed_settings(
    checkpoint: Path,
    name: str,
    before: list[dict[str, Any]],
    now: list[dict[str, Any]],
) -> list[str]:
    """List the settings of an optimizer that differ from the checkpoint's.

    Args:
        checkpoint: its directory.
        name: of the optimizer.
        before: settings of its groups in the checkpoint; missing ones count as equal.
        now: settings of the script.

    Raises:
        CheckpointError: it is an optimizer of another class, with other settings or another kind of
            weight decay.

    Example:
        >>> changed_settings(Path("CKPT+a"), "sgd", [{"lr": 0.1}], [{"class": "SGD", "lr": 0.2}])
        ['lr 0.1 -> 0.2']
    """
    pairs = list(zip(before, now, strict=False))
    for old, new in pairs:
        kinds = [
            (group.keys() - {"initial_lr"}, group.get("decoupled_weight_decay"))
            for group in (old, new)
        ]
        if old.get("class") not in {None, new["class"]} and kinds[0] != kinds[1]:
            raise CheckpointUsageError(
                OTHER_OPTIMIZER.format(checkpoint, name, old["class"], new["class"])
            )
    keys = [
        (key, old, new)
        for old, new in pairs
        for key in new
        if key in old and key not in _left_out(old, new)
    ]
    return list(
        dict.fromkeys(
            f"{key} {old[key]} -> {new[key]}" for key, old, new in keys if old[key] != new[key]
        )
    )


def _left_out(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
) -> set[str]:
    """Return the settings that are not compared: with a schedule on both sides, what it has made of
    the rate.
    """
    has_schedule = "initial_lr" in old and "initial_lr" in new
    return {"class", "fused", "lr"} if has_schedule else {"class", "fused"}
