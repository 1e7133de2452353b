"""What the CUDA kernels of batch normalisation compute, on a CPU, and as strict about dtypes as
they are.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from ddpkit import syncbn


def _wide(x):
    """Return the dtype that the kernels add up in."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _spans(x):
    return [0, *range(2, x.dim())]


def _shaped(statistic, x):
    return statistic.view(1, -1, *([1] * (x.dim() - 2)))


def stats(x, eps):
    assert x.numel(), "the kernel divides by nothing"
    var, mean = torch.var_mean(x.to(_wide(x)), _spans(x), correction=0)
    return mean, (var + eps).rsqrt()


def elemt(x, weight, bias, mean, inverse_std, eps):
    assert {mean.dtype, inverse_std.dtype} == {_wide(x)}
    output = (x.to(_wide(x)) - _shaped(mean, x)) * _shaped(inverse_std, x)
    if weight is not None:
        assert weight.dtype in (x.dtype, _wide(x))
        output = output * _shaped(weight, x)
    if bias is not None:
        assert bias.dtype == weight.dtype
        output = output + _shaped(bias, x)
    return output.to(x.dtype)


def backward_reduce(grad, x, mean, inverse_std, weight, *wanted):
    assert grad.dtype == x.dtype
    assert {mean.dtype, inverse_std.dtype} == {_wide(x)}
    assert wanted == (True, False, False), (
        "the sums for the input's gradient; not that of weight, nor of bias"
    )
    wide = grad.to(_wide(x))
    return wide.sum(_spans(x)), (wide * (x - _shaped(mean, x))).sum(_spans(x)), None, None


def backward_elemt(grad, x, mean, inverse_std, weight, *of_all):
    sum_grad, sum_product, counts = of_all
    assert grad.dtype == x.dtype
    assert {mean.dtype, inverse_std.dtype, sum_grad.dtype, sum_product.dtype} == {_wide(x)}
    assert counts.dtype == torch.int32
    assert weight is None or weight.dtype == _wide(x)
    total = counts.sum()
    slope = _shaped(inverse_std.square() * sum_product / total, x)
    values = grad.to(_wide(x)) - _shaped(sum_grad / total, x) - (x - _shaped(mean, x)) * slope
    factor = inverse_std if weight is None else inverse_std * weight
    return (values * _shaped(factor, x)).to(x.dtype)


@contextlib.contextmanager
def as_on_cuda():
    """Have layers converted, and rows normalised, as if they were on a GPU."""
    kernels = {
        "batch_norm_stats": stats,
        "batch_norm_elemt": elemt,
        "batch_norm_backward_reduce": backward_reduce,
        "batch_norm_backward_elemt": backward_elemt,
    }
    with contextlib.ExitStack() as stack:
        for name, kernel in kernels.items():
            stack.enter_context(mock.patch.object(torch, name, kernel))
        stack.enter_context(mock.patch.object(syncbn, "_has_kernels", return_value=True))
        stack.enter_context(
            mock.patch.object(syncbn, "_device_of", return_value=torch.device("cuda"))
        )
        yield
