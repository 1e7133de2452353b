"""What ``torch.utils.data.get_worker_info()`` returns in this process.

Reason: a stream that every worker reads whole must not shard itself by worker as well, and torch has no public way to
set the worker info.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import _utils, get_worker_info


def show_worker(info: Any) -> None:
    """Have ``get_worker_info()`` return something else.

    Args:
        info: its return value from now on; None as in the main process.

    Raises:
        RuntimeError: this version of torch keeps it elsewhere.

    Ranks: local.

    Example:
        >>> show_worker(None)
    """
    _utils.worker._worker_info = info  # noqa: SLF001
    if get_worker_info() is not info:
        raise RuntimeError(
            "a stream cannot be dealt out to loader workers with this version of torch: it would see its worker, and "
            "divide itself once more. Set num_workers=0."
        )
