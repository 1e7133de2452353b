"""The same bits on any number of processes: a step is computed as by ``V`` virtual ranks, whoever computes them.

Every batch is cut into the same ``V`` shards. A process works on ``V / world_size`` of them, one after another, each
with noise that belongs to the shard; their gradients are not summed up in the parameters, but taken away and added in
the order of one tree (:mod:`ddpkit.comm.tree_sum`). So the gradient of a step, and with it the weights, do not depend
on the number of processes. DDP takes no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit.comm import TreeSum, add_tensors, sum_over_ranks_in_order
from ddpkit.device import widest_float
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.errors import ConfigError
from ddpkit.seed import seed_streams
from ddpkit.strategies.base import NO_CONTEXT, Strategy
from ddpkit.strategies.modules import spread_from_main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from ddpkit.training import Feed, Progress, StreamFeed, Window

    Part = list[torch.Tensor | None]  # number of shards, count of the loss, moves of buffers, gradients

_NOISE = 0x5AAD  # what random numbers are for

INSIDE = (
    "virtual_ranks={0}: fit_batch called optimizers_step() in the middle of a step, or twice in one. A step of {0} "
    "shards takes several calls of fit_batch on each process: call it once, where self.should_step is true."
)
PAST = (
    "virtual_ranks={}: fit_batch called {} past the Brain: the gradients of the shards would not be added up in one "
    "order. Call self.backward(loss), and self.optimizers_step() where self.should_step is true."
)


class VirtualRanks(Strategy):
    """``V`` virtual ranks: every process computes the gradients of its shards, which are added up in one order.

    A buffer of a module that changes in a forward pass, such as the statistics of a BatchNorm, starts from the same
    value in every shard; the mean of what the shards make of it is its next value, once per optimizer step.

    Args:
        device: of this rank.
        number: ``V``, a multiple of the number of ranks.
        is_strict: whether a step that is not made through the Brain is an error, as where a recipe has its own
            ``fit_batch``.

    Attributes:
        shards: how many of them this process works on.

    Ranks: collective.

    Example:
        >>> VirtualRanks("cpu", 8).shards
        8
    """

    name = "virtual ranks"

    def __init__(self, device: str, number: int, *, is_strict: bool = False) -> None:
        self.device, self.shards = device, number // get_world_size()
        self.virtual_ranks: int = number
        self._is_strict = is_strict
        self._first = (get_rank() or 0) * self.shards
        self._parameters: list[nn.Parameter] = []
        self._buffers: dict[str, tuple[nn.Module, str]] = {}
        self._moving: set[str] | None = None  # names of buffers; None until the first step of an epoch has shown them
        self._window: Window | None = None
        self._shard, self._adds_at_once, self._dtype = 0, True, widest_float(device)
        self._begin_step()

    def _begin_step(self) -> None:
        self._tree = TreeSum(add_tensors)
        self._parts: dict[int, Part] = {}  # of this process's shards, where each has several batches in a step
        self._before: dict[str, torch.Tensor] = {}  # values of buffers at the beginning of the step
        self._count: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._is_added = False

    # ------------------------------------------------------------------ as a strategy

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Give every rank the values of rank 0, and see to it that the same computation gives the same bits.

        Raises:
            ConfigError: an entry is wrapped, or sharded, already.
        """
        for name, module in modules.items():
            is_wrapped = isinstance(module, (DistributedDataParallel, nn.DataParallel))
            if is_wrapped or any(hasattr(one, "device_mesh") for one in module.parameters()):
                raise ConfigError(
                    f"virtual_ranks={self.virtual_ranks}: modules[{name!r}] is wrapped or sharded already "
                    f"({type(module).__name__}). Give the module itself."
                )
            if get_world_size() > 1:
                spread_from_main(module, self.device)
        if self.device.startswith("cpu"):
            torch.set_num_threads(1)  # sums of several threads have other bits than those of one
        else:
            torch.use_deterministic_algorithms(True)
        self.follow(modules)

    def follow(self, modules: nn.ModuleDict) -> None:
        """Take note of what is trained in the coming epoch, and look anew at which buffers move."""
        self._parameters = [one for one in modules.parameters() if one.requires_grad]
        owners, saved = dict(modules.named_modules()), modules.state_dict(keep_vars=True)
        names = [name for name, _ in modules.named_buffers() if name in saved]
        self._buffers = {name: (owners[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names}
        self._moving = None
        self._begin_step()

    def adopt(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Refuse optimizers with parameters that are in no module.

        Raises:
            ConfigError: there is one.
        """
        known = {id(one) for one in self._parameters}
        for name, optimizer in optimizers.items():
            given = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
            if not known.issuperset(map(id, given)):
                raise ConfigError(
                    f"virtual_ranks={self.virtual_ranks}: the optimizer {name!r} has parameters that are not in "
                    "modules: their gradients would not be added up over the processes. Put their module into modules."
                )

    def feed(self, feed: Feed | StreamFeed, progress: Progress, seed: int) -> ShardFeed:
        """Return the feed, which seeds the noise of each shard and takes its gradient away after it."""
        return ShardFeed(feed, self, progress, seed)

    def backward_pass(self, modules: nn.Module, *, closes: bool, counts: bool) -> AbstractContextManager[None]:
        """Refuse a backward pass after the gradients of the step were added up."""
        if self._is_added:
            raise ConfigError(INSIDE.format(self.virtual_ranks))
        return NO_CONTEXT

    def start_average(self, count: torch.Tensor | float, device: str) -> Callable[[], torch.Tensor]:
        """Take the count of the shard that closes a step; return what adds up the step, and gives its count."""
        self._count = self._wide(count)

        def total() -> torch.Tensor:
            self.finish_gradients()
            return cast("torch.Tensor", self._total)

        return total

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Add up the gradients of all shards, once the last of a step is computed.

        Raises:
            ConfigError: it is not computed yet; or not by ``self.backward``.
        """
        window = self._window
        if window is None or self._is_added:
            return
        if not window.closes:
            raise ConfigError(INSIDE.format(self.virtual_ranks))
        self._take_shard(window)
        for shard, part in self._parts.items():
            self._tree.push(self._first + shard, part)
        moving = self._watched()
        wide = [torch.empty_like(self._before[name], dtype=self._dtype) for name in moving]
        like = [self._wide(0.0), self._wide(0.0), *wide, *self._parameters]
        number, self._total, *sums = sum_over_ranks_in_order(self._tree, self.virtual_ranks, like)
        for parameter, gradient in zip(self._parameters, sums[len(moving) :], strict=True):
            parameter.grad = gradient
        self._move_buffers(dict(zip(moving, sums, strict=False)), number)
        self._tree, self._parts, self._is_added = TreeSum(add_tensors), {}, True

    # ------------------------------------------------------------------ one shard

    def begin_shard(self, window: Window, number: int, per_step: int) -> int:
        """Note that a shard comes; return its number among those of all processes.

        Args:
            window: of the feed.
            number: of this process's batch in the epoch.
            per_step: such batches per optimizer step.
        """
        self._window, self._shard, self._adds_at_once = window, number % self.shards, per_step == self.shards
        if self._is_added:
            self._begin_step()
        if not self._before:
            self._before = {name: self._buffer(name).clone() for name in self._watched()}
        for name, before in self._before.items():
            self._buffer(name).copy_(before)
        return self._first + self._shard

    @torch.no_grad()
    def end_shard(self, window: Window) -> None:
        """Take a shard's gradient away; after the last one of a step, look whether they were added up.

        Raises:
            ConfigError: the step was made past the Brain.
        """
        if not window.closes:
            self._take_shard(window)
        elif not self._is_added:
            if self._is_strict:
                raise ConfigError(PAST.format(self.virtual_ranks, "optimizer.step(), or left a step out,"))
            self._begin_step()  # nobody wants the gradients: no optimizer steps

    def _take_shard(self, window: Window) -> None:
        gradients = [one.grad for one in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if any(one is not None for one in gradients) and not (window.is_weighed or window.counted is not None):
            raise ConfigError(PAST.format(self.virtual_ranks, "loss.backward()"))
        count, self._count = self._count, None
        if window.counted is not None and not window.closes:
            count, window.counted = self._wide(window.counted), 0.0
        watched = self._watched()
        moves = [self._buffer(name).to(self._dtype) - self._before[name].to(self._dtype) for name in watched]
        part: Part = [self._wide(1.0), count, *moves, *(None if one is None else one.contiguous() for one in gradients)]
        if not window.count:
            part = [None] * len(part)  # of a sample that is repeated to keep step
        if self._adds_at_once:
            self._tree.push(self._first + self._shard, part)
        else:
            known = self._parts.get(self._shard)
            self._parts[self._shard] = part if known is None else add_tensors(known, part)

    def _wide(self, number: torch.Tensor | float) -> torch.Tensor:
        if isinstance(number, torch.Tensor):
            return number.detach().reshape(()).to(self.device, self._dtype, copy=True)
        return torch.full((), number, dtype=self._dtype, device=self.device)

    # ------------------------------------------------------------------ buffers

    def _watched(self) -> list[str]:
        return [name for name in self._buffers if self._moving is None or name in self._moving]

    def _buffer(self, name: str) -> torch.Tensor:
        owner, attribute = self._buffers[name]
        found: torch.Tensor = getattr(owner, attribute)
        return found

    def _move_buffers(self, moves: dict[str, torch.Tensor | None], number: torch.Tensor | None) -> None:
        """Move buffers by the mean of what the shards have moved them by; find out which move at all."""
        if self._moving is None:
            self._moving = {name for name, move in moves.items() if move is not None and move.any()}
        for name, move in moves.items():
            before = self._before[name]
            if move is not None and number is not None and name in self._moving:
                before = before.to(self._dtype) + move / number
            self._buffer(name).copy_(before)


@dataclass
class ShardFeed:
    """A feed whose batches are shards: each has noise and a gradient of its own.

    Attributes:
        inner: yields this process's shards.
        ranks: takes their gradients.
        progress: of the run.
        seed: of the run.

    Ranks: as the inner feed.
    """

    inner: Feed | StreamFeed
    ranks: VirtualRanks
    progress: Progress
    seed: int

    @property
    def length(self) -> int | None:
        """The number of shards of this process in an epoch, or None."""
        return self.inner.length

    @property
    def factor(self) -> int:
        """The number of shards of this process in an optimizer step."""
        return self.inner.factor

    def batches(self, window: Window) -> Iterator[Any]:
        """Yield the shards, each after seeding the random streams by (seed, step, shard); take their gradients."""
        ranks, place = self.ranks, (_NOISE, self.progress.epoch, self.progress.began_at)
        for number, batch in enumerate(self.inner.batches(window), self.inner.start):
            shard = ranks.begin_shard(window, number, self.inner.factor)
            seed_streams(self.seed, *place, number // ranks.shards, shard)
            yield batch
            ranks.end_shard(window)
