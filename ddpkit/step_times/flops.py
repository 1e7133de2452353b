"""Floating-point operations of an optimizer step, counted from the operations that torch runs in
it.

The formulas are torch's own, of ``torch.utils.flop_counter``: products of matrices, convolutions
and attention, a multiplication and an addition each counting one. What is element by element counts
nothing. Some formulas are added here, and one is replaced.

- torch has none for layers of recurrent networks in one kernel, nor for attention on a CPU.
- Its backward pass of a convolution in groups counts each group as if it saw all channels.

The count changes no number: the same kernels run, on the same tensors, one after another. But it
intercepts each operation, and an operation may refuse that: it is for a step that a user wants
counted.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit.errors import ConfigError
from ddpkit.step_times.device_peaks import TF32, device_peak

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CONVOLUTION = "convolution"
RECURRENT = "recurrent"
PRODUCT = "product"

HIGHER_ORDER = (
    "count_flops=True: torch {} runs {} another way while operations are counted, and its "
    "gradients may be lost. Leave --count_flops out, or install a torch whose TorchDispatchMode "
    "has ignore_compile_internals."
)

_PLAIN = {torch.Tensor, nn.Parameter}
_aten = torch.ops.aten


# ---------------------------------------------------------------------- formulas


def _convolution_backward(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    *others: Any,
    **_: Any,
) -> int:
    """Count a forward pass for each of the two gradients, that of the input and that of the weight.

    Each value of one side, the output or with ``transposed`` the input, meets a whole kernel of its
    group.
    """
    is_transposed = others[4]
    output_mask = others[7]
    places = inputs if is_transposed else gradient
    forward = 2 * places.shape[0] * math.prod(places.shape[2:]) * weight.numel()
    return forward * (int(output_mask[0]) + int(output_mask[1]))


def _rnn(
    inputs: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *_: Any,
    **__: Any,
) -> int:
    """Count a multiplication and an addition for each step of each sequence and each weight."""
    steps = inputs.numel() // inputs.shape[-1]
    return 2 * steps * sum(weight.numel() for weight in weights if weight.dim() > 1)


def _rnn_backward(*args: Any, **_: Any) -> int:
    return 2 * _rnn(*args)


def _rnn_layer(inputs: torch.Tensor, *weights: Any, **_: Any) -> int:
    return _rnn(inputs, weights[:4])


def _rnn_layer_backward(inputs: torch.Tensor, *weights: Any, **_: Any) -> int:
    return 2 * _rnn(inputs, weights[:4])


def _attention(*tensors: Any, **_: Any) -> int:
    count: Any = flop_counter.sdpa_flop_count
    return int(count(*(tensor.shape for tensor in tensors[:3])))


def _attention_backward(*tensors: Any, **_: Any) -> int:
    count: Any = flop_counter.sdpa_backward_flop_count
    return int(count(*(tensor.shape for tensor in tensors[:4])))


def _own_formulas() -> dict[Any, Callable[..., int]]:
    """Return the formulas that torch lacks, by operation, as far as this torch has the
    operation.
    """
    named: dict[str, Callable[..., int]] = {
        "convolution_backward": _convolution_backward,
        "_cudnn_rnn": _rnn,
        "_cudnn_rnn_backward": _rnn_backward,
        "miopen_rnn": _rnn,
        "miopen_rnn_backward": _rnn_backward,
        "mkldnn_rnn_layer": _rnn_layer,
        "mkldnn_rnn_layer_backward": _rnn_layer_backward,
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "_scaled_dot_product_fused_attention_overrideable": _attention,
        "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    }
    return {
        getattr(_aten, name): formula for name, formula in named.items() if hasattr(_aten, name)
    }


def _kind_of(operation: Any) -> str:
    name = str(operation)
    if "conv" in name:
        return CONVOLUTION
    return RECURRENT if "rnn" in name else PRODUCT


# ---------------------------------------------------------------------- counting


class FlopCounter(TorchDispatchMode):
    """A context that counts the floating-point operations of what runs inside of it; it may be
    entered again.

    What runs in another thread is not seen, but for backward passes; nor what is compiled, nor what
    is replayed by a CUDA graph.

    Args:
        is_repeated: tells whether what runs now was counted before, and is computed again to save
            memory.

    Attributes:
        counts: operations by kind, and by the dtype of what is multiplied.
        problem: why the count is not whole; empty where it is.

    Raises:
        ConfigError: an operation that calls functions, such as ``torch.cond``, under a torch that
            would not compile it here.

    Example:
        >>> with FlopCounter() as counter:
        ...     product = torch.ones(2, 3) @ torch.ones(3, 5)
        >>> counter.total  # 2 * 2 * 3 * 5
        60
    """

    supports_higher_order_operators = True

    def __init__(self, is_repeated: Callable[[], bool] = bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, torch.dtype]] = Counter()
        self.problem = ""
        self._is_repeated = is_repeated
        self._formulas = {**flop_counter.flop_registry, **_own_formulas()}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have torch compile as ever; by default it would run eagerly what is compiled.

        ``torch.cond`` compiles itself, and has no gradients of the weights of its branches
        otherwise.
        """
        return True

    @property
    def total(self) -> int:
        """The number of operations."""
        return self.counts.total()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count it."""
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet is None and not _keeps_compiling():
            raise ConfigError(HIGHER_ORDER.format(torch.__version__, func))
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # shapes that DTensor looks up: nothing is computed
        if any(kind not in _PLAIN for kind in types):
            return (
                NotImplemented  # it runs operations on the tensors that it holds, which come here
            )
        result = func(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            self.problem = "a part of it runs in torch.inference_mode"
        elif packet is None:
            self.problem = f"{func} does not show what it computes"
        elif packet in self._formulas and not self._is_repeated():
            self._count(func, self._formulas[packet], args, kwargs, result)
        return result

    def _count(
        self,
        func: Any,
        formula: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        dtype = next(
            (argument.dtype for argument in args if isinstance(argument, torch.Tensor)),
            torch.float32,
        )
        try:
            number = int(formula(*args, **kwargs, out_val=result))
        except Exception as error:  # noqa: BLE001 -- of torch or a recipe: the step goes on, the count is not known
            self.problem = f"the formula of {func} has failed: {type(error).__name__}: {error}"
            return
        self.counts[_kind_of(func), dtype] += number

    def peak(self, device_name: str) -> float | None:
        """Return how many such operations per second a device can make at most, in this mix of
        kinds and dtypes.

        Args:
            device_name: as ``torch.cuda.get_device_name()`` gives it.

        Returns:
            Operations per second; None where one of the peaks is not known.
        """
        seconds = 0.0
        for (kind, dtype), number in self.counts.items():
            peak = _peak_of(device_name, kind, dtype)
            if peak is None:
                return None
            seconds += number / peak
        return self.total / seconds if seconds else None


def _keeps_compiling() -> bool:
    """Say whether this torch asks a mode for ``ignore_compile_internals``."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals")


def _peak_of(device_name: str, kind: str, dtype: torch.dtype) -> float | None:
    if dtype is torch.float32 and _allows_tf32(kind):
        peak = device_peak(device_name, TF32)
        if peak is not None:
            return peak
    return device_peak(device_name, dtype)


def _allows_tf32(kind: str) -> bool:
    """Say whether float32 is multiplied on tensor cores; by default torch does that in convolutions
    alone.
    """
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    owner = {CONVOLUTION: "conv", RECURRENT: "rnn"}.get(kind)
    precision = getattr(
        matmul if owner is None else getattr(cudnn, owner, None),
        "fp32_precision",
        None,
    )
    if precision is None:  # torch before 2.9
        return bool(matmul.allow_tf32 if owner is None else cudnn.allow_tf32)
    return bool(precision == "tf32")
