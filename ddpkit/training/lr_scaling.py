"""Learning rates that follow the batch: what a recipe set for one batch size, scaled to that of the run.

A step over a batch ``k`` times as large sees ``k`` times as much data. To go as far over an epoch, which now has fewer
steps, its learning rate is multiplied by ``k`` (linear) or by its root (sqrt, as the noise of a gradient shrinks). The
batch is that of an optimizer step: the samples of all ranks and of the accumulation window.

Every parameter group remembers by what it was multiplied, in the optimizer's own state. So a resumed run does not scale
twice, and where its batch is another one it scales by what is missing.

Source: linear, Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677); square root, Krizhevsky, "One
weird trick for parallelizing convolutional neural networks", 2014 (arXiv:1404.5997).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddpkit.dataloader import LoopedLoader, plan_of
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.sampler import DealtBatchSampler, PlannedBatchSampler
from ddpkit.training.batch_sizes import batch_sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpkit.run_opts import RunOptions

logger = get_logger(__name__)

MARK = "ddpkit_lr_scale"
"""Under this name a parameter group, or a scheduler, keeps what its learning rates were multiplied by."""

_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_SCHEDULER_RATES = ("base_lrs", "_last_lr", "eta_min", "min_lrs", "default_min_lr", "max_lrs")


def require_reference(options: Any) -> None:
    """Make sure that there is a batch size that learning rates are scaled from.

    Args:
        options: ``lr_scaling`` and ``reference_batch_size`` count.

    Raises:
        ConfigError: otherwise.

    Ranks: local.
    """
    if options.lr_scaling != "none" and options.reference_batch_size is None:
        raise ConfigError(
            f"lr_scaling={options.lr_scaling} needs reference_batch_size: how many samples, over all processes, an "
            "optimizer step had in the run that the learning rates are meant for. Give --reference_batch_size=N, or "
            "use --lr_scaling=none."
        )


@dataclass(frozen=True)
class LrScaling:
    """What the learning rates of a run are multiplied by, and why.

    Attributes:
        factor: what they are multiplied by.
        reason: in words.
        asked: whether a rule was given.

    Ranks: local; alike on every rank.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> sgd = torch.optim.SGD([weight], lr=0.1)
        >>> LrScaling(2.0, "a test").apply({"sgd": sgd})
        ['sgd 0.1 -> 0.2']
        >>> LrScaling(2.0, "a test").apply({"sgd": sgd})
        []
    """

    factor: float = 1.0
    reason: str = "lr_scaling=none"
    asked: bool = False

    @classmethod
    def of(cls, options: RunOptions, loader: Any, world_size: int) -> LrScaling:
        """Find the factor for a run.

        Args:
            options: ``lr_scaling``, ``reference_batch_size`` and ``grad_accumulation_factor`` count.
            loader: of the training.
            world_size: number of ranks.

        Raises:
            ConfigError: there is no reference, or nobody knows how many samples a step has.
        """
        rule, reference = options.lr_scaling, options.reference_batch_size
        require_reference(options)
        if rule == "none" or reference is None:
            return cls()
        accumulated = options.grad_accumulation_factor
        samples = batch_sizes(loader, None, accumulated, world_size).per_step
        if samples is None:
            raise ConfigError(
                f"lr_scaling={rule} cannot be done: {_why_unknown(loader)}, so the samples of an optimizer step are "
                "not known. Use --lr_scaling=none and set the learning rate for this run, or load the data with a "
                "batch_size."
            )
        factor = scaling_factor(rule, samples, reference)
        shown = f"{samples} samples per step ({world_size} process(es), accumulation {accumulated})"
        return cls(factor, f"lr_scaling={rule}, {shown}, reference_batch_size={reference}: x {factor:.6g}", asked=True)

    def apply(self, optimizers: Mapping[str, Any], holders: Iterable[Any] = ()) -> list[str]:
        """Multiply the learning rates that are not at this scale yet, and those of torch's schedulers over them.

        Args:
            optimizers: by name.
            holders: mappings whose values may be schedulers, or lists, tuples or dicts of them.

        Returns:
            For every optimizer that was changed, its name with the old and new learning rates.

        State: the groups' learning rates; the schedulers' base, last, lowest and highest ones; the mark of both.
        """
        for scheduler in _schedulers(holders, list(optimizers.values())):  # first: they are compared with the groups
            self._scale_scheduler(scheduler)
        return [line for name, optimizer in optimizers.items() if (line := self._scale_optimizer(name, optimizer))]

    def _scale_optimizer(self, name: str, optimizer: Any) -> str:
        before, done, marks = _shown(optimizer), set[int](), set()
        for group in optimizer.param_groups:
            mark = group.get(MARK, 1.0)
            if _same(mark, self.factor):
                continue
            marks.add(mark)
            for key in _GROUP_RATES:
                if key == "lr" and isinstance(group[key], torch.Tensor):
                    _scale_in_place(group[key], self.factor / mark, done)
                elif key in group:
                    group[key] = _scaled(group[key], self.factor / mark)
            group[MARK] = self.factor
        if not marks:
            return ""
        scaled = "".join(f" (x {mark:.6g} in the checkpoint)" for mark in sorted(marks) if mark != 1.0)
        return f"{name} {before}{scaled} -> {_shown(optimizer)}"

    def _scale_scheduler(self, scheduler: Any) -> None:
        mark = _scale_of(scheduler)
        if not _same(mark, self.factor):
            ratio = self.factor / mark
            for key in _SCHEDULER_RATES:
                if isinstance(getattr(scheduler, key, None), (float, int, list, tuple, torch.Tensor)):
                    setattr(scheduler, key, _scaled(getattr(scheduler, key), ratio))
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.eps *= ratio  # below it a learning rate is not reduced
        if hasattr(scheduler, MARK) or not _same(self.factor, 1.0):
            setattr(scheduler, MARK, self.factor)


def scaling_factor(rule: str, samples: int, reference: int) -> float:
    """Return what a learning rate is multiplied by.

    Args:
        rule: ``"none"``, ``"linear"`` or ``"sqrt"``.
        samples: of an optimizer step, over all ranks.
        reference: samples of a step that the learning rate was meant for.

    Ranks: local.

    Example:
        >>> scaling_factor("linear", 256, 64), scaling_factor("sqrt", 256, 64), scaling_factor("none", 256, 64)
        (4.0, 2.0, 1.0)
    """
    ratio = samples / reference
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def scale_learning_rates(
    scaling: LrScaling,
    optimizers: Mapping[str, Any],
    attributes: Mapping[str, Any],
    holders: Iterable[Mapping[str, Any]],
) -> None:
    """Bring the learning rates of a recipe to a scale, and say so in one line.

    Args:
        scaling: what by.
        optimizers: by name.
        attributes: of the recipe; optimizers and schedulers are looked for in it.
        holders: where else schedulers may be.

    Ranks: local; alike on every rank.

    State: as :meth:`LrScaling.apply`.

    Example:
        >>> scale_learning_rates(LrScaling(), {}, {}, [])
    """
    optimizers = dict(optimizers)
    for name, value in attributes.items():
        if isinstance(value, torch.optim.Optimizer) and not any(value is one for one in optimizers.values()):
            optimizers[name] = value
    changed = scaling.apply(optimizers, [attributes, *holders])
    if changed:
        logger.announce("Learning rates (%s): %s.", scaling.reason, "; ".join(changed))
    elif scaling.asked:
        found = "; ".join(f"{name} {_shown(optimizer)}" for name, optimizer in optimizers.items())
        found = found or "no optimizer found"
        logger.announce("Learning rates (%s): %s, at this scale already.", scaling.reason, found)


def _schedulers(holders: Iterable[Any], optimizers: list[Any]) -> Iterator[Any]:
    """Yield torch's schedulers over some optimizers, and those that they are made of, each once."""
    seen: set[int] = set()
    waiting: list[Any] = [value for holder in holders for value in holder.values()]
    waiting += [inner for value in waiting for inner in _inside(value)]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, (LRScheduler, ReduceLROnPlateau)) or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += getattr(one, "_schedulers", [])
        if any(one.optimizer is optimizer for optimizer in optimizers):
            yield one


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


