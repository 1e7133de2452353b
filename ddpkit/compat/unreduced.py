"""Which parameters DDP still waits for after a backward pass, so that their gradients are averages on no rank.

Reason: DDP says so in its next forward pass, after an optimizer step with gradients that were not averaged, and with
numbers for names.
"""

from __future__ import annotations

import re
from typing import Any

_INDICES = re.compile(r"did not receive grad for rank \d+: ((?:\d+ ?)+)")


def unreduced_parameters(module: Any, error: RuntimeError | None = None) -> list[str] | None:
    """Return the parameters without a gradient if DDP waits for them; otherwise None, as where torch does not tell.

    Args:
        module: wrapped in DDP, after a backward pass.
        error: that DDP has raised; None: it is asked.

    Ranks: local.

    Example:
        >>> import torch
        >>> layer, words = torch.nn.Linear(1, 1), "Expected to have finished reduction in the prior iteration ..."
        >>> unreduced_parameters(layer, RuntimeError(f"{words} which did not receive grad for rank 0: 1 "))
        ['bias']
    """
    ask = getattr(getattr(module, "reducer", None), "_check_reducer_finalized", None)
    if error is None and ask is not None:
        try:
            ask()
        except RuntimeError as found:
            error = found
    if error is None or not str(error).startswith("Expected to have finished reduction"):
        return None
    numbers = _INDICES.search(str(error))
    trained = list(dict.fromkeys(name for name, one in module.named_parameters() if one.requires_grad))
    return [trained[int(number)].removeprefix("module.") for number in numbers[1].split()] if numbers else []
