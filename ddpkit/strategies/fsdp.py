"""FSDP2, ``torch.distributed.fsdp.fully_shard``: each rank holds a part of every weight, gradient
and optimizer state.

The parameters of a *block* are gathered on all ranks for its forward pass, and again for its
backward pass, and freed after each. Its gradients are averaged over the ranks and divided in one
go. Class and names of the modules stay.

Source: what a block gathers, and when, was read in ``torch/distributed/fsdp/_fully_shard`` of torch
2.13. A block that is not divided again after a forward pass without a backward pass would go on
with old weights after the next optimizer step, so :meth:`FSDP.finish_gradients` divides all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ddpkit.base import is_sharded
from ddpkit.checkpointing import sharded_states, whole_states
from ddpkit.compat import tell_waits_of_fsdp
from ddpkit.distributed import exchange, get_world_size, require_all_ranks
from ddpkit.errors import BatchError, ConfigError, RankMismatchError
from ddpkit.logger import get_logger
from ddpkit.optim import parameters_of
from ddpkit.strategies.base import Strategy, WholeState, asks_for_shards, removing_hooks
from ddpkit.strategies.batch_norm_layers import batch_norm_row, has_moving_buffers
from ddpkit.strategies.batch_outputs import go_backwards_from, with_graph
from ddpkit.strategies.entries import (
    broadcast_from_main,
    modules_on_device,
    refuse_shared_parameters,
    refuse_wrapped,
)
from ddpkit.strategies.meta_modules import give_values, is_on_meta
from ddpkit.strategies.names import OF_DDP
from ddpkit.strategies.option_refusals import ROUNDED, refuse_with
from ddpkit.strategies.rank_memory import bytes_in, divided_memory
from ddpkit.strategies.rare_questions import NO_CONTEXT, bytes_of
from ddpkit.strategies.sending import send_from_main
from ddpkit.strategies.unwrapped_buffers import UnwrappedBuffers
from ddpkit.syncbn import convert_sync_batchnorm
from ddpkit.training import Accumulation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun

logger = get_logger(__name__)

NOT_WITH = {
    **OF_DDP,
    "sync_batchnorm=False": (
        "each process would have batch statistics of its own, and only DDP sends buffers from rank "
        "0 (use --strategy=ddp)"
    ),
    "find_unused_parameters": "all ranks gather a block together, so each must use it",
    "skip_nonfinite_grads": "each rank sees a part of a gradient only",
    "precision=fp16": "the range of fp16 needs a scale (use bf16)",
}
FIRST_STEPS = 3  # the ranks compare the blocks that they have used after each of these
OTHER_BLOCKS = (
    "strategy='fsdp': the ranks have not used the same blocks in the same order, or not the same "
    "parameters. Weights of a block are gathered, and its gradients added, at once, so that the "
    "ranks have mixed them. The steps since the last checkpoint may be wrong; they are not saved. "
    "Choose what a batch uses in the same way on all ranks (a torch.Generator with the same "
    "seed); or use --strategy=ddp or zero1 with --find_unused_parameters, and put the "
    "alternatives into one entry of modules."
)
WHOLE_MATRICES = {"LBFGS", "Muon", "Adafactor", "Rprop"}  # by name: an older torch has fewer
CANNOT = (
    "strategy='fsdp' does not work with the optimizer {!r}, {}: each rank would step its part of "
    "a parameter by other numbers than the whole, or torch fails. Use one that works on each "
    "element by itself, such as torch.optim.AdamW; or --strategy=ddp; --strategy=zero1 works too, "
    "except with LBFGS."
)
WITHOUT_GRAPH = (
    "strategy='fsdp': the loss of a batch depends on no parameter, and in a backward pass all "
    "ranks gather weights and add gradients up together. Return a zero that depends on what the "
    "modules have computed, 0.0 * outputs.sum(). Or return None, if the other batches return "
    "(loss_sum, count). Or use --strategy=zero1 or ddp."
)
NOT_CALLED = (
    "strategy='fsdp': the loss of a batch depends on no parameter, and the batch has called no "
    "entry of modules with gradients. In a backward pass all ranks gather weights and add "
    "gradients up together. Call the modules in every batch, or use --strategy=zero1 or ddp."
)


def _owners(module: nn.Module) -> Counter[int]:
    """Count in how many parts of a module each parameter is, by its id."""
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    return Counter(id(parameter) for part in parts for parameter in part.parameters(recurse=False))


class _BlockBytes(NamedTuple):
    """The bytes of a block while it is whole: its weights, and its gradients with what divides
    them.
    """

    weights: float
    reduced: float


def _share(tensor: torch.Tensor, processes: int) -> float:
    """Return which part of a tensor the rank with the most of it holds: rows are divided."""
    if not tensor.dim() or not tensor.shape[0]:
        return 1.0
    rows = tensor.shape[0]
    return -(-rows // processes) / rows


def _send_buffers(module: nn.Module, _: Any) -> None:
    """Give all ranks the buffers of rank 0 before a training forward pass, as DDP does where they
    move.
    """
    if module.training and torch.is_grad_enabled():
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer.detach(), src=0)


def require_elementwise(name: str, optimizer: Any) -> None:
    """Refuse an optimizer that is known to need whole parameters.

    Args:
        name: of the optimizer, for messages.
        optimizer: of a recipe.

    Raises:
        ConfigError: it needs whole ones.

    Ranks: local.
    """
    if not WHOLE_MATRICES.isdisjoint(base.__name__ for base in type(optimizer).__mro__):
        raise ConfigError(CANNOT.format(name, type(optimizer).__name__))


class FSDP(Strategy):
    """Several processes: ``fully_shard`` on every entry with parameters, and on blocks inside of
    it.

    Args:
        options: of the run; those with ``fsdp_`` in their name are read here.

    Ranks: collective.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> FSDP(RunOptions(device="cpu")).name
        'fully_shard (FSDP2)'
    """

    name = "fully_shard (FSDP2)"
    label = "fsdp"
    unrepeatable = (
        "which sends weights and gradients inside of the passes, where a process that has run out "
        "of memory leaves the others waiting: find a --micro_batch_size that fits by hand, with "
        "--activation_checkpointing or --fsdp_cpu_offload for a larger one"
    )

    def __init__(self, options: RunOptions | None = None) -> None:
        if options is not None:
            self.bind(
                options,
                Accumulation(options),
                has_own_fit_batch=False,
            )
        self.roots: list[Any] = []
        self.blocks: list[Any] = []  # the roots, too
        self._sending: list[nn.Module] = []  # roots whose buffers move on each rank by itself
        self._called = set[int]()  # blocks, by their places in that list
        # a number that follows from the order of the calls; optimizer steps looked at
        self._order = self._compared = 0
        self._is_noting = True
        self._outputs: list[torch.Tensor] = []  # of entries, since the last backward pass
        self._progress: Any = None
        # what autograd computes gradients of: whole parameters
        self._gathered: dict[int, nn.Parameter] = {}

    def bind(
        self,
        options: RunOptions,
        accumulation: Accumulation,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Take the options, and with them the device whose buffers are sent."""
        super().bind(options, accumulation, has_own_fit_batch=has_own_fit_batch)
        self._unwrapped = UnwrappedBuffers(self.device)

    def check(
        self,
        options: RunOptions,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Refuse what cannot work where each rank has a part of the weights.

        Raises:
            ConfigError: naming the options.
        """
        if has_own_fit_batch:
            refuse_with(
                "a fit_batch of the recipe",
                options,
                {
                    "fsdp_whole_gradients": (
                        "it may step whenever it likes, and gradients are exchanged only in the "
                        "last batch of a step"
                    )
                },
            )
        refuse_with(
            "strategy=fsdp",
            options,
            NOT_WITH,
        )
        if options.fsdp_param_dtype == "bf16":
            refuse_with(
                "strategy=fsdp fsdp_param_dtype=bf16",
                options,
                ROUNDED,
            )

    # ------------------------------------------------------------------ dividing

    def place(
        self,
        modules: Mapping[str, Any],
        device: str,
    ) -> nn.ModuleDict:
        """Move modules to the device. What is on the meta device stays there until it is divided:
        no rank has to hold all of it before.
        """
        return modules_on_device(
            modules,
            device,
            keeps_meta=True,
        )

    def divided_modules(self) -> list[Any]:
        """Return the entries that are divided so far."""
        return self.roots

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Give every rank the values of rank 0, convert BatchNorm, and divide every entry that has
        parameters.

        Raises:
            ConfigError: an entry is wrapped or divided already, or two share a parameter.
        """
        refuse_shared_parameters(modules)
        for name in [
            name
            for name, module in modules.items()
            if all(module is not root for root in self.roots)
        ]:
            refuse_wrapped(
                name,
                modules[name],
                "strategy='fsdp'",
            )
            broadcast_from_main(modules[name], self.device)
            modules[name] = convert_sync_batchnorm(modules[name])
            self._follow_buffers(modules[name])
            self.divide(name, modules[name])
        self._follow_unwrapped(modules)

    def _follow_buffers(self, module: nn.Module) -> None:
        if next(module.parameters(), None) is not None and has_moving_buffers(module):
            self._sending.append(module)
            module.register_forward_pre_hook(_send_buffers)

    def divide(self, name: str, module: nn.Module) -> None:
        """Divide an entry that has parameters. What is on the meta device gets the values of
        rank 0.
        """
        if next(module.parameters(), None) is not None:
            self._divide(name, module)
        elif is_on_meta(module):
            self._give_values(name, module)

    def _follow_unwrapped(self, modules: nn.ModuleDict) -> None:
        self._unwrapped.follow(
            module for module in modules.values() if next(module.parameters(), None) is None
        )

    def _give_values(
        self,
        name: str,
        module: nn.Module,
    ) -> None:
        """Give tensors on the meta device the values of rank 0, by blocks: no rank holds the whole
        model.
        """
        give_values(
            name,
            module,
            self.device,
        )
        broadcast_from_main(module, self.device)

    def _divide(
        self,
        name: str,
        module: nn.Module,
    ) -> None:
        # Not at the top: it changes the filters of warnings.
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options = self.options
        blocks = self._chosen_blocks(name, module)
        from_meta = is_on_meta(module)
        kind = torch.device(self.device).type
        policy: dict[str, Any] = {
            "mesh": torch.distributed.init_device_mesh(kind, (get_world_size(),)),
            "reshard_after_forward": options.fsdp_reshard_after_forward,
        }
        if options.fsdp_param_dtype != "own":
            policy["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
            )
        if options.fsdp_cpu_offload:
            policy["offload_policy"] = CPUOffloadPolicy(pin_memory=kind != "cpu")
        paths = {id(part): path for path, part in module.named_modules()}
        parts: list[Any] = [*blocks, module]
        for block in parts:
            path = f"{name}.{paths[id(block)]}".removesuffix(".")
            if from_meta:
                self._give_values(path, block)
            fully_shard(block, **policy)
            if kind == "cpu":  # a GPU's collectives wait in streams of their own
                tell_waits_of_fsdp(block)
            # before torch's own hook, which gathers
            note = functools.partial(
                self._note_call,
                len(self.blocks),
                path,
            )
            block.register_forward_pre_hook(torch.compiler.disable(note), prepend=True)  # type: ignore[no-untyped-call]
            self.blocks.append(block)
        self.roots.append(module)
        module.register_forward_hook(torch.compiler.disable(self._note_output))  # type: ignore[no-untyped-call]
        # Torch makes the whole parameters with the first gathering, and keeps the objects: hooks on
        # gradients must be on them, as autograd knows no others.
        for block in parts:
            block.unshard()
            self._gathered |= {
                id(parameter): parameter
                for parameter in block.parameters()
                if not is_sharded(parameter)
            }
            block.reshard()
        logger.info(
            "modules[%r] is divided over %d ranks, in %d blocks.",
            name,
            get_world_size(),
            len(parts),
        )

    def _chosen_blocks(
        self,
        name: str,
        module: nn.Module,
    ) -> list[nn.Module]:
        """Return the parts of a module that are gathered by themselves, inner ones first."""
        names = set(self.options.fsdp_blocks or ())
        least = self.options.fsdp_min_parameters
        everywhere = _owners(module)
        taken = set[int]()
        blocks = []
        # a part comes after all that is in it
        for path, part in reversed(list(module.named_modules())):
            free = [weight for weight in part.parameters() if id(weight) not in taken]
            own = {id(weight): weight.numel() for weight in free}
            is_large = next(part.children(), None) is not None and sum(own.values()) >= least
            is_wanted = type(part).__name__ in names if names else is_large
            if (
                part is module
                or not own
                or not is_wanted
                or type(part).forward is nn.Module.forward
            ):
                continue
            if all(everywhere[parameter] == number for parameter, number in _owners(part).items()):
                taken |= own.keys()
                blocks.append(part)
            elif names:
                raise ConfigError(
                    f"fsdp_blocks={sorted(names)}: {path} of modules[{name!r}] shares a parameter "
                    "with a part outside of it. Name a class that contains both, or leave this "
                    "one out."
                )
        return blocks

    def rank_memory(self, run: RehearsedRun) -> RankMemory:
        """Return the memory of a rank's parts, and of the blocks that are gathered at a time."""
        self.options = run.options
        divided = divided_memory(run, lambda tensor: _share(tensor, run.processes))
        gathered = [
            self._gathered_sizes(name, module, run.gradients)
            for name, module in run.modules.items()
        ]
        roots = sum(sizes[-1].weights for sizes in gathered)
        inner = max((size.weights for sizes in gathered for size in sizes[:-1]), default=0.0)
        everything = sum(size.weights for sizes in gathered for size in sizes)
        # an entry stays whole while its blocks compute; a block is gathered in one piece and copied
        # into its parameters, while the block before it is still whole
        exchange = max(2 * roots, roots + 3 * inner)
        if not run.options.fsdp_reshard_after_forward:
            exchange = everything + max(roots, inner)
        last = max((sizes[-1].reduced for sizes in gathered), default=0.0)
        block = max((size.reduced for sizes in gathered for size in sizes[:-1]), default=0.0)
        whole = sum(run.gradients.values()) if run.options.fsdp_whole_gradients else 0.0
        whole *= run.micro_batches > 1
        if run.options.fsdp_cpu_offload:
            divided = dataclasses.replace(divided, weights=0.0, gradients=0.0, optimizer=0.0)
        return dataclasses.replace(
            divided,
            exchange=exchange + whole,
            after_backward=max(last, roots + 2 * inner + block) + whole,
            in_step=0.0,
        )

    def _gathered_sizes(
        self,
        name: str,
        module: nn.Module,
        gradients: Mapping[torch.Tensor, int],
    ) -> list[_BlockBytes]:
        """Return what each block of an entry takes while it is whole; the entry comes last."""
        taken = set[int]()
        found = []
        is_half = self.options.fsdp_param_dtype != "own"
        for block in (*self._chosen_blocks(name, module), module):
            own = [weight for weight in block.parameters() if id(weight) not in taken]
            taken |= {id(weight) for weight in own}
            weights = sum(weight.numel() * 2.0 if is_half else bytes_in(weight) for weight in own)
            reduced = sum(gradients.get(weight, 0) for weight in own)
            # whole gradients, and a copy of them in the order in which they are divided
            found.append(_BlockBytes(weights, reduced * (1.5 if is_half else 2.0)))
        return found

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows on the blocks, and on batch statistics."""
        holds = (
            f"fsdp: each process holds 1/{get_world_size()} of the weights, in "
            f"{len(self.blocks)} block(s)"
        )
        return {
            "strategy": holds,
            "batch norm": batch_norm_row(modules, self.options.sync_batchnorm),
        }

    def begin_epoch(self, modules: nn.ModuleDict) -> None:
        """Reshard, before an epoch, the blocks that a recipe's own forward pass has left
        unsharded.
        """
        self.reshard()
        self._follow_unwrapped(modules)

    def reshard(self) -> None:
        """Divide again what a forward pass has left whole."""
        for block in self.blocks:
            block.reshard()

    # ----------------------------------------------------------------- the same blocks on all ranks

    def _note_call(
        self,
        number: int,
        path: str,
        *_: Any,
    ) -> None:
        if not self._is_noting:
            return
        require_all_ranks(f"the forward pass of {path} (strategy='fsdp')")
        # only a call that gathers: without resharding, the first of a block in a step
        if self.options.fsdp_reshard_after_forward or number not in self._called:
            self._order = hash((self._order, number))
            self._called.add(number)

    def _require_same_order(self, orders: Collection[Any]) -> None:
        """Raise an error on all ranks if they used different blocks, or another order.

        Args:
            orders: of all ranks.

        Raises:
            RankMismatchError: two ranks differ in a block or in the order.
        """
        if len(set(orders)) > 1:
            raise RankMismatchError(OTHER_BLOCKS)

    def end_pass(self, modules: nn.ModuleDict) -> None:
        """Compare, at the end of a training pass, the blocks that the ranks have used.

        Raises:
            RankMismatchError: two ranks used different blocks, or another order.
        """
        self._require_same_order(exchange(self._order, site="blocks"))

    def prepare_optimizers(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        """Refuse optimizers with parameters that are not divided, and optimizers that need whole
        parameters.

        Raises:
            ConfigError: an optimizer has undivided parameters, or needs whole ones.

        Source: each optimizer of torch 2.13 was compared with one process. ``Muon`` steps otherwise
        without an error; the others fail.
        """
        for name, optimizer in optimizers.items():
            require_elementwise(name, optimizer)
            if not all(
                is_sharded(parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                raise ConfigError(
                    f"strategy='fsdp': the optimizer {name!r} has parameters that are not in "
                    "modules, or that were taken before they were divided. Put their module into "
                    "modules, and make the optimizer in init_optimizers."
                )

    # ------------------------------------------------------------------ gradients

    def begin_pass(self, progress: Any) -> None:
        """Note what tells whether the losses of a window are counted."""
        self._progress = progress

    @contextlib.contextmanager
    def _gradients_stay(self) -> Iterator[None]:
        for root in self.roots:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for root in self.roots:
                root.set_requires_gradient_sync(True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which whole gradients are accumulated, if ``fsdp_whole_gradients``;
        else an empty one.
        """
        return self._gradients_stay() if self.options.fsdp_whole_gradients else NO_CONTEXT

    def backward_pass(
        self,
        modules: nn.Module,
        *,
        closes: bool,
        counts: bool,
    ) -> AbstractContextManager[None]:
        """Return a context for one backward pass of a window; where it does not count, all
        gradients become zero.
        """
        self._outputs = []
        # the pass itself cannot be left out: the other ranks gather and reduce in theirs
        trained: list[Any] = (
            []
            if counts
            else [parameter for parameter in self._gathered.values() if parameter.requires_grad]
        )
        return (
            removing_hooks([parameter.register_hook(torch.zeros_like) for parameter in trained])
            if trained
            else NO_CONTEXT
        )

    def without_backward(
        self,
        modules: nn.ModuleDict,
        *,
        closes: bool,
        counts: bool = True,
        retain_graph: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in the place of a backward pass: the other ranks gather weights in
        theirs, and add gradients up. So this one goes backwards from what its modules have
        returned, with gradients of zero.

        Raises:
            BatchError: the batch has called no module with gradients; or its loss is a mean: where
                no rank has a loss, nothing would keep an optimizer from moving by weight decay.
        """
        if not self._outputs:
            raise BatchError(NOT_CALLED)
        if retain_graph:
            raise BatchError(WITHOUT_GRAPH)
        return self._backward_of_zeros(modules, closes=closes)

    @contextlib.contextmanager
    def _backward_of_zeros(
        self,
        modules: nn.Module,
        *,
        closes: bool,
    ) -> Iterator[None]:
        starts = self._outputs
        yield  # the loss is counted
        if self._progress is None or self._progress.window.counted is None:
            raise BatchError(WITHOUT_GRAPH)
        with self.backward_pass(
            modules,
            closes=closes,
            counts=False,
        ):
            go_backwards_from(starts)

    def _note_output(
        self,
        module: nn.Module,
        _: Any,
        output: Any,
    ) -> None:
        """Keep what an entry has returned until the next backward pass."""
        if module.training and torch.is_grad_enabled():
            self._outputs += with_graph(output)

    def note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note which parameters have a gradient, as ranks may use other layers of the same
        block.
        """
        self._order = hash((self._order, *[parameter.grad is None for parameter in parameters]))

    def finish_gradients(self, optimizers: Collection[Any] = ()) -> None:
        """Divide what a forward pass without a backward pass has left whole: an optimizer steps on
        the parts.

        Raises:
            RankMismatchError: the ranks have used other blocks; looked at in the first steps.
        """
        self.reshard()
        self.note_gradients(parameters_of(optimizers))
        # a comparison waits for all ranks: later it is made at the end of a pass and before a save
        if self._compared < FIRST_STEPS:
            self._compared += 1
            self._require_same_order(exchange(self._order, site="blocks"))
        if not self.options.fsdp_reshard_after_forward:
            self._called.clear()  # a second call in a step gathers nothing
        self._unwrapped.send()

    def leave_step_out(self) -> None:
        """Send buffers that move without a step, too, and that no forward pass sends."""
        self._unwrapped.send()

    def sent_bytes(self, parameters: Iterable[torch.Tensor]) -> float:
        """Return the bytes of all gradients."""
        return bytes_of(parameters)

    # ------------------------------------------------------------------ evaluation and checkpoints

    @contextlib.contextmanager
    def evaluating(self, length: int | None) -> Iterator[None]:
        """Return a context for an evaluation, which keeps the blocks whole if the ranks' forward
        passes may differ. Before it, every rank gets the buffers of rank 0, as the next training
        batch would do: what is evaluated is what a checkpoint holds.

        Args:
            length: number of batches of this rank, if each rank evaluates the same data; else None.
        """
        found = exchange((length, self._order), site="evaluating")
        self._require_same_order([order for _, order in found])
        send_from_main(buffer for module in self._sending for buffer in module.buffers())
        self._unwrapped.send_all()
        lengths = {name for name, _ in found}
        keeps_whole = None in lengths or len(lengths) > 1
        if keeps_whole:
            self._is_noting = False
            for root in self.roots:
                root.set_reshard_after_forward(False)
            for block in self.blocks:
                block.unshard()
        try:
            yield
        finally:
            self._is_noting = True
            self.reshard()
            for root in self.roots:
                root.set_reshard_after_forward(self.options.fsdp_reshard_after_forward)

    def writes_shards(self) -> bool:
        """Say whether the options ask for shards, and the ranks share a folder."""
        return asks_for_shards(self)

    def divided_states(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take the states apart that are divided; or, with ``ckpt_layout=whole``, gather them: on
        the other ranks than rank 0 each tensor is dropped at once.
        """
        self._require_same_order(exchange(self._order, site="blocks"))
        self.reshard()
        if self.writes_shards():
            return sharded_states(objects)
        return {name: WholeState(state) for name, state in whole_states(objects).items()}
