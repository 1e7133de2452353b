"""Has torch check the indices of the sparse tensors that it loads.

An index outside of a tensor's shape makes ``to_dense`` and others read or write memory that is not
the tensor's. torch checks the indices in each ``torch.load(weights_only=True)`` from 2.14 on, and
before only where ``torch.sparse.check_sparse_tensor_invariants`` is enabled.

Source: https://pytorch.org/docs/stable/generated/torch.sparse.check_sparse_tensor_invariants.html ;
that ``torch.load`` heeds it, and that sparse tensors of a load that failed are checked with those
of the next one, was read in torch 2.8's, 2.13's and 2.14's ``_utils.py`` and is tested.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import torch

from ddpkit.base import map_named
from ddpkit.compat import forget_unchecked_sparse_tensors, refused_sparse_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of each process, by its number: a forked child has no thread that would release its parent's.
_LOCKS: dict[int, threading.RLock] = {}


@contextlib.contextmanager
def sparse_tensors_checked(*, enable: bool) -> Iterator[None]:
    """Have each ``torch.load`` in a block check the sparse tensors of its file, and no others.

    One thread at a time: what torch has still to check, and whether it does, is one for the
    process.

    Args:
        enable: whether they are checked; False for the meta device, where there is nothing to
            check. From torch 2.14 on they are checked all the same.

    Ranks: local.
    """
    with (
        _LOCKS.setdefault(os.getpid(), threading.RLock()),
        torch.sparse.check_sparse_tensor_invariants(enable=enable),  # type: ignore[no-untyped-call]
    ):
        forget_unchecked_sparse_tensors()  # of a torch.load of somebody else's
        try:
            yield
        finally:
            forget_unchecked_sparse_tensors()


def refused_tensor_text(error: BaseException) -> str | None:
    """Return the words for the sparse tensor that made a load fail; None if none did.

    Args:
        error: raised by ``torch.load``.

    Ranks: local.
    """
    found = refused_sparse_tensor(error)
    if found is None:
        return None
    state, tensor = found
    names: list[str] = []

    def note(name: str, value: object) -> None:
        if value is tensor:
            names.append(name)

    with contextlib.suppress(RecursionError):  # a forged state may hold itself
        map_named(state, note)
    name = f" {names[0]!r}" if names else ""
    return f"its sparse tensor{name} of shape {tuple(tensor.shape)} is not valid"
