"""What a process does when it fails: it leaves the reason where the launcher will show it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def record_for_launcher(error: BaseException) -> None:
    """Write an exception into torchrun's error file, so that its closing summary shows the reason.

    Without torchrun nothing happens. The first failure that a process records stays.

    Args:
        error: the exception, with its traceback.

    Ranks: local.

    Example:
        >>> record_for_launcher(ValueError("nothing happens without torchrun"))
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


@contextlib.contextmanager
def failure_notice() -> Iterator[None]:
    """Record an exception that passes through for the launcher, and let it go on.

    Ranks: local.

    Example:
        >>> with failure_notice():
        ...     pass
    """
    try:
        yield
    except Exception as error:
        record_for_launcher(error)
        raise
