"""The two sides of a rehearsal: a Brain on pretended ranks, and the same Brain as one process on the joined batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpkit.loop import Progress
from ddpkit.noise import FunctionsWithoutNoise, layers_without_noise
from ddpkit.parity_report import Comparison
from ddpkit.parity_windows import ParityWindow, ParityWindows
from ddpkit.precision import TorchAutocast
from ddpkit.rehearsal import Outcome, Rehearsal, parameter_names
from ddpkit.strategy import is_trainable
from ddpkit.syncbn import SyncBatchNorm, is_convertible
from ddpkit.types import Stage


class Sides:
    """Both sides, ready to work on windows.

    Args:
        brain: after ``on_fit_start``. Shallow copies of it work; ``on_stage_start(TRAIN)`` is called on each.
        windows: where their batches come from.

    Attributes:
        ranks: the pretended ranks.
        joined: the one process.
        synchronised: name -> BatchNorm that real ranks synchronise.
        alone: name -> BatchNorm that they do not.
        has_drawn: whether the last window that was tried for noise drew random numbers.
        outside: names of the optimized parameters that stand in no module of the Brain.

    Ranks: local; one process.

    State: modules are set to training mode. See :class:`~ddpkit.rehearsal.Rehearsal`.

    Example:
        >>> Sides.__name__
        'Sides'
    """

    def __init__(self, brain: Any, windows: ParityWindows) -> None:
        self.brain, self.windows = brain, windows
        world_size = len(windows.loaders)
        ranks = [_copy(brain, rank, windows.epoch, windows.factor) for rank in range(world_size)]
        joined = _copy(brain, 0, windows.epoch, windows.joined_factor)
        for one in (*ranks, joined):
            one.on_stage_start(Stage.TRAIN, windows.epoch)
        brain.modules.train()
        names, self.outside = parameter_names(joined)
        self.synchronised, self.alone = batch_norms(brain.raw_modules)
        self.is_calm = self.has_drawn = False
        self.ranks = Rehearsal(ranks, self.synchronised, names, self.in_thread)
        self.joined = Rehearsal([joined], {}, names, self.in_thread)

    def in_thread(self) -> AbstractContextManager[Any]:
        """Make the context that the recipe's code runs in."""
        return FunctionsWithoutNoise() if self.is_calm else contextlib.nullcontext()

    @contextlib.contextmanager
    def without_noise(self) -> Iterator[None]:
        """Switch noise off, as far as that is possible."""
        self.is_calm = True
        try:
            with layers_without_noise(self.brain.modules):
                yield
        finally:
            self.is_calm = False

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Switch autocast off."""
        hosts = [*self.ranks.hosts, *self.joined.hosts]
        before = [host.training_ctx for host in hosts]
        try:
            for host in hosts:
                host.training_ctx = TorchAutocast(device_type=torch.device(host.device).type)
            yield
        finally:
            for host, context in zip(hosts, before, strict=True):
                host.training_ctx = context

    def comparison(self) -> Comparison:
        """Make a comparison with the tolerances for what this Brain computes in."""
        context = self.joined.hosts[0].training_ctx
        rough = str(self.brain.device).startswith("cuda") and (
            torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        )
        return Comparison(context.dtype if context.enabled else None, rough=rough)

    def compare(self, window: ParityWindow, into: Comparison | None = None) -> bool:
        """Work on a window on both sides, and say whether the gradients are equal up to rounding."""
        comparison = self.comparison() if into is None else into
        expected = self.as_one(window).steps  # first: what raises here is no matter of parity
        return comparison.add_all(self.as_ranks(window).steps, expected)

    def as_ranks(self, window: ParityWindow, *, seed: int = 0) -> Outcome:
        """Work on a window on the pretended ranks."""
        return self.ranks.run(window.ranks, window.first, seed=seed)

    def as_one(self, window: ParityWindow, *, seed: int = 0) -> Outcome:
        """Work on a window as one process."""
        first = window.number * self.windows.joined_factor
        return self.joined.run([window.joined], first, seed=seed)

    def is_noisy(self, window: ParityWindow) -> bool:
        """Say whether one process gets other gradients from the same window with other random numbers.

        Where some are drawn, and two passes agree nevertheless, it is tried a few times more: chances may be small.
        """
        first = self.as_one(window, seed=1)
        self.has_drawn = first.has_drawn
        seeds = range(2, 9) if first.has_drawn else (2,)
        return not all(self.comparison().add_all(first.steps, self.as_one(window, seed=seed).steps) for seed in seeds)


def batch_norms(modules: nn.ModuleDict) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Find the BatchNorm layers that DDP synchronises, and those that it leaves alone.

    Args:
        modules: of a Brain, without wrappers.

    Returns:
        Both, by name.

    Ranks: local.

    Example:
        >>> modules = nn.ModuleDict({"net": nn.BatchNorm1d(2), "frozen": nn.BatchNorm1d(2, affine=False)})
        >>> [list(part) for part in batch_norms(modules)]
        [['net'], ['frozen']]
    """
    synchronised: dict[str, nn.Module] = {}
    alone: dict[str, nn.Module] = {}
    for entry, module in modules.items():
        for inner, layer in module.named_modules():
            name = f"{entry}.{inner}" if inner else entry
            if any(layer is known for known in synchronised.values()):
                continue  # in two entries
            if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
                synchronised[name] = layer
            elif isinstance(layer, _BatchNorm):
                found = synchronised if is_trainable(module) and is_convertible(layer, name) else alone
                found[name] = layer
            elif str(getattr(layer, "original_name", "")).startswith("BatchNorm"):  # scripted
                alone[name] = layer
    return synchronised, alone


@contextlib.contextmanager
def standing_still(layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Keep some layers in evaluation mode for a while.

    Args:
        layers: by name.

    Ranks: local.

    Example:
        >>> layer = nn.BatchNorm1d(1)
        >>> with standing_still({"norm": layer}):
        ...     layer.training
        False
    """
    before = {name: layer.training for name, layer in layers.items()}
    for layer in layers.values():
        layer.training = False
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.training = before[name]


def _copy(brain: Any, rank: int, epoch: int, factor: int) -> Any:
    """Make a Brain with attributes and options of its own, and the same modules."""
    one = copy.copy(brain)
    one.rank = rank
    one.progress = Progress(epoch=epoch, optimizer_step=brain.progress.optimizer_step)
    one.run_opts = brain.run_opts.copy()
    one.grad_accumulation_factor = factor
    return one
