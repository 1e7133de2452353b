"""An exponential moving average of the weights: kept at every step, saved, and evaluated on
request.

Source: the arithmetic is ``torch.optim.swa_utils.get_ema_multi_avg_fn``. Its ``AveragedModel`` is
not used: read in torch 2.13, it copies the modules with all their wrappers and hooks, sends a
counter to the device in every update, which waits for the device, and has no way to evaluate the
module itself with other weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddpkit.base import local_part, sharded_like
from ddpkit.checkpointing import BASE, UPDATES_OF_AVERAGE, base_of, is_code, plain_key
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.logger import get_logger
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["WeightAverage", "require_average"]

logger = get_logger(__name__)

RECOVERABLE = "ema"
# in no tensor's name, since those begin with the name of an entry and a dot
COUNT = UPDATES_OF_AVERAGE
STATISTICS = ("running_mean", "running_var")


class _Weight(NamedTuple):
    """A tensor that can be averaged, where it is, and what a checkpoint calls it."""

    owner: nn.Module
    attribute: str
    names: list[str]  # several where it is tied; the first is its own

    def now(self) -> torch.Tensor:
        value: torch.Tensor = getattr(self.owner, self.attribute)
        return value


class _HasModules(Protocol):
    """What has modules: of a run they may be others in the next epoch."""

    modules: nn.ModuleDict


@dataclass
class _Modules:
    modules: nn.ModuleDict


class WeightAverage:
    """The exponential moving average of what is trained in some modules: ``Brain.ema``.

    Averaged are the parameters that are trained, or were since this was made, and the running
    statistics of normalisation layers (``running_mean``, ``running_var``). All else, frozen
    parameters and other buffers, has the value that it has in the modules. What is narrower than
    float32 is averaged in float32. Parameters of 8 bits or less are quantized, and no optimizer
    steps them: they have the value of the modules.

    Args:
        modules: name -> module, wrapped or not. What is in it is looked at when it is needed, not
            now.
        decay: weight of the average so far, in ``[0, 1)``; the new weights have the rest.

    Attributes:
        decay: as given.
        updates: how many updates are in the average.
        origin: what has asked for it, in words.
        is_evaluated: whether stages are evaluated with it whatever ``evaluate_ema`` says.

    Raises:
        ConfigError: ``decay`` is outside of ``[0, 1)``.

    Ranks: local. Weights are equal on all ranks after a step, and so are their averages.

    State: a state dict of the modules with the averages in it, named
    ``<entry>.<name in the module>`` as without wrappers, and the number of updates, a tensor of
    shape ``()``, under ``"n_averaged"``.

    Example:
        >>> modules = nn.ModuleDict({"net": nn.Linear(1, 1, bias=False)})
        >>> average = WeightAverage(modules, decay=0.75)
        >>> for value in (1.0, 5.0):
        ...     _ = nn.init.constant_(modules.net.weight, value)
        ...     average.update()
        >>> with average.applied():
        ...     modules.net.weight.item()
        2.0
        >>> modules.net.weight.item()
        5.0
    """

    takes_stored_tensors = True  # what loads a checkpoint need not read whole tensors for it

    def __init__(self, modules: nn.ModuleDict, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(
                f"ema_decay={decay!r} has to be at least 0 and less than 1, for example 0.999."
            )
        self.decay = decay
        self.updates = 0
        self.origin = f"ema_decay={decay}"
        self.is_evaluated = False
        self._owner: _HasModules = _Modules(modules)
        self._looked_at: nn.ModuleDict | None = None  # whose weights are listed below
        self._lerp: Callable[..., None] = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._averages: dict[str, torch.Tensor] = {}
        # averages: of the parameters, and then of the statistics
        self._followed: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._statistics: list[_Weight] = []  # looked up anew: some layers replace theirs
        self._is_applied = False
        # the weights themselves, while the averages are in their place
        self._own: list[torch.Tensor] = []
        # fingerprints of weights that a save leaves out, by their ids: base weights from elsewhere
        self.tell_bases: Callable[[], Mapping[int, str]] = dict

    @property
    def row(self) -> str:
        """What the block at the start of a run says of it."""
        return f"decay {self.decay}"

    @property
    def modules(self) -> nn.ModuleDict:
        """The modules whose weights are averaged."""
        return self._owner.modules

    @modules.setter
    def modules(self, modules: nn.ModuleDict) -> None:
        self._owner = _Modules(modules)

    @property
    def averages(self) -> list[torch.Tensor]:
        """The averages themselves, of the weights that are followed now."""
        return list(self._averages.values())

    def follow_modules_of(self, owner: _HasModules) -> None:
        """Average from now on the modules that an object has, whichever these are at a step.

        Args:
            owner: has the modules in its attribute ``modules``.
        """
        self._owner = owner

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights into the average; the first time, copy them. Waits for no device and for
        no rank.

        The Brain calls it after every step that :meth:`~ddpkit.brain.Brain.optimizers_step` really
        made. A recipe that steps its optimizers itself calls it after each step.

        Raises:
            ConfigError: called inside :meth:`applied`, where the weights are the averages.
        """
        if self._is_applied:
            raise ConfigError(
                "The average was updated inside `with brain.ema.applied()`: train outside of it."
            )
        # modules may be others than in the step before: a recipe has put them in their place
        is_known = self._followed and self._looked_at is self._owner.modules
        if not (self.updates and is_known):
            self.follow()
        weights = self._weights_now()
        if not self.updates:
            _copy(weights, self._followed)
        elif weights:
            pairs = zip(weights, self._followed, strict=True)
            wide = [
                weight if weight.dtype == average.dtype else weight.to(average.dtype)
                for weight, average in pairs
            ]
            self._lerp(self._followed, wide, self.updates)
        if not self.updates:
            logger.info(
                "The average of the weights (%s) starts with the weights of now.",
                self.origin,
            )
        self.updates += 1

    @torch.no_grad()
    def follow(self) -> None:
        """Update the list of trained weights; a newly unfrozen weight starts with its value as
        average.

        The Brain calls it when an epoch begins.
        """
        averages = {}
        self._looked_at = self._owner.modules
        self._followed = []
        self._parameters = []
        self._statistics = []
        for weight in self._weights():
            now = weight.now()
            average = self._average_of(weight, now)
            if average is None:
                continue
            averages[weight.names[0]] = average
            self._followed.append(local_part(average))
            if isinstance(now, nn.Parameter):
                self._parameters.append(local_part(now))
            else:
                self._statistics.append(weight)
        self._averages = averages

    def _weights_now(self) -> list[torch.Tensor]:
        return [*self._parameters, *(statistic.now() for statistic in self._statistics)]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the modules have the averaged weights; afterwards they have
        their own again.

        The weights are overwritten in place and restored, so every reference to a parameter sees
        the average. Inside the context one more copy of the averaged tensors is kept. Before the
        first update nothing is changed.

        Ranks: local; where it is around something collective, use it on every rank.
        """
        if self._is_applied or not self.updates:
            yield
            return
        self.follow()
        weights = self._weights_now()
        self._own = [weight.detach().clone() for weight in weights]
        self._is_applied = True
        try:
            _copy(self._followed, weights)
            yield
        finally:
            _copy(self._own, weights)
            self._is_applied = False
            self._own = []

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context inside of :meth:`applied` in which the modules have their own weights;
        else it does nothing.

        Every save of the Brain's checkpointer is made in it.

        Ranks: local.
        """
        if not self._is_applied:
            yield
            return
        weights = self._weights_now()
        averages = [weight.detach().clone() for weight in weights]
        try:
            _copy(self._own, weights)
            yield
        finally:
            _copy(averages, weights)

    def evaluated(self, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """Return :meth:`applied` for a stage, if there is an average to evaluate.

        Args:
            stage: before the first update, VALID evaluates the weights themselves, with a warning.

        Raises:
            CheckpointError: TEST without an average.
        """
        if not self.updates and stage is Stage.TEST:
            raise CheckpointError(
                "evaluate_ema=True, and there is no average of the weights: no step was averaged, "
                "and no checkpoint with an average was loaded. Train with ema_decay set, or leave "
                "evaluate_ema out."
            )
        if not self.updates:
            logger.warning_once(
                "evaluate_ema=True, and no step was averaged yet: the weights themselves are "
                "evaluated. A recipe that steps its optimizers itself calls self.ema.update() "
                "after each step."
            )
        return self.applied()

    # ---------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the modules with the averages in it, and the number of updates.

        Returns:
            Tensors of the average itself, not copies.
        """
        state = {COUNT: torch.tensor(self.updates), **self._module_state()}
        if self.updates:
            for weight in self._weights():
                if weight.names[0] in self._averages:
                    state.update(dict.fromkeys(weight.names, self._averages[weight.names[0]]))
        return self._without_bases(state)

    def saved_bytes(self, left_out: Iterable[torch.Tensor] = ()) -> int:
        """Estimate the bytes of :meth:`state_dict` in a file, whole, also where each rank has a
        part of the weights.

        Args:
            left_out: weights that a save leaves out.
        """
        tensors = {
            id(tensor): tensor for tensor in (*self.modules.parameters(), *self.modules.buffers())
        }
        for tensor in left_out:
            tensors.pop(id(tensor), None)
        return sum(tensor.numel() * _saved_size(tensor) for tensor in tensors.values())

    def _without_bases(self, state: dict[str, Any]) -> dict[str, Any]:
        bases = self.tell_bases()
        left_out = {
            plain_key(self.modules, name): bases[id(parameter)]
            for name, parameter in self.modules.named_parameters(remove_duplicate=False)
            if id(parameter) in bases
        }
        if not left_out:
            return state
        return {name: state[name] for name in state if name not in left_out} | {BASE: left_out}

    def load_state_dict(self, state: Any) -> None:
        """Take over a state; the values are compared with the modules' when they are needed next.

        Args:
            state: of :meth:`state_dict`, of modules with the same names and shapes.

        Raises:
            CheckpointError: it is not such a state, or belongs to other modules.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get(COUNT), torch.Tensor):
            raise CheckpointError(
                f"not an average of weights: {COUNT!r}, the number of updates, is missing."
            )
        weights = {weight.names[0]: weight.now() for weight in self._weights()}
        elsewhere = base_of(state)
        strange = state.keys() - {COUNT, BASE} - weights.keys() - self._module_state().keys()
        strange |= {
            name
            for name, now in weights.items()
            if getattr(state.get(name), "shape", None) != now.shape and name not in elsewhere
        }
        if strange:
            listed = ", ".join(sorted(map(str, strange))[:5])
            raise CheckpointError(
                f"the average is of other modules; missing, unknown or of another shape: {listed}."
            )
        self.updates = int(state[COUNT])
        self._averages = {
            name: sharded_like(state[name], now).detach().clone()
            for name, now in weights.items()
            if name in state
        }
        self._looked_at = None

    # -------------------------------------------------------------------------------- what there is

    def _weights(self) -> list[_Weight]:
        """Find the parameters, and then the running statistics."""
        found: dict[int, _Weight] = {}
        statistics: dict[int, _Weight] = {}
        for path, part in self.modules.named_modules(remove_duplicate=False):
            tensors = [
                (found, *parameter)
                for parameter in part.named_parameters(recurse=False, remove_duplicate=False)
            ]
            for attribute, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
                if attribute in STATISTICS and buffer.is_floating_point():
                    tensors.append((statistics, attribute, buffer))
            for kind, attribute, value in tensors:
                weight = kind.setdefault(id(value), _Weight(part, attribute, []))
                weight.names.append(plain_key(self.modules, f"{path}.{attribute}"))
        return [
            weight for weight in (*found.values(), *statistics.values()) if _can_be_averaged(weight)
        ]

    def _average_of(self, weight: _Weight, now: torch.Tensor) -> torch.Tensor | None:
        """Return the average of a weight; None for a frozen weight, whose average is its value."""
        wide = torch.promote_types(now.dtype, torch.float32)
        value = now.detach().to(wide)
        known = self._averages.get(weight.names[0])
        trained = now.requires_grad or not isinstance(now, nn.Parameter)
        if known is not None and known.shape == now.shape:
            average: torch.Tensor = sharded_like(known, now).to(now.device, wide)
            return average if trained or not torch.equal(average, value) else None
        return (
            torch.empty_like(now, dtype=wide, requires_grad=False).copy_(value) if trained else None
        )

    def _module_state(self) -> dict[str, Any]:
        return {
            plain_key(self.modules, key): value for key, value in self.modules.state_dict().items()
        }


