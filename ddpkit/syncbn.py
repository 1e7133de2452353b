"""Batch normalisation over the joined batch of all ranks, on any backend: CPU and gloo included.

torch's own ``torch.nn.SyncBatchNorm`` refuses CPU tensors, and ``DistributedDataParallel`` refuses
a CPU module that holds one. :class:`SyncBatchNorm` here has neither limit;
:func:`convert_sync_batchnorm` puts it where a model has BatchNorm. On CUDA it computes with the
kernels of torch's layer, but what the ranks send each other is the same everywhere: torch's layer
sends float32 for rows in half precision, and half precision for no rows, which NCCL does not notice
and cannot match; and it waits for the GPU in every forward pass.

What is computed, for one channel with values x[i] over all rows and positions of *all* ranks, N of
them::

    mean = sum(x) / N
    var  = sum((x - mean)^2) / N
    y    = weight * (x - mean) / sqrt(var + eps) + bias

Each rank brings its own mean, its own sum of squared distances from it, and its own count; they are
gathered once and combined by the parallel formula, which, unlike sums of squares, does not cancel
where the mean is large.

Gradients. Let L[r] be the loss that rank r back-propagates, and L the sum of all L[r]. On rank r
autograd gives:

- for the input: dL / dx, with L *summed over the ranks*: a row moves every rank's output through
  the shared statistics;
- for weight and bias: dL[r] / dweight, the rank's *own* share. Their sum over the ranks is dL /
  dweight.

This is what ``torch.nn.SyncBatchNorm`` does, and what DDP, which averages parameter gradients,
needs: below the layer every parameter gets the rank's share of dL, above it too, so that after
DDP's average all are dL / (number of ranks).

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances", 1979; S. Ioffe, C. Szegedy, "Batch Normalization", 2015,
https://arxiv.org/abs/1502.03167, section 3. The CUDA kernels are called as
``torch/nn/modules/_functions.py`` of torch 2.13 does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from ddpkit.base import reads_device, waiting
from ddpkit.comm import exchange_tensor, get_runtime, is_exchanged, start_sum
from ddpkit.compat import forget_compiled
from ddpkit.device import widest_float
from ddpkit.errors import ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.metrics import is_repeating

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm", "is_convertible"]

logger = get_logger(__name__)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with training statistics over the rows of all ranks.

    Output, running statistics and gradients are as in ``torch.nn.BatchNorm*d`` over the joined
    batch, also when the ranks hold different numbers of rows, one row, or none. In evaluation,
    without a process group, and in a group of one rank it is plain batch normalisation and
    communicates nothing. Half-precision inputs are normalised by float32 statistics.

    Args:
        num_features: C, the size of the input's dimension 1.
        eps: and ``momentum``, ``affine``, ``track_running_stats``, ``device``, ``dtype``: as in
            ``torch.nn.BatchNorm1d``.

    Shape:
        input ``(rows, C, ...)`` of a floating dtype, with any number of further dimensions; output
        the same.

    Attributes:
        before_sending: of the class: called before the ranks send each other anything, with all
            memory for it taken; what it raises, it must raise on all of them. Or None.

    State: ``weight``, ``bias``, ``running_mean``, ``running_var``, ``num_batches_tracked``: the
        keys of BatchNorm.

    Ranks: collective in training: every rank must call forward, and backward, the same number of
        times and in the same order (one gather of 2 C + 1 numbers forward, one all-reduce of 2 C
        backward, float64).

    Example:
        >>> layer = SyncBatchNorm(3, momentum=None)
        >>> layer(torch.randn(8, 3, 5)).mean().abs().item() < 1e-6
        True
        >>> list(layer.state_dict()) == list(torch.nn.BatchNorm1d(3).state_dict())
        True
    """

    before_sending: ClassVar[Callable[[], None] | None] = None

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 -- torch's name
        if input.dim() < 2:  # noqa: PLR2004 -- rows and channels
            raise ConfigError(
                f"expected at least 2D input (rows, channels, ...), got shape {tuple(input.shape)}."
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's name
        """Normalise, in training over the rows of all ranks.

        Rows of a batch that this rank repeats only to keep step (:func:`ddpkit.metrics.counted_by`)
        are normalised, too; they count in no statistic, and get and give no gradient through one.

        Args:
            input: shape ``(rows, C, ...)``; the number of rows may differ between ranks, and be 0.

        Returns:
            A tensor of the input's shape and dtype.

        Raises:
            ConfigError: fewer than two dimensions.
            DataError: one value per channel over all ranks, which has no variance; raised on every
                rank.

        Ranks: collective in training, else local.
        """
        self._check_input_dim(input)
        group = _statistics_group(input.device) if self.training else None
        if group is None:
            return super().forward(input)
        input = _packed(input)  # noqa: A001 -- torch's name
        joined = _join(input.detach(), self.eps, group)
        if joined is None:
            return super().forward(input)  # no rank has any row: empty in, empty out
        if self.track_running_stats:
            self._update_running(joined)
        output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, joined, self.eps
        )
        return output

    @torch.no_grad()
    def _update_running(self, joined: _Joined) -> None:
        """Move the running statistics towards the joined batch's: the mean, and the unbiased
        variance.
        """
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum: Any = self.momentum
        # the average of all batches so far; as a tensor, which nobody waits for
        if momentum is None:
            momentum = (
                0.0
                if self.num_batches_tracked is None
                else self.num_batches_tracked.to(joined.var).reciprocal()
            )
        if self.running_mean is not None:
            _move(self.running_mean, joined.mean, momentum)
        if self.running_var is not None:
            _move(
                self.running_var,
                joined.var * (joined.total / (joined.total - 1)),
                momentum,
            )


