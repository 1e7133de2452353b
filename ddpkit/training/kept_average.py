"""The average of the weights that a run keeps: a part's, the option's, or the recipe's own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    from ddpkit.ema import WeightAverage
    from ddpkit.training.context import RunContext
    from ddpkit.types import Stage

NAME = "ema"  # of its file in a checkpoint
KEPT_WITH = "; 'ema' is kept with ema_decay, or the part AveragedWeights"


class KeptAverage:
    """The one average of the weights that a run keeps, or none: a part's, the option's, or what a
    recipe has put into ``Brain.ema``.

    Args:
        context: of the run, whose modules it follows.
        weights: the average; None: no weights are averaged.

    Attributes:
        weights: as given, or as the recipe has assigned it since.

    Ranks: local; alike on every rank.
    """

    def __init__(self, context: RunContext, weights: WeightAverage | None = None) -> None:
        self.weights = weights
        self._context = context
        self._registered: WeightAverage | None = None  # with the checkpointer

    @classmethod
    def of_run(cls, context: RunContext) -> KeptAverage:
        """Choose the average that a part keeps, or that ``ema_decay`` asks for.

        Raises:
            ConfigError: ``ema_decay`` is no decay.
        """
        average: WeightAverage | None = context.parts.weight_average()
        if average is None and context.options.ema_decay is not None:
            from ddpkit import ema  # which few runs need

            average = ema.WeightAverage(context.modules, context.options.ema_decay)
        if average is not None:
            average.follow_modules_of(context)
        return cls(context, average)

    def replace(self, weights: WeightAverage | None) -> None:
        """Keep another average from now on."""
        # of the modules of now it is an average of whatever the run trains; else of a teacher
        if weights is not None and weights.modules is self._context.modules:
            weights.follow_modules_of(self._context)
        self.weights = weights

    # ------------------------------------------------------------------ in a stage

    def follow(self) -> None:
        """Look, when an epoch begins, which weights are trained in it."""
        if self.weights is not None:
            self.weights.follow()

    @property
    def is_evaluated(self) -> bool:
        """Whether stages are evaluated with averaged weights, if there are any."""
        is_asked = bool(self._context.options.evaluate_ema)
        return is_asked or (self.weights is not None and self.weights.is_evaluated)

    def evaluated(self, stage: Stage) -> AbstractContextManager[None]:
        """Return a context in which a stage is evaluated, with the averaged weights or without."""
        if self.weights is None or not self.is_evaluated:
            return contextlib.nullcontext()
        return self.weights.evaluated(stage)

    @property
    def row(self) -> str:
        """What the block at the start says of it; empty without an average."""
        if self.weights is None:
            return ""
        use = "" if self.is_evaluated else "not "
        return f"of the weights, {self.weights.row}, {use}used in evaluation"

    # ------------------------------------------------------------------ in a checkpoint

    def register(
        self,
        checkpointer: Any,
        require_free: Callable[[str, str, Any], None],
        bases: Callable[[], Mapping[int, str]],
    ) -> None:
        """Have a checkpointer save it, in the place of an earlier one.

        Args:
            checkpointer: or None.
            require_free: is given its name, what it is, and what may have the name already.
            bases: tells which weights a save leaves out.
        """
        average = self.weights
        if checkpointer is None or average is None:
            return
        require_free(NAME, f"the average of the weights ({average.origin})", self._registered)
        checkpointer.add_recoverable(NAME, average, optional_load=True)
        average.tell_bases = bases
        self._registered = average

    def forget_registered(self) -> None:
        """Another checkpointer is going to save it, which has nothing of it yet."""
        self._registered = None

    def advice_if_lost(self, lost: Collection[str]) -> str:
        """Return what follows a sentence on files of a checkpoint that nothing takes up."""
        return KEPT_WITH if NAME in lost else ""

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context for a save, which has the weights themselves."""
        return contextlib.nullcontext() if self.weights is None else self.weights.suspended()

    def require_in(self, checkpoint: Any) -> None:
        """Refuse to evaluate a checkpoint that has no averaged weights, if the option asks for
        them.

        Raises:
            CheckpointError: it has none.
        """
        if self._context.options.evaluate_ema:
            from ddpkit.ema import require_average  # which few runs need

            require_average(checkpoint)
