"""Number formats: autocast for training and for evaluation, and the gradient scaler, as one
object.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from ddpkit.base import map_values
from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["AMPConfig", "Precision", "TorchAutocast", "drop_casts", "fwd_default_precision"]

F = TypeVar("F", bound="Callable[..., Any]")

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class AMPConfig:
    """A number format by its short name.

    Attributes:
        dtype: the torch dtype.

    Ranks: local.

    Example:
        >>> AMPConfig.from_name("bf16").dtype
        torch.bfloat16
    """

    dtype: torch.dtype

    @classmethod
    def from_name(cls, name: str | None) -> AMPConfig:
        """Look a format up.

        Args:
            name: ``"fp32"``, ``"fp16"`` or ``"bf16"``; None means ``"fp32"``.

        Returns:
            The format.

        Raises:
            ConfigError: the name is none of these.

        Ranks: local.
        """
        dtype = _DTYPES.get("fp32" if name is None else name)
        if dtype is None:
            raise ConfigError(
                f"precision={name!r} is not a format that ddpkit trains in. Choose one of "
                f"{', '.join(_DTYPES)} (bf16 works on CPUs and on recent GPUs, fp16 on GPUs only)."
            )
        return cls(dtype)


class TorchAutocast:
    """Autocast that can be entered again and again, also inside itself; for float32 it does
    nothing, cheaply.

    Of one thread: each ``torch.autocast`` that is entered stores the state to restore on itself.

    Args:
        device_type: such as ``"cpu"`` or ``"cuda"``.
        dtype: the dtype to compute in; float32 (or float64) leaves everything as it is.

    Ranks: local.

    Example:
        >>> context = TorchAutocast(device_type="cpu", dtype=torch.bfloat16)
        >>> with context, context:
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """

    __slots__ = ("_entered", "device_type", "dtype")

    def __init__(self, device_type: str, dtype: torch.dtype = torch.float32) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self._entered: list[torch.autocast] | None = (
            None if dtype in (torch.float32, torch.float64) else []
        )

    @property
    def enabled(self) -> bool:
        """Whether entering changes anything."""
        return self._entered is not None

    def __enter__(self) -> None:
        if self._entered is not None:
            autocast = torch.autocast(self.device_type, dtype=self.dtype)
            autocast.__enter__()  # type: ignore[no-untyped-call]
            self._entered.append(autocast)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._entered is not None:
            self._entered.pop().__exit__(kind, error, trace)


class StepScaler(torch.amp.GradScaler):
    """A gradient scaler whose ``unscale_`` does nothing where it was called before in the same
    step.

    So gradients can be unscaled for a recipe that clips by itself, and whoever unscales after that
    does no harm.

    Ranks: local.

    Example:
        >>> StepScaler("cpu", enabled=False).is_enabled()
        False
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unscaled_now: set[int] = set()  # ids of optimizers, since the last update

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, once in a step.

        Args:
            optimizer: whose gradients.
        """
        if id(optimizer) not in self._unscaled_now:
            super().unscale_(optimizer)
            self._unscaled_now.add(id(optimizer))

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Choose the next scale; the next gradients have it.

        Args:
            new_scale: instead of the scaler's own choice.
        """
        super().update(new_scale)
        self._unscaled_now.clear()


class Precision:
    """What the loop needs to know about number formats: two contexts and a gradient scaler.

    Args:
        precision: of training: ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        eval_precision: of validation and test, likewise.
        device: such as ``"cpu"`` or ``"cuda:1"``.

    Attributes:
        training_ctx: wraps forward and loss in training; may be entered any number of times.
        evaluation_ctx: wraps them in validation and test.
        scaler: a ``torch.amp.GradScaler``; enabled for fp16 training on CUDA only, else it passes
            everything through.

    Raises:
        ConfigError: an unknown format, or fp16 on a CPU, which computes it slowly and underflows.

    Ranks: local.

    State: ``scaler`` has a ``state_dict`` of its own, to be saved where it is enabled.

    Example:
        >>> precision = Precision("bf16", "fp32", "cpu")
        >>> (
        ...     precision.training_ctx.dtype,
        ...     precision.evaluation_ctx.enabled,
        ...     precision.scaler.is_enabled(),
        ... )
        (torch.bfloat16, False, False)
    """

    def __init__(
        self,
        precision: str | None,
        eval_precision: str | None,
        device: str,
    ) -> None:
        device_type = str(device).partition(":")[0]
        dtype = AMPConfig.from_name(precision).dtype
        eval_dtype = AMPConfig.from_name(eval_precision).dtype
        for option, value in (("precision", dtype), ("eval_precision", eval_dtype)):
            if device_type == "cpu" and value is torch.float16:
                raise ConfigError(
                    f"{option}='fp16' does not work on device={device!r}: half precision is for "
                    f"GPUs. bf16 works there: use --{option}=bf16, or fp32."
                )
        self.training_ctx = TorchAutocast(device_type=device_type, dtype=dtype)
        self.evaluation_ctx = TorchAutocast(device_type=device_type, dtype=eval_dtype)
        scaled = dtype is torch.float16 and device_type == "cuda"
        self.scaler = StepScaler("cuda", enabled=scaled)