class _Joined(NamedTuple):
    """The joined batch: float64 ``mean`` and biased ``var`` (C,), ``total`` (), each rank's count,
    and the group.
    """

    mean: Tensor
    var: Tensor
    total: Tensor
    counts: Tensor
    group: Any


def _move(statistic: Tensor, towards: Tensor, momentum: Tensor | float) -> None:
    part = momentum.to(statistic.dtype) if isinstance(momentum, Tensor) else momentum
    statistic.lerp_(towards.to(statistic.dtype), part)


def _has_kernels(x: Tensor) -> bool:
    """Say whether the kernels of torch's own layer compute on a tensor: they are for CUDA only
    (AMD's GPUs too).
    """
    return x.is_cuda


def _packed(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Lay a tensor out as the kernels want it: channels last if it is so already, else contiguous.

    Args:
        x: as it came.
        like: one whose layout it has to take; the kernels look at one of the two only.
    """
    if not _has_kernels(x):
        return x
    for layout in (torch.channels_last, torch.channels_last_3d):
        if (x if like is None else like).is_contiguous(memory_format=layout):
            return x.contiguous(memory_format=layout)
    return x.contiguous()


def _over(x: Tensor) -> tuple[list[int], list[int]]:
    """Return the dimensions that a channel spans, and the shape in which (C,) broadcasts against
    x.
    """
    spans = [0, *range(2, x.dim())]
    return spans, [
        1,
        -1,
        *([1] * (x.dim() - 2)),
    ]


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _local_moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's mean, sum of squared distances from it, and count, per channel: (C,),
    (C,), (1,).

    The one place to change for rows that must not count (padding): they enter through these three
    alone.
    """
    wide = widest_float(x.device)
    channels = x.shape[1]
    count = x.numel() // channels if channels and not is_repeating() else 0
    counted = torch.full(
        (1,),
        count,
        dtype=wide,
        device=x.device,
    )
    if count == 0:
        nothing = torch.zeros(channels, dtype=wide, device=x.device)
        return nothing, nothing, counted
    if _has_kernels(x):
        mean, inverse_std = torch.batch_norm_stats(x, eps)
        return mean.to(wide), (inverse_std.to(wide).square().reciprocal() - eps) * count, counted
    spans, shape = _over(x)
    values = x.to(_statistics_dtype(x))
    # Two passes, the second over distances from the mean: as sound as Welford's, and 10 to 20 times
    # as fast on a CPU as `torch.var_mean` over these dimensions (64x32x16x16 on one core: 0.11 ms,
    # and 2.4 ms).
    mean = values.mean(spans)
    squares = (values - mean.view(shape)).square_().sum(spans)
    return mean.to(wide), squares.to(wide), counted


@torch.no_grad()
@reads_device
def _join(x: Tensor, eps: float, group: Any) -> _Joined | None:
    """Gather every rank's moments, in one collective, and combine them: the same bits on every
    rank.

    Returns None where no rank has any value.
    """
    local = torch.cat(_local_moments(x, eps))
    gathered = local.new_empty(dist.get_world_size(group), local.numel())
    if SyncBatchNorm.before_sending is not None:
        SyncBatchNorm.before_sending()
    _gather(gathered, local, group)
    means, squares, counts = torch.split(
        gathered,
        [x.shape[1], x.shape[1], 1],
        dim=1,
    )
    total = counts.sum()
    if is_repeating() or x.numel() <= x.shape[1]:
        # Only then can the joined batch be too small; so a rank with two values per channel never
        # waits for this number.
        if total == 0:
            return None
        if total == 1:
            raise DataError(
                "Expected more than 1 value per channel when training, got input size "
                f"{list(x.shape)} on this rank and 1 value over all {len(gathered)} ranks. Use a "
                "larger batch, drop_last=True, or eval()."
            )
    mean = (means * counts).sum(0) / total
    var = (squares + counts * (means - mean).square()).sum(0) / total
    return _Joined(mean, var, total, counts.squeeze(1), group)


def _gather(gathered: Tensor, local: Tensor, group: Any) -> None:
    """Gather a row of each rank; NCCL into one piece, as else it would copy row by row."""
    if "nccl" in dist.get_backend(group):
        # the older name
        into_one: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        into_one(gathered.view(-1), local, group=group)
    elif is_exchanged([local], group):
        rank = dist.get_rank(group)
        gathered[rank], gathered[1 - rank] = local, exchange_tensor(local, group)()
    else:
        with waiting():
            dist.all_gather(
                list(gathered.unbind(0)),
                local,
                group=group,
            )


class _Normalise(torch.autograd.Function):
    """Normalise by the joined statistics; back through them with one all-reduce."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        joined: _Joined,
        eps: float,
    ) -> Tensor:
        dtype = _statistics_dtype(x)
        mean = joined.mean.to(dtype)
        var = joined.var.to(dtype)
        scale = None if weight is None else weight.detach().to(dtype)
        shift = None if bias is None else bias.detach().to(dtype)
        inverse_std = (joined.var + eps).rsqrt().to(dtype)
        ctx.save_for_backward(x, scale, mean, inverse_std, joined.counts)
        ctx.group = joined.group
        ctx.left_out = is_repeating()
        ctx.dtypes = (
            None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
        )
        if not _has_kernels(x):
            return F.batch_norm(
                x,
                mean,
                var,
                scale,
                shift,
                training=False,
                eps=eps,
            )
        return (
            torch.batch_norm_elemt(x, scale, shift, mean, inverse_std, eps)
            if x.numel()
            else torch.empty_like(x)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, mean, inverse_std, counts = ctx.saved_tensors
        grad = _packed(grad_output, like=x)
        sum_grad, sum_product, values = _local_sums(x, grad, mean, inverse_std)
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_grad, sum_product]).to(counts.dtype)
            if SyncBatchNorm.before_sending is not None:
                SyncBatchNorm.before_sending()
            start_sum(sums, ctx.group)()
            if ctx.left_out:  # the statistics do not depend on these rows
                factor = inverse_std if scale is None else inverse_std * scale
                grad_input = grad.to(mean.dtype) * factor.view(_over(x)[1])
            else:
                grad_input = _through_statistics(
                    values,
                    grad,
                    scale,
                    mean,
                    inverse_std,
                    sums,
                    counts,
                )
            grad_input = grad_input.to(x.dtype)
        weight_dtype, bias_dtype = ctx.dtypes
        grad_weight = (
            (sum_product * inverse_std).to(weight_dtype) if ctx.needs_input_grad[1] else None
        )
        grad_bias = sum_grad.to(bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None, None


def _local_sums(
    x: Tensor,
    grad: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return two sums over this rank's rows, and the values that :func:`_through_statistics` is to
    be given.

    The sums are over the gradient, and over its product with the distance from the mean. The values
    are the rows themselves for the kernels, otherwise the distances from the mean.
    """
    if _has_kernels(x) and x.numel():
        # the two sums; the gradients of weight and bias follow from them
        wanted = (True, False, False)
        sum_grad, sum_product, _, _ = torch.batch_norm_backward_reduce(
            grad,
            x,
            mean,
            inverse_std,
            None,
            *wanted,
        )
        return sum_grad, sum_product, x
    spans, shape = _over(x)
    wide = grad.to(mean.dtype)
    centred = x - mean.view(shape)
    return wide.sum(spans), (wide * centred).sum(spans), centred


def _through_statistics(
    values: Tensor,
    grad: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    inverse_std: Tensor,
    sums: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the gradient of the input: ``sums`` are over all ranks, ``counts`` the number of
    values per rank.
    """
    if _has_kernels(values) and values.numel():
        sum_grad, sum_product = sums.to(mean.dtype).chunk(2)
        whole = counts.to(torch.int32)
        return torch.batch_norm_backward_elemt(
            grad,
            values,
            mean,
            inverse_std,
            scale,
            sum_grad,
            sum_product,
            whole,
        )
    shape = _over(values)[1]
    mean_grad, mean_product = (sums / counts.sum()).to(mean.dtype).chunk(2)
    slope = -mean_product * inverse_std.square()
    factor = inverse_std if scale is None else inverse_std * scale
    wide = grad.to(mean.dtype)
    return (
        values.mul_(slope.view(shape))
        .add_(wide)
        .sub_(mean_grad.view(shape))
        .mul_(factor.view(shape))
    )


def convert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
    """Replace every BatchNorm of a model by one that normalises over the rows of all ranks.

    Parameters, buffers, mode, hooks and state-dict keys stay: the very objects, so an optimizer
    made before still holds them. Left as they are: InstanceNorm, layers that are synchronised
    already (a second call changes nothing), and, with a warning, scripted layers, subclasses with a
    ``forward`` of their own and parametrised layers, whose meaning a replacement would lose.

    Args:
        module: the model; its children are replaced in place.

    Returns:
        The module, or its replacement where it is a BatchNorm itself.

    Ranks: collective where a group must be made (every rank must convert the same models), else
    local.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
        >>> keys, weight = list(model.state_dict()), model[1].weight
        >>> model = convert_sync_batchnorm(model)
        >>> type(model[1]).__name__, model[1].weight is weight, list(model.state_dict()) == keys
        ('SyncBatchNorm', True, True)
    """
    fallback = _device_of(module, torch.device("cpu"))
    made: dict[torch.nn.Module, torch.nn.Module] = {}
    for name, layer in module.named_modules():
        if is_convertible(layer, name):
            made[layer] = _twin(layer)
            _statistics_group(_device_of(layer, fallback))
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if path and layer in made:
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent).add_module(name, made[layer])
    return made.get(module, module)


def _device_of(module: torch.nn.Module, fallback: torch.device) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), fallback)


def is_convertible(layer: torch.nn.Module, name: str) -> bool:
    """Say whether :func:`convert_sync_batchnorm` replaces a layer; warn where it leaves a BatchNorm
    as it is.

    Args:
        layer: any module, without its children.
        name: what the messages call it.

    Ranks: local.

    Example:
        >>> (
        ...     is_convertible(torch.nn.BatchNorm1d(2), "norm"),
        ...     is_convertible(torch.nn.LayerNorm(2), "norm"),
        ... )
        (True, False)
    """
    # what torch.jit.script leaves of it
    is_scripted = str(getattr(layer, "original_name", "")).startswith("BatchNorm")
    is_shared = isinstance(layer, (SyncBatchNorm, torch.nn.SyncBatchNorm))
    if is_shared or not (is_scripted or isinstance(layer, _BatchNorm)):
        return False
    if (
        is_scripted
        or type(layer).forward is not _BatchNorm.forward
        or parametrize.is_parametrized(layer)
    ):
        logger.warning(
            "module %r (%s) is a BatchNorm that is scripted, or has a forward or a "
            "parametrization of its own: each rank normalises over its own rows. Build it on "
            "ddpkit.syncbn.SyncBatchNorm to share statistics.",
            name,
            type(layer).__name__,
        )
        return False
    return True


def _twin(layer: torch.nn.Module) -> torch.nn.Module:
    """Return a synchronised layer that holds another's very parameters, buffers, hooks and
    attributes.
    """
    twin = SyncBatchNorm.__new__(SyncBatchNorm)
    twin.__dict__.update(layer.__dict__)
    forget_compiled(twin)
    return twin


def _statistics_group(device: torch.device) -> Any:
    """Return the group of all ranks for statistics alone, made on first use; None where a rank is
    alone.

    Why a separate group: collectives of one group are matched by the order in which each rank
    starts them. DDP's buckets start in a fixed order, and so do the layers. But the two interleave
    differently if a rank leaves parameters out (``find_unused_parameters``), takes another branch,
    or has several wrapped modules finish in another order. Then one rank's statistics would be
    added to another's gradients. Each group also has its own threads (NCCL: its own stream), so
    statistics never wait for a bucket.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    backend = "gloo" if device.type == "cpu" and dist.is_gloo_available() else None
    return get_runtime().own_group("statistics of batch norm", backend)
