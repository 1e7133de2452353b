"""Training or evaluation mode of the modules in a stage. What a hook sets for a module stays."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ddpkit.logger import get_logger
from ddpkit.strategies import batch_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

logger = get_logger(__name__)

_NAMES = {True: "training", False: "evaluation"}
_MOST_SHOWN = 4
WHOLE = (
    "on_stage_start has set all modules to %s mode, and the stage is one of %s: they are set back. "
    "To keep a part in another mode, set that part alone: self.modules.net.part.%s()."
)
EARLIER = (
    "These layers were in evaluation mode before the epoch: %s. Each epoch begins with "
    "modules.train(), so that their statistics move. To keep them, call eval() of the part in "
    "on_stage_start(TRAIN)."
)


@contextlib.contextmanager
def stage_mode(
    find: Callable[[], nn.ModuleDict],
    *,
    training: bool,
) -> Iterator[None]:
    """Set the modules to the mode of a stage; what the hook inside sets otherwise, of parts, stays
    so.

    Args:
        find: returns the modules; the hook may put others in their place.
        training: whether the stage trains.

    Example:
        >>> from torch import nn
        >>> modules = nn.ModuleDict({"net": nn.BatchNorm1d(2), "head": nn.Linear(2, 1)}).eval()
        >>> with stage_mode(lambda: modules, training=True):
        ...     _ = modules.net.eval()
        >>> modules.net.training, modules.head.training
        (False, True)
    """
    before = find()
    if training:
        _tell_of_earlier(before)
    before.train(training)
    known = {id(module) for module in before.modules()}
    yield
    now = find()
    if now is not before:
        now.train(training)
    elif now.training is not training:
        method = "eval" if training else "train"
        logger.warning_once(WHOLE, _NAMES[not training], _NAMES[training], method)
        now.train(training)
    elif not training:
        for module in now.modules():
            if id(module) not in known:
                module.eval()  # a module is made in training mode


@contextlib.contextmanager
def kept_modes(modules: nn.Module) -> Iterator[None]:
    """Return a context after which each part of the modules is in the mode that it was in before.

    Args:
        modules: of the recipe.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval())
        >>> with kept_modes(net):
        ...     _ = net.eval()
        >>> net[0].training, net[1].training
        (True, False)
    """
    modes = [(module, module.training) for module in modules.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _tell_of_earlier(modules: nn.ModuleDict) -> None:
    """Warn of normalisation layers whose statistics were frozen before the epoch."""
    if not modules.training:
        return  # after an evaluation
    held = {
        id(layer)
        for entry in modules.values()
        if entry.training
        for layer in batch_norms(entry)
        if not layer.training and layer.track_running_stats
    }
    names = [name for name, module in modules.named_modules() if id(module) in held]
    if names:
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        logger.warning_once(EARLIER, ", ".join(names[:_MOST_SHOWN]) + more)
