"""How far the averaging of each module's gradients is, and the hook by which DDP tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ddpkit.compat import version_of
from ddpkit.strategies.batch_outputs import BatchOutputs
from ddpkit.strategies.comm_hooks import average_of_all, done

if TYPE_CHECKING:
    from collections.abc import Callable


class BatchClock:
    """Counts batches, and the calls of wrapped modules: for the order of first calls in a batch.

    Attributes:
        batch: backward passes so far.
        calls: first calls so far.
        outputs: what the modules have returned; None where it is not needed.

    Ranks: local.
    """

    __slots__ = ("batch", "calls", "outputs")

    def __init__(self) -> None:
        self.batch = 0
        self.calls = 0
        self.outputs: BatchOutputs | None = None


class GradientReduction:
    """Reduction state of one DDP module. Kept outside of it, where each write would cost a
    microsecond.

    A forward pass that synchronises sets ``armed`` and ``reduced``; a bucket that
    :func:`average_or_defer` averages sets ``fired``. A backward pass that leaves gradients as they
    are takes both back. A backward pass that does not reach the module leaves it armed.

    Attributes:
        reduced: whether the gradients present are, or are about to be, averages over the ranks.
        armed: whether the next backward pass through the module averages.
        watched: whether DDP calls :func:`average_or_defer` for each bucket, which then decides.
        defers: whether that hook leaves the gradients of the running backward pass as they are.
        held: whether it does so inside of ``no_sync``: with a static graph, where torch's own way
            fails.
        entry: name of the module.
        hook: averages a bucket; None: as DDP does it by itself.
        fired: whether a bucket was averaged since :meth:`after_backward` last looked.
        probe: one of the trained parameters.
        before: version of its gradient when the module was last called; -1: there was none.
        called: whether the module was called, with gradients, since the last optimizer step.
        clock: of all wrapped modules.
        awaited: whether, at an optimizer step, an average was expected and no backward pass has
            come.
        batch: in which the module was last called.
        call: number of its first call there.
        came: whether a bucket has come since the module was called.
        skipped: whether DDP still waits for a backward pass whose gradients are not averaged.

    Ranks: local.
    """

    __slots__ = (
        "armed",
        "awaited",
        "batch",
        "before",
        "call",
        "called",
        "came",
        "clock",
        "defers",
        "entry",
        "fired",
        "held",
        "hook",
        "probe",
        "reduced",
        "skipped",
        "watched",
    )

    def __init__(self, probe: nn.Parameter) -> None:
        self.reduced = self.armed = self.watched = self.defers = self.held = self.fired = False
        self.entry = ""
        self.probe = probe
        self.before = -1
        self.called = self.came = self.skipped = self.awaited = False
        self.clock = BatchClock()
        self.batch = -1
        self.call = 0
        self.hook: Callable[..., torch.futures.Future[torch.Tensor]] | None = None

    def is_awaited(self) -> bool:
        """Say whether a backward pass that averages was expected, and none has come to the module
        since its call.
        """
        old = self.armed if self.watched else self.before == version_of(self.probe.grad)
        return self.reduced and old

    def after_backward(self) -> None:
        """Record the result of a backward pass, which may have reached this module or not."""
        if self.fired:
            self.reduced = True
            self.armed = False
            self.fired = False
        elif self.defers or not self.armed:
            self.skipped = self.armed and not self.came
            self.reduced = self.armed = False


def average_or_defer(
    state: GradientReduction,
    bucket: torch.distributed.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks; or leave them as they are.

    Ranks: collective, where it averages.
    """
    state.came = True
    if not (state.defers or state.held):
        state.fired = True
        state.armed = False
        return (state.hook or average_of_all)(bucket)
    return done(bucket.buffer())


average_or_defer.__annotations__.clear()  # DDP compares them with types, and here they are strings
