"""What a strategy is asked, and what strategies do with the modules of a recipe.

By itself it is the strategy of one process on one device.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ddpkit.base import is_sharded, kind_of, local_part, unwrap
from ddpkit.compat import without_weak_references
from ddpkit.device import widest_float
from ddpkit.distributed import start_sum
from ddpkit.errors import ConfigError
from ddpkit.seed import global_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ddpkit.run_opts import RunOptions
    from ddpkit.step_times import StepTimer

NO_CONTEXT: AbstractContextManager[None] = contextlib.nullcontext()
NO_VALUES = (
    "modules: {} is on the meta device, without values, and {} {}. Give the class a reset_parameters() that sets all "
    "parameters and buffers of its own and none of the parts inside, as torch's layers have it; or build the module "
    "without torch.device('meta')."
)
UNSET = 0xA5  # in every byte: nothing that anybody sets all numbers of a tensor to


class WholeState(NamedTuple):
    """Placeholder that is saved instead of a sharded object: its full state.

    Ranks: local.
    """

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return the full, unsharded state."""
        return self.state


class Strategy:
    """One process, one device: nothing to wrap. Base class of the other strategies.

    Attributes:
        is_distributed: whether gradients are averaged over processes by torch.
        virtual_ranks: over how many the data is divided; None: over the ranks.
        shards: how many parts of every batch each rank works on.
        same_bits: whether no bit may depend on the number of processes: losses and logged values are then added up
            without rounding, and outside of batches all ranks draw the same random numbers.
        saves_alone: whether the main process has all that a checkpoint needs; not where each rank has a part of the
            weights, or of what the optimizers know.
        divides: whether :meth:`wrap` leaves each rank a part of the weights: nobody has to hold them whole before.
        roots: the entries that are divided so far.
        unrepeatable: why an optimizer step cannot be repeated; empty where nothing of it is sent under
            :meth:`no_sync` before :meth:`finish_gradients`.
        averages_weights: whether :meth:`after_window` must be called.
        steps_alone: whether the next optimizer step is made with this rank's own gradients.
        is_apart: whether the ranks' weights differ until the next average: a checkpoint must wait.
        timer: measures steps; or None.

    Ranks: local.

    Example:
        >>> Strategy().name
        'one device'
    """

    name = "one device"
    is_distributed = False
    virtual_ranks: int | None = None
    shards = 1
    same_bits = False
    saves_alone = True
    divides = False
    roots: Sequence[Any] = ()
    unrepeatable = ""
    averages_weights = steps_alone = is_apart = False
    timer: StepTimer | None = None

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Wrap every trainable entry that is not wrapped yet, in place."""

    def replace_modules(self, modules: nn.ModuleDict) -> None:
        """Know other modules from now on; :meth:`wrap` or :meth:`follow` wraps them before they are trained."""

    def follow(self, modules: nn.ModuleDict) -> None:
        """Wrap entries again in which a recipe has frozen or unfrozen parameters."""

    def prepare_optimizers(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Prepare optimizers before a checkpoint is loaded into them; refuse those that the strategy cannot step."""

    def feed(self, feed: Any, progress: Any, seed: int) -> Any:
        """Wrap the batches of a training pass, so that the strategy sees each of them."""
        self.follow_batches(progress)
        return feed

    def follow_batches(self, progress: Any) -> None:
        """Note what tells at which batch the training is, where its batches do not come by :meth:`feed`."""

    def evaluated(self, batches: Iterable[Any], seed: int, *place: int) -> Iterable[Any]:
        """Return the batches of a divided evaluation.

        Args:
            batches: of this rank.
            seed: of the run.
            place: numbers that name the evaluation.
        """
        return batches

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without being averaged over ranks."""
        return NO_CONTEXT

    def backward_pass(self, modules: nn.Module, *, closes: bool, counts: bool) -> AbstractContextManager[None]:
        """Return a context for one backward pass of a window."""
        return NO_CONTEXT

    def without_backward(
        self, *, closes: bool, counts: bool = True, retain_graph: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context in the place of a backward pass, for a loss that depends on no parameter."""
        return NO_CONTEXT

    def finish_gradients(self, optimizers: Collection[Any] = ()) -> None:
        """Make sure that the gradients present are averages over the ranks.

        Args:
            optimizers: that step now.
        """

    def after_window(self) -> None:
        """Average over the ranks, after an optimizer step, what the strategy has let differ, if it is time."""

    def noting_use(self, *, counts: bool) -> AbstractContextManager[None]:
        """Return a context for a micro-batch that does not count on all ranks: what only others use has no gradient."""
        return NO_CONTEXT

    def end_pass(self, modules: nn.ModuleDict) -> None:
        """Make equal on all ranks, at the end of a training pass, what the strategy has let differ."""

    def start_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows for the start-up block: ``strategy``, and what is not computed as in one process."""
        return {"strategy": "single: one process"}

    def diverged_entries(self, modules: nn.Module) -> list[str]:
        """Return the trained entries whose weights differ between ranks."""
        return []

    def gradient_orders(self) -> dict[str, list[int]]:
        """Return the order in which each entry's gradients became ready, where that bears on their sums."""
        return {}

    def load_gradient_orders(self, modules: nn.ModuleDict, orders: Mapping[str, list[int]]) -> None:
        """Restore the order of gradient sums of the run that wrote a checkpoint."""

    def hook_states(self) -> dict[str, dict[str, Any]]:
        """Return the state that gradient averaging keeps on this rank between steps, by entry."""
        return {}

    def load_hook_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with what :meth:`hook_states` returned on this rank."""

    def forget_errors(self) -> None:
        """Drop what the averaging of gradients has kept, after gradients that are not finite."""

    def evaluating(self, length: int | None) -> AbstractContextManager[None]:
        """Return a context for an evaluation. Collective.

        Args:
            length: number of batches of this rank, if each rank evaluates the same data; None: they may differ.
        """
        return NO_CONTEXT

    def whole_states(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the states of objects whole before rank 0 saves them: collective, on every rank in the same order.

        Called only where :attr:`saves_alone` is False.

        Args:
            objects: what a checkpoint stores as ``torch.save`` does, by name.

        Returns:
            By name what to save on rank 0 in the place of some of them: has ``state_dict``, which needs no other rank.
        """
        return {}

    def start_average(self, count: torch.Tensor | float, device: str) -> Callable[[], torch.Tensor | float]:
        """Start averaging a number over the ranks, before the backward pass, without waiting for it or for the device.

        Args:
            count: a number, or a tensor of one element.
            device: of this rank.

        Returns:
            What waits for the others and gives the average, shape ``()``; in one process a number stays a number.
        """
        if not self.is_distributed:
            own = count.detach().to(widest_float(device)) if isinstance(count, torch.Tensor) else count
            return lambda: own
        total = wide_number(count, device)
        wait = start_sum(total)

        def average() -> torch.Tensor:
            wait()
            return total / torch.distributed.get_world_size()

        return average


