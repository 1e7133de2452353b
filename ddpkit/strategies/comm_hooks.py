"""The hooks that average a bucket of DDP's gradients over the ranks.

A bucket travels as it is, in half precision, by one exchange of two ranks, or by PowerSGD, whose
leftovers go into checkpoints.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ddpkit.comm import exchange_tensor, is_exchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpkit.run_opts import RunOptions


def hook_of(options: RunOptions, module: nn.Module) -> Callable[..., Any] | None:
    """Return the hook that averages a module's buckets; None if gradients are sent unchanged.

    Ranks: local; alike on all ranks.
    """
    name = options.ddp_comm_hook
    if name not in {"fp16", "bf16", "powersgd"}:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # Ranks that use different parameters have their buckets in another order: they must not
        # wait for each.
        return (
            _average_of_pair
            if is_exchanged(trained) and not options.find_unused_parameters
            else None
        )
    if name == "powersgd":
        return PowerSGD(options["matrix_approximation_rank"], options["start_powersgd_iter"])
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    half = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    return functools.partial(half[name], None)  # type: ignore[arg-type]  # torch's default group


_HALF = 2  # bytes of a number in fp16 and bf16
_MATRIX = 2  # dimensions from which on PowerSGD compresses
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")  # by number of bucket
_EPSILON = 1e-8  # a gradient of zero has no direction


class PowerSGD:
    """torch's PowerSGD for one module in DDP, with a state for checkpoints.

    Gradients travel as products of thin matrices, and what is lost is added to the next step's.

    Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization", 2019, https://arxiv.org/abs/1905.13727;
    ``powerSGD_hook.py`` of torch 2.13.

    Args:
        rank: columns of the thin matrices.
        start: optimizer steps before, in which gradients travel as they are; at least 2, since DDP
            makes its buckets anew after the first.

    Ranks: local; what is called with a bucket is collective.

    Example:
        >>> PowerSGD(1, 10).state_dict()["iter"]
        0
    """

    def __init__(
        self,
        rank: int,
        start: int,
    ) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._average = powerSGD_hook.powerSGD_hook
        self.state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start,
            orthogonalization_epsilon=_EPSILON,
        )

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the ranks; wait for it, since the collectives of two buckets could
        mix.
        """
        known = self.state.error_dict.get(bucket.index())
        if known is not None and known.shape != bucket.buffer().shape:
            self.forget()  # of a run with buckets of another size
        return done(self._average(self.state, bucket).wait())

    def forget(self) -> None:
        """Drop what earlier steps have left: after a gradient that is not finite it is not finite
        either.
        """
        for name in _MEMORIES:
            getattr(self.state, name).clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the random stream, and what is left over: as large as the
        gradients.
        """
        _, keys, position, *_ = self.state.rng.get_state()
        found: dict[str, Any] = {
            "iter": self.state.iter,
            "random": [*map(int, keys), position],
        }
        for name in _MEMORIES:
            found[name] = {
                bucket: tensor.to("cpu", copy=True)
                for bucket, tensor in getattr(self.state, name).items()
            }
        return found

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        device: str,
    ) -> None:
        """Go on from a state.

        Args:
            state: of the same rank.
            device: of this rank.
        """
        *keys, position = state["random"]
        self.state.rng.set_state(
            (
                "MT19937",
                np.array(keys, dtype=np.uint32),
                position,
                0,
                0.0,
            )
        )
        self.state.iter = state["iter"]
        for name in _MEMORIES:
            getattr(self.state, name).update(
                {key: tensor.to(device, copy=True) for key, tensor in state[name].items()}
            )


def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that has its value already.

    Ranks: local.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def average_of_all(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, as torch's own hook does.

    Ranks: collective.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # torch's default group


def _average_of_pair(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over two ranks, as DDP does: each gradient is divided first."""
    own = bucket.buffer()
    if own.layout is not torch.strided:  # of nn.Embedding(sparse=True)
        return average_of_all(bucket)
    own.div_(2)
    # Waited for here: the thread of a collective is not to enter Python.
    return done(own.add_(exchange_tensor(own)()))


def bytes_of_gradient(options: RunOptions, parameter: torch.Tensor) -> float:
    """Return how many bytes of a parameter's gradient travel in a step.

    Args:
        options: of the run.
        parameter: that is trained.
    """
    hook = options["ddp_comm_hook"]
    numbers = parameter.numel()
    if hook in {"fp16", "bf16"}:
        return float(numbers * _HALF)
    if hook == "powersgd" and parameter.dim() >= _MATRIX:
        rows = parameter.shape[0]
        thin = options["matrix_approximation_rank"] * (rows + numbers // rows)
        return float(min(thin, numbers) * parameter.element_size())
    return float(numbers * parameter.element_size())


BUCKET_MIB = 25.0  # of gradients in a bucket, where bucket_cap_mb does not say it
_MIB = 1 << 20


class HookMemory(NamedTuple):
    """The bytes that the averages of buckets take on a rank.

    Attributes:
        in_passes: at most, in the passes.
        kept: from step to step.
    """

    in_passes: float
    kept: float


def bytes_of_hook(options: RunOptions, gradients: Mapping[torch.Tensor, int]) -> HookMemory:
    """Return what the averages of buckets take beside the buckets.

    Args:
        options: of the run.
        gradients: bytes of each gradient, by its parameter.
    """
    hook = options["ddp_comm_hook"]
    if hook in {"fp16", "bf16"}:  # copies of all buckets may be under way at once
        return HookMemory(sum(bytes_of_gradient(options, weight) for weight in gradients), 0.0)
    if hook == "powersgd":  # what is left over of each gradient, and a copy of one bucket
        whole = float(sum(gradients.values()))
        return HookMemory(
            whole + min(whole, (options["bucket_cap_mb"] or BUCKET_MIB) * _MIB), whole
        )
    # else a bucket is summed up where it is
    return HookMemory(0.0, 0.0)
