"""A trace of some training steps, with the option ``profile_training``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ddpkit.logger import get_logger
from ddpkit.parts.own import OwnPart
from ddpkit.profiler import prepare_profiler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from ddpkit.training import RunContext

logger = get_logger(__name__)

NOTHING = (
    "profile_training: nothing was recorded: training ended within --profile_warmup=%d batches."
)


class Profiling(OwnPart):
    """Gives each call of ``fit`` a profiler, which the training steps.

    Args:
        warmup: steps before it records.
        steps: that it records.

    Ranks: all; each records itself.

    Example:
        >>> Profiling(warmup=5, steps=5).name
        'Profiling'
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup = warmup
        self.steps = steps

    @classmethod
    def of_run(cls, context: RunContext) -> Self:
        """Make it of ``profile_warmup`` and ``profile_steps``."""
        return cls(context.options.profile_warmup, context.options.profile_steps)

    @contextlib.contextmanager
    def around_fit(self, brain: Any) -> Iterator[None]:
        """Make the profiler; say after the training if it has recorded nothing."""
        folder = getattr(brain.hparams, "output_folder", "results")
        profiler = prepare_profiler(self.warmup, self.steps, folder)
        brain.profiler = profiler
        yield
        if profiler.step_num < self.warmup:
            logger.warning(NOTHING, self.warmup)
