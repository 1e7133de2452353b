"""Which parameters get gradients in the first optimizer step, and which it moves: differences are
named.

A module that a recipe computes with and that is in no entry of ``modules`` is not trained. Nor is
what no optimizer has. torch says nothing of either. So the first loss of a training is followed
back to the parameters that it depends on, once; the steps after it pay nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.base import is_sharded
from ddpkit.checkpointing import plain_key
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.optim import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

logger = get_logger(__name__)

MOST_NODES = 200_000  # of a graph that are looked at, which takes about a quarter of a second
_MOST_SHOWN = 4

OUTSIDE = (
    "%s: the loss depends on %s, in no entry of modules and in no optimizer. Nothing trains, "
    "averages or saves them, or moves them to the device. Put the module into `modules`; or "
    "freeze it with requires_grad_(False), if it shall stay as it is."
)
NOT_STEPPED = (
    "%s: gradients come to parameters of `modules` that no optimizer has: %s. They are not "
    "trained. Give them to an optimizer; or freeze them with requires_grad_(False), if they shall "
    "stay as they are.%s"
)
COPIED = (
    " The optimizer %r has %d parameter(s) without a gradient that are in no entry of modules: "
    "was it made from a copy?"
)
NOTHING = (
    "{}: nothing is trained. The loss depends on {}, and none of that is in the optimizer: {}. {} "
    "of its parameters are in no entry of modules. Put what is trained into `modules`, and make "
    "the optimizer in init_optimizers, of self.modules.parameters(). A copy of a module, or one "
    "that is made anew, has parameters of its own."
)
NEVER = (
    "{}: nothing is trained. In the whole first epoch no parameter of the optimizer got a "
    "gradient: {}. Make it in init_optimizers, of self.modules.parameters(); look for "
    "torch.no_grad() and .detach() between them and the loss."
)


def leaves_of(loss: torch.Tensor) -> dict[int, nn.Parameter]:
    """Follow a loss back to the parameters that its backward pass gives gradients to.

    Args:
        loss: shape ``()``, before its backward pass.

    Returns:
        By identity. Some may be missing: behind a node that hides them, as reentrant checkpointing
        does, and in a graph of more than :data:`MOST_NODES` nodes.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> len(leaves_of(net(torch.ones(2)).sum()))
        2
    """
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    found: dict[int, nn.Parameter] = {}
    while waiting and len(seen) <= MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            found[id(leaf)] = leaf
        waiting += [inner for inner, _ in node.next_functions]
    return found


class FirstGradients:
    """Watches a training until its first optimizer step with gradients.

    Args:
        name: of the recipe's class, for messages.

    Attributes:
        is_done: whether that step was made and the untrained parameters were reported.

    Ranks: local; speaks on the main process.

    Example:
        >>> from types import SimpleNamespace
        >>> net, first = nn.Linear(1, 1), FirstGradients("Line")
        >>> loss = net(torch.ones(1)).sum()
        >>> first.note(loss, 1)
        >>> loss.backward()
        >>> modules = nn.ModuleDict({"net": net})
        >>> first.compare(SimpleNamespace(), modules, {"sgd": torch.optim.SGD(net.parameters())})
        >>> first.is_done
        True
    """

    def __init__(self, name: str) -> None:
        self.is_done = False
        self._name = name
        self._step: int | None = None
        self._leaves: dict[int, nn.Parameter] = {}
        self._handles: list[Any] = []
        self._whole: dict[int, nn.Parameter] = {}
        self._has_compared = False

    def note(self, loss: Any, step: int) -> None:
        """Note what the loss of the first batch depends on.

        Args:
            loss: before its backward pass; what is no tensor is refused there.
            step: number of the batch.
        """
        if self._step in (None, step) and isinstance(loss, torch.Tensor):
            self._leaves |= leaves_of(loss)
            self._step = step if self._leaves else None

    def watch(self, optimizers: Mapping[str, Any], compare: Callable[..., None]) -> None:
        """Have something called before steps that a recipe makes by itself.

        Args:
            optimizers: by name.
            compare: is given the optimizer, and the arguments of its step.
        """
        torchs = [
            optimizer
            for optimizer in optimizers.values()
            if isinstance(optimizer, torch.optim.Optimizer)
        ]
        # In a step ZeRO-1 leaves an optimizer this rank's part of its parameters.
        self._whole |= {id(parameter): parameter for parameter in parameters_of(torchs)}
        self._handles += [optimizer.register_step_pre_hook(compare) for optimizer in torchs]

    def stop(self) -> None:
        """Watch steps no longer; not to be called in one of them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def compare(
        self,
        brain: Any,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, Any],
    ) -> None:
        """Compare who has gradients with who is stepped, and warn of what is not. Once there are
        gradients, no more.

        Args:
            brain: of the recipe; names are found in its attributes and in those of its ``hparams``.
            modules: of the recipe.
            optimizers: all that the Brain knows, by name; others are found in the recipe's
                attributes.

        Raises:
            ConfigError: no optimizer has any parameter that the loss depends on.
        """
        if self.is_done:
            return
        self._has_compared = True
        known = {**_optimizers_in(brain), **optimizers}
        stepped = self._whole | {
            id(parameter): parameter for parameter in parameters_of([*known.values()])
        }
        # Where it is divided, a graph has other objects than the modules.
        is_divided = any(is_sharded(parameter) for parameter in modules.parameters())
        if not any(parameter.grad is not None for parameter in stepped.values()):
            if not is_divided:
                self._require_overlap(brain, modules, known, stepped.keys())
            return
        self.is_done = True
        inside = {id(parameter) for parameter in modules.parameters()}
        trained = stepped.keys() | inside
        outside = (
            {}
            if is_divided
            else {id(parameter): parameter for parameter in _with_gradients(brain)} | self._leaves
        )
        if missing := [parameter for key, parameter in outside.items() if key not in trained]:
            logger.warning(OUTSIDE, self._name, _in_words(missing, brain))
        lost = [
            plain_key(modules, name)
            for name, parameter in modules.named_parameters()
            if parameter.requires_grad
            and parameter.grad is not None
            and id(parameter) not in stepped
        ]
        if lost:
            logger.warning(
                NOT_STEPPED,
                self._name,
                _listed(lost, "parameter(s)"),
                _hint(known, inside),
            )
        self._leaves = {}

    def require(self, optimizers: Mapping[str, Any]) -> None:
        """Require, after the first epoch, that an optimizer had a gradient, if steps were seen.

        Args:
            optimizers: by name.

        Raises:
            ConfigError: none had.
        """
        if self._has_compared and not self.is_done:
            raise ConfigError(NEVER.format(self._name, ", ".join(optimizers)))

    def _require_overlap(
        self,
        brain: Any,
        modules: nn.ModuleDict,
        known: Mapping[str, Any],
        stepped: Collection[int],
    ) -> None:
        """Refuse optimizers that have nothing of what the loss depends on."""
        if not self._leaves or not self._leaves.keys().isdisjoint(stepped):
            return
        named = {
            id(parameter): plain_key(modules, name)
            for name, parameter in modules.named_parameters()
        }
        inside = [named[key] for key in self._leaves if key in named]
        outside = [parameter for key, parameter in self._leaves.items() if key not in named]
        words = [f"{_listed(inside, 'parameter(s)')} of `modules`"] if inside else []
        words += [_in_words(outside, brain)] if outside else []
        strange = len(set(stepped) - named.keys())
        raise ConfigError(
            NOTHING.format(
                self._name,
                " and ".join(words),
                ", ".join(known),
                strange,
            )
        )


