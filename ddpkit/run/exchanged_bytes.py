"""How many bytes of gradients a rank sends for an optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.distributed import get_world_size

if TYPE_CHECKING:
    import torch

    from ddpkit.run_opts import RunOptions
    from ddpkit.training import RunContext

_HALF = 2  # bytes of a number in fp16 and bf16
_MATRIX = 2  # dimensions from which on PowerSGD compresses


def exchanged_bytes(context: RunContext) -> int:
    """Return how many bytes of gradients this rank hands over for one optimizer step, on average.

    What a collective makes of them, such as a ring that sends each number twice, is not counted.

    Args:
        context: of the run; its modules are wrapped.

    Ranks: local; equal on all ranks.
    """
    if get_world_size() == 1:
        return 0
    options = context.options
    trained = [parameter for parameter in context.modules.parameters() if parameter.requires_grad]
    total = sum(_bytes_of(parameter, options) for parameter in trained)
    if options["ddp_comm_hook"] == "post_local_sgd":  # whole weights, once a period
        return round(total / (options["local_sgd_period"] or 1))
    return round(total)


def _bytes_of(parameter: torch.Tensor, options: RunOptions) -> float:
    hook = options["ddp_comm_hook"]
    numbers = parameter.numel()
    if hook in {"fp16", "bf16"}:
        return float(numbers * _HALF)
    if hook == "powersgd" and parameter.dim() >= _MATRIX:
        rows = parameter.shape[0]
        thin = options["matrix_approximation_rank"] * (rows + numbers // rows)
        return float(min(thin, numbers) * parameter.element_size())
    return float(numbers * parameter.element_size())