@contextlib.contextmanager
def hooked(handles: list[Any]) -> Iterator[None]:
    """Return a context at whose end hooks are removed.

    Args:
        handles: what registering them has returned.

    Ranks: local.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> with hooked([weight.register_hook(torch.zeros_like)]):
        ...     weight.sum().backward()
        >>> weight.grad
        tensor([0.])
    """
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def wide_number(count: torch.Tensor | float, device: str) -> torch.Tensor:
    """Return a copy of a number, or of a tensor of one element, in the widest dtype of a device; nobody waits for it.

    Ranks: local.

    Example:
        >>> wide_number(torch.tensor([3]), "cpu")
        tensor(3., dtype=torch.float64)
    """
    wide = widest_float(device)
    if isinstance(count, torch.Tensor):
        return count.detach().reshape(()).to(device, wide, copy=True, non_blocking=True)
    return torch.full((), count, dtype=wide, device=device)


def refuse_with(chosen: str, options: RunOptions, reasons: Mapping[str, str]) -> None:
    """Refuse the first option that is given and does not go with what was chosen.

    Args:
        chosen: what was chosen, such as ``"ddp_comm_hook=fp16"``.
        options: of the run.
        reasons: why an option does not go with it, by ``"name"``; by ``"name=value"`` where it is one value.

    Raises:
        ConfigError: an option is given that does not go with it.

    Ranks: local.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> refuse_with("strategy='fsdp'", RunOptions(debug=True), {"debug": "it is not divided"})
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: strategy='fsdp' does not work with debug=True: it is not divided. Change one, ...
    """
    for key, why in reasons.items():
        if is_given(options, key):
            name, _, value = key.partition("=")
            if value == "None":
                raise ConfigError(f"{chosen} needs --{name}: {why}.")
            raise ConfigError(
                f"{chosen} does not work with {name}={options[name]}: {why}. Change one, or leave it out."
            )