def _with_gradients(brain: Any) -> list[nn.Parameter]:
    """Return the parameters that have a gradient, of the modules that a recipe holds by itself."""
    return [
        parameter
        for _, module in _modules_in(brain)
        for parameter in module.parameters()
        if parameter.grad is not None
    ]


def _hint(optimizers: Mapping[str, Any], inside: set[int]) -> str:
    """Say which optimizer was perhaps made from a copy."""
    for name, optimizer in optimizers.items():
        strange = [
            parameter
            for parameter in parameters_of([optimizer])
            if id(parameter) not in inside and parameter.grad is None
        ]
        if strange:
            return COPIED % (name, len(strange))
    return ""


def _in_words(parameters: list[nn.Parameter], brain: Any) -> str:
    """Name parameters by the attributes of a recipe that hold them."""
    left = {id(parameter): parameter for parameter in parameters}
    names = []
    for name, module in _modules_in(brain):
        own = [id(parameter) for parameter in module.parameters() if id(parameter) in left]
        if own:
            names.append(f"{name} ({len(own)} parameter(s))")
        for key in own:
            del left[key]
    shapes = [f"a parameter of shape {tuple(parameter.shape)}" for parameter in left.values()]
    return _listed([*names, *shapes], "modules and parameters")


def _listed(names: list[str], noun: str) -> str:
    more = len(names) - _MOST_SHOWN
    shown = ", ".join(names[:_MOST_SHOWN])
    return shown if more <= 0 else f"{shown} and {more} more {noun}"


def _modules_in(brain: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a recipe holds in attributes and in ``hparams``, and not in
    ``modules``, which is a property.
    """
    for prefix, attributes in (
        ("self.", _attributes(brain)),
        ("hparams.", _attributes(getattr(brain, "hparams", None))),
    ):
        for name, value in _flat(attributes):
            if isinstance(value, nn.Module):
                yield f"{prefix}{name}", value


def _optimizers_in(brain: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that a recipe keeps in attributes of its own, and steps by itself."""
    found = _flat(_attributes(brain))
    return {name: value for name, value in found if isinstance(value, torch.optim.Optimizer)}


def _attributes(holder: Any) -> Mapping[str, Any]:
    return getattr(holder, "__dict__", {})


def _flat(attributes: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return attributes, and the entries of lists and dicts among them, by name."""
    for name, value in list(attributes.items()):
        yield name, value
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}[{number}]", item) for number, item in enumerate(value))
        elif type(value) is dict:
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
