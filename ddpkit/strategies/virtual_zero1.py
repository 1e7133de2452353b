"""Virtual ranks where each process keeps the optimizer state of a part of the parameters only:
``--virtual_ranks`` with ``--strategy=zero1``.

The gradients are added up in the order of the tree, so that every process has the same bits of all
of them. Each steps the parameters that it owns, and sends them to the others. An optimizer that
works on each parameter by itself makes of the same bits the same ones, whichever other parameters
it is given (:mod:`ddpkit.strategies.zero1`); one that draws random numbers in its step does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.distributed import get_world_size
from ddpkit.strategies.base import asks_for_shards
from ddpkit.strategies.optimizer_draws import refuse_draws
from ddpkit.strategies.rare_questions import bytes_of
from ddpkit.strategies.virtual_ranks import VirtualRanks
from ddpkit.strategies.zero1 import (
    CANNOT_DIVIDE,
    DividedOptimizers,
    dealt_memory,
    require_divisible,
    states_of_divided,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import nn

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun
    from ddpkit.training import Accumulation

DRAWS = "It draws random numbers in its step, for the parameters that a process has."


class VirtualZero1(VirtualRanks):
    """``V`` virtual ranks, with the optimizers' state divided over the processes.

    Ranks: collective.

    Example:
        >>> VirtualZero1("cpu", 8).division().each
        8
    """

    name = "virtual ranks, optimizer state divided (ZeRO-1)"
    gathers_if_needed = True

    def bind(
        self,
        options: RunOptions,
        accumulation: Accumulation,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Take the options, before any optimizer is divided."""
        super().bind(options, accumulation, has_own_fit_batch=has_own_fit_batch)
        self._optimizers = DividedOptimizers()

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return the rows of virtual ranks, and that the optimizers' state is divided."""
        rows = super().startup_rows(modules)
        return {**rows, "strategy": f"{rows['strategy']}, optimizer state divided (zero1)"}

    def prepare_optimizers(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        """Divide the state of optimizers over the processes. What cannot be divided is refused on
        one process, too.

        Raises:
            ConfigError: an optimizer has parameters that are in no module, updates all its
                parameters together, or keeps its state in its own way.
        """
        super().prepare_optimizers(modules, optimizers)
        for name, optimizer in optimizers.items():
            require_divisible(name, optimizer)
            refuse_draws(optimizer, CANNOT_DIVIDE.format(name, type(optimizer).__name__, DRAWS))
        if get_world_size() > 1:
            self._optimizers.divide(optimizers)

    def rank_memory(self, run: RehearsedRun) -> RankMemory:
        """Return the memory as with virtual ranks, with the states that the process with the most
        of them owns.

        Raises:
            ConfigError: the virtual ranks cannot be divided over so many processes.
        """
        whole = super().rank_memory(run)
        return dealt_memory(whole, run) if run.processes > 1 else whole

    def writes_shards(self) -> bool:
        """Say whether the options ask for shards, and the processes share a folder."""
        return asks_for_shards(self)

    def divided_states(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the states of the optimizers among some objects, in shards or whole."""
        return states_of_divided(objects, in_shards=self.writes_shards())

    def sent_bytes(self, parameters: Iterable[torch.Tensor]) -> float:
        """Return the bytes of all gradients, and of the parameters that a process has stepped."""
        trained = list(parameters)
        return super().sent_bytes(trained) + bytes_of(trained) / get_world_size()
