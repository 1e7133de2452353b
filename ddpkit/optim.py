"""Optimizers and schedules are made, and step: unscale, weigh, clip every group together, skip if not finite, zero.

The norm is taken over the parameters of all groups of all optimizers that step, and read once. After the gradients have
been averaged it is the same number on every rank, so that whether to skip needs no further agreement.

Learning-rate scaling: a batch ``k`` times as large makes ``k`` times fewer steps per epoch. So the learning rate is
multiplied by ``k`` (linear) or by its square root (sqrt, as the noise of a gradient shrinks): the samples of a step
against those that the rate was set for. The factor is applied only during each step: parameter groups, schedulers and
checkpoints keep the recipe's rates. So every schedule is the unscaled schedule times the factor, and a run can be
resumed with another batch size.

Source: linear, Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677); square root, Krizhevsky, "One
weird trick for parallelizing convolutional neural networks", 2014 (arXiv:1404.5997). The clip coefficient
``max_norm / (norm + 1e-6)`` is as in :func:`torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpkit.base import is_sharded, kind_of, local_part, reads_device
from ddpkit.compat import multiply_all, norm_of_all, watches_all_steps
from ddpkit.device import widest_float
from ddpkit.errors import ConfigError, DdpkitError
from ddpkit.logger import get_logger
from ddpkit.precision import drop_casts
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ddpkit.run_opts import RunOptions
    from ddpkit.training import BatchSizes

__all__ = [
    "LateStep",
    "LrScaling",
    "Schedule",
    "StepCounters",
    "StepResult",
    "drop_nonfinite",
    "gradients",
    "make_optimizer",
    "make_schedule",
    "multiply_gradients",
    "own_gradients",
    "parameters_of",
    "rate_factor",
    "rm_vector_weight_decay",
    "take_late_step",
    "take_step",
    "unscale",
    "zero_gradients",
]

logger = get_logger(__name__)

UNASKED: tuple[Any, ...] = (torch.optim.Adam, torch.optim.AdamW)  # are fused without being asked for it
WITH_FUSED: tuple[Any, ...] = (*UNASKED, torch.optim.SGD)
WIDE = (torch.float32, torch.float64)
GPUS = ("cuda",)  # kinds of devices that fused kernels are used on unasked, and that are not waited for
_COUNTERS = ("optimizer_step", "nonfinite", "clipped")
_looking = threading.RLock()  # a thread of the recipe, or of autograd, may look at a step, too
# Of optimizers whose steps are scaled: two Brains may have the same one, and the one that trains scales it.
_scalings: weakref.WeakKeyDictionary[Optimizer, LrScaling] = weakref.WeakKeyDictionary()
# Of optimizers inside of a step, or after one that failed: the recipe's rates.
_own_rates: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()


class StepResult(NamedTuple):
    """What became of an optimizer step.

    Attributes:
        stepped: False when it was skipped.
        norm: the gradients' norm before clipping; not finite, or negative with the multiplier, when the step was
            skipped.
        clipped: whether the gradients were scaled down to the largest norm that was allowed.

    Ranks: local; equal on every rank when the gradients are.

    Example:
        >>> StepResult(stepped=True, norm=1.5).stepped
        True
    """

    stepped: bool
    norm: float
    clipped: bool = False


class LateStep:
    """An optimizer step of which the GPU has found out by itself whether to skip it; the host has not looked yet.

    Args:
        norm: of the gradients, shape ``()``, on their device; as in :class:`StepResult`.
        max_norm: to which they are scaled down; None or <= 0: not at all.

    Ranks: local; equal on every rank when the gradients are.

    Example:
        >>> LateStep(torch.tensor(3.0), 1.0).result()
        StepResult(stepped=True, norm=3.0, clipped=True)
    """

    def __init__(self, norm: torch.Tensor, max_norm: float | None) -> None:
        self._max_norm, self._norm, self._event = max_norm, norm.to("cpu", non_blocking=True), None
        if norm.is_cuda:  # then the copy is on its way to pinned memory
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(norm.device))

    @reads_device
    def result(self) -> StepResult:
        """Wait until the norm has come, which was sent before the optimizers' kernels, and say what became of it."""
        if self._event is not None:
            self._event.synchronize()
        norm = self._norm.item()
        finite = math.isfinite(norm) and norm >= 0.0
        return StepResult(finite, norm, clipped=finite and self._max_norm is not None and 0.0 < self._max_norm < norm)


