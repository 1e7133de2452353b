"""``nn.DataParallel``: one process with several GPUs, each of which has the whole model."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit import distributed
from ddpkit.base import own_first
from ddpkit.errors import ConfigError
from ddpkit.strategies.attribute_forwarding import AttributeForwarding
from ddpkit.strategies.base import Strategy
from ddpkit.strategies.batch_norm_layers import batch_norms
from ddpkit.strategies.entries import trained_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun
    from ddpkit.training import Accumulation

FOR_ONE_PROCESS = "it is for one process"


class WrappedDataParallel(AttributeForwarding, nn.DataParallel[nn.Module]):
    """``nn.DataParallel`` through which attributes can be reached; its replicas compute in the
    caller's precision.

    Ranks: local (one process, several GPUs).

    Example:
        >>> WrappedDataParallel(torch.nn.Linear(2, 1)).in_features
        2
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._is_made = True

    def parallel_apply(
        self,
        replicas: Sequence[nn.Module],
        inputs: Sequence[Any],
        kwargs: Any,
    ) -> list[Any]:
        """Run each replica in a thread, which torch tells that autocast is on, but not in which
        dtype: that is ours.

        Source: ``torch/nn/parallel/parallel_apply.py`` of torch 2.13; the dtype of autocast is kept
        per thread.
        """
        kind = self.src_device_obj.type
        dtype = torch.get_autocast_dtype(kind)
        in_dtype: Any = [functools.partial(_run_in, kind, dtype, replica) for replica in replicas]
        return super().parallel_apply(in_dtype, inputs, kwargs)


def _run_in(
    kind: str,
    dtype: torch.dtype,
    module: nn.Module,
    *inputs: Any,
    **kwargs: Any,
) -> Any:
    """Run a module under autocast to a dtype, where autocast is on in this thread."""
    with torch.autocast(
        kind,
        dtype=dtype,
        enabled=torch.is_autocast_enabled(kind),
    ):
        return module(*inputs, **kwargs)


class DataParallel(Strategy):
    """One process, ``nn.DataParallel`` around every trainable entry of the modules, on all GPUs.

    Args:
        device: where the modules are, such as ``"cuda:1"``; its GPU comes first, as
            ``nn.DataParallel`` wants it. None: as the options say, in :meth:`bind`.

    Raises:
        ConfigError: this machine has no GPU.

    Example:
        >>> DataParallel("cpu")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: data_parallel_backend=True needs a GPU, ...
    """

    name = "nn.DataParallel"
    unrepeatable = "whose GPUs have parts of one batch"

    def __init__(self, device: str | None = None) -> None:
        if device is not None:
            self._take(device)

    def _take(self, device: str) -> None:
        if not device.startswith("cuda"):
            raise ConfigError(
                f"data_parallel_backend=True needs a GPU, and the device is {device!r}. Leave it "
                "out, or use several processes: torchrun --standalone --nproc_per_node=2 train.py "
                "hparams.yaml --device=cpu"
            )
        self.device = device

    def runs_alone(self) -> bool:
        """Say that there is work in one process."""
        return True

    def check(self, options: RunOptions, *, has_own_fit_batch: bool) -> None:
        """Refuse a group of processes.

        Raises:
            ConfigError: there is one.
        """
        if options.data_parallel_backend and distributed.is_distributed_initialized():
            raise ConfigError(
                "data_parallel_backend=True is for one process, which has all GPUs of the machine, "
                f"and this one is in a process group of {distributed.get_world_size()}. Start one: "
                "python train.py hparams.yaml --data_parallel_backend; or leave it out, and each "
                "process has a GPU of its own."
            )

    def bind(
        self,
        options: RunOptions,
        accumulation: Accumulation,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Take the device.

        Raises:
            ConfigError: it is no GPU.
        """
        super().bind(options, accumulation, has_own_fit_batch=has_own_fit_batch)
        self._take(self.device)

    def rank_memory(self, run: RehearsedRun) -> RankMemory | None:
        """Say that it is for one process, of which nothing is known.

        Raises:
            ConfigError: there are several processes.
        """
        if run.processes > 1:
            raise ConfigError(FOR_ONE_PROCESS)
        return None

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows on the GPUs, and on batch statistics, which each GPU takes from its own
        rows.
        """
        gpus = (
            f"data parallel: one process, with {torch.cuda.device_count()} GPU(s) (nn.DataParallel)"
        )
        return {
            "strategy": gpus,
            "batch norm": "each GPU by its own rows" if batch_norms(modules) else "",
        }

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Put ``nn.DataParallel`` around every trainable entry."""
        for name, module in modules.items():
            if trained_parameters(module) and not isinstance(module, nn.DataParallel):
                modules[name] = WrappedDataParallel(module, device_ids=own_first(self.device))
