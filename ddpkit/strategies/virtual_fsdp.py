"""Virtual ranks where each process holds a part of every parameter, gradient and optimizer state:
``--virtual_ranks`` with ``--strategy=fsdp``.

FSDP2 gathers the parameters of a block and divides its gradients; what it adds up, and in which
order, is decided here (:mod:`ddpkit.strategies.gradient_parts`). An optimizer that works on each
element by itself makes of the same bits the same ones, whichever part it is given. The norm of the
gradients has the bits of whole ones (:mod:`ddpkit.strategies.whole_norm`).

On one process nothing is divided: that is :class:`~ddpkit.strategies.virtual_ranks.VirtualRanks`,
which refuses what would be refused on several.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import local_part
from ddpkit.compat import is_compiled
from ddpkit.distributed import get_world_size
from ddpkit.errors import ConfigError
from ddpkit.strategies.base import asks_for_shards
from ddpkit.strategies.entries import (
    broadcast_from_main,
    refuse_shared_parameters,
    refuse_wrapped,
)
from ddpkit.strategies.fsdp import FSDP, require_elementwise
from ddpkit.strategies.gradient_parts import GradientParts
from ddpkit.strategies.optimizer_draws import refuse_draws
from ddpkit.strategies.option_refusals import refuse_with
from ddpkit.strategies.rare_questions import NO_CONTEXT
from ddpkit.strategies.virtual_ranks import MISUSED, VirtualRanks
from ddpkit.strategies.whole_norm import norm_of_parts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun
    from ddpkit.training import Accumulation, Progress, Window

TOGETHER = "virtual_ranks with strategy=fsdp"
PIECES = (
    "torch compiles a module that is gathered in other pieces than a whole one, and what stands in "
    "one piece is rounded together"
)
COMPILED = (
    "virtual_ranks with strategy='fsdp' does not work with modules[{!r}], of which a part is "
    "compiled: {}. Do not compile it, or use strategy=zero1."
)
NOT_WITH = {
    "fsdp_param_dtype=bf16": (
        "the other strategies have no such rounding of weights (use --precision=bf16)"
    ),
    "fsdp_cpu_offload": "an optimizer has other bits on a CPU than on a GPU",
    "fsdp_whole_gradients": "the gradients of each shard are divided by themselves",
    "find_unused_parameters": "all processes gather a block together, so each must use it",
    "skip_nonfinite_grads": "each process sees a part of a gradient only",
    # the compiler leaves out FSDP2's hooks, and so begins a new graph at each block
    **dict.fromkeys(("compile", "compile_module_keys", "compile_blocks"), PIECES),
}
OLD_TORCH = (
    "virtual_ranks with strategy='fsdp' needs a torch whose FSDP2 takes a reduce-scatter of one's "
    "own (FSDPModule.set_custom_reduce_scatter), and this is {}. Use a newer torch, or "
    "strategy=zero1."
)
DRAWS = (
    "virtual_ranks with strategy='fsdp' does not work with the optimizer {!r}, {}: it draws random "
    "numbers in its step, for the parts that a process has. Use one that draws none, such as "
    "torch.optim.AdamW, or --strategy=single."
)
FUSED = (
    "virtual_ranks with strategy='fsdp': the optimizer {!r}, {}, has fused=True. On a CPU its "
    "kernels round the last numbers of a part otherwise than the others, so that bits would follow "
    "from where a parameter is divided. Leave fused out, or use strategy=zero1."
)
TWO_DTYPES = (
    "virtual_ranks with strategy='fsdp': trained parameters have several dtypes ({}), or gradients "
    "of another dtype than theirs. Their norm would have other bits than that of whole gradients. "
    "Use one dtype, or strategy=zero1."
)


class VirtualFSDP(VirtualRanks):
    """``V`` virtual ranks, with parameters, gradients and optimizers' state divided over the
    processes.

    Ranks: collective.

    Example:
        >>> VirtualFSDP().in_turns
        True
    """

    name = "virtual ranks, fully_shard (FSDP2)"
    in_turns = True
    unrepeatable = FSDP.unrepeatable
    unauditable = (
        "where no process has the whole gradient of a shard, and none can compute one alone: use "
        "strategy=zero1, or leave the strategy out"
    )

    def check(
        self,
        options: RunOptions,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Refuse also what has other bits where weights are divided.

        Raises:
            ConfigError: naming the options.
        """
        super().check(options, has_own_fit_batch=has_own_fit_batch)
        refuse_with(TOGETHER, options, NOT_WITH)

    def bind(
        self,
        options: RunOptions,
        accumulation: Accumulation,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Take the options, before anything is divided."""
        self._is_divided = get_world_size() > 1
        self._blocks = FSDP()
        self._blocks.bind(
            options,
            accumulation,
            has_own_fit_batch=has_own_fit_batch,
        )
        self._gradients = GradientParts(get_world_size(), TOGETHER)
        super().bind(
            options,
            accumulation,
            has_own_fit_batch=has_own_fit_batch,
        )
        if self._is_divided:
            self.norm_of_parts = norm_of_parts

    def is_distributed(self) -> bool:
        """Say whether blocks are gathered in a step."""
        return self._is_divided

    # ------------------------------------------------------------------ dividing

    def place(
        self,
        modules: Mapping[str, Any],
        device: str,
    ) -> nn.ModuleDict:
        """Move modules to the device; what is on the meta device stays there until it is
        divided.
        """
        if self._is_divided:
            return self._blocks.place(modules, device)
        return super().place(modules, device)

    def divided_modules(self) -> Sequence[nn.Module]:
        """Return the entries that are divided so far."""
        return self._blocks.divided_modules()

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Give every rank the values of rank 0, and divide every entry that has parameters.

        Raises:
            ConfigError: an entry is wrapped or divided already, or two share a parameter; dtypes
                differ; a part is compiled; torch cannot do it.
        """
        refuse_shared_parameters(modules)
        self._require_one_dtype(modules)
        self._require_not_compiled(modules)
        if not self._is_divided:
            super().wrap(modules)
            return
        for name, module in modules.items():
            self._require_additive(name, module)
        roots = self._blocks.divided_modules()
        known = len(self._blocks.blocks)
        for name, module in modules.items():
            if all(module is not root for root in roots):
                refuse_wrapped(
                    name,
                    module,
                    TOGETHER,
                )
                broadcast_from_main(module, self.device)
                self._blocks.divide(name, module)
        for block in self._blocks.blocks[known:]:
            if not hasattr(block, "set_custom_reduce_scatter"):
                raise ConfigError(OLD_TORCH.format(torch.__version__))
            # sums, and not averages: the losses are weighed for all shards together
            block.set_custom_reduce_scatter(self._gradients)
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)
        self.begin_epoch(modules)

    def _require_one_dtype(self, modules: nn.Module) -> None:
        trained = [parameter for parameter in modules.parameters() if parameter.requires_grad]
        dtypes = {parameter.dtype for parameter in trained}
        # torch 2.8 has none
        others = {getattr(parameter, "grad_dtype", None) for parameter in trained} - {None}
        if len(dtypes | others) > 1:
            raise ConfigError(TWO_DTYPES.format(", ".join(sorted(map(str, dtypes | others)))))

    def _require_not_compiled(self, modules: nn.ModuleDict) -> None:
        for name, module in modules.items():
            # by the recipe itself: options are refused before
            if any(map(is_compiled, module.modules())):
                raise ConfigError(COMPILED.format(name, PIECES))

    def begin_epoch(self, modules: nn.ModuleDict) -> None:
        """Divide what a recipe's own forward pass has left whole; take note of the parameters and
        buffers.
        """
        self._blocks.reshard()
        super().begin_epoch(modules)

    def prepare_optimizers(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        """Refuse optimizers that do not step each element by itself, on one process, too.

        Raises:
            ConfigError: an optimizer has parameters that are in no module or are not divided, or
                needs whole ones.
        """
        super().prepare_optimizers(modules, optimizers)
        for name, optimizer in optimizers.items():
            require_elementwise(name, optimizer)
            is_fused = any(group.get("fused") for group in optimizer.param_groups)
            if is_fused and self.device.startswith("cpu"):
                raise ConfigError(FUSED.format(name, type(optimizer).__name__))
            refuse_draws(optimizer, DRAWS.format(name, type(optimizer).__name__))
        if self._is_divided:
            self._blocks.prepare_optimizers(modules, optimizers)

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return the rows of virtual ranks, and what each process holds."""
        rows = super().startup_rows(modules)
        if not self._is_divided:
            return rows
        holds = (
            f"each process holds 1/{get_world_size()} of the weights, in "
            f"{len(self._blocks.blocks)} block(s) (fsdp)"
        )
        return {**rows, "strategy": f"{rows['strategy']}, {holds}"}

    def rank_memory(self, run: RehearsedRun) -> RankMemory:
        """Return the memory as under FSDP2, with this rank's parts of the gradients of earlier
        shards.

        Raises:
            ConfigError: the virtual ranks cannot be divided over so many processes.
        """
        if run.processes == 1:
            return super().rank_memory(run)
        number = run.options["virtual_ranks"]
        if number % run.processes:
            raise ConfigError(f"{number} virtual ranks cannot be divided over them")
        divided = FSDP().rank_memory(run)
        # subtrees of the tree, or each shard where it has several batches in a step
        kept = math.ceil(math.log2(number)) if run.micro_batches == 1 else number
        before = kept * divided.gradients
        return dataclasses.replace(
            divided,
            exchange=divided.exchange + before,
            after_backward=divided.after_backward + before,
            keeps_gradients=False,
        )

    # ------------------------------------------------------------------ a step

    def begin_pass(self, progress: Progress) -> None:
        """Note what tells whether the losses of a window are counted."""
        self._blocks.begin_pass(progress)

    def end_pass(self, modules: nn.ModuleDict) -> None:
        """Compare, at the end of a training pass, the blocks that the ranks have used.

        Raises:
            RankMismatchError: two ranks used different blocks, or another order.
        """
        if self._is_divided:
            self._blocks.end_pass(modules)

    def backward_pass(
        self,
        modules: nn.Module,
        *,
        closes: bool,
        counts: bool,
    ) -> AbstractContextManager[None]:
        """Return a context in which the gradients of a shard are divided, and taken after it."""
        context = super().backward_pass(
            modules,
            closes=closes,
            counts=counts,
        )
        if not self._is_divided:
            return context
        divided = self._blocks.backward_pass(
            modules,
            closes=closes,
            counts=counts,
        )
        return self._taking(divided)

    def without_backward(
        self,
        modules: nn.ModuleDict,
        *,
        closes: bool,
        counts: bool = True,
        retain_graph: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in the place of a backward pass: the other ranks gather weights in
        theirs.

        Raises:
            BatchError: the batch has called no module with gradients; or its loss is a mean.
        """
        if not self._is_divided:
            return NO_CONTEXT
        return self._taking(
            self._blocks.without_backward(
                modules,
                closes=closes,
                counts=counts,
                retain_graph=retain_graph,
            )
        )

    @contextlib.contextmanager
    def _taking(self, passing: AbstractContextManager[None]) -> Iterator[None]:
        self._require_unchanged()  # since an earlier pass of the same batch
        for parameter in self._parameters:
            parameter.grad = None
        self._gradients.begin_pass(
            self._shard,
            is_apart=self.has_own_fit_batch or not self._adds_at_once,
        )
        with passing:
            yield
        # shards that use other parameters than the other ranks' have mixed their gradients
        self._blocks.note_gradients(self._parameters)
        self._gradients.take(self._parameters)
        # what these are is known to self._gradients
        if self._is_strict:
            self._noted = []

    def _require_unchanged(self) -> None:
        if not self._is_divided:
            super()._require_unchanged()
        elif self._noted is not None and self._gradients.are_changed(self._parameters):
            raise ConfigError(
                MISUSED.format(self.virtual_ranks, "changed gradients before optimizers_step()")
            )
        self._noted = None

    def _take_shard(self, window: Window) -> None:
        super()._take_shard(window)
        if self._is_divided:
            self._gradients.end_turn(
                self._shard,
                len(self._parameters),
                is_whole=self._adds_at_once,
            )

    def _summed_at_the_end(self, gradients: list[Any]) -> list[Any]:
        return [] if self._is_divided else gradients

    def _give_gradients(self, sums: list[Any]) -> None:
        if not self._is_divided:
            super()._give_gradients(sums)
            return
        pairs = zip(
            self._parameters,
            self._gradients.total(),
            strict=True,
        )
        for parameter, total in pairs:
            parameter.grad = None if total is None else _divided_like(parameter, total)

    def finish_gradients(self, optimizers: Collection[Any] = ()) -> None:
        """Add up the gradients of all shards; divide what a forward pass without a backward pass
        has left whole.

        Raises:
            ConfigError: the last shard is not computed yet; or not by ``self.backward``.
            RankMismatchError: the ranks have used other blocks; looked at in the first steps.
        """
        was_added = self._is_added
        super().finish_gradients(optimizers)
        if self._is_divided and self._is_added and not was_added:
            self._blocks.finish_gradients(optimizers)

    def sent_bytes(self, parameters: Iterable[torch.Tensor]) -> float:
        """Return the bytes of all gradients of every shard, and of the parts whose norm is
        taken.
        """
        whole = super().sent_bytes(parameters)
        return self.shards * whole + whole / get_world_size()

    # ------------------------------------------------------------------ evaluation and checkpoints

    def evaluating(self, length: int | None) -> AbstractContextManager[None]:
        """Return a context for an evaluation, which keeps the blocks whole if the ranks' forward
        passes may differ.
        """
        return self._blocks.evaluating(length) if self._is_divided else NO_CONTEXT

    def writes_shards(self) -> bool:
        """Say whether the options ask for shards, and the ranks share a folder."""
        return asks_for_shards(self)

    def divided_states(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take the states apart that are divided, or gather them."""
        self._blocks.gathers_states = self.gathers_states
        return self._blocks.divided_states(objects) if self._is_divided else {}


def _divided_like(parameter: Any, part: torch.Tensor) -> Any:
    """Return this rank's part of a gradient as a tensor that is divided as its parameter is."""
    from torch.distributed.tensor import DTensor  # is loaded: the parameter is one

    return DTensor.from_local(
        part.view(local_part(parameter).shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