def drop_casts(*_: Any) -> None:
    """Drop the casts of weights that autocast has kept: a hook after the steps of an optimizer.

    Autocast casts a weight once, and keeps the result until its outermost context ends. A step
    inside of the context changes the weight, and the next forward pass would compute with the old
    one.

    Args:
        _: the optimizer, and the arguments of its step.

    Ranks: local.

    Source: https://docs.pytorch.org/docs/stable/amp.html, ``cache_enabled``.

    Example:
        >>> net = torch.nn.Linear(1, 1)
        >>> sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        >>> _ = sgd.register_step_post_hook(drop_casts)
    """
    torch.clear_autocast_cache()


@overload
def fwd_default_precision(fwd: F, cast_inputs: torch.dtype | None = ...) -> F: ...
@overload
def fwd_default_precision(
    fwd: None = ...,
    cast_inputs: torch.dtype | None = ...,
) -> Callable[[F], F]: ...
def fwd_default_precision(fwd: Any = None, cast_inputs: torch.dtype | None = torch.float32) -> Any:
    """Make a ``forward`` compute in a fixed dtype even inside autocast, for what half precision
    would spoil.

    Inside autocast the floating-point tensors among the arguments (also in lists, tuples and dicts)
    are cast to ``cast_inputs`` and autocast is off during the call. Outside autocast nothing
    changes. The decorated function takes one more keyword, ``force_allow_autocast``: True calls it
    as if it were not decorated.

    Args:
        fwd: the function; its first argument is usually the module. None returns a decorator.
        cast_inputs: the dtype; None leaves both the arguments and autocast as they are.

    Returns:
        The decorated function, or a decorator.

    Ranks: local.

    Source: it is ``torch.amp.custom_fwd`` for plain modules,
    https://pytorch.org/docs/stable/amp.html#torch.amp.custom_fwd.

    Example:
        >>> class Square(torch.nn.Module):
        ...     @fwd_default_precision
        ...     def forward(self, x):
        ...         return x @ x
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     (
        ...         Square()(torch.ones(2, 2)).dtype,
        ...         Square()(torch.ones(2, 2), force_allow_autocast=True).dtype,
        ...     )
        (torch.float32, torch.bfloat16)
    """
    if fwd is None:
        return functools.partial(fwd_default_precision, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(*args: Any, force_allow_autocast: bool = False, **kwargs: Any) -> Any:
        if force_allow_autocast or cast_inputs is None:
            return fwd(*args, **kwargs)
        device_type = _infer_device_type(args, kwargs)
        if not torch.is_autocast_enabled(device_type):
            return fwd(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return fwd(*_cast(args, cast_inputs), **_cast(kwargs, cast_inputs))

    return forward


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of nested tuples, lists and dicts; all else stays the same
    object.
    """

    def narrowed(value: Any) -> Any:
        # A float64 tensor is always explicit: it is not narrowed.
        is_cast = (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
        )
        return value.to(dtype) if is_cast else value

    return map_values(value, narrowed)


def _infer_device_type(*values: Any) -> str:
    """Return the device type of the first tensor, else of a module's first parameter, else
    "cpu".
    """
    found: list[Any] = []
    map_values(values, found.append)
    parameters = (
        parameter
        for module in found
        if isinstance(module, torch.nn.Module)
        for parameter in module.parameters()
    )
    tensors = (tensor for tensor in found if isinstance(tensor, torch.Tensor))
    first = next(itertools.chain(tensors, parameters), None)
    return "cpu" if first is None else str(first.device.type)