def _scale_of(scheduler: Any) -> float:
    """Return what a scheduler's learning rates were multiplied by.

    Without a mark, it was made from the learning rates of the groups, before or after they were scaled. It is then at
    their scale; unless the groups come from a checkpoint and the scheduler does not.
    """
    groups = scheduler.optimizer.param_groups
    mark: float = getattr(scheduler, MARK, 0.0)
    if mark or not groups:
        return mark or 1.0
    mark = groups[0].get(MARK, 1.0)
    bases = getattr(scheduler, "base_lrs", [])
    at_one = bool(bases) and all(
        _same(float(base) * mark, float(group.get("initial_lr", math.nan)))
        for base, group in zip(bases, groups, strict=False)
    )
    return 1.0 if at_one else mark


def _scaled(value: Any, ratio: float) -> Any:
    """Multiply a number or a tensor, or those in a list; what is given stays as it is."""
    return type(value)(one * ratio for one in value) if isinstance(value, (list, tuple)) else value * ratio


def _scale_in_place(rate: torch.Tensor, ratio: float, done: set[int]) -> None:
    """Multiply a learning rate that is a tensor, once: groups may share it, and a compiled step holds it."""
    if id(rate) not in done:
        done.add(id(rate))
        rate.mul_(ratio)


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)


def _shown(optimizer: Any) -> str:
    """Show the learning rates of an optimizer's groups, each once."""
    return ", ".join(dict.fromkeys(f"{float(group['lr']):.6g}" for group in optimizer.param_groups if "lr" in group))


def _why_unknown(loader: Any) -> str:
    """Say why the number of samples of a step is not known."""
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    planned = plan_of(inner)
    if isinstance(planned, DealtBatchSampler):
        return f"{type(planned.batch_sampler).__name__} makes batches whose size nobody can vouch for"
    if isinstance(planned, PlannedBatchSampler):
        return f"{type(inner.dataset).__name__} gives whole batches (batch_size=None)"
    return f"{type(inner).__name__} has no batch_size"
