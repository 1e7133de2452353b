"""Post-local SGD: after a number of steps each rank steps by itself, and now and then weights are averaged.

Source: T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020,
https://arxiv.org/abs/1808.07217; ``post_localSGD_hook.py``, ``averagers.py`` and ``post_localSGD_optimizer.py`` of
torch 2.13, which average weights alone (decision 0020).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ddpkit.comm import control_group, optimizer_facts, require_agreement
from ddpkit.device import widest_float
from ddpkit.distributed import sum_over_ranks
from ddpkit.errors import ConfigError, RankMismatchError
from ddpkit.strategies.ddp import DDP, UNUSED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from ddpkit.run_opts import RunOptions

BUCKET_ELEMENTS = 1 << 25  # of one collective, and of the memory that it takes
CANNOT = (
    "ddp_comm_hook=post_local_sgd cannot average the optimizer {!r} ({}) over the ranks: {} Use one that keeps tensors "
    "by parameter, such as torch.optim.AdamW; or leave --ddp_comm_hook out."
)
DIFFERS = "it keeps numbers in its groups that are not the same on all ranks.\n{}"
FREEZE = "Between two averages no other rank gives it one: freeze what no step uses (requires_grad_(False))."
UNEVEN = (
    "ddp_comm_hook=post_local_sgd: the ranks have not as many numbers to average (here {}): an optimizer keeps a state "
    "for parameters that other ranks have not used. Every rank must use the same parameters."
)


class LocalSGD(DDP):
    """DDP in which, from an optimizer step on, each rank steps with its own gradients; weights are averaged instead.

    A rank's gradient is then its part of what DDP would average, times the number of ranks: with plain SGD and an
    average after every step the weights are those of DDP. What is averaged is the parameters and the state of the
    optimizers, and the saved buffers of the modules; integer buffers are rank 0's.

    Args:
        options: of the run.

    Attributes:
        steps_alone: whether the next optimizer step is made with this rank's own gradients.
        is_apart: whether a step was made so since the last average.

    Ranks: collective.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> LocalSGD(RunOptions(device="cpu", ddp_comm_hook="post_local_sgd", local_sgd_period=8)).period
        8
    """

    name = "DistributedDataParallel, weights averaged (post-local SGD)"
    averages_weights = True

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        self.start, self.period = options["local_sgd_start"] or 0, options["local_sgd_period"]
        self.patience = options["nonfinite_patience"]
        self._optimizers: Mapping[str, Any] = {}
        self._progress: Any = None
        self._entries: Mapping[str, nn.Module] = {}
        self._expected: dict[str, list[tuple[str, nn.Parameter]]] = {}  # parameters that need a gradient, by entry
        self._noted = 0, 0  # clipped and non-finite steps so far
        self._news: list[float] = []  # how many of each came in each step since the last average
        self._is_compared = False

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Wrap as DDP does; note all entries, whose buffers are averaged."""
        super().wrap(modules)
        self._entries = dict(modules.items())

    def prepare_optimizers(self, optimizers: Mapping[str, Any]) -> None:
        """Note what to average.

        Raises:
            ConfigError: one of them is not torch's, so that its state cannot be known.
        """
        for name, one in optimizers.items():
            if not isinstance(one, torch.optim.Optimizer):
                raise ConfigError(CANNOT.format(name, type(one).__name__, "it is not a torch.optim.Optimizer."))
        self._optimizers = optimizers

    # ------------------------------------------------------------------ steps

    def feed(self, feed: Any, progress: Any, seed: int) -> Any:
        """Note, as a pass begins, how many steps there have been. The ranks are the same."""
        self._progress, self.is_apart, self._news = progress, False, []
        self._close_orders()
        self._expected = {
            one.gradient_reduction.entry: [pair for pair in one.module.named_parameters() if pair[1].requires_grad]
            for one in self.wrapped
        }
        self._choose_phase()
        return super().feed(feed, progress, seed)

    def _choose_phase(self) -> None:
        """Have DDP average the gradients of the next step, or not."""
        self._noted = self._progress.clipped, self._progress.nonfinite
        self.steps_alone = self._progress.optimizer_step >= self.start
        for module in self.wrapped:
            module.require_backward_grad_sync = not self.steps_alone

    def finish_gradients(self) -> None:
        """Finish gradients as DDP does; those of a rank alone must be there, or the ranks' states would differ."""
        if not self.steps_alone:
            super().finish_gradients()
            return
        self.is_apart = True
        for entry, parameters in self._expected.items():
            missing = [name for name, one in parameters if one.grad is None]
            if missing and len(missing) < len(parameters):
                raise ConfigError(UNUSED.format(entry, ", ".join(missing), FREEZE))

    def after_window(self) -> None:
        """Average if it is time, by the optimizer steps of the run: then a resume does not move it."""
        if self.steps_alone:
            progress = self._progress
            self._news += [progress.clipped - self._noted[0], progress.nonfinite - self._noted[1]]
            if self.is_apart and (progress.optimizer_step - self.start) % self.period == 0:
                self._average()
        self._choose_phase()

    def end_pass(self, modules: nn.ModuleDict) -> None:
        """Average at the end of an epoch, whatever the period."""
        if self.is_apart:
            self._average()
        super().end_pass(modules)

    def start_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows as of DDP, and on how long gradients are averaged."""
        told = f"each process's own after {self.start} optimizer steps; weights averaged every {self.period} steps"
        return {**super().start_rows(modules), "gradients": f"{told} (--ddp_comm_hook=post_local_sgd)"}

    # ------------------------------------------------------------------ averages

    def _average(self) -> None:
        if not self._is_compared:
            self._require_equal_groups()
        tensors, progress, news = list(self._tensors()), self._progress, self._news
        own = sum(one.numel() for one in tensors)
        size, *everybody = sum_over_ranks([float(own), *news])
        if size != own * dist.get_world_size():
            raise RankMismatchError(UNEVEN.format(own))
        # A step counts as clipped, or as not finite, that was so on some rank.
        progress.clipped += sum(map(bool, everybody[::2])) - int(sum(news[::2]))
        progress.nonfinite += sum(map(bool, everybody[1::2])) - int(sum(news[1::2]))
        _average_over_ranks(tensors, torch.device(self.device))
        self.is_apart, self._news, self._noted = False, [], (progress.clipped, progress.nonfinite)
        progress.require_patience("each on some rank", self.patience)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is averaged, in the same order on all ranks."""
        known: set[int] = set()
        for name, optimizer in self._optimizers.items():
            trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
            for parameter in trained:
                if id(parameter) not in known:  # two optimizers may have it
                    known.add(id(parameter))
                    yield parameter
                yield from _state_of(name, optimizer, parameter)
        wrapped = {id(one): one.module for one in self.wrapped}
        for entry in self._entries.values():  # an entry without trained parameters is not wrapped
            module = wrapped.get(id(entry), entry)
            saved = module.state_dict(keep_vars=True)
            yield from (one for key, one in module.named_buffers() if key in saved)

    def _require_equal_groups(self) -> None:
        for name, one in self._optimizers.items():
            try:
                require_agreement(optimizer_facts({name: one}), site="the optimizers of local SGD")
            except RankMismatchError as error:
                raise ConfigError(CANNOT.format(name, type(one).__name__, DIFFERS.format(error))) from error
        self._is_compared = True


