"""The moment at which this rank's gradients are there, and the wait for the others begins.

torch's engine calls functions that were queued during a backward pass when the pass is over, in the
order in which they were queued. DDP and FSDP2 wait for the other ranks in such a function. One that
is queued before theirs is called when this rank has computed all that it can by itself, and before
it waits.

Source: ``Engine::queue_callback`` and ``GraphTask::exec_post_processing`` in torch 2.13's
``engine.cpp``; ``Reducer::all_reduce_bucket`` and ``Reducer::mark_variable_ready`` in its
``reducer.cpp``. The name is private to torch, which uses it itself in
``torch/nn/parallel/distributed.py``.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def call_at_arrival(loss: torch.Tensor, note: Callable[[], object]) -> Any:
    """Have a function called when the coming backward pass from a loss has made this rank's
    gradients.

    Otherwise, where torch's engine is another, nothing is called: the wait for the others then
    cannot be told from the backward pass.

    Args:
        loss: requires a gradient.
        note: called before the pass waits for other ranks.

    Returns:
        A handle whose ``remove()`` is to be called after the pass; None: the function is not
        called.

    Example:
        >>> weight, seen = torch.ones(1, requires_grad=True), []
        >>> loss = weight.sum()
        >>> handle = call_at_arrival(loss, lambda: seen.append(weight.grad.item()))
        >>> loss.backward(); handle.remove(); seen
        [1.0]
    """
    queue = _queue()
    if queue is None or torch.compiler.is_compiling():
        return None

    def begin(_: torch.Tensor) -> None:
        queue(note)

    return loss.register_hook(begin)  # type: ignore[no-untyped-call]


@functools.cache
def _queue() -> Callable[[Callable[[], object]], object] | None:
    """Return torch's function that queues a call, tried on one number; None if it is not there or
    not as expected.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue: Any = getattr(engine, "queue_callback", None)
    if queue is None:
        return None
    calls: list[str] = []
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        contextlib.suppress(Exception),
    ):  # of another torch
        number: Any = torch.ones(1, device="cpu", requires_grad=True)
        loss = number.sum()
        loss.register_hook(lambda _: queue(lambda: calls.append("queued")))
        number.register_hook(lambda _: calls.append("gradient"))
        loss.backward()
    return queue if calls == ["gradient", "queued"] else None