def is_given(options: RunOptions, key: str) -> bool:
    """Say whether an option is given: any value of ``"name"``, or that of ``"name=value"``.

    Ranks: local.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> is_given(RunOptions(ema_decay=0.0), "ema_decay"), is_given(RunOptions(strategy="ddp"), "strategy=fsdp")
        (True, False)
    """
    name, _, value = key.partition("=")
    given = str(options[name])  # as text: ema_decay=0.0 is given, and equals False
    return given == value or not (value or given in {"None", "False", "[]", "none"})


# ---------------------------------------------------------------------- the modules of a recipe


def is_on_meta(module: nn.Module) -> bool:
    """Say whether a module has parameters or buffers on the meta device, without values.

    Ranks: local.

    Example:
        >>> is_on_meta(nn.Linear(1, 1, device="meta"))
        True
    """
    return any(one.is_meta for one in (*module.parameters(), *module.buffers()))


def give_values(name: str, module: nn.Module, device: str) -> None:
    """Give what is on the meta device its first values, by the ``reset_parameters`` of each part of a module.

    Each part draws on the CPU from a seed of its own, made of the run's seed and the name of the part: the values do
    not depend on the device, the strategy, or on what else is given values in the same call. Random numbers that are
    drawn later stay the same.

    Args:
        name: of the module, such as ``"net"`` for an entry of ``modules`` and ``"net.layers.0"`` for a part of it.
        module: is changed; what has values keeps them.
        device: where parameters and buffers go to, those that had values, too.

    Raises:
        ConfigError: a part has no ``reset_parameters``, or it leaves a tensor of its own, or changes parts that are
            divided over the ranks already.

    Ranks: local. Without ``seed_everything`` the values differ between ranks until rank 0 sends its own.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2, device="meta"))
        >>> give_values("net", net, "cpu")
        >>> net[0].weight.shape, is_on_meta(net)
        (torch.Size([2, 3]), False)
    """
    state, seed = torch.get_rng_state(), global_seed()
    seed = torch.initial_seed() if seed is None else seed
    for path, part in reversed(list(module.named_modules())):  # as they were built: children first
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        empty = {key: one for key, one in own if one.is_meta}
        if empty:
            whole = f"{name}.{path}".strip(".")
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {whole}".encode()))
            _reset(whole, part, empty)
    torch.set_rng_state(state)
    for one in (*module.parameters(), *module.buffers()):
        if not is_sharded(one):
            one.data = one.data.to(device)