@dataclass
class StepCounters:
    """Counts optimizer steps, of which the last may not have been looked at yet.

    Nobody finds a counter that is behind: while a step is open its counters are not there, and whoever reads one looks
    at the step first. So nothing is waited for in a step that nobody asks about.

    Attributes:
        optimizer_step: updates since the run began.
        nonfinite: steps skipped in the current epoch because a gradient was not finite.
        clipped: updates of the current epoch whose gradients were scaled down to ``max_grad_norm``; equal on all ranks.
        follow: does what follows the last step, once it is looked at; None: that is done.
        error: what that has raised.

    Ranks: local.

    Example:
        >>> counters = StepCounters()
        >>> def follow(): counters.optimizer_step += 1
        >>> counters.leave_open(follow); "optimizer_step" in vars(counters), counters.optimizer_step
        (False, 1)
    """

    # Without a default in the class, so that a counter can be taken away.
    optimizer_step: int = field(default_factory=int)
    nonfinite: int = field(default_factory=int)
    clipped: int = field(default_factory=int)
    follow: Callable[[], None] | None = field(default=None, init=False, repr=False)
    error: DdpkitError | None = field(default=None, init=False, repr=False)
    _aside: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def leave_open(self, follow: Callable[[], None]) -> None:
        """Leave a step open.

        Args:
            follow: called once, before a counter is read: counts the step, or counts it as skipped.
        """
        with _looking:
            self.follow = follow
            for name in _COUNTERS:
                self._aside[name] = self.__dict__.pop(name)

    def look(self) -> None:
        """Look at the step that is open, if one is. An error waits for :meth:`settle`: this rank may look alone."""
        with _looking:
            if self.follow is None:
                return
            self.__dict__.update(self._aside)
            self._aside.clear()
            try:
                self.follow()
            except DdpkitError as error:
                self.error = error
            finally:
                self.follow = None

    def settle(self) -> None:
        """Look at the step that is open, where all ranks do.

        Raises:
            DdpkitError: what followed that step has raised.

        Ranks: all, at the same step.
        """
        self.look()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def settled_step(self) -> int:
        """Settle, and return the updates since the run began."""
        self.settle()
        return self.optimizer_step

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: counters that no open step is missing from."""
        self.look()
        return {**vars(self), "_aside": {}}

    if not TYPE_CHECKING:  # else mypy would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Look first at the step that is open, whose counters are not there."""
            if name in _COUNTERS:
                self.look()
            if name not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__[name]


