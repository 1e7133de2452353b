"""What torch keeps to itself: groups, operations on many tensors, backward passes, recurrent and
compiled layers, DDP.

Process groups: a group may have been made by the recipe, so nothing of it passes through ddpkit;
its store is the one channel to the other ranks that needs no collective, and every group must be
closed before the process ends.

Operations over many tensors, as torch's own optimizers use them: a kernel for each gradient would
be launched in every step whose gradients are weighed, or added up in order; and torch's public
``get_total_norm`` makes 60 calls of Python in every step around the two that compute.

Backward passes: the checks that ``loss.backward`` makes in Python before it starts the engine take
a tenth of the time of a small model's pass, and for a loss of one number their results are known.

Recurrent layers hold weak references to their weights, and a tensor that has such cannot be swapped
for another.

Compiled modules: ``module.compile()`` leaves no public trace, and a module is not compiled twice.

The order in which DDP adds gradients up, which a resumed run takes over from the one before:

DDP puts gradients into buckets, and after the first backward pass puts them anew, in the order in
which they became ready. From three ranks on, the order in which a number is added up over the ranks
depends on its place in the bucket, so that the last bit of a gradient does. The run that was never
stopped has had its first backward pass long ago. A resumed one must not add up its first gradients
in another order: so the order is saved, and shown to DDP before.

Source: ``Reducer::rebuild_buckets`` and ``Reducer::push_rebuilt_params`` in torch 2.13's
``reducer.cpp``. That the order of this module is taken over is tested. Otherwise DDP finds its own
order: the last bits may then be others.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import get_total_norm
from torch.overrides import has_torch_function_unary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def default_store() -> Any:
    """Return the store of the default process group; otherwise asked of the group itself, which
    newer torch tells.

    Raises:
        ValueError: there is no process group (torch's own error).

    Ranks: local.

    Example:
        >>> default_store()
        Traceback (most recent call last):
        ValueError: Default process group has not been initialized, please make sure to call
        init_process_group.
    """
    ask = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    if ask is not None:
        return ask()
    torch.distributed.get_backend()  # raises torch's own error where there is no group
    return torch.distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]


def base_store(store: Any) -> Any:
    """Return the store below all prefixes; otherwise the store itself.

    Args:
        store: a store of torch's, or None.

    Ranks: local.

    Example:
        >>> from torch.distributed import HashStore, PrefixStore
        >>> isinstance(base_store(PrefixStore("a", PrefixStore("b", HashStore()))), HashStore)
        True
    """
    while isinstance(store, torch.distributed.PrefixStore):
        below = getattr(store, "underlying_store", None)
        if below is None:
            break
        store = below
    return store


def all_groups() -> list[Any]:
    """Return all process groups of this process; otherwise the default one alone.

    Ranks: local.

    Example:
        >>> all_groups()
        []
    """
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    known = getattr(world, "pg_map", None)
    if known is not None:
        return list(known)
    return [] if torch.distributed.group.WORLD is None else [torch.distributed.group.WORLD]


def timeout_of(group: Any) -> timedelta | None:
    """Return how long a group's collectives wait; None if its backend does not say (``mpi``), or
    torch is another.

    Args:
        group: a process group, or None.

    Ranks: local.
    """
    for device in getattr(group, "_device_types", ()):
        get_backend = getattr(group, "_get_backend", None)
        options = getattr(None if get_backend is None else get_backend(device), "options", None)
        limit = getattr(options, "_timeout", None)
        if isinstance(limit, timedelta):
            return limit
    return None


# --------------------------------------------------------------------- operations over many tensors


def add_all(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add tensors to tensors in place, in one pass; otherwise one by one.

    Args:
        tensors: written into.
        others: as many, of the same shapes.

    Ranks: local.

    Example:
        >>> ones = [torch.ones(1), torch.ones(2)]
        >>> add_all(ones, [torch.ones(1), torch.ones(2)]); ones
        [tensor([2.]), tensor([2., 2.])]
    """
    at_once = getattr(torch, "_foreach_add_", None)
    if at_once is not None:
        at_once(list(tensors), list(others))
        return
    for tensor, other in zip(tensors, others, strict=True):
        tensor.add_(other)


def multiply_all(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place, in one pass for each device; otherwise one by one.

    Args:
        tensors: on any devices.
        factor: a number, or a tensor of shape ``()``.

    Ranks: local.

    Example:
        >>> ones = [torch.ones(1), torch.ones(2)]
        >>> multiply_all(ones, 3.0); ones
        [tensor([3.]), tensor([3., 3.])]
    """
    at_once: Any = getattr(
        torch,
        "_foreach_mul_",
        lambda ones, number: [tensor.mul_(number) for tensor in ones],
    )
    if isinstance(factor, torch.Tensor) and {tensor.dtype for tensor in tensors} == {torch.float32}:
        # else one kernel each; not half precision, which cannot say a small factor
        factor = factor.to(torch.float32)
    for device in {tensor.device for tensor in tensors}:
        own = [tensor for tensor in tensors if tensor.device == device]
        there = factor
        # a copy from the CPU would wait for the GPU
        if isinstance(factor, torch.Tensor) and factor.device != device:
            there = factor.item() if factor.is_cpu else factor.to(device)
        at_once(own, there)


def norm_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all tensors as of one vector: the bits of
    ``torch.nn.utils.get_total_norm``.

    Args:
        tensors: on any devices.

    Returns:
        Shape ``()``, on the first one's device.

    Ranks: local.

    Example:
        >>> norm_of_all([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    at_once: Any = getattr(torch, "_foreach_norm", None)
    kinds = {(tensor.__class__, tensor.dtype, tensor.device) for tensor in tensors}
    if at_once is None or len(kinds) != 1:
        return get_total_norm(tensors)
    [(kind, _, device)] = kinds
    if kind is not torch.Tensor or device.type not in {"cpu", "cuda"}:
        return get_total_norm(tensors)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(at_once(tensors, 2.0)))
    return norm


def norms_of_each(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the norm of each tensor: the bits of those that :func:`norm_of_all` takes the norm of.

    Args:
        tensors: of one dtype, on one device.

    Ranks: local.

    Example:
        >>> norms_of_each([torch.tensor([3.0, 4.0])])
        [tensor(5.)]
    """
    at_once: Any = getattr(torch, "_foreach_norm", None)
    if at_once is None:
        return [torch.linalg.vector_norm(tensor) for tensor in tensors]
    found: Sequence[torch.Tensor] = list(at_once(tensors, 2.0)) if tensors else []
    return found


def norm_of_norms(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of tensors whose norms these are.

    Ranks: local.

    Example:
        >>> norm_of_norms([torch.tensor(3.0), torch.tensor(4.0)])
        tensor(5.)
    """
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


# ---------------------------------------------------------------------- backward passes

_PUBLIC: Any = torch.Tensor.backward, torch.autograd.backward
_is_transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)  # noqa: SLF001


def back_propagate(
    loss: torch.Tensor,
    weight: torch.Tensor,
    *,
    retain_graph: bool = False,
) -> None:
    """Do what ``loss.backward(weight)`` does, in fewer calls; call that itself where it may have
    been replaced.

    Args:
        loss: one real number.
        weight: the gradient that it gets; of its shape, dtype and device.
        retain_graph: keep the graph for another backward pass.

    Ranks: collective under DDP.

    Example:
        >>> number = torch.ones(1, requires_grad=True)
        >>> back_propagate(number.sum(), torch.tensor(0.5)); number.grad
        tensor([0.5000])
    """
    special = torch.compiler.is_compiling() or has_torch_function_unary(loss) or _is_transforming()
    special = special or loss.__class__ is not torch.Tensor or "backward" in loss.__dict__
    if (
        special
        or (torch.Tensor.backward, torch.autograd.backward) != _PUBLIC
        or not (engine := _engine())
    ):
        loss.backward(weight, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        engine(
            (loss,),
            (weight,),
            bool(retain_graph),
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )


@functools.cache
def _engine() -> Callable[..., object] | None:
    """Return torch's function that starts its engine, tried on one number; None if it is not there
    or not as expected.

    None also where something else stood in the place of torch's public functions when this module
    was loaded.
    """
    engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
    # of another torch
    with torch.inference_mode(mode=False), torch.enable_grad(), contextlib.suppress(Exception):
        number: Any = torch.ones(1, device="cpu", requires_grad=True)
        loss = number.sum()
        weight = torch.full_like(loss, 0.5)
        engine(
            (loss,),
            (weight,),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        homes = {public.__globals__["__name__"] for public in _PUBLIC}
        return (
            engine
            if homes == {"torch._tensor", "torch.autograd"} and number.grad.item() == weight
            else None
        )
    return None


# ---------------------------------------------------------------------- recurrent layers


@contextlib.contextmanager
def without_weak_references(module: torch.nn.Module) -> Iterator[None]:
    """Drop a recurrent layer's weak references to its weights inside the block, as torch's own
    ``_apply`` does.

    Of a layer without such, nothing is changed: torch's own error tells what cannot be swapped.

    Ranks: local.

    Example:
        >>> layer = torch.nn.GRU(1, 1, device="meta")
        >>> with without_weak_references(layer):
        ...     torch.utils.swap_tensors(layer.weight_ih_l0, torch.nn.Parameter(torch.ones(3, 1)))
        >>> layer.weight_ih_l0.sum().item()
        3.0
    """
    inside = isinstance(module, torch.nn.RNNBase) and hasattr(module, "_init_flat_weights")
    layer: Any = module if inside and hasattr(module, "_flat_weight_refs") else None
    if layer is not None:
        layer._flat_weight_refs = []  # noqa: SLF001 -- see the module
    yield
    if layer is not None:
        layer._init_flat_weights()  # noqa: SLF001


def watches_all_steps() -> bool:
    """Return whether hooks are registered for the steps of all optimizers; otherwise, or if
    unknown, False.

    Ranks: local.
    """
    inside = vars(sys.modules[torch.optim.Optimizer.__module__])
    return any(inside.get(f"_global_optimizer_{when}_hooks") for when in ("pre", "post"))


# ---------------------------------------------------------------------- compiled modules


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled, by ``torch.compile`` or in place; otherwise False: it is
    compiled anew.

    Ranks: local.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> layer.compile(backend="eager")
        >>> is_compiled(layer), is_compiled(torch.nn.Linear(1, 1))
        (True, False)
    """
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@contextlib.contextmanager
def requiring_compiled_code() -> Iterator[None]:
    """Return a context in which torch raises where it would go on without compiling, as it has
    compiled a module for as many kinds of inputs as it does.

    Without torch's compiler in this process nothing is compiled, and nothing changes.

    Ranks: local.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None:
        yield
        return
    # a setting of the whole process: what a recipe has chosen comes back
    before = compiler.config.fail_on_recompile_limit_hit
    compiler.config.fail_on_recompile_limit_hit = True
    try:
        yield
    finally:
        compiler.config.fail_on_recompile_limit_hit = before


def is_recompile_limit(error: BaseException) -> bool:
    """Say whether an exception is that of :func:`requiring_compiled_code`; otherwise, if torch has
    another name for it, False.

    Args:
        error: out of a compiled module.

    Ranks: local.

    Example:
        >>> is_recompile_limit(RuntimeError("out of memory"))
        False
    """
    return type(error).__name__ == "FailOnRecompileLimitHit"


def has_compiled_code() -> bool:
    """Return whether ``torch.compile`` has compiled anything in this process; otherwise, if
    unknown, True.

    Ranks: local.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return True if counters is None else bool(counters.get("frames", {}).get("total"))


def forget_compiled(module: torch.nn.Module) -> None:
    """Take off a copy of a module what ``compile`` has bound to the module; otherwise nothing, as
    there is nothing.

    Ranks: local.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> layer.compile(backend="eager"); forget_compiled(layer); is_compiled(layer)
        False
    """
    vars(module).pop("_compiled_call_impl", None)


# ---------------------------------------------------------------------- DDP


def trained_in(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients DDP averages, as it numbers them.

    Ranks: local.

    Example:
        >>> [one.shape[0] for one in trained_in(torch.nn.Linear(2, 3))]
        [3, 3]
    """
    unique = dict.fromkeys(
        parameter for parameter in module.parameters() if parameter.requires_grad
    )
    return list(unique)


class GradientOrder:
    """Notes in which order the gradients of a module become ready in the first backward pass that
    averages them.

    Args:
        module: wrapped in DDP, which has made no backward pass yet.

    Attributes:
        order: numbers of the parameters; shorter than their number until that pass is over.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> layer = torch.nn.Linear(1, 1)
        >>> layer.require_backward_grad_sync = True
        >>> noted = GradientOrder(layer)
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> sorted(noted.order), noted.close()
        ([0, 1], True)
    """

    def __init__(self, module: Any) -> None:
        self.order: list[int] = []
        self._module = module
        parameters = trained_in(module)
        self._number = len(parameters)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._noting(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
        ]

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have come."""
        return len(self.order) == self._number

    def _noting(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:  # noqa: ARG001 -- torch gives it
            if self._module.require_backward_grad_sync and not self.is_complete:
                self.order.append(number)

        return note

    def close(self) -> bool:
        """Stop noting if all gradients have come; say whether they have.

        Ranks: local.
        """
        if self.is_complete:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        return self.is_complete


def show_order(module: Any, order: list[int]) -> bool:
    """Have DDP make its buckets in a given order, before its first real backward pass.

    A backward pass of nothing but zeros is made, in which the gradients become ready in that order.

    Args:
        module: as it was just wrapped in DDP.
        order: numbers of its parameters, as :attr:`GradientOrder.order` has them.

    Returns:
        Whether it was done; False if the order belongs to another module, or DDP is not as
        expected.

    Ranks: collective.

    State: gradients are dropped.

    Example:
        >>> show_order(torch.nn.Linear(1, 1), [7])
        False
    """
    parameters = trained_in(module)
    if sorted(order) != list(range(len(parameters))) or not _shows_order(module):
        return False
    # its first backward pass only looks at what is used; the second makes the order
    if module.static_graph:
        module.reducer.prepare_for_forward()
        _go_backwards(module, parameters, order)
        module.reducer._delay_all_reduce()  # noqa: SLF001 -- what DDP calls at the end of that pass
        module._static_graph_delay_allreduce_enqueued = True  # noqa: SLF001 -- no other pass is the first
        module.reducer.prepare_for_forward()
    _go_backwards(module, parameters, order)
    for parameter in parameters:
        parameter.grad = None
    return True


def _shows_order(module: Any) -> bool:
    """Say whether DDP and its reducer have what :func:`show_order` calls and sets."""
    own = ["reducer", "static_graph"]
    calls = ["prepare_for_backward"]
    if getattr(module, "static_graph", False):
        own.append("_static_graph_delay_allreduce_enqueued")
        calls += ["prepare_for_forward", "_delay_all_reduce"]
    return all(hasattr(module, name) for name in own) and all(
        hasattr(module.reducer, name) for name in calls
    )


def _go_backwards(
    module: Any,
    parameters: list[torch.nn.Parameter],
    order: list[int],
) -> None:
    total = torch.zeros((), device=parameters[0].device)
    for number in reversed(order):  # what is added last is the first to go backwards
        total = total + (parameters[number].reshape(-1)[:1].float() * 0.0).sum()
    module.reducer.prepare_for_backward([])
    total.backward()  # type: ignore[no-untyped-call]


def expect_backward_pass(module: Any, output: torch.Tensor) -> None:
    """Tell DDP, where it looks for what a backward pass will reach, from which tensor the coming
    one starts.

    Otherwise, without DDP's reducer or where DDP does not look, nothing.

    Args:
        module: wrapped in DDP, whose forward pass expects a backward pass.
        output: from which that starts.

    Ranks: local.
    """
    reducer = getattr(module, "reducer", None)
    if reducer is not None and module.find_unused_parameters:
        reducer.prepare_for_backward([output])


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether functions of the recipe are called with a tensor's gradient
    (``register_hook``); otherwise False.

    Ranks: local.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> handle = weight.register_hook(print)
        >>> has_gradient_hooks(weight), has_gradient_hooks(torch.ones(1))
        (True, False)
    """
    return bool(getattr(tensor, "_backward_hooks", None))


def is_hooked_backward(module: torch.nn.Module) -> bool:
    """Return whether functions of the recipe are called in a backward pass when a gradient is
    written: those of modules, of parameters (``register_post_accumulate_grad_hook``), or of all
    modules; otherwise False.

    Such a function may change the gradient of any parameter.

    Args:
        module: with all that is in it.

    Ranks: local.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> is_hooked_backward(layer)
        False
        >>> handle = layer.register_full_backward_hook(lambda *given: None)
        >>> is_hooked_backward(torch.nn.Sequential(layer))
        True
    """
    of_all = torch.nn.modules.module
    if getattr(of_all, "_global_backward_hooks", None):
        return True
    if getattr(of_all, "_global_backward_pre_hooks", None):
        return True
    return any(
        getattr(one, "_backward_hooks", None) or getattr(one, "_backward_pre_hooks", None)
        for one in module.modules()
    ) or any(getattr(one, "_post_accumulate_grad_hooks", None) for one in module.parameters())


def version_of(tensor: torch.Tensor | None) -> int:
    """Return how often a tensor has been written to: each backward pass that reaches a gradient
    does.

    Args:
        tensor: of any shape and dtype; None: -1.

    Ranks: local.

    Example:
        >>> version_of(torch.ones(2).add_(1).mul_(2))
        2
    """
    return -1 if tensor is None else tensor._version  # noqa: SLF001 -- what autograd itself compares


def waits_for_gradients(module: Any) -> bool:
    """Return whether DDP still waits for a gradient, so that the gradients present are not averaged
    yet.

    DDP says so by itself in its next forward pass, after an optimizer step with such gradients: so
    it goes where it cannot be asked.

    Args:
        module: wrapped in DDP, after a backward pass that averages.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> waits_for_gradients(
        ...     SimpleNamespace(reducer=SimpleNamespace(_check_reducer_finalized=lambda: None))
        ... )
        False
    """
    ask = getattr(getattr(module, "reducer", None), "_check_reducer_finalized", bool)
    try:
        ask()
    except RuntimeError:
        return True
    return False


def bytes_held_by(gradient: torch.Tensor) -> int:
    """Return the bytes of a gradient; of a sparse one those of its rows and their numbers, where a
    row that was looked up twice is there twice.

    The public ``values()`` want each row once. Where torch does not hand out the others, so it is
    counted.

    Args:
        gradient: dense or sparse.

    Ranks: local.

    Example:
        >>> bytes_held_by(torch.ones(2, 3))
        24
    """
    if not gradient.is_sparse:
        return gradient.untyped_storage().nbytes()
    try:
        parts = [gradient._values(), gradient._indices()]  # noqa: SLF001
    except AttributeError:
        once = gradient.coalesce()
        parts = [once.values(), once.indices()]
    return sum(part.untyped_storage().nbytes() for part in parts)


# ---------------------------------------------------------------------- sparse tensors of a file


def forget_unchecked_sparse_tensors() -> None:
    """Empty the list of sparse tensors that torch has loaded and not yet checked; otherwise
    nothing, where there is none.

    A ``torch.load`` that fails leaves its own there, and the next one would be refused for them.

    Ranks: local.

    Example:
        >>> forget_unchecked_sparse_tensors()
    """
    getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()  # noqa: SLF001


def refused_sparse_tensor(error: BaseException) -> tuple[Any, torch.Tensor] | None:
    """Return what a file holds and the sparse tensor of it for which ``torch.load`` refused it;
    otherwise None, where torch is another or has refused it for something else.

    Args:
        error: raised by ``torch.load``.

    Ranks: local.

    Example:
        >>> refused_sparse_tensor(RuntimeError("no memory")) is None
        True
    """
    state = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_validate_loaded_sparse_tensors":
            tensor = frame.f_locals.get("t")
            return (state, tensor) if isinstance(tensor, torch.Tensor) else None
        state = frame.f_locals.get("result")
    return None