def _reset(name: str, part: nn.Module, empty: Mapping[str, torch.Tensor]) -> None:
    """Initialise the empty tensors of one part in place; tied tensors stay tied."""
    kind = type(part).__name__
    reset = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
    if reset is None:
        raise ConfigError(NO_VALUES.format(name, kind, "has no reset_parameters()"))
    divided = [local_part(one) for one in part.parameters() if is_sharded(one)]
    before = [one.clone() for one in divided]
    for one in empty.values():
        values = torch.empty_like(one, device="cpu")
        _bytes_of(values).fill_(UNSET)
        values = nn.Parameter(values, one.requires_grad) if isinstance(one, nn.Parameter) else values
        vars(values).update(vars(one))  # marks of the recipe's own
        with without_weak_references(part):
            torch.utils.swap_tensors(one, values)  # type: ignore[no-untyped-call]
    reset()
    left = [key for key in empty if getattr(part, key).numel() and (_bytes_of(getattr(part, key)) == UNSET).all()]
    if left:
        raise ConfigError(NO_VALUES.format(name, f"{kind}.reset_parameters()", f"leaves some: {', '.join(left)}"))
    if not all(map(torch.equal, before, divided)):
        raise ConfigError(NO_VALUES.format(name, f"{kind}.reset_parameters()", "changes parts inside that are divided"))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def broadcast_from_main(module: nn.Module, device: str) -> None:
    """Give every rank the parameters and buffers of rank 0, so that also what is frozen and random is equal everywhere.

    Args:
        module: is changed.
        device: of this rank; what is elsewhere is left alone.

    Ranks: collective.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device.type == torch.device(device).type and not is_sharded(tensor):
            sent = tensor.detach().contiguous()  # else NCCL refuses it, and gloo sends it in the order of memory
            torch.distributed.broadcast(sent, src=0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)


def take_device(device: str) -> None:
    """Make a device the current one of this process: what asks for "cuda" without a number then gets the rank's own.

    Else memory that is pinned, kernels that recipes bring along, and tensors on ``"cuda"`` would each open a context of
    this process on the first GPU, half a gigabyte large.

    Args:
        device: of this rank, such as ``"cuda:1"``; nothing is done for one without a number.

    Ranks: local.

    State: the current device.

    Example:
        >>> take_device("cpu")
    """
    kind, _, number = device.partition(":")
    set_device = getattr(getattr(torch, kind, None), "set_device", None)
    if number and callable(set_device):
        set_device(torch.device(device))


def modules_on_device(modules: Mapping[str, Any], device: str, *, keeps_meta: bool = False) -> nn.ModuleDict:
    """Gather a recipe's modules on a device; each through its own ``to``, in case it moves more than tensors.

    Args:
        modules: by name.
        device: such as ``"cuda:1"``.
        keeps_meta: leave entries that are on the meta device there, for :func:`give_values` later; else they get their
            values now.

    Raises:
        ConfigError: no names are given, an entry is not a module, or is on the meta device and cannot be given values.

    Ranks: local.

    Example:
        >>> modules_on_device({"net": nn.Linear(1, 1)}, "cpu").net.weight.device
        device(type='cpu')
    """
    if not hasattr(modules, "items"):
        raise ConfigError(f"modules is {kind_of(modules)}, not modules by name: pass {{'net': net}}.")
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise ConfigError(f"modules[{name!r}] is {kind_of(module)}, not a torch.nn.Module.")
    gathered = nn.ModuleDict(dict(modules))
    if is_on_meta(gathered) and not keeps_meta and torch.device(device).type != "meta":
        give_values("", gathered, device)  # of all entries at once: two may share a weight
    for module in modules.values():
        if not is_on_meta(module):
            module.to(device)
    return gathered if is_on_meta(gathered) else gathered.to(device)


def trained_parameters(module: nn.Module) -> frozenset[int]:
    """Return the identities of the parameters of a module that require a gradient.

    Ranks: local.

    Example:
        >>> len(trained_parameters(nn.Linear(1, 1)))
        2
    """
    return frozenset(id(parameter) for parameter in module.parameters() if parameter.requires_grad)


def blocks_of(modules: nn.Module, classes: Collection[str], option: str) -> dict[str, nn.Module]:
    """Find the parts of a model whose class has one of the given names.

    Args:
        modules: the model.
        classes: names of classes, such as ``"TransformerEncoderLayer"``.
        option: which gave them, for the message.

    Returns:
        By their names in the model; each once.

    Raises:
        ConfigError: no part is of such a class.

    Ranks: local.

    Example:
        >>> list(blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["ReLU"], "compile_blocks"))
        ['1']
    """
    parts = {name: one for name, one in modules.named_modules() if name}
    there = {type(one).__name__ for one in parts.values()}
    unknown = sorted(set(classes) - there)
    if unknown:
        raise ConfigError(
            f"{option}={list(classes)!r} names {', '.join(map(repr, unknown))}, and the classes in the modules are: "
            f"{', '.join(sorted(there)) or 'none'}."
        )
    return {name: one for name, one in parts.items() if type(one).__name__ in classes}


def has_moving_buffers(module: nn.Module) -> bool:
    """Say whether a module has saved floating-point buffers that are not batch statistics.

    Such buffers (codebooks, running normalisers) may drift apart between ranks, so DDP broadcasts them from rank 0
    before each training forward pass, as it does by default. Batch statistics are equal already.

    Ranks: local.

    Example:
        >>> has_moving_buffers(nn.BatchNorm1d(3))
        False
    """
    saved = module.state_dict(keep_vars=True)
    batch_statistics = {id(buffer) for part in batch_norms(module) for buffer in part.buffers(recurse=False)}
    return any(
        name in saved and buffer.is_floating_point() and id(buffer) not in batch_statistics
        for name, buffer in module.named_buffers()
    )


def batch_norms(modules: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers of a model, synchronised or not.

    Ranks: local.

    Example:
        >>> len(batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        1
    """
    return [part for part in modules.modules() if isinstance(part, _BatchNorm)]