def gradients(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """List the gradients of all groups of all optimizers, each once.

    Args:
        optimizers: the optimizers that are about to step.

    Returns:
        The ``grad`` of every parameter that has one.

    Ranks: local.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2)); weight.sum().backward()
        >>> gradients([torch.optim.SGD([weight], lr=0.1)])
        [tensor([1., 1.])]
    """
    return [one.grad for one in parameters_of(optimizers) if one.grad is not None]


@reads_device
def take_step(
    optimizers: Sequence[Optimizer],
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None = None,
    multiplier: float | torch.Tensor = 1.0,
    *,
    updates: bool = True,
    alone: bool = False,
) -> StepResult:
    """Update the parameters with the accumulated gradients, and clear the gradients.

    Args:
        optimizers: the optimizers that step.
        max_norm: the gradients of all of them together are scaled down to this norm; None or <= 0: no clipping.
        scaler: the loss scaler of fp16 training, if it is enabled.
        multiplier: applied to the gradients, in the same pass as the clipping: a number, or a tensor of shape ``()``
            on their device, which nobody then waits for. It divides by what was not known during the window.
        updates: let the scaler choose its next scale; False while gradients of other optimizers still have this scale.
        alone: each rank steps with its own gradients (post-local SGD). If one is not finite on this rank, all of this
            rank's become zero and it steps all the same, so that all ranks make the same number of steps.

    Returns:
        Whether the step was taken, the norm, and whether that was clipped. A step is skipped, and its gradients
        dropped, when a gradient is not finite.

    Ranks: local; gradients must have been averaged over the ranks before. Where each rank has a part of them,
        collective: one small sum gives all the same norm.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1)); (3 * weight).sum().backward()
        >>> take_step([torch.optim.SGD([weight], lr=1.0)], max_norm=None), weight.item()
        (StepResult(stepped=True, norm=3.0, clipped=False), -3.0)
    """
    own_gradients([one for one in optimizers if not type(one).__module__.startswith("torch.")])
    if scaler is not None:
        optimizers = unscale(optimizers, scaler)
    factor = multiplier
    found, total_norm = _with_norm(optimizers)
    is_plain = isinstance(multiplier, float) and multiplier == 1.0
    if not is_plain:
        total_norm = total_norm * multiplier
    norm = total_norm.item()
    finite = math.isfinite(norm) and norm >= 0.0  # negative: counts add up to less than 0
    clips = finite and max_norm is not None and 0.0 < max_norm < 1.01 * norm + 1e-5  # else surely nothing is clipped
    if clips:
        clip = torch.clamp((total_norm + 1e-6).reciprocal() * cast("float", max_norm), max=1.0)
        factor = clip if is_plain else multiplier * clip
    if clips or (finite and not is_plain):
        multiply_all(found, factor)
    stepped = finite or (alone and _zeroed(found, multiplier))
    if stepped:
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None and optimizers and updates:
        scaler.update()
    zero_gradients(optimizers, set_to_none=True)
    return StepResult(stepped=stepped, norm=norm, clipped=clips and norm > cast("float", max_norm))


def take_late_step(
    optimizers: Sequence[Optimizer], max_norm: float | None, multiplier: float | torch.Tensor = 1.0
) -> LateStep | None:
    """Step as :func:`take_step` does, bit for bit, where the GPU can decide on skipping and nobody waits for it.

    Args:
        optimizers: the optimizers that step.
        max_norm: as for :func:`take_step`.
        multiplier: likewise.

    Returns:
        What knows later what became of the step; None: nothing was done, and :func:`take_step` has to.

    Ranks: local; gradients must have been averaged over the ranks before.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1)); (3 * weight).sum().backward()
        >>> take_late_step([torch.optim.SGD([weight], lr=1.0, fused=True)], None).result(), weight.item()
        (StepResult(stepped=True, norm=3.0, clipped=False), -3.0)
    """
    found = gradients(optimizers)
    if not _skip_by_themselves(optimizers, found):
        return None
    norm, factor = norm_of_all(found), multiplier
    is_plain = isinstance(multiplier, float) and multiplier == 1.0
    if not is_plain:
        norm = norm * multiplier
    late = LateStep(norm, max_norm)
    # 1 where it is not finite, or made negative: in few kernels, each of which the host has to launch.
    skip = ((norm if is_plain else norm.sqrt()) * 0.0).ne_(0.0).float()
    clips = max_norm is not None and max_norm > 0.0
    if clips:
        clip = torch.clamp((norm + 1e-6).reciprocal() * cast("float", max_norm), max=1.0)  # 1 where nothing is clipped
        factor = clip if is_plain else multiplier * clip
    if clips or not is_plain:
        multiply_all(found, factor)
    for one in cast("Any", optimizers):
        one.grad_scale, one.found_inf = None, skip  # as torch's GradScaler hands it over
        try:
            one.step()
        finally:
            del one.grad_scale, one.found_inf
    zero_gradients(optimizers, set_to_none=True)
    return late


def _skip_by_themselves(optimizers: Sequence[Optimizer], found: list[torch.Tensor]) -> bool:
    """Say whether fused kernels of torch can skip this step with nothing left behind.

    No hook and no wrapper may see the step. Every parameter must have its state: a step that is skipped makes none,
    and SGD's kernel begins with uninitialised momentum where it skips its first step (torch 2.13).
    """
    kinds = {(one.__class__, one.dtype, one.device, one.layout) for one in found}
    kind, dtype, _, layout = kinds.pop() if len(kinds) == 1 else (None, None, None, None)
    if kind is not torch.Tensor or dtype not in WIDE or layout is not torch.strided or watches_all_steps():
        return False
    for optimizer in optimizers:
        parts = vars(optimizer)
        own: Any = parts.get("step")
        inner = own.__wrapped__ if hasattr(own, "_wrapped_by_lr_sched") else None  # torch's schedulers wrap it
        is_plain = own is None or inner is type(optimizer).step
        if type(optimizer) not in WITH_FUSED or _is_watched(optimizer) or not is_plain:
            return False
        for group in optimizer.param_groups:
            kept = "exp_avg" if "betas" in group else "momentum_buffer" if group["momentum"] else ""
            stepping = [one for one in group["params"] if kept and one.grad is not None]
            if not group["fused"] or any(optimizer.state.get(one, {}).get(kept) is None for one in stepping):
                return False
    return True


def _is_watched(optimizer: Optimizer) -> bool:
    """Say whether a hook sees the steps of an optimizer; one that only drops casts does not look."""
    hooks = [vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    return any(one is not drop_casts for found in hooks if found for one in found.values())


@reads_device
def _zeroed(found: list[torch.Tensor], multiplier: float | torch.Tensor) -> bool:
    """Fill all gradients with zeros; not if the multiplier, the same on all ranks, is why they are not finite."""
    if not 0.0 < multiplier < math.inf:
        return False
    for gradient in found:
        gradient.zero_()
    return True


@reads_device
def _dense(parameter: torch.Tensor) -> Any:
    """Return a gradient; of a sparse one (``nn.Embedding(sparse=True)``) the values of its rows, each row once."""
    gradient: Any = parameter.grad
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad.values()


def _with_norm(optimizers: Sequence[Optimizer]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return what this rank has of the gradients, and the norm of all of them on all ranks as of one vector."""
    found: list[Any] = gradients(optimizers)
    if not found or found[0].__class__ is torch.Tensor or not is_sharded(found[0]):
        try:
            return found, norm_of_all(found)
        except NotImplementedError:  # torch has no norm of sparse gradients
            found = [_dense(one) for one in parameters_of(optimizers) if one.grad is not None]
            return found, norm_of_all(found)
    parts = [local_part(one) for one in found]
    square = norm_of_all(parts).to(widest_float(parts[0].device)).square()
    shared = square.to(found[0].device_mesh.device_type)  # the parts may be in host memory
    torch.distributed.all_reduce(shared, group=found[0].device_mesh.get_group())
    return parts, shared.sqrt().to(square.device)


def multiply_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply gradients by a number, this rank's part where they are divided.

    Args:
        parameters: whose gradients.
        factor: the number.

    Ranks: local.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1)); weight.sum().backward()
        >>> multiply_gradients([weight], 0.5); weight.grad
        tensor([0.5000])
    """
    found: list[Any] = [one for one in parameters if one.grad is not None]
    multiply_all([local_part(one.grad) if is_sharded(one.grad) else _dense(one) for one in found], factor)


def unscale(optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler) -> list[Optimizer]:
    """Unscale the gradients of those optimizers that have any; the scaler refuses the others.

    Args:
        optimizers: that step.
        scaler: enabled.

    Returns:
        Those with gradients.

    Raises:
        ConfigError: two of them share a parameter.

    Ranks: local.

    Example:
        >>> unscale([], torch.amp.GradScaler("cpu"))
        []
    """
    ready = [optimizer for optimizer in optimizers if gradients([optimizer])]
    if sum(len(gradients([optimizer])) for optimizer in ready) > len(gradients(ready)):
        raise ConfigError(
            "Two optimizers that step together share a parameter, which does not work with precision=fp16. Give each "
            "parameter to one optimizer, or train with --precision=bf16."
        )
    for optimizer in ready:
        scaler.unscale_(optimizer)
    return ready


def make_optimizer(
    opt_class: Callable[[Iterable[Any]], Optimizer], modules: torch.nn.Module, *, split_vectors: bool = False
) -> Optimizer:
    """Call a recipe's ``opt_class`` with all parameters; one that is frozen may be unfrozen later.

    torch's Adam and AdamW are called with ``fused=True`` if all parameters are on a GPU.

    Args:
        opt_class: returns an optimizer.
        modules: whose parameters are optimized.
        split_vectors: make two groups of the trainable parameters; the group of vectors has no weight decay.

    Returns:
        The optimizer.

    Raises:
        ConfigError: nothing can be trained, or ``opt_class`` returned something that is not an optimizer.

    Ranks: local.

    Example:
        >>> type(make_optimizer(torch.optim.Adam, torch.nn.Linear(1, 1))).__name__
        'Adam'
    """
    _require_maker("opt_class", opt_class)
    parameters = list(modules.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            "opt_class was given, but no entry of modules has a trainable parameter. Pass the model in modules, or "
            "leave opt_class out."
        )
    groups: Any = rm_vector_weight_decay(modules) if split_vectors else parameters
    how: dict[str, Any] = {"fused": True} if _may_be_fused(opt_class, modules) else {}
    try:
        optimizer = opt_class(groups, **how)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"opt_class cannot make an optimizer: {type(error).__name__}: {error}") from error
    _require(optimizer, "opt_class must return an optimizer", "param_groups", "step", "zero_grad")
    return optimizer


def _require_maker(name: str, given: Any) -> None:
    """Refuse an object, or the name of a class, where a class or a function is called to make one.

    Args:
        name: of the argument.
        given: what was given for it.

    Raises:
        ConfigError: it cannot be called.
    """
    if callable(given):
        return
    kind = type(given).__name__
    if isinstance(given, str):
        what = f"{name}={given!r} is a text"
    else:
        what = f"{name} is an object of the class {kind}, which is made already"
    raise ConfigError(
        f"{what}: give a class or a function that makes it, in YAML with !name: instead of !new:, in Python "
        "functools.partial(TheClass, ...). An object of your own is set in init_optimizers."
    )


def _may_be_fused(opt_class: Any, modules: torch.nn.Module) -> bool:
    """Say whether torch's fused kernel does what its others do; not if the recipe has chosen one of them.

    SGD's takes no sparse gradients, and with momentum none that come later than another's (torch 2.13).
    """
    kind, given = getattr(opt_class, "func", opt_class), getattr(opt_class, "keywords", {})
    if kind not in UNASKED or given.keys() & {"fused", "foreach", "capturable", "differentiable"}:
        return False
    return all(
        type(one) is torch.nn.Parameter and one.device.type in GPUS and one.dtype in WIDE
        for one in modules.parameters()
    )


def _require(made: Any, words: str, *names: str) -> None:
    missing = [name for name in names if not hasattr(made, name)]
    if missing:
        raise ConfigError(f"{words}, got {kind_of(made)} (without {', '.join(missing)}).")


class Schedule:
    """Steps a learning-rate scheduler, and saves its state in checkpoints.

    Args:
        scheduler: torch's, or an object with ``step``, ``state_dict`` and ``load_state_dict``.
        optimizer: the scheduler's.
        every: ``"step"`` or ``"epoch"``.
        total_steps: how many steps it was made for; None where that is not known.
        make: makes the scheduler for another number of steps; None: that number was not asked for.

    Attributes:
        stepped_at: the optimizer step after which the last epoch's step was made.

    Ranks: local; alike on every rank.

    State: the scheduler's state, ``every``, ``total_steps`` and ``stepped_at``.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizer: Optimizer,
        every: str,
        total_steps: int | None,
        make: Callable[[int | None], Any] | None = None,
    ) -> None:
        self.scheduler, self.optimizer, self.every, self.total_steps = scheduler, optimizer, every, total_steps
        self.stepped_at = 0
        self._make = make

    def __str__(self) -> str:
        """Say it in one line."""
        total = self.total_steps or "an unknown number"
        return f"{type(self.scheduler).__name__}, after each {self.every} (of {total})"

    @property
    def follows_loss(self) -> bool:
        """Whether each step needs the valid loss."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def after_step(self, stepped: Iterable[Optimizer]) -> None:
        """Step after an optimizer step, if that is when, and if the scheduler's own optimizer has stepped.

        Args:
            stepped: the optimizers that have.
        """
        if self.every == "step" and any(one is self.optimizer for one in stepped):
            self._step()

    def after_stage(self, stage: Stage, loss: float, optimizer_step: int) -> None:
        """Step after an epoch, if that is when: after training, or after validation where its loss is needed.

        An epoch counts once, also where a resumed run ends it again; one without an optimizer step does not count.

        Args:
            stage: that has ended.
            loss: its mean loss.
            optimizer_step: optimizer steps so far.
        """
        if self.every != "epoch" or stage is not (Stage.VALID if self.follows_loss else Stage.TRAIN):
            return
        if optimizer_step != self.stepped_at:
            self.stepped_at = optimizer_step
            self._step(*([loss] if self.follows_loss else []))

    def _step(self, *loss: float) -> None:
        try:
            self.scheduler.step(*loss)
        except ValueError as error:
            made = "" if self._make is None else f" was made for {_count(self.total_steps, self.every)} and"
            raise ConfigError(
                f"{type(self.scheduler).__name__}{made} cannot go on: {error}. Train no longer than that, or use a "
                "schedule without an end."
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, ``every``, ``total_steps`` and ``stepped_at``."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "every": self.every,
            "total_steps": self.total_steps,
            "stepped_at": self.stepped_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with the length that the schedule had there; say so where the script has another.

        A function may have put the number of steps where no state has it. So it is called once more, with the number
        that it was called with when the checkpoint's run began.
        """
        total, every = state["total_steps"], state.get("every", self.every)
        has_length = self._make is not None
        if every != self.every or (has_length and total != self.total_steps):
            self._tell_length(total, every, has_length=has_length)
        if self._make is not None and total != self.total_steps:
            with _settings_kept(self.optimizer):
                self.scheduler = self._make(total)
        own = self.scheduler.state_dict()
        self.scheduler.load_state_dict(state["scheduler"])
        self._tell_settings(own, state["scheduler"])
        self.every, self.total_steps, self.stepped_at = every, total, state["stepped_at"]

    def _tell_length(self, total: int | None, every: str, *, has_length: bool) -> None:
        """Say that the schedule keeps its length, or the unit that it counts in."""
        name = type(self.scheduler).__name__
        before, now = f"{every}s", f"{self.every}s"
        if has_length:
            before, now = _count(total, every), _count(self.total_steps, self.every)
        logger.warning(KEEPS_LENGTH, name, before, now)

    def _tell_settings(self, own: Any, saved: Any) -> None:
        """Say which settings of the script have no effect, because a state has them, too."""
        if not (isinstance(own, dict) and isinstance(saved, dict)):
            return
        settings = inspect.signature(type(self.scheduler)).parameters.keys() - {"last_epoch"}
        names = sorted(settings & own.keys() & saved.keys())
        plain = [name for name in names if isinstance(own[name], (bool, int, float, str, list, tuple, type(None)))]
        changed = [f"{name} {saved[name]} -> {own[name]}" for name in plain if saved[name] != own[name]]
        if changed:
            logger.warning(KEEPS_SETTINGS, type(self.scheduler).__name__, ", ".join(changed))


KEEPS_LENGTH = (
    "The schedule %s was made for %s, and this run has %s. It goes on as it was made. For a schedule of another length "
    "begin a new run from the checkpoint's weights: load them before fit, and give --resume=never."
)
KEEPS_SETTINGS = (
    "The schedule %s has other settings than those with which the checkpoint's run began (%s), without effect: it goes "
    "on with the checkpoint's."
)


def _count(number: int | None, what: str) -> str:
    """Return a number of steps or epochs in words."""
    return f"an unknown number of {what}s" if number is None else f"{number} {what}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def _settings_kept(optimizer: Optimizer) -> Iterator[None]:
    """Return a context after which an optimizer has the settings that it had: a new scheduler sets the first rates."""
    before = [
        {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        for group in ({name: group[name] for name in group if name != "params"} for group in optimizer.param_groups)
    ]
    yield
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        for name, value in settings.items():
            if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                group[name].copy_(value)  # a step may have been compiled with this very tensor
            else:
                group[name] = value


def make_schedule(
    scheduler_class: Callable[..., Any], optimizer: Optimizer, every: str, total_steps: int | None
) -> Schedule:
    """Call a recipe's ``scheduler_class``.

    Args:
        scheduler_class: a function, called with ``(optimizer, total_steps)``; or a class (or a ``functools.partial`` of
            one), called with ``(optimizer)`` and, by name, with the number of steps if it has a parameter
            ``total_steps`` or ``T_max`` that is not given yet.
        optimizer: the scheduler's.
        every: ``"step"`` or ``"epoch"``.
        total_steps: how many steps the schedule will make; None where that is not known.

    Raises:
        ConfigError: the call failed, or returned something that is not a scheduler.

    Ranks: local; alike on every rank.
    """
    _require_maker("scheduler_class", scheduler_class)
    make = functools.partial(_make_scheduler, scheduler_class, optimizer)
    asks = _asks_for_length(scheduler_class)
    schedule = Schedule(make(total_steps), optimizer, every, total_steps, make if asks else None)
    if schedule.follows_loss and every != "epoch":
        raise ConfigError("ReduceLROnPlateau follows the valid loss: use it with --scheduler_every=epoch.")
    return schedule


def _make_scheduler(scheduler_class: Callable[..., Any], optimizer: Optimizer, total_steps: int | None) -> Any:
    """Call ``scheduler_class`` for a number of steps, and check what it returns."""
    arguments, keywords = _arguments_for(scheduler_class, total_steps)
    name = getattr(getattr(scheduler_class, "func", scheduler_class), "__name__", "")
    try:
        scheduler = scheduler_class(optimizer, *arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"scheduler_class ({name}) cannot make a scheduler for {total_steps} steps: {error}. A class is given "
            "total_steps or T_max if it has such a parameter; give its other arguments beforehand (!name: in YAML, "
            "functools.partial in Python), or pass a function (optimizer, total_steps) -> scheduler. For a stream, "
            "whose number of steps is None, give optimizer_step_limit."
        ) from error
    _require(scheduler, f"scheduler_class ({name}) must return a scheduler", "step", "state_dict", "load_state_dict")
    return scheduler


def _arguments_for(scheduler_class: Any, total_steps: int | None) -> tuple[list[Any], dict[str, Any]]:
    """Return how the number of steps is handed over: by position, by name, or not at all."""
    is_class, names = _parameters_for_length(scheduler_class)
    if not _asks_for_length(scheduler_class) or (is_class and total_steps is None):
        return [], {}
    return ([], {names[0]: total_steps}) if names else ([total_steps], {})


def _asks_for_length(scheduler_class: Any) -> bool:
    """Return whether ``scheduler_class`` is called with the number of steps, where that is known."""
    is_class, names = _parameters_for_length(scheduler_class)
    given = getattr(scheduler_class, "keywords", {})
    return bool(names or not is_class) and not any(name in given for name in names)


def _parameters_for_length(scheduler_class: Any) -> tuple[bool, list[str]]:
    """Return whether ``scheduler_class`` is a class, and its parameters for the number of steps."""
    parameters = inspect.signature(scheduler_class).parameters
    is_class = isinstance(getattr(scheduler_class, "func", scheduler_class), type)
    known = ("total_steps", "T_max") if is_class else ("total_steps",)
    return is_class, [name for name in known if name in parameters]


def rm_vector_weight_decay(modules: torch.nn.Module) -> list[dict[str, Any]]:
    """Make two parameter groups: vectors (biases, normalisation) without weight decay, then all the rest.

    Args:
        modules: whose trainable parameters are divided.

    Returns:
        Two groups for an optimizer's constructor.

    Ranks: local.

    Example:
        >>> [len(group["params"]) for group in rm_vector_weight_decay(torch.nn.Linear(2, 3))]
        [1, 1]
    """
    parameters = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
        {"params": [parameter for parameter in parameters if parameter.ndim != 1]},
    ]


def parameters_of(optimizers: Collection[Any]) -> list[torch.nn.Parameter]:
    """Return the parameters of some optimizers, each once.

    Ranks: local.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> len(parameters_of([torch.optim.SGD([weight]), torch.optim.Adam([weight])]))
        1
    """
    found = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    return found if len(optimizers) == 1 else list(dict.fromkeys(found))


def zero_gradients(optimizers: Iterable[Optimizer], *, set_to_none: bool) -> None:
    """Drop or zero the gradients of some optimizers.

    Args:
        optimizers: whose parameters' gradients go.
        set_to_none: drop them instead of filling them with zeros.

    Ranks: local.

    Example:
        >>> zero_gradients([], set_to_none=True)
    """
    for optimizer in optimizers:
        is_torchs = getattr(type(optimizer), "zero_grad", None) is Optimizer.zero_grad
        if not (set_to_none and is_torchs and "zero_grad" not in vars(optimizer)):
            optimizer.zero_grad(set_to_none=set_to_none)
            continue
        for parameter in parameters_of([optimizer]):  # as torch's does, which makes 40 calls of Python
            parameter.grad = None


def own_gradients(optimizers: Sequence[Optimizer]) -> None:
    """Copy gradients, which may be views of DDP's buckets, so that they outlive the next backward pass.

    Args:
        optimizers: of whose parameters.

    Ranks: local.

    Example:
        >>> own_gradients([])
    """
    if not (optimizers and torch.distributed.is_initialized()):
        return
    for parameter in parameters_of(optimizers):
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


@reads_device
def drop_nonfinite(modules: torch.nn.Module) -> list[str]:
    """Drop the gradients that are not finite; waits for the device once per parameter.

    Args:
        modules: whose parameters are looked at.

    Returns:
        The names of the parameters whose gradient was dropped.

    Ranks: local.

    Example:
        >>> drop_nonfinite(torch.nn.Linear(1, 1))
        []
    """
    dropped = []
    for name, parameter in modules.named_parameters():
        if parameter.grad is not None and not torch.isfinite(_dense(parameter)).all():
            parameter.grad = None
            dropped.append(name)
    return dropped


# ---------------------------------------------------------------------------------------- learning-rate scaling


class LrScaling:
    """Multiplies the learning rates of optimizers while they step.

    Attributes:
        factor: on the learning rates.
        reason: in words.

    Ranks: local; alike on every rank.

    Example:
        >>> import torch
        >>> from ddpkit.run_opts import RunOptions
        >>> from ddpkit.training import BatchSizes
        >>> weight = torch.nn.Parameter(torch.zeros(1)); weight.grad = torch.ones(1)
        >>> scaling, sgd = LrScaling(), torch.optim.SGD([weight], lr=0.5)
        >>> options = RunOptions(lr_scaling="linear", reference_batch_size=8)
        >>> scaling.choose(options, BatchSizes(1, (16, 16), factor=1, per_step=16, steps=7, samples=99))
        >>> scaling.follow({"sgd": sgd}); sgd.step()
        >>> weight.item(), sgd.param_groups[0]["lr"]
        (-1.0, 0.5)
    """

    def __init__(self) -> None:
        self.factor, self.reason = 1.0, "lr_scaling=none"

    def choose(self, options: RunOptions, sizes: BatchSizes) -> None:
        """Find the factor for a call of ``fit``.

        Args:
            options: ``lr_scaling`` and ``reference_batch_size`` count.
            sizes: of the training.

        Raises:
            ConfigError: the reference batch size is missing, or the samples per step are unknown.
        """
        rule, reference = options.lr_scaling, options.reference_batch_size
        if rule == "none":
            return
        if reference is None:
            raise ConfigError(
                f"lr_scaling={rule} needs reference_batch_size: the samples of an optimizer step, over all processes, "
                "that the learning rates are meant for. Give --reference_batch_size=N, or --lr_scaling=none."
            )
        if sizes.per_step is None:
            raise ConfigError(
                f"lr_scaling={rule} needs a step of known size, and the batches of the training come from a batch "
                "sampler without batch_size, or whole out of the dataset. Use --lr_scaling=none, or give batch_size."
            )
        ratio = sizes.per_step / reference
        self.factor = ratio if rule == "linear" else math.sqrt(ratio)
        processes = "" if sizes.virtual_on is None else f"{sizes.world_size} virtual ranks on "
        processes += f"{sizes.virtual_on or sizes.world_size} process(es)"
        shown = f"{sizes.per_step} samples per step ({processes}, accumulation {sizes.factor})"
        self.reason = f"lr_scaling={rule}, {shown}, reference_batch_size={reference}: x {self.factor:.6g}"

    def follow(self, optimizers: Mapping[str, Any]) -> None:
        """Scale the steps of optimizers from now on, and say so in one line.

        Args:
            optimizers: by name.

        Raises:
            ConfigError: one of them is not torch's, and has no hooks around its step.
        """
        lines = []
        for name, optimizer in optimizers.items():
            is_known = optimizer in _scalings
            if self.factor == 1.0 and not is_known:
                continue
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"lr_scaling cannot scale {name}, {kind_of(optimizer)}: it is not a torch.optim.Optimizer. "
                    "Use --lr_scaling=none and set its learning rate for this run."
                )
            before = [float(group["lr"]) for group in optimizer.param_groups]
            lines.append(f"{name} {_shown(before)} -> {_shown([rate * self.factor for rate in before])}")
            _scalings[optimizer] = self
            if not is_known:
                optimizer.register_step_pre_hook(_scale)
                optimizer.register_step_post_hook(_restore)
        if lines:
            logger.announce("Learning rates (%s): %s.", self.reason, "; ".join(lines))


def rate_factor(optimizer: Any) -> float:
    """Return what the learning rates of an optimizer are multiplied by in its steps.

    Args:
        optimizer: any.

    Returns:
        The factor of ``--lr_scaling``; 1 where its steps are not scaled.

    Ranks: local; alike on every rank.

    Example:
        >>> rate_factor(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
        1.0
    """
    scaling = _scalings.get(optimizer) if isinstance(optimizer, Optimizer) else None
    return 1.0 if scaling is None else scaling.factor


def _scale(optimizer: Optimizer, *_: Any) -> None:
    groups = optimizer.param_groups
    for group, rate in zip(groups, _own_rates.setdefault(optimizer, [one["lr"] for one in groups]), strict=True):
        group["lr"] = rate * _scalings[optimizer].factor


def _restore(optimizer: Optimizer, *_: Any) -> None:
    for group, rate in zip(optimizer.param_groups, _own_rates.pop(optimizer, ()), strict=False):
        group["lr"] = rate


def _shown(rates: list[float]) -> str:
    return ", ".join(dict.fromkeys(f"{rate:.6g}" for rate in rates))
