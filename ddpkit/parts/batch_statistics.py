"""Running statistics of BatchNorm layers, computed anew for the weights of now.

The first batches of the epoch's order are read once more, past the loader: no position of it, and
no random stream of the run, moves. Layers of BatchNorm compute as in training, all else as in an
evaluation. Each layer takes the mean over the batches of what the joined batch of all ranks has.

Source: ``torch.optim.swa_utils.update_bn`` of torch 2.13, which reads a loader of its own, and has
the statistics of one process.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from ddpkit.data import inner_loader
from ddpkit.dataloader import plan_of
from ddpkit.errors import ConfigError
from ddpkit.metrics import counted_by
from ddpkit.seed import restore_rng_state, rng_state, seed_streams
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_RENEWAL = 0xBA7C  # what random numbers are for

NO_PLAN = (
    "AveragedWeights: renew_batch_statistics={} reads batches of the training data once more, and "
    "of {} it cannot: only a dataset with a length, which ddpkit divides into batches, can be read "
    "at any place. Leave renew_batch_statistics out; then the statistics are averaged."
)


def require_batches(loader: Any, number: int) -> None:
    """Refuse a loader whose batches cannot be read once more.

    Args:
        loader: of the training.
        number: of batches, for the message.

    Raises:
        ConfigError: they cannot.

    Ranks: local; alike on every rank.
    """
    inner = inner_loader(loader)
    if plan_of(inner) is None or getattr(inner, "batch_sampler", None) is None:
        dataset = getattr(inner, "dataset", inner)
        kind = type(getattr(dataset, "whole", dataset)).__name__
        raise ConfigError(NO_PLAN.format(number, kind))


def layers_with_statistics(modules: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers whose running statistics move now: in training mode.

    Ranks: local.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval())
        >>> len(layers_with_statistics(net))
        1
    """
    return [
        layer
        for layer in modules.modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None
    ]


@torch.no_grad()
def renew_statistics(brain: Any, layers: Sequence[Any], number: int) -> None:
    """Compute the running statistics of layers anew.

    Args:
        brain: of the recipe; its ``compute_forward`` runs.
        layers: of BatchNorm.
        number: of batches of this rank; fewer if an epoch has fewer.

    Ranks: collective where batch statistics are.

    State: the running statistics.
    """
    loader = brain.progress.loader
    inner = inner_loader(loader)
    plan: Any = plan_of(inner)
    counted = SimpleNamespace(count=1)
    with (
        _random_streams_kept(),
        _only_statistics_move(brain.modules, layers),
        brain.progress.logged.during(None, None),  # nothing is logged
        counted_by(counted),
    ):
        seed_streams(plan.seed, _RENEWAL, plan.epoch)
        for position, batch in enumerate(_first_batches(inner, plan, number)):
            counted.count = plan.count(position)
            with brain.training_ctx:
                brain.compute_forward(batch, Stage.TRAIN)


def _first_batches(loader: Any, plan: Any, number: int) -> Iterator[Any]:
    """Yield the first batches of an epoch, and leave the loader as it is."""
    order = copy.copy(plan)
    order.skip = 0
    reader: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=list(itertools.islice(iter(order), number)),
        collate_fn=loader.collate_fn,
        generator=torch.Generator(),
    )
    yield from reader


@contextlib.contextmanager
def _random_streams_kept() -> Iterator[None]:
    state = rng_state()
    try:
        yield
    finally:
        restore_rng_state(state)


@contextlib.contextmanager
def _only_statistics_move(modules: nn.Module, layers: Sequence[Any]) -> Iterator[None]:
    """Return a context in which layers average their statistics from nothing on, and all else is in
    evaluation mode.
    """
    modes = [(module, module.training) for module in modules.modules()]
    counts = [(layer, layer.momentum, layer.num_batches_tracked) for layer in layers]
    kept = [None if count is None else count.clone() for *_, count in counts]
    try:
        modules.eval()
        for layer in layers:
            layer.train()
            layer.momentum = None  # the mean of all batches
            layer.reset_running_stats()
        yield
    finally:
        for (layer, momentum, count), before in zip(counts, kept, strict=True):
            layer.momentum = momentum
            if count is not None:
                count.copy_(before)
        for module, mode in modes:
            module.training = mode