def batch_norm_row(modules: nn.Module, synchronises: bool | None) -> str:
    """Say over which rows the BatchNorm layers of a model normalise in training; nothing where it has none.

    Args:
        modules: after its conversion.
        synchronises: the option ``sync_batchnorm``.

    Ranks: local.

    Example:
        >>> model = nn.Sequential(nn.SyncBatchNorm(2), nn.SyncBatchNorm(2), nn.BatchNorm1d(2))
        >>> batch_norm_row(model, None)
        'over the rows of all processes (--sync_batchnorm=auto): 2 of 3 layers; the others by those of each process'
        >>> batch_norm_row(model, False)
        'each process by its own rows, as --sync_batchnorm=off says'
    """
    layers = batch_norms(modules)
    if not layers:
        return ""
    if synchronises is False:
        return "each process by its own rows, as --sync_batchnorm=off says"
    from ddpkit.syncbn import SyncBatchNorm  # loaded already where there is one

    shared = sum(isinstance(one, (SyncBatchNorm, nn.SyncBatchNorm)) for one in layers)
    given = "auto" if synchronises is None else "on"
    rest = "" if shared == len(layers) else f": {shared} of {len(layers)} layers; the others by those of each process"
    return f"over the rows of all processes (--sync_batchnorm={given}){rest}"


def refuse_wrapped(name: str, module: nn.Module, option: str) -> None:
    """Refuse an entry that is wrapped, or whose parameters are divided over the ranks, already.

    Args:
        name: of the entry.
        module: the entry.
        option: what ddpkit would do with it.

    Raises:
        ConfigError: naming the entry.

    Ranks: local.

    Example:
        >>> refuse_wrapped("net", nn.DataParallel(nn.Linear(1, 1)), "strategy='fsdp'")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: strategy='fsdp': modules['net'] is wrapped or sharded already (DataParallel)...
    """
    is_wrapped = isinstance(module, (DistributedDataParallel, nn.DataParallel))
    if is_wrapped or any(map(is_sharded, module.parameters())):
        raise ConfigError(
            f"{option}: modules[{name!r}] is wrapped or sharded already ({type(module).__name__}). Give the module "
            "itself; --strategy=fsdp shards it."
        )


def refuse_shared_parameters(modules: nn.ModuleDict) -> None:
    """Refuse two entries that share a trainable parameter, or one on the meta device.

    Raises:
        ConfigError: naming both entries and the parameter.

    Ranks: local.

    Example:
        >>> refuse_shared_parameters(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}))
    """
    owner: dict[int, tuple[str, str]] = {}
    for entry, module in modules.items():
        for name, parameter in unwrap(module).named_parameters():
            if not (parameter.requires_grad or parameter.is_meta):
                continue
            other = owner.setdefault(id(parameter), (entry, name))
            if other[0] != entry:
                raise ConfigError(
                    f"modules[{entry!r}] and modules[{other[0]!r}] share the parameter {other[1]!r}: its gradient "
                    "would be averaged twice, or it would get two values from the meta device. Keep it in one entry."
                )
