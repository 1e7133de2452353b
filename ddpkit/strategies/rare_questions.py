"""Methods that few strategies answer in a way of their own: for divided data and weights, for
batches that count on some ranks only, and for numbers that are averaged beside the gradients.

A strategy from outside needs none of it. Each answer here fits a strategy in which every process
holds the whole model, and its own part of the data.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ddpkit import distributed
from ddpkit.comm import start_sum
from ddpkit.data import Division
from ddpkit.device import widest_float
from ddpkit.strategies.entries import modules_on_device
from ddpkit.strategies.names import OF_ONE_PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from ddpkit.errors import DdpkitError
    from ddpkit.run_opts import RunOptions
    from ddpkit.step_times import StepTimer

NO_CONTEXT: AbstractContextManager[None] = contextlib.nullcontext()


class RareQuestions:
    """What a strategy is asked besides :class:`~ddpkit.strategies.base.Strategy`'s own methods.

    Attributes:
        unrepeatable: why an optimizer step cannot be repeated; empty where nothing of it is sent
            under ``no_sync`` before ``finish_gradients``.
        unauditable: why no process can compute again what another has computed; empty where each
            can, with the same bits.
        sends_fp16: whether gradients travel in fp16. Loss sums are divided by their count before
            the backward pass then, to stay in its range.
        awaits_steps: whether the host has to know of each optimizer step, before the next batch,
            whether it was skipped.
        gathers_states: whether a save gathers states though the options say shards: set where the
            ranks share no folder.
        gathers_if_needed: whether it may do so without being asked where the ranks share no folder,
            since each rank has memory for a whole model anyway.
        norm_of_parts: gives the norm of gradients of which each rank has a part; None: the root of
            the sum of the parts' squares.
        timer: measures steps; or None.

    Ranks: local.
    """

    unrepeatable = ""
    unauditable = OF_ONE_PROCESS
    sends_fp16 = False
    awaits_steps = False
    gathers_states = False
    gathers_if_needed = False
    norm_of_parts: Callable[[list[Any]], torch.Tensor] | None = None
    timer: StepTimer | None = None
    _of_ranks: Division | None = None

    # ------------------------------------------------------------------ what kind it is

    def runs_alone(self) -> bool:
        """Say whether there is work in a process without a group; if not, such a process trains on
        one device.
        """
        return False

    def is_distributed(self) -> bool:
        """Say whether the ranks exchange something in a step."""
        return distributed.is_distributed_initialized()

    def division(self) -> Division:
        """Say into how many shards every batch is divided, and which of them this rank works on:
        one for each rank.
        """
        known = self._of_ranks
        # asked in every pass; a process group may be made later
        if known is None or known.world_size != distributed.get_world_size():
            known = self._of_ranks = Division.of_ranks()
        return known

    def has_same_bits(self) -> bool:
        """Say whether no bit may depend on the number of processes.

        Losses and logged values are then added up without rounding, and outside of batches all
        ranks draw the same random numbers.
        """
        return False

    def explain(self, error: Exception) -> DdpkitError | None:
        """Return what to raise in the place of an error of torch that the strategy is the cause of;
        None: not known.

        Args:
            error: raised in a stage.
        """
        return None

    def data_ranks(self, options: RunOptions, processes: int) -> int:
        """Return over how many ranks the samples of an optimizer step are divided; of a strategy
        that is not bound yet.

        Args:
            options: of the run.
            processes: number of them.
        """
        return processes

    # ------------------------------------------------------------------ modules

    def place(
        self,
        modules: Mapping[str, Any],
        device: str,
    ) -> nn.ModuleDict:
        """Move a recipe's modules to the device. Weights on the meta device get their values.

        Args:
            modules: by name.
            device: of this rank.
        """
        return modules_on_device(modules, device)

    def divided_modules(self) -> Sequence[nn.Module]:
        """Return the entries of which each rank holds a part of the weights."""
        return ()

    def begin_epoch(self, modules: nn.ModuleDict) -> None:
        """Wrap entries again in which a recipe has frozen or unfrozen parameters."""

    def diverged_entries(self, modules: nn.Module) -> list[str]:
        """Return the trained entries whose weights differ between ranks."""
        return []

    def writes_shards(self) -> bool:
        """Say whether each rank writes a shard of its own into a checkpoint, so that all of them
        need its folder.
        """
        return False

    def divided_states(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Say how the states of objects are saved of which the main process has a part: collective,
        on every rank in the same order.

        Called where a strategy overrides it: where the main process alone has not all that a
        checkpoint needs.

        Args:
            objects: what a checkpoint stores as ``torch.save`` does, by name.

        Returns:
            By name what to save in the place of some of them: on rank 0 an object whose
            ``state_dict`` is whole and needs no other rank; or on every rank a
            :class:`~ddpkit.checkpointing.shard_states.ShardedState`.
        """
        return {}

    # ------------------------------------------------------------------ batches

    def feed(
        self,
        feed: Any,
        progress: Any,
        seed: int,
    ) -> Any:
        """Wrap the batches of a training pass, so that the strategy sees each of them."""
        return feed

    def evaluated(self, batches: Iterable[Any], seed: int, *place: int) -> Iterable[Any]:
        """Return the batches of a divided evaluation.

        Args:
            batches: of this rank.
            seed: of the run.
            place: numbers that name the evaluation.
        """
        return batches

    def evaluating(self, length: int | None) -> AbstractContextManager[None]:
        """Return a context for an evaluation. Collective.

        Args:
            length: number of batches of this rank, if each rank evaluates the same data; None: they
                may differ.
        """
        return NO_CONTEXT

    def recording_use(self, *, counts: bool) -> AbstractContextManager[None]:
        """Return a context for a micro-batch that does not count on all ranks: what only others use
        has no gradient.
        """
        return NO_CONTEXT

    # ------------------------------------------------------------------ gradients

    def without_backward(
        self,
        modules: nn.ModuleDict,
        *,
        closes: bool,
        counts: bool = True,
        retain_graph: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in the place of a backward pass, for a loss that depends on no
        parameter.
        """
        return NO_CONTEXT

    def exchanged_bytes(self, modules: nn.Module) -> int:
        """Return how many bytes this rank hands over for one optimizer step, on average; 0 in one
        process.

        Args:
            modules: of the recipe, wrapped.
        """
        trained = [weight for weight in modules.parameters() if weight.requires_grad]
        return round(self.sent_bytes(trained)) if distributed.get_world_size() > 1 else 0

    def sent_bytes(self, parameters: Iterable[torch.Tensor]) -> float:
        """Return how many bytes this rank hands over for one optimizer step, on average; 0 where
        that is not known.

        What a collective makes of them, such as a ring that sends each number twice, is not
        counted.

        Args:
            parameters: that are trained.
        """
        return 0.0

    def leave_step_out(self) -> None:
        """Called in the place of ``finish_gradients`` where a window closes and no optimizer steps:
        the recipe has frozen all of them, or has none. What its forward passes have written into
        buffers is read by what comes before the next batch, such as a save.
        """

    def forget_errors(self) -> None:
        """Drop what the averaging of gradients has kept, after gradients that are not finite."""

    def start_average(
        self,
        count: torch.Tensor | float,
        device: str,
    ) -> Callable[[], torch.Tensor | float]:
        """Start averaging a number over the ranks, before the backward pass, without waiting for it
        or for the device.

        Args:
            count: a number, or a tensor of one element.
            device: of this rank.

        Returns:
            What waits for the others and gives the average, shape ``()``; in one process a number
            stays a number.
        """
        if not self.is_distributed():
            own = (
                count.detach().to(widest_float(device))
                if isinstance(count, torch.Tensor)
                else count
            )
            return lambda: own
        total = wide_number(count, device)
        wait = start_sum(total)

        def average() -> torch.Tensor:
            wait()
            return total / torch.distributed.get_world_size()

        return average


def bytes_of(parameters: Iterable[torch.Tensor]) -> float:
    """Return how many bytes the numbers of tensors have.

    Example:
        >>> bytes_of([torch.ones(3), torch.ones(2, dtype=torch.float64)])
        28.0
    """
    return float(sum(parameter.numel() * parameter.element_size() for parameter in parameters))


def wide_number(count: torch.Tensor | float, device: str) -> torch.Tensor:
    """Return a copy of a number, or of a tensor of one element, in the widest dtype of a device,
    without waiting for the device.

    Example:
        >>> wide_number(torch.tensor([3]), "cpu")
        tensor(3., dtype=torch.float64)
    """
    wide = widest_float(device)
    if isinstance(count, torch.Tensor):
        return (
            count.detach()
            .reshape(())
            .to(
                device,
                wide,
                copy=True,
                non_blocking=True,
            )
        )
    return torch.full(
        (),
        count,
        dtype=wide,
        device=device,
    )
