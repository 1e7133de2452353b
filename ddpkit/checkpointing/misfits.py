"""What is said of a checkpoint that does not fit to an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ddpkit.base import unwrap
from ddpkit.errors import CheckpointError, CheckpointUsageError

if TYPE_CHECKING:
    from pathlib import Path

MOST_MISFITS = 6  # lines of torch's list of what does not fit
START_ANEW = (
    " Make it as it was when this was saved, or start anew: --resume=never, or another experiment "
    "folder."
)
FROM_WEIGHTS = (
    " Make it as it was when this was saved. Or begin anew from the weights alone: give "
    "--init_from=CKPT, and --resume=never or another experiment folder."
)
OTHER_LAYERS = " --init_skip=NAMES leaves out the layers that do not fit."
GROUPS = "The checkpoint has parameter groups of {} tensors, and the script makes groups of {}."
LATER_GROUPS = (
    " A group that the run has added later has to be there at its start: add it in init_optimizers."
)


def way_out(obj: Any, state: Any) -> str:
    """Say how to go on where the state of a checkpoint does not fit an object: also with another
    head or optimizer.
    """
    if isinstance(obj, nn.Module):
        return FROM_WEIGHTS + OTHER_LAYERS
    if not isinstance(obj, Optimizer):
        return START_ANEW
    saved = _group_sizes(state)
    made = _group_sizes({"param_groups": obj.param_groups})
    if not saved or saved == made:
        return FROM_WEIGHTS
    later = LATER_GROUPS if len(saved) > len(made) else ""
    return f" {GROUPS.format(saved, made)}{later}{FROM_WEIGHTS}"


def _group_sizes(state: Any) -> list[int]:
    groups = state.get("param_groups", []) if isinstance(state, Mapping) else []
    return [len(group["params"]) for group in groups]


def misfit(
    obj: Any,
    path: Path,
    error: Exception,
    advice: str = "",
) -> CheckpointError:
    """Return the error for what loading has raised."""
    lines = str(error).splitlines()  # of a module, one for each parameter
    if len(lines) > MOST_MISFITS:
        lines[MOST_MISFITS:] = [f"\t... and {len(lines) - MOST_MISFITS} more"]
    text = "\n".join(lines).rstrip(". ")
    kind = CheckpointError
    # a fault of the recipe, or no memory
    if type(error) not in (RuntimeError, ValueError, CheckpointError):
        text = f"{type(error).__name__}: {text}"
        advice = ""
    elif isinstance(obj, (nn.Module, Optimizer)):
        kind = CheckpointUsageError
    return kind(f"{path} does not fit this {type(unwrap(obj)).__name__}: {text}.{advice}")
