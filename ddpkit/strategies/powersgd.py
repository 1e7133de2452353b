"""PowerSGD by torch: gradients travel as products of thin matrices, and what is lost is added to the next step's.

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019, https://arxiv.org/abs/1905.13727; ``powerSGD_hook.py`` of torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

if TYPE_CHECKING:
    from collections.abc import Mapping

_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")  # by number of bucket
_EPSILON = 1e-8  # a gradient of zero has no direction


class PowerSGD:
    """torch's PowerSGD for one module in DDP, with a state for checkpoints.

    Args:
        rank: columns of the thin matrices.
        start: optimizer steps before, in which gradients travel as they are; at least 2, since DDP makes its buckets
            anew after the first.

    Ranks: local; what is called with a bucket is collective.

    Example:
        >>> PowerSGD(1, 10).state_dict()["iter"]
        0
    """

    def __init__(self, rank: int, start: int) -> None:
        self.state = PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start, orthogonalization_epsilon=_EPSILON
        )

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the ranks; wait for it, since the collectives of two buckets could mix."""
        known = self.state.error_dict.get(bucket.index())
        if known is not None and known.shape != bucket.buffer().shape:
            self.forget()  # of a run with buckets of another size
        averaged = powerSGD_hook(self.state, bucket).wait()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(averaged)
        return future

    def forget(self) -> None:
        """Drop what earlier steps have left: after a gradient that is not finite it is not finite either."""
        for name in _MEMORIES:
            getattr(self.state, name).clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the random stream, and what is left over: as large as the gradients."""
        _, keys, position, *_ = self.state.rng.get_state()
        found: dict[str, Any] = {"iter": self.state.iter, "random": [*map(int, keys), position]}
        for name in _MEMORIES:
            found[name] = {bucket: one.to("cpu", copy=True) for bucket, one in getattr(self.state, name).items()}
        return found

    def load_state_dict(self, state: Mapping[str, Any], device: str) -> None:
        """Go on from a state.

        Args:
            state: of the same rank.
            device: of this rank.
        """
        *keys, position = state["random"]
        self.state.rng.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
        self.state.iter = state["iter"]
        for name in _MEMORIES:
            getattr(self.state, name).update({key: one.to(device, copy=True) for key, one in state[name].items()})
