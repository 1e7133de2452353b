"""Post-local SGD: after a number of steps each rank steps by itself, and now and then weights are
averaged.

Source: T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, "Don't Use Large Mini-Batches, Use Local SGD",
ICLR 2020, https://arxiv.org/abs/1808.07217; ``post_localSGD_hook.py``, ``averagers.py`` and
``post_localSGD_optimizer.py`` of torch 2.13, which average weights alone (decision 0020).
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.optim import Optimizer

from ddpkit.base import kind_of, unwrap, waiting
from ddpkit.comm import control_group
from ddpkit.errors import ConfigError, RankMismatchError
from ddpkit.optim import parameters_of
from ddpkit.strategies.ddp import DDP
from ddpkit.strategies.equal_groups import require_equal_groups
from ddpkit.strategies.no_gradients import has_gradients, trained_of
from ddpkit.strategies.option_refusals import refuse_with
from ddpkit.strategies.rank_memory import whole_memory
from ddpkit.strategies.rare_questions import bytes_of
from ddpkit.strategies.tensor_averages import BUCKET_ELEMENTS, average_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torch import nn

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun
    from ddpkit.training import Accumulation

_FLOAT = 4  # bytes of a number in float32
CHOSEN = "ddp_comm_hook=post_local_sgd"
NOT_WITH = {
    "strategy=fsdp": "each process needs the whole state of the optimizers",
    "strategy=zero1": "each process needs the whole state of the optimizers",
    "virtual_ranks": "the answer depends on the number of processes",
    "data_parallel_backend": "it is for several processes, and that option for one",
    "check_parity": "the answer depends on the number of processes",
    "precision=fp16": "each process would have a scale of its own",
    "ema_decay": "the averages would differ between processes",
    "skip_nonfinite_grads": "each process would drop different gradients",
    "find_unused_parameters": "each process would use different parameters",
    "static_graph": "DDP would go on averaging gradients",
    "local_sgd_period=None": (
        "it needs the optimizer steps between two averages, such as --local_sgd_period=8"
    ),
}
CANNOT_AVERAGE = (
    "ddp_comm_hook=post_local_sgd cannot average the optimizer {!r} over the ranks: {} {} Use one "
    "that keeps tensors by parameter, such as torch.optim.AdamW; or leave --ddp_comm_hook out."
)
UNEVEN = (
    "ddp_comm_hook=post_local_sgd: the ranks have other numbers to average (here {} in all): an "
    "optimizer keeps a state for parameters that other ranks have not used. Use the same "
    "parameters on every rank (a torch.Generator with the same seed chooses alike), or leave "
    "--ddp_comm_hook out."
)


class LocalSGD(DDP):
    """DDP in which, from an optimizer step on, each rank steps with its own gradients; weights are
    averaged instead.

    A rank's gradient is then its part of what DDP would average, times the number of ranks: with
    plain SGD and an average after every step the weights are those of DDP. What is averaged is the
    parameters and the state of the optimizers, and the saved buffers of the modules; integer
    buffers are rank 0's.

    Args:
        options: of the run.

    Attributes:
        steps_locally: whether the next optimizer step is made with this rank's own gradients.
        weights_differ: whether a step was made so since the last average.

    Ranks: collective.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> LocalSGD(
        ...     RunOptions(device="cpu", ddp_comm_hook="post_local_sgd", local_sgd_period=8)
        ... ).period
        8
    """

    name = "DistributedDataParallel, weights averaged (post-local SGD)"

    def check(
        self,
        options: RunOptions,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Refuse what cannot work where each process steps by itself.

        Raises:
            ConfigError: naming the options.
        """
        if has_own_fit_batch:
            refuse_with(
                "a fit_batch of the recipe",
                options,
                {
                    CHOSEN: (
                        "it may step past optimizers_step(), which counts the steps to the next "
                        "average"
                    )
                },
            )
        refuse_with(
            CHOSEN,
            options,
            NOT_WITH,
        )
        super().check(options, has_own_fit_batch=has_own_fit_batch)

    def bind(
        self,
        options: RunOptions,
        accumulation: Accumulation,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Take the options, and with them when to begin and how often to average."""
        super().bind(
            options,
            accumulation,
            has_own_fit_batch=has_own_fit_batch,
        )
        self.start = options["local_sgd_start"] or 0
        self.period = options["local_sgd_period"]
        self._optimizers: Mapping[str, Any] = {}
        self._progress: Any = None
        self._is_compared = False
        self._is_of_sums = False  # whether losses of the window are sums with counts

    def prepare_optimizers(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, Any],
    ) -> None:
        """Note what to average.

        Raises:
            ConfigError: an optimizer is not torch's, so its state is unknown.
        """
        super().prepare_optimizers(modules, optimizers)
        for name, optimizer in optimizers.items():
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    CANNOT_AVERAGE.format(
                        name,
                        type(optimizer).__name__,
                        "is not a torch.optim.Optimizer.",
                    )
                )
        self._optimizers = optimizers

    # ------------------------------------------------------------------ steps

    def begin_pass(self, progress: Any) -> None:
        """Note, as a pass begins, how many steps there have been. The ranks are the same."""
        self._progress = progress
        self.weights_differ = False
        self._close_orders()
        self._choose_phase()
        super().begin_pass(progress)

    def _choose_phase(self) -> None:
        """Switch DDP's averaging of the next step's gradients on or off."""
        self.steps_locally = self._progress.optimizer_step >= self.start
        for module in self.wrapped:
            module.require_backward_grad_sync = not self.steps_locally

    def finish_gradients(self, optimizers: Collection[Any] = ()) -> None:
        """Finish gradients as DDP does; those of a rank alone stay as they are."""
        if self.steps_locally:
            self.weights_differ = True
            if self._zeros.versions:
                self._zeros.drop_own()
            if self._is_of_sums:
                self._add_zeros()
            self._is_of_sums = False
        else:
            super().finish_gradients(optimizers)

    def leave_step_out(self) -> None:
        """Note that the ranks differ if buffers may have moved on each of them by itself."""
        if not self.steps_locally:
            super().leave_step_out()
        elif any(map(_saved_buffers, self._entries)):
            self.weights_differ = True

    def start_average(
        self,
        count: torch.Tensor | float,
        device: str,
    ) -> Callable[[], torch.Tensor | float]:
        """Start averaging a count, and note that the losses have one."""
        self._is_of_sums = True
        return super().start_average(count, device)

    def _add_zeros(self) -> None:
        """Give a module without any gradient gradients of zero: its batches had no loss.

        Ranks that have one make a step, and so does this one: else the states of their optimizers
        would not be alike. Where no rank has one the step is left out, by the count.
        """
        for module in self.wrapped:
            if not has_gradients(module):
                for parameter in trained_of(module):
                    parameter.grad = torch.zeros_like(parameter)

    def after_window(self, modules: nn.ModuleDict) -> None:
        """Average if it is time, by the optimizer steps of the run: then a resume does not move
        it.
        """
        if self.weights_differ and (self._progress.optimizer_step - self.start) % self.period == 0:
            self._average(modules)
        self._choose_phase()

    def end_pass(self, modules: nn.ModuleDict) -> None:
        """Average at the end of an epoch, whatever the period."""
        if self.weights_differ:
            self._average(modules)
        super().end_pass(modules)

    def sent_bytes(self, parameters: Iterable[torch.Tensor]) -> float:
        """Return the bytes of all weights, once a period."""
        return bytes_of(parameters) / (self.period or 1)

    def averages_gradients(self) -> bool:
        """Say whether they are averaged before the ranks begin to step by themselves."""
        return self.start > 0

    def rank_memory(self, run: RehearsedRun) -> RankMemory:
        """Return the memory of the whole model, with DDP's buckets, which hold no gradient of a
        rank alone, and the bucket in which weights and states are averaged after a step.
        """
        whole = whole_memory(run)
        averaged = min(whole.weights + whole.optimizer + whole.buffers, BUCKET_ELEMENTS * _FLOAT)
        averaged -= whole.gradients  # which are gone by then
        return dataclasses.replace(
            whole,
            exchange=whole.gradients,
            after_backward=whole.gradients,
            in_step=whole.gradients + max(averaged, 0.0),
        )

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows as of DDP, and on how long gradients are averaged."""
        told = (
            f"each process's own after {self.start} optimizer steps; weights averaged every "
            f"{self.period} steps"
        )
        return {
            **super().startup_rows(modules),
            "gradients": (f"{told} (--ddp_comm_hook=post_local_sgd)"),
        }

    # ------------------------------------------------------------------ averages

    def _average(self, modules: nn.ModuleDict) -> None:
        if not self._is_compared:
            for name, optimizer in self._optimizers.items():
                require_equal_groups(
                    CANNOT_AVERAGE,
                    name,
                    optimizer,
                )
            self._is_compared = True
        parts = list(self._parts(modules))
        progress = self._progress
        sizes = [[tensor.numel() for tensor in part] for part in parts]
        own = zlib.crc32(repr(sizes).encode())  # layers of one size may take turns
        most = torch.tensor([own, -own, progress.clipped, progress.nonfinite])
        with waiting():
            dist.all_reduce(
                most,
                dist.ReduceOp.MAX,
                group=control_group(),
            )
        largest, smallest, clipped, nonfinite = most.tolist()
        progress.take_counts_of_all_ranks(clipped=clipped, nonfinite=nonfinite)
        if largest != -smallest:
            raise RankMismatchError(UNEVEN.format(sum(map(sum, sizes))))
        average_equal(itertools.chain(*parts), torch.device(self.device))
        self.weights_differ = False
        progress.require_patience("on the rank with the most", self.options["nonfinite_patience"])

    def _parts(self, modules: nn.ModuleDict) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors to average by parameter, and those of the modules, in the same order on
        all ranks.
        """
        known: set[int] = set()
        for name, optimizer in self._optimizers.items():
            for parameter in [
                parameter for parameter in parameters_of([optimizer]) if parameter.requires_grad
            ]:
                own = [] if id(parameter) in known else [parameter]  # two optimizers may have it
                known.add(id(parameter))
                yield [
                    *own,
                    *_state_of(
                        name,
                        optimizer,
                        parameter,
                    ),
                ]
        yield from map(_saved_buffers, modules.values())


def _saved_buffers(module: nn.Module) -> list[torch.Tensor]:
    inner = unwrap(module)
    saved = inner.state_dict(keep_vars=True)
    return [buffer for key, buffer in inner.named_buffers() if key in saved]


def _state_of(
    name: str,
    optimizer: Optimizer,
    parameter: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """Yield the tensors to average of an optimizer's state for a parameter; counts are the same on
    all ranks.
    """
    for key, value in sorted(optimizer.state.get(parameter, {}).items()):
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            yield value
        elif not (
            value is None
            or isinstance(value, (int, str))
            or getattr(
                value,
                "numel",
                int,
            )()
            == 1
        ):
            reason = (
                f"keeps state[{key!r}], {kind_of(value)}, not a tensor of floating-point numbers."
            )
            raise ConfigError(
                CANNOT_AVERAGE.format(
                    name,
                    type(optimizer).__name__,
                    reason,
                )
            )
