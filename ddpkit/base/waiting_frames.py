"""Where a thread is, and whether it waits for other ranks there."""

from __future__ import annotations

import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING

from ddpkit.base.user_frames import is_library, line_of

if TYPE_CHECKING:
    from types import FrameType


_PACKAGE = PurePath(__file__).parents[1]  # a folder above it may have the same name: that of a clone

# Where a rank that waits for others is, and not itself at fault: files of torch, and of this package.
_WAITING_FILES = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")
_WAITING_OWN = {"late_ranks.py", "mailbox.py", "distributed.py", "gathering.py", "time_outs.py"}
# Where Python reads a number from a GPU. With NCCL, whose collectives return at once, that is where a rank waits.
_DEVICE_READS = (
    *(
        (_PACKAGE / name).as_posix()
        for name in (
            "optim.py",
            "metrics.py",
            "distributed.py",
            "syncbn.py",
            "comm/tree_sum.py",
            "strategies/ddp.py",
            "strategies/gradient_average.py",
        )
    ),
    "torch/nn/modules/_functions.py", "torch/amp/grad_scaler.py", "torch/cuda/__init__.py", "torch/cuda/streams.py",
)  # fmt: skip
_LOADER_FILE = "torch/utils/data/dataloader.py"
AT_LOADER = ", waiting for its loader"


def look_at(frame: FrameType | None) -> tuple[str, bool]:
    """Say where a thread is, and whether it waits for other ranks there.

    Args:
        frame: the innermost.

    Returns:
        The innermost line of the user's own code, and the call it is in.

    Ranks: local.

    Example:
        >>> look_at(sys._getframe())[1]
        False
    """
    if frame is None:
        return "nowhere", False
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    depth = next((number for number, one in enumerate(stack) if not is_library(one.filename)), 0)
    own, inner = line_of(stack[depth : depth + 1]), line_of(stack[:1])  # the innermost stands first here
    where = f"{own}, which is in {inner}" if depth else inner
    if any(_LOADER_FILE in one.filename for one in stack[:12]):
        return f"{where}{AT_LOADER}", False
    return where, any(_is_waiting(PurePath(one.filename)) for one in stack[: min(3, depth)])


def _is_waiting(path: PurePath) -> bool:
    is_own = path.name in _WAITING_OWN and _PACKAGE in path.parents
    return is_own or any(part in path.as_posix() for part in _WAITING_FILES)
