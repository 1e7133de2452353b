"""The arguments of a loader that a recipe gives by name, as in ``train_loader_kwargs``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from ddpkit.errors import ConfigError

_KNOWN = tuple(inspect.signature(DataLoader.__init__).parameters)[2:]  # without self and dataset


def require_loader_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that no loader takes: torch's error comes late, below many lines.

    Args:
        given: by name.

    Raises:
        ConfigError: no argument has this name.

    Ranks: local; alike on every rank.
    """
    for name in given:
        if name in _KNOWN:
            continue
        close = difflib.get_close_matches(name, _KNOWN, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"a loader takes no argument {name}={given[name]!r:.80}.{meant} It takes those of "
            f"torch.utils.data.DataLoader: {', '.join(_KNOWN)}."
        )
