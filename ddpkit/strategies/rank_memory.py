"""How much memory a run takes on each rank: what a strategy is given, and what it returns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpkit.optim import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch import nn

    from ddpkit.run_opts import RunOptions


@dataclass(frozen=True, eq=False)
class RehearsedRun:
    """A run whose steps were rehearsed in one process, and are to be made by several.

    Attributes:
        modules: of the recipe, whole and not wrapped.
        optimizers: by name; they have made a step, so that their states are there.
        gradients: bytes of each gradient, by its parameter.
        averages: averaged weights, each whole.
        options: of the run.
        processes: over how many the strategy is to work.
        micro_batches: batches of each process per optimizer step.
        has_own_fit_batch: whether the recipe has its own ``fit_batch``.

    Ranks: local.
    """

    modules: nn.ModuleDict
    optimizers: Mapping[str, torch.optim.Optimizer]
    gradients: Mapping[torch.Tensor, int]
    averages: Iterable[torch.Tensor]
    options: RunOptions
    processes: int
    micro_batches: int = 1
    has_own_fit_batch: bool = False

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors of the optimizers' states, each after its parameter."""
        return [
            (parameter, value)
            for optimizer in self.optimizers.values()
            for parameter, state in getattr(optimizer, "state", {}).items()
            if isinstance(state, dict)
            for value in state.values()
            if hasattr(value, "untyped_storage")
        ]


@dataclass(frozen=True)
class RankMemory:
    """The bytes of a rank that do not depend on its batch; of the rank with the most.

    A peak is in the backward pass, or in the optimizer step. In the backward pass there are all
    parts but ``step``, and the activations. Gradients appear there while activations go, unless
    they keep their memory from step to step.

    Attributes:
        weights: what the rank holds of the parameters.
        buffers: of the modules.
        gradients: of the parameters that are trained.
        optimizer: states of the optimizers.
        averages: averaged weights.
        exchange: what the strategy itself holds in the passes, such as buckets of gradients, or
            weights that are gathered.
        after_backward: what it holds, in the place of ``exchange``, at the end of the backward
            pass, when activations are gone.
        in_step: what it holds, in the place of ``exchange``, in the optimizer step.
        step_share: part of the parameters that the rank steps: as much of what an optimizer
            allocates in its step.
        keeps_gradients: whether gradients have their memory from the first pass on.

    Ranks: local.

    Example:
        >>> RankMemory(weights=8, gradients=8, optimizer=16).held
        24
    """

    weights: float = 0
    buffers: float = 0
    gradients: float = 0
    optimizer: float = 0
    averages: float = 0
    exchange: float = 0
    after_backward: float = 0
    in_step: float = 0
    step_share: float = 1.0
    keeps_gradients: bool = False

    @property
    def held(self) -> float:
        """What is there all the time."""
        return self.weights + self.buffers + self.optimizer + self.averages


def whole_memory(run: RehearsedRun) -> RankMemory:
    """Return the memory of a rank that holds all of a model.

    Args:
        run: as it was rehearsed.

    Ranks: local.
    """
    parameters = [
        *run.modules.parameters(),
        *parameters_of(run.optimizers.values()),
    ]
    return RankMemory(
        weights=size_of(parameters),
        buffers=size_of(run.modules.buffers()),
        gradients=float(sum(run.gradients.values())),
        optimizer=size_of(value for _, value in run.states()),
        averages=size_of(run.averages),
        keeps_gradients=run.micro_batches > 1,
    )


def divided_memory(
    run: RehearsedRun,
    share: Callable[[torch.Tensor], float],
) -> RankMemory:
    """Return the memory of a rank that holds a part of each parameter, and with it of its gradient,
    its average and its states.

    Args:
        run: as it was rehearsed.
        share: of a tensor, what the rank holds of it, between 0 and 1.

    Ranks: local.
    """
    whole = whole_memory(run)
    parameters = list(run.modules.parameters())
    states = [
        bytes_in(value) * (share(parameter) if value.shape == parameter.shape else 1.0)
        for parameter, value in run.states()
    ]
    stepped = sum(run.gradients.values())
    gradients = sum(size * share(parameter) for parameter, size in run.gradients.items())
    return dataclasses.replace(
        whole,
        weights=sum(bytes_in(parameter) * share(parameter) for parameter in parameters),
        gradients=gradients,
        optimizer=sum(states),
        averages=sum(bytes_in(average) * share(average) for average in run.averages),
        step_share=gradients / stepped if stepped else 1.0,
    )


def bytes_in(tensor: torch.Tensor) -> float:
    """Return the bytes of a tensor's numbers.

    Example:
        >>> import torch
        >>> bytes_in(torch.ones(3))
        12.0
    """
    return float(tensor.numel() * tensor.element_size())


def size_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the bytes of tensors, each memory once.

    Example:
        >>> import torch
        >>> rows = torch.ones(2, 3)
        >>> size_of([rows, rows[0], torch.ones(1)])
        28.0
    """
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # memory that was freed, as that of a divided parameter, has no address
        key = storage.data_ptr() or id(tensor)
        found[key] = float(storage.nbytes())
    return sum(found.values())
