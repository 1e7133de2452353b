"""Switches the noise of a model off, so that two passes over the same samples can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def without_noise(modules: nn.Module) -> Iterator[None]:
    """Let dropout do nothing, and torch's random functions return fixed values, in this thread.

    Uniform numbers are 0.5, normal ones 0, whole ones the lowest, coins fall on the likelier side,
    permutations change nothing. What draws from elsewhere (numpy, Python, a custom kernel) stays random.

    Args:
        modules: changed in place, and changed back.

    Ranks: local.

    Example:
        >>> with without_noise(nn.Identity()):
        ...     torch.randn(2), F.dropout(torch.ones(2)), torch.randperm(3)
        (tensor([0., 0.]), tensor([1., 1.]), tensor([0, 1, 2]))
    """
    with contextlib.ExitStack() as stack:
        for layer in modules.modules():
            if isinstance(layer, (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)):
                rate = "p" if isinstance(layer, _DropoutNd) else "dropout"
                stack.callback(setattr, layer, rate, getattr(layer, rate))
                setattr(layer, rate, 0.0)
        stack.enter_context(_FixedNumbers())
        yield


class _FixedNumbers(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stand_in = _STAND_INS.get(func)
        if stand_in is None:
            return func(*args, **(kwargs or {}))
        return stand_in(func, *args, **(kwargs or {}))


def _nothing(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 -- torch's name
    return input


def _filled(value: float) -> Callable[..., Tensor]:
    """Return what makes the tensor that a function would make, filled with one value."""

    def fill(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = func(*args, **kwargs)
        return made.detach().fill_(value)

    return fill


def _attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return func(**{**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0})


def _lowest(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Stand in for ``randint`` and ``randint_like``, whose lower bound may be left out."""
    numbers = [one for one in args if isinstance(one, int)]
    low = kwargs.get("low", numbers[0] if len(numbers) + ("high" in kwargs) > 1 else 0)
    return _filled(low)(func, *args, **kwargs)


def _in_order(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    made: Tensor = func(*args, **kwargs)
    return made.copy_(torch.arange(len(made)))


def _likelier(func: Any, input: Tensor, p: Any = None, **kwargs: Any) -> Tensor:  # noqa: A002 -- torch's name
    p = 0.5 if p is None and func is Tensor.bernoulli_ else p
    chances = input if p is None else torch.zeros_like(input) + p
    return input.copy_(chances.round()) if func is Tensor.bernoulli_ else chances.detach().round()


_STAND_INS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout), _nothing),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), _nothing),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.rand, torch.rand_like, Tensor.uniform_), _filled(0.5)),
    **dict.fromkeys((torch.randn, torch.randn_like, torch.normal, Tensor.normal_), _filled(0.0)),
    **dict.fromkeys((torch.randint, torch.randint_like), _lowest),
    torch.randperm: _in_order,
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_), _likelier),
}
