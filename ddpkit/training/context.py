"""What all parts of a run share. Each fact is in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpkit.optim import RateFactor
from ddpkit.parts import PartEvents
from ddpkit.training.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import SimpleNamespace

    import torch
    from torch import nn

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies import Strategy
    from ddpkit.training.accumulation import Accumulation
    from ddpkit.training.recipe import Recipe


@dataclass(eq=False, slots=True)
class RunContext:
    """What all parts of a run share. A part keeps the context and copies nothing of it.

    So what a recipe puts in the place of its modules or hparams is what every part sees next. The
    objects in ``options``, ``strategy`` and ``progress`` stay the same for the whole run.

    Attributes:
        recipe: what its class says of itself.
        options: of the run, as they were given.
        accumulation: how an optimizer step is divided into micro-batches.
        modules: what is trained and evaluated, by name.
        hparams: of the recipe.
        strategy: how modules are wrapped and gradients averaged.
        progress: how far the run has come.
        opt_class: makes the optimizer; or None.
        scheduler_class: makes its scheduler; or None.
        parts: features that were given to the Brain, and the events that each hears.
        rate_factor: on the learning rates of each step, in this call of ``fit``.
        device: of this rank, such as ``"cuda:1"``; an option that cannot be changed any more.

    Ranks: local; alike on every rank.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> from ddpkit.run_opts import RunOptions
        >>> from ddpkit.strategies import Strategy
        >>> from ddpkit.training import Accumulation, Recipe
        >>> options = RunOptions(device="cpu")
        >>> context = RunContext(
        ...     Recipe("Line"),
        ...     options,
        ...     Accumulation(options),
        ...     nn.ModuleDict(),
        ...     SimpleNamespace(),
        ...     Strategy(),
        ... )
        >>> context.device, context.progress.optimizer_step
        ('cpu', 0)
    """

    recipe: Recipe
    options: RunOptions
    accumulation: Accumulation
    modules: nn.ModuleDict
    hparams: SimpleNamespace
    strategy: Strategy
    progress: Progress = field(default_factory=Progress)
    opt_class: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None
    scheduler_class: Callable[..., Any] | None = None
    parts: PartEvents = field(default_factory=PartEvents)
    rate_factor: RateFactor = field(default_factory=RateFactor)
    device: str = field(init=False)

    def __post_init__(self) -> None:
        # once: to ask the options in each step costs a call, and the device stays the same
        self.device = str(self.options.device)
