"""Which frames of a stack are the user's own code, and which belong to libraries."""

from __future__ import annotations

import os
import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


# a folder above it may have the same name: that of a clone
_PACKAGE = PurePath(__file__).parents[1]

_NOT_THE_USERS = (f"{PurePath(os.__file__).parent}{os.sep}", f"{_PACKAGE}{os.sep}", "<")


def is_library(file: str) -> bool:
    """Say whether a file of code belongs to Python, to an installed package, or to this one.

    Example:
        >>> is_library(os.__file__), is_library("/home/me/data.py")
        (True, False)
    """
    return "site-packages" in file or file.startswith(_NOT_THE_USERS)


def line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost traceback line in user code; without one, the innermost line.

    Args:
        frames: of a traceback, the innermost last.

    Returns:
        Such as ``"train.py:12 in compute_forward"``; empty without frames.

    Example:
        >>> import traceback
        >>> line_of([traceback.FrameSummary("/home/me/train.py", 12, "forward", lookup_line=False)])
        'train.py:12 in forward'
    """
    if not frames:
        return ""
    frame = user_frame(frames)
    return f"{PurePath(frame.filename).name}:{frame.lineno} in {frame.name}"


def user_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the innermost of some lines that is user code; without one, the innermost line.

    Args:
        frames: of a traceback, the innermost last; at least one.

    Example:
        >>> user_frame(
        ...     [traceback.FrameSummary("/home/me/train.py", 12, "forward", lookup_line=False)]
        ... ).lineno
        12
    """
    return next((frame for frame in reversed(frames) if not is_library(frame.filename)), frames[-1])
