"""ZeRO-1: DDP where each rank keeps the optimizer state of a part of the parameters only.

Every rank has all weights and all gradients. A step updates on each rank the parameters that the
rank *owns*; then the owners send them to the others. The numbers are those of DDP to the last bit,
since an optimizer that works on each parameter by itself does not know which others it works on.

The optimizer stays the recipe's own object, with all its parameters in ``param_groups``:
schedulers, the gradient scaler, clipping and a recipe's attributes hold it. Only inside of its
``step`` the groups have the rank's own part.

Source: stage 1 of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020 (arXiv:1910.02054). How parameters are dealt out, the largest first to the
rank with the least, is as in ``torch.distributed.optim.ZeroRedundancyOptimizer``, which is not used
itself (decision 0019).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.optim import LBFGS, Optimizer

from ddpkit.base import (
    OWN_PART,
    map_named,
    map_values,
    reads_device,
    temporarily,
    waiting,
    waits_for_ranks,
)
from ddpkit.checkpointing import ShardedState
from ddpkit.comm import control_group
from ddpkit.device import widest_float
from ddpkit.distributed import exchange, get_world_size
from ddpkit.errors import ConfigError
from ddpkit.optim import parameters_of
from ddpkit.strategies.base import WholeState, asks_for_shards
from ddpkit.strategies.ddp import APART, DDP
from ddpkit.strategies.equal_groups import require_equal_groups
from ddpkit.strategies.rank_memory import bytes_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun
    from ddpkit.training import Accumulation

PACKED_BELOW = 1 << 20  # bytes: smaller parameters of an owner travel together

NOT_WHOLE = (
    "strategy='zero1': {}.state_dict() has a part of the state only, since each rank has its own. "
    "The Brain's checkpointer saves all of it: make the optimizer one of its recoverables."
)
NOT_BY_PARAMETER = (
    "is no torch.optim.Optimizer, has a state_dict of its own, or works on all parameters together."
)
CANNOT_DIVIDE = (
    "strategy='zero1' cannot divide the optimizer {!r}: {} {} Use one that steps each parameter "
    "by itself, such as torch.optim.AdamW; or leave --strategy=zero1 out."
)
NOT_AVERAGED = (
    "strategy='zero1': the gradients of the optimizer {!r} are not the same on all ranks, so that "
    "each parameter would follow one rank's data. DDP averages what is computed through "
    "self.modules, not through hparams or a module's inner parts. Call self.backward(loss) and "
    "self.optimizers_step(), which averages the rest, and not the optimizer's own step()."
)

MARK = "ddpkit_zero1"  # attribute of an optimizer that is divided already


def deal(parameters: Iterable[torch.Tensor], loads: list[int]) -> dict[torch.Tensor, int]:
    """Assign parameters to ranks, the largest first, each to the rank with the smallest total.

    Args:
        parameters: which no rank has yet.
        loads: elements that each rank has already; kept up to date.

    Returns:
        The rank of each.

    Example:
        >>> sizes = [torch.ones(4), torch.ones(3), torch.ones(2)]
        >>> list(deal(sizes, [0, 0]).values())
        [0, 1, 1]
    """
    owners = {}
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
        owner = loads.index(min(loads))
        owners[parameter] = owner
        loads[owner] += parameter.numel()
    return owners


def is_packed(parameter: torch.Tensor) -> bool:
    """Say whether a parameter travels together with others, in a buffer that is kept."""
    return not parameter.is_contiguous() or bytes_in(parameter) < PACKED_BELOW


def dealt_memory(
    whole: RankMemory,
    run: RehearsedRun,
) -> RankMemory:
    """Return the memory of the rank that owns the most of the optimizers' state.

    Args:
        whole: of a rank that owns all of it.
        run: that was rehearsed.
    """
    ranks = range(run.processes)
    loads = [0 for _ in ranks]
    owners: dict[torch.Tensor, int] = {}
    for optimizer in run.optimizers.values():
        trained = dict.fromkeys(parameters_of([optimizer]))
        owners |= deal([weight for weight in trained if weight not in owners], loads)
    states = [0.0 for _ in ranks]
    for parameter, value in run.states():
        states[owners[parameter]] += bytes_in(value)
    # as much as it steps does an optimizer allocate in its step
    stepped = [0.0 for _ in ranks]
    for parameter, size in run.gradients.items():
        stepped[owners.get(parameter, 0)] += size
    packed = sum(bytes_in(parameter) for parameter in owners if is_packed(parameter))
    return dataclasses.replace(
        whole,
        optimizer=max(states),
        exchange=whole.exchange + packed,
        after_backward=whole.after_backward + packed,
        in_step=whole.in_step + packed,
        step_share=max(stepped) / (sum(stepped) or 1.0),
    )


class DividedOptimizer:
    """Has each rank step its own part of an optimizer's parameters, and keep the state of that
    part.

    Args:
        name: of the optimizer, for messages.
        optimizer: is given hooks.
        loads: elements that each rank owns of all optimizers; kept up to date.

    Ranks: collective: its steps, and :meth:`whole`.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        loads: list[int],
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self._loads = loads
        self._rank = dist.get_rank()
        self._owners: dict[torch.Tensor, int] = {}
        self._is_gathering = False
        # ids of the parameters that the plan below is for, by group
        self._steps_of: list[list[int]] = []
        self._own: list[list[torch.Tensor]] = []
        # owner, buffer and parameters of each broadcast; without a buffer the parameter itself is
        # sent
        self._sent: list[tuple[int, torch.Tensor | None, list[torch.Tensor]]] = []
        # while a step hides the others' parameters
        self._groups: list[list[torch.Tensor]] | None = None
        self._is_compared = False
        parameters = parameters_of([self.optimizer])
        # frozen ones last: they have no state, and must not make the parts of the others uneven
        self._deal([parameter for parameter in parameters if parameter.requires_grad])
        self._deal(parameters)
        for parameter in [
            parameter for parameter in optimizer.state if not self._is_mine(parameter)
        ]:
            del optimizer.state[parameter]
        optimizer.register_step_pre_hook(self._show_own)
        optimizer.register_step_post_hook(self._send_own)
        vars(optimizer)[OWN_PART] = self.own_part
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self.own_part(state))
        optimizer.register_state_dict_pre_hook(self._refuse_part)

    # ------------------------------------------------------------------ who owns what

    def _is_mine(self, parameter: Any) -> bool:
        return self._owners.get(parameter, self._rank) == self._rank

    def _deal(self, parameters: Iterable[torch.Tensor]) -> None:
        """Assign unowned parameters to ranks."""
        new = [parameter for parameter in parameters if parameter not in self._owners]
        self._owners |= deal(new, self._loads)

    def _plan(self, groups: list[list[torch.Tensor]]) -> None:
        """Work out the parameters that this rank steps, and the buffers to broadcast."""
        trained = list(itertools.chain(*groups))
        self._deal(trained)
        self._own = [
            [parameter for parameter in group if self._is_mine(parameter)] for group in groups
        ]
        together: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for parameter in trained:
            key = (
                self._owners[parameter],
                parameter.dtype,
                parameter.device,
                0 if is_packed(parameter) else id(parameter),
            )
            together.setdefault(key, []).append(parameter)
        self._sent = []
        for (owner, dtype, device, alone), packed in together.items():
            size = sum(parameter.numel() for parameter in packed)
            buffer = (
                None
                if alone
                else torch.empty(
                    size,
                    dtype=dtype,
                    device=device,
                )
            )
            self._sent.append((owner, buffer, packed))

    # ------------------------------------------------------------------ a step

    def _show_own(self, *_: Any) -> None:
        self._show_all()  # after a step that failed
        self._groups = [group["params"] for group in self.optimizer.param_groups]
        trained = [
            [parameter for parameter in group if parameter.requires_grad] for group in self._groups
        ]
        ids = [list(map(id, group)) for group in trained]
        # a recipe may freeze parameters, or add a group, between steps
        if ids != self._steps_of:
            self._plan(trained)
            self._steps_of = ids
        if not self._is_compared:
            self._require_equal_gradients()
        for group, own in zip(
            self.optimizer.param_groups,
            self._own,
            strict=True,
        ):
            group["params"] = own

    def _show_all(self) -> None:
        for group, parameters in zip(
            self.optimizer.param_groups,
            self._groups or (),
            strict=False,
        ):
            group["params"] = parameters
        self._groups = None

    @torch.no_grad()
    @waits_for_ranks
    def _send_own(self, *_: Any) -> None:
        self._show_all()
        works = []
        for owner, buffer, packed in self._sent:
            if buffer is not None and owner == self._rank:
                torch.cat([parameter.flatten() for parameter in packed], out=buffer)
            works.append(
                dist.broadcast(
                    packed[0] if buffer is None else buffer,
                    src=owner,
                    async_op=True,
                )
            )
        for work, (owner, buffer, packed) in zip(
            works,
            self._sent,
            strict=True,
        ):
            with waiting():
                work.wait()
            if buffer is not None and owner != self._rank:
                for parameter, values in zip(
                    packed,
                    torch.split(buffer, [parameter.numel() for parameter in packed]),
                    strict=True,
                ):
                    parameter.copy_(values.view_as(parameter))
        if not self._is_compared:
            self._is_compared = True
            require_equal_groups(
                CANNOT_DIVIDE,
                self.name,
                self.optimizer,
            )

    @reads_device
    def _require_equal_gradients(self) -> None:
        """Refuse, in the first step, gradients that are not averages over the ranks: no weights
        would show it later.
        """
        gradients = [
            parameter.grad
            for parameter in parameters_of([self.optimizer])
            if parameter.grad is not None
        ]
        sizes = exchange(
            float(
                sum(
                    gradient.abs().sum(dtype=widest_float(gradient.device))
                    for gradient in gradients
                )
            ),
            MARK,
        )
        if max(sizes) - min(sizes) > APART * max(sizes):
            raise ConfigError(NOT_AVERAGED.format(self.name))

    # ------------------------------------------------------------------ checkpoints

    def own_part(
        self,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """Return only this rank's part of a whole state, before it is copied to the device.

        Args:
            state: its tensors may be in files.
        """
        numbers = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
        by_number = dict(
            zip(
                numbers,
                parameters_of([self.optimizer]),
                strict=False,
            )
        )
        own = {
            key: value for key, value in state["state"].items() if self._is_mine(by_number.get(key))
        }
        return {**state, "state": own}

    def _refuse_part(self, *_: Any) -> None:
        if not self._is_gathering:
            raise ConfigError(NOT_WHOLE.format(type(self.optimizer).__name__))

    def whole(self) -> WholeState:
        """Return the whole state on the main process, elsewhere a part of it.

        Ranks: collective. The other ranks send their parts, one after the other.
        """
        state = self._part()
        parts = self._collected(
            state["state"],
            lambda own: map_values(own, _on_the_cpu),
        )
        return WholeState({**state, "state": parts})

    def in_shards(self) -> ShardedState:
        """Return the state with this rank's part as a shard.

        Ranks: collective. The other ranks send what is in no shard, and the shapes of the rest.
        """
        state = self._part()
        rows: dict[str, torch.Tensor] = {}

        def without_values(name: str, value: Any) -> Any:
            if name in rows or not _has_rows(value):
                return _on_the_cpu(value)
            rows[name] = value
            return torch.empty(
                value.shape,
                dtype=value.dtype,
                device="meta",
            )

        own = map_named(state["state"], without_values, "state")
        parts = self._collected(own, lambda told: told)
        return ShardedState(
            {**state, "state": parts},
            rows,
            dict.fromkeys(rows, 0),  # each tensor is whole in one shard
            lambda: self.whole().state,
        )

    def _part(self) -> dict[str, Any]:
        """Return this rank's part of the state."""
        require_equal_groups(
            CANNOT_DIVIDE,
            self.name,
            self.optimizer,
        )
        with temporarily(self, _is_gathering=True):
            return self.optimizer.state_dict()

    def _collected(
        self,
        own: dict[Any, Any],
        prepare: Callable[[dict[Any, Any]], dict[Any, Any]],
    ) -> dict[Any, Any]:
        """Return what all ranks have of a state on the main process, elsewhere the rank's own.

        Collective. One rank after the other, so that the main process holds one part more than it
        keeps.
        """
        parts = own
        group = control_group()
        for source in range(1, dist.get_world_size()):
            if self._rank == source:
                dist.send_object_list(
                    [prepare(own)],
                    0,
                    group=group,
                )
            elif self._rank == 0:
                received: list[Any] = [None]
                dist.recv_object_list(
                    received,
                    source,
                    group=group,
                )
                parts = received[0] | parts
        return parts


def _on_the_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _has_rows(value: Any) -> bool:
    """Say whether a value goes into a shard: a file has no strides, and a number no rows."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.is_contiguous()
        and value.ndim > 0
        and value.numel() > 0
    )


class DividedOptimizers:
    """The optimizers of a run, each of which a rank steps a part of.

    Ranks: collective.

    Attributes:
        divided: one for each optimizer.
    """

    def __init__(self) -> None:
        self.divided: list[DividedOptimizer] = []
        self._loads = [0] * get_world_size()

    def divide(self, optimizers: Mapping[str, Any]) -> None:
        """Divide the state of optimizers over the ranks.

        Args:
            optimizers: by name.

        Raises:
            ConfigError: an optimizer updates all its parameters together, or keeps its state in its
                own way.
        """
        for name, optimizer in optimizers.items():
            require_divisible(name, optimizer)
            divided = vars(optimizer)[MARK] = vars(optimizer).get(MARK) or DividedOptimizer(
                name,
                optimizer,
                self._loads,
            )
            self.divided += [] if divided in self.divided else [divided]


def require_divisible(name: str, optimizer: Any) -> None:
    """Refuse an optimizer that is known to work on all its parameters together, or to keep its
    state in its own way.

    Args:
        name: of the optimizer, for messages.
        optimizer: of a recipe.

    Raises:
        ConfigError: it cannot be divided.

    Ranks: local.
    """
    kind = type(optimizer)
    is_torchs = isinstance(optimizer, Optimizer) and kind.state_dict is Optimizer.state_dict
    if (
        not is_torchs
        or isinstance(optimizer, LBFGS)
        or kind.load_state_dict is not Optimizer.load_state_dict
    ):
        raise ConfigError(
            CANNOT_DIVIDE.format(
                name,
                kind.__name__,
                NOT_BY_PARAMETER,
            )
        )


def states_of_divided(
    objects: Mapping[str, Any],
    *,
    in_shards: bool,
) -> dict[str, WholeState | ShardedState]:
    """Return the states of the divided optimizers among some objects.

    Args:
        objects: by name.
        in_shards: whether each rank writes its own part; else they are whole, on the CPU but for
            rank 0's own part.

    Ranks: collective.
    """
    found = {
        name: getattr(
            obj,
            MARK,
            None,
        )
        for name, obj in objects.items()
    }
    return {
        name: optimizer.in_shards() if in_shards else optimizer.whole()
        for name, optimizer in found.items()
        if optimizer is not None
    }


class Zero1(DDP):
    """DDP with the optimizers' state divided over the ranks. Takes what
    :class:`~ddpkit.strategies.ddp.DDP` takes.

    An optimizer must be torch's in this: a ``torch.optim.Optimizer`` that steps each parameter by
    itself and keeps its state in ``state``. A parameter is not divided: the rank with the largest
    one has its whole state.

    Ranks: collective.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> Zero1(RunOptions(device="cpu")).name
        'DistributedDataParallel, optimizer state divided (ZeRO-1)'
    """

    name = "DistributedDataParallel, optimizer state divided (ZeRO-1)"
    label = "zero1"
    holds = "zero1: each process holds the whole model, and a part of the optimizers' state"
    gathers_if_needed = True

    def bind(
        self,
        options: RunOptions,
        accumulation: Accumulation,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Take the options, before any optimizer is divided."""
        super().bind(
            options,
            accumulation,
            has_own_fit_batch=has_own_fit_batch,
        )
        self.optimizers = DividedOptimizers()

    def prepare_optimizers(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, Any],
    ) -> None:
        """Divide the state of optimizers over the ranks.

        Raises:
            ConfigError: an optimizer updates all its parameters together, or keeps its state in its
                own way.
        """
        super().prepare_optimizers(modules, optimizers)
        self.optimizers.divide(optimizers)

    def rank_memory(self, run: RehearsedRun) -> RankMemory:
        """Return the memory as under DDP, with the states that the rank with the most of them
        owns, and the buffers in which small parameters travel.
        """
        return dealt_memory(super().rank_memory(run), run)

    def writes_shards(self) -> bool:
        """Say whether the options ask for shards, and the ranks share a folder."""
        return asks_for_shards(self)

    def divided_states(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the states of the optimizers among some objects, in shards or whole."""
        return states_of_divided(objects, in_shards=self.writes_shards())
