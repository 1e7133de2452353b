"""Where a thread is, and whether it waits for other ranks there."""

from __future__ import annotations

import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING

from ddpkit.base.user_frames import is_library, line_of
from ddpkit.base.waiting_marks import is_marked_reading, is_marked_waiting

if TYPE_CHECKING:
    from types import FrameType

# Where torch waits for other ranks. Functions of this package that do are marked where they are
# written.
_WAITING_FILES = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")
# Where torch reads a number from a GPU. With NCCL, whose collectives return at once, that is where
# a rank waits.
_DEVICE_READS = (
    "torch/nn/modules/_functions.py",
    "torch/amp/grad_scaler.py",
    "torch/accelerator/__init__.py",
    "torch/cuda/__init__.py",
    "torch/cuda/streams.py",
)
_LOADER_FILE = "torch/utils/data/dataloader.py"
AT_LOADER = ", waiting for its loader"


def look_at(frame: FrameType | None) -> tuple[str, bool]:
    """Say where a thread is, and whether it waits for other ranks there.

    Args:
        frame: the innermost.

    Returns:
        The innermost line of the user's own code, and the call it is in.

    Example:
        >>> import sys
        >>> look_at(sys._getframe())[1]
        False
    """
    if frame is None:
        return "nowhere", False
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    depth = next(
        (number for number, frame in enumerate(stack) if not is_library(frame.filename)), 0
    )
    # the innermost stands first here
    own = line_of(stack[depth : depth + 1])
    inner = line_of(stack[:1])
    where = f"{own}, which is in {inner}" if depth else inner
    if any(_LOADER_FILE in frame.filename for frame in stack[:12]):
        return f"{where}{AT_LOADER}", False
    return where, any(map(_is_waiting, stack[: min(3, depth)]))


def reads_number(frame: FrameType) -> bool:
    """Say whether a thread reads a number from a device.

    Args:
        frame: the innermost.

    Example:
        >>> import sys
        >>> reads_number(sys._getframe())
        False
    """
    file = frame.f_code.co_filename
    return is_marked_reading(file, frame.f_lineno) or PurePath(file).as_posix().endswith(
        _DEVICE_READS
    )


def _is_waiting(line: traceback.FrameSummary) -> bool:
    is_own = is_marked_waiting(line.filename, line.lineno or 0)
    return is_own or any(part in PurePath(line.filename).as_posix() for part in _WAITING_FILES)