def _can_be_averaged(weight: _Weight) -> bool:
    value = weight.now()
    return (
        not is_lazy(value)
        and not is_code(value)
        and (value.is_floating_point() or value.is_complex())
    )


def _saved_size(tensor: torch.Tensor) -> int:
    """Return the bytes of a number of it in a saved average, where narrow ones are wider."""
    is_averaged = tensor.requires_grad and tensor.is_floating_point()
    size = tensor.element_size()
    return max(size, torch.float32.itemsize) if is_averaged and size > 1 else size


@torch.no_grad()
def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Copy tensors into targets in place; clear autocast's cached casts of them."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    torch.clear_autocast_cache()


def require_average(checkpoint: Any) -> None:
    """Refuse a checkpoint without averaged weights.

    Args:
        checkpoint: a :class:`~ddpkit.checkpointing.checkpoint.Checkpoint` whose average is about to
            be evaluated.

    Raises:
        CheckpointError: it holds none.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> require_average(SimpleNamespace(paramfiles={"ema": "CKPT+a/ema.ckpt"}))
    """
    if RECOVERABLE not in checkpoint.paramfiles:
        raise CheckpointError(
            f"evaluate_ema=True, and {checkpoint.path} holds no averaged weights "
            f"({RECOVERABLE}.ckpt). Choose another checkpoint, or leave evaluate_ema out."
        )