def _state_of(name: str, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors to average of an optimizer's state for a parameter; counts are the same on all ranks."""
    for key, value in sorted(optimizer.state.get(parameter, {}).items()):
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            yield value
        elif not (value is None or isinstance(value, (int, str)) or getattr(value, "numel", int)() == 1):
            reason = f"state[{key!r}] is a {type(value).__name__}, not a tensor of floating-point numbers."
            raise ConfigError(CANNOT.format(name, type(optimizer).__name__, reason))


@torch.no_grad()
def _average_over_ranks(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Replace tensors by their averages over the ranks, the same bits on all; integers by rank 0's.

    Half precision is added up in float32, and single numbers in float64: Adam's count of steps stays a whole number.
    What is in host memory beside the device travels there.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for one in tensors:
        is_exact = not (one.is_floating_point() or one.is_complex())
        wide = widest_float(one.device) if one.numel() == 1 else torch.float32
        dtype = one.dtype if is_exact else torch.promote_types(one.dtype, wide)
        kinds.setdefault((dtype, one.device), []).append(one)
    for (dtype, where), alike in kinds.items():
        group = control_group() if where.type != device.type else None
        ends = itertools.accumulate(one.numel() for one in alike)
        for _, pairs in itertools.groupby(zip(alike, ends, strict=True), lambda pair: pair[1] // BUCKET_ELEMENTS):
            bucket = [one for one, _ in pairs]
            flat = torch.cat([one.reshape(-1).to(dtype) for one in bucket])
            if dtype.is_floating_point or dtype.is_complex:
                flat /= dist.get_world_size()  # before the sum, which could overflow: a mask has the lowest number
                dist.all_reduce(flat, group=group)
            else:
                dist.broadcast(flat.view(torch.uint8), src=0, group=group)
            for one, values in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                one.copy_(values.view_as(one))
