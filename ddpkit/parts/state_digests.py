"""SHA-256 of weights, gradients and states of optimizers, tensor by tensor.

A tensor's digest is that of its dtype, its shape and its bytes, whole: it depends on no strategy
and on no number of processes where the bits do not. A tensor that is divided over the ranks is
gathered for it, one at a time; states that another rank keeps whole are hashed there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import gather_whole, is_sharded, reads_device
from ddpkit.checkpointing import plain_key
from ddpkit.distributed import gather_objects, if_main_process

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from ddpkit.strategies import Strategy

MOST_MODULES = 64  # that a record names; of a model with more, those further up
SHOWN_DIGITS = 16  # of a module's digest
#: Settings of an optimizer that choose how it computes, or are no setting.
_NO_SETTINGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@reads_device
def digest_of(value: Any) -> str:
    """Return the SHA-256 of a tensor: of its dtype, its shape and its bytes; of another value, of
    its text.

    Args:
        value: a tensor that is whole, on any device; or a number, a text or None.

    Ranks: local.

    Example:
        >>> digest_of(torch.ones(2))[:8], digest_of(torch.ones(2).half())[:8]
        ('99748111', 'b38ec8d6')
        >>> digest_of(torch.ones(2, 3)) == digest_of(torch.ones(3, 2).T.contiguous())
        True
    """
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    if hasattr(value, "__tensor_flatten__"):  # made of other tensors, such as a quantized one
        digests = {}
        names, _ = value.__tensor_flatten__()
        for name in names:
            digests[name] = digest_of(getattr(value, name))
        return combined(digests)
    dense = value.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    dense = dense.resolve_conj().resolve_neg()
    dense = dense.cpu().contiguous()
    shape = tuple(dense.shape)
    hashed = hashlib.sha256(f"{dense.dtype} {shape} ".encode())
    data: Any = dense.reshape(-1).view(torch.uint8).numpy()
    hashed.update(data)
    return hashed.hexdigest()


def combined(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 of digests by name, in the order of the names.

    Ranks: local.

    Example:
        >>> combined({"a": "1", "b": "2"}) == combined({"b": "2", "a": "1"})
        True
    """
    rows = sorted(digests.items())
    text = json.dumps(rows)
    return hashlib.sha256(text.encode()).hexdigest()


def by_module(digests: Mapping[str, str], most: int = MOST_MODULES) -> dict[str, str]:
    """Return one short digest for each module: as deep in the model as ``most`` names allow.

    Args:
        digests: by the names of tensors, such as ``"net.0.weight"``; of an optimizer's state such
            as ``"optimizer/net.0.weight/exp_avg"``.
        most: names.

    Ranks: local.

    Example:
        >>> found = by_module({"net.0.weight": "1", "net.0.bias": "2", "net.2.weight": "3"})
        >>> list(found)
        ['net.0', 'net.2']
        >>> list(by_module({"net.0.weight": "1", "net.2.weight": "3"}, most=1))
        ['net']
    """
    paths = {}
    for name in digests:
        paths[name] = _module_path(name)
    depth = max(map(len, paths.values()), default=1)
    groups = _groups(digests, paths, depth)
    while len(groups) > most and depth > 1:
        depth -= 1
        groups = _groups(digests, paths, depth)
    found = {}
    for name in sorted(groups):
        digest = combined(groups[name])
        found[name] = digest[:SHOWN_DIGITS]
    return found


def _groups(
    digests: Mapping[str, str],
    paths: Mapping[str, list[str]],
    depth: int,
) -> dict[str, dict[str, str]]:
    """Return the digests of each module, so deep in the model."""
    groups: dict[str, dict[str, str]] = {}
    for name, digest in digests.items():
        path = paths[name][:depth]
        group = groups.setdefault(".".join(path), {})
        group[name] = digest
    return groups


def _module_path(name: str) -> list[str]:
    """Return the parts of the name of the module in which a tensor stands."""
    words = name.split("/")
    whole = words[1] if len(words) > 1 else words[0]
    parts = whole.split(".")
    return parts[:-1] or parts


class StateDigests:
    """Hashes what a run trains.

    Args:
        modules: of the recipe, without wrappers.
        optimizers: by name.
        strategy: knows whether the ranks keep different states.

    Ranks: collective: the ranks walk through the tensors in the same order. The main process has
    the digests; others get what they have worked out for it.
    """

    def __init__(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, Any],
        strategy: Strategy,
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._is_divided = strategy.overrides("divided_states")
        self._names: dict[torch.Tensor, str] = {}
        for name, parameter in modules.named_parameters():
            self._names[parameter] = plain_key(modules, name)
        for name, optimizer in optimizers.items():
            for number, stepped in enumerate(_parameters(optimizer)):
                # of no module
                self._names.setdefault(stepped, f"{name}.parameters.{number}")

    def weights(self) -> dict[str, str]:
        """Hash parameters, and the buffers that a checkpoint has."""
        tensors = itertools.chain(
            self._parameters(),
            self._buffers(),
        )
        return _hash(tensors)

    def gradients(self) -> dict[str, str]:
        """Hash the gradients; a parameter without one has no digest."""
        gradients = []
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                gradients.append((name, parameter.grad))
        return _hash(gradients)

    def states(self) -> dict[str, str]:
        """Hash the states of the optimizers."""
        own = _hash(self._states(), divided=self._is_divided)
        if not self._is_divided:
            return own
        found: dict[str, str] = {}
        for digests in reversed(gather_objects(lambda: own)):  # the main process has the last word
            found |= digests
        return found

    def of_state(self, state: Any, name: str) -> dict[str, str]:
        """Hash tensors and plain values of a state that is alike on every rank, or divided.

        Args:
            state: of what a checkpoint has, such as averaged weights; what is neither is left out.
            name: of it, which each digest's name begins with.
        """
        kept = (torch.Tensor, bool, int, float, str, type(None))
        return _hash(pair for pair in _leaves(state, name) if isinstance(pair[1], kept))

    def settings(self) -> dict[str, str]:
        """Return the settings of the optimizers, such as learning rates, by optimizer and group."""
        found = {}
        for name, optimizer in self._optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                for setting in sorted(group.keys() - _NO_SETTINGS):
                    value = _plain(group[setting])
                    found[f"{name}/{number}/{setting}"] = repr(value)
        return found

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, name in self._names.items():
            yield name, parameter

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        saved = self._modules.state_dict().keys()
        for name, buffer in self._modules.named_buffers():
            if name in saved:
                yield plain_key(self._modules, name), buffer

    def _states(self) -> Iterator[tuple[str, Any]]:
        for name, optimizer in self._optimizers.items():
            for parameter in _parameters(optimizer):
                state = optimizer.state.get(parameter, {})
                whole_name = f"{name}/{self._names[parameter]}"
                yield from _leaves(state, whole_name)


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        found += group["params"]
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what containers hold, each with the names that lead to it."""
    if isinstance(value, dict):
        inside: Iterable[tuple[Any, Any]] = [(key, value[key]) for key in sorted(value, key=str)]
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    else:
        yield name, value
        return
    for key, inner in inside:
        yield from _leaves(inner, f"{name}/{key}")


def _hash(
    values: Iterable[tuple[str, Any]],
    *,
    divided: bool = False,
) -> dict[str, str]:
    """Hash values by name: on the main process all that it has; elsewhere those alone that other
    ranks may not have.
    """
    is_main = if_main_process()
    found = {}
    for name, value in values:
        if is_sharded(value):
            whole = gather_whole(value, keep=is_main)
            if is_main:
                found[name] = digest_of(whole)
        elif is_main or divided:
            found[name] = digest_of(value)
    return found
