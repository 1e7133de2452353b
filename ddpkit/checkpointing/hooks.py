"""How one object is saved and loaded: the hooks of torch's own objects.

A *hook* saves or loads one object: ``save(obj, path)``, ``load(obj, path, end_of_epoch)``,
``transfer(obj, path)``. The tables :data:`DEFAULT_SAVE_HOOKS`, :data:`DEFAULT_LOAD_HOOKS` and
:data:`DEFAULT_TRANSFER_HOOKS` map classes to hooks; any code may add to them. How the hook of an
object is found, says :mod:`ddpkit.checkpointing.hook_lookup`.

Source: https://pytorch.org/docs/stable/notes/serialization.html#weights-only says what
``torch.load(weights_only=True)`` accepts; that the variable ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD``
changes only calls that leave ``weights_only`` out was read in torch 2.13's ``serialization.py`` and
is tested.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddpkit.base import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS,
    DEFAULT_TRANSFER_HOOKS,
    children_of,
    gather_whole,
    inner_name,
    is_sharded,
    kind_of,
    map_values,
    sharded_like,
    unwrap,
    with_article,
)
from ddpkit.checkpointing.storage import BLOCK_BYTES, FILE_THREADS, write_file
from ddpkit.distributed import get_rank, main_process_only, require_all_ranks
from ddpkit.errors import CheckpointError, CheckpointUsageError
from ddpkit.logger import get_logger

logger = get_logger(__name__)

LEAST_MEAN_BYTES = 1 << 20  # of a storage, for threads to copy it sooner than torch reads it
MOST_MISFITS = 6  # lines of torch's list of what does not fit
START_ANEW = (
    " Make it as it was when this was saved, or start anew: --resume=never, or another experiment "
    "folder."
)
FROM_WEIGHTS = (
    " Make it as it was when this was saved. Or begin anew from the weights alone: load them "
    "before fit by ddpkit.parameter_transfer.Pretrainer, and give --resume=never, or another "
    "experiment folder."
)
OTHER_LAYERS = (
    " Pretrainer loads what both have by name; a layer of another shape needs another name."
)
GROUPS = "The checkpoint has parameter groups of {} tensors, and the script makes groups of {}."
LATER_GROUPS = (
    " A group that the run has added later has to be there at its start: add it in init_optimizers."
)


@main_process_only(hand_over=False)
def torch_save(obj: Any, path: Path) -> None:
    """Save the ``state_dict`` of an object; a module's without the names that wrappers put in.

    Args:
        obj: a module, optimizer, scheduler, scaler, or anything else with ``state_dict``. NumPy
            numbers in its state are stored as Python's.
        path: the file to write.

    Raises:
        CheckpointError: the state holds objects that could not be loaded again without running
            code.
        OSError: the file cannot be written.

    Ranks: any; only the main process writes.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.ckpt"
        >>> torch_save(nn.Linear(2, 1), path)
        >>> sorted(safe_load(path))
        ['bias', 'weight']
    """
    write_state(saved_state(obj), path)


def saved_state(obj: Any) -> Any:
    """Return what :func:`torch_save` stores of an object.

    Args:
        obj: as there.

    Returns:
        Its state. The tensors share memory with the object, which may change them.

    Ranks: local.

    Example:
        >>> sorted(saved_state(nn.DataParallel(nn.Linear(2, 1))))
        ['bias', 'weight']
    """
    if isinstance(obj, nn.Module):
        return _unwrapped_state(obj)
    return map_values(
        obj.state_dict(),
        lambda one: one.item() if isinstance(one, np.generic) else one,
    )


def whole_states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Gather the states of those objects whose tensors are divided over the ranks.

    Args:
        objects: by name, as for :func:`torch_save`.

    Returns:
        By name the states that were divided, with plain tensors on the CPU; on other ranks than
        rank 0 they are empty, since each tensor is dropped as soon as it is gathered.

    Raises:
        LaunchError: in main-only code, if a state is divided.

    Ranks: collective; the same objects in the same order on all ranks.

    Example:
        >>> whole_states({"net": nn.Linear(1, 1)})
        {}
    """
    found = {}
    keep = not get_rank()
    for name, obj in objects.items():
        state = saved_state(obj)
        if _has(state, is_sharded):
            require_all_ranks("whole_state_dict")
            found[name] = map_values(
                state,
                lambda one: gather_whole(one, keep=keep) if is_sharded(one) else one,
            )
    return found


def _has(state: Any, test: Callable[[Any], bool]) -> bool:
    values: list[Any] = []
    map_values(state, values.append)
    return any(map(test, values))


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def whole_state_dict(obj: Any) -> Any:
    """Return the ``state_dict`` of a module or an optimizer, whole, also where each rank holds a
    part (``fsdp``).

    Args:
        obj: as for :func:`torch_save`.

    Returns:
        On rank 0 the state, with plain tensors; None on the other ranks.

    Raises:
        LaunchError: in main-only code, where each rank's part alone is there: call it before, on
            every rank.

    Ranks: collective.

    Example:
        >>> sorted(whole_state_dict(nn.Linear(2, 1)))
        ['bias', 'weight']
    """
    state = whole_states({"": obj}).get("")
    return None if get_rank() else saved_state(obj) if state is None else state


def write_state(state: Any, path: Path) -> str:
    """Write a file of ``torch.save`` that can be loaded without running code.

    Args:
        state: what to store.
        path: the file.

    Returns:
        Its SHA-256, in hexadecimal digits.

    Raises:
        CheckpointError: the state holds objects that could not be loaded again without running
            code, or tensors of which each rank has a part, or without values.
        OSError: the file cannot be written.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.ckpt"
        >>> _ = write_state({"step": 3}, path)
        >>> safe_load(path)
        {'step': 3}
    """
    if _has(state, _is_on_meta):
        raise CheckpointError(ON_META.format("save"))
    if _has(state, is_sharded):
        raise CheckpointError(
            "each rank has a part of its tensors (DTensor), and only the main process saves. Save "
            "it with the Brain's checkpointer, on every rank; or save what "
            "ddpkit.checkpoints.whole_state_dict gives, called on every rank."
        )
    digest = write_file(path, functools.partial(torch.save, state))
    # reads the pickle alone, not the tensors
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if refused:
        raise CheckpointError(
            f"its state holds {', '.join(sorted(refused))}, which could not be loaded again "
            "without running code. Let its state_dict return tensors, numbers, strings and plain "
            "containers, or allow the type with torch.serialization.add_safe_globals."
        )
    return digest


def torch_recovery(obj: Any, path: Path, end_of_epoch: bool) -> None:  # noqa: ARG001 -- every load hook has it
    """Load what :func:`torch_save` wrote; a module must match exactly, wrapped or not.

    Args:
        obj: a module, or anything with ``load_state_dict``.
        path: the file.
        end_of_epoch: not needed here.

    Raises:
        CheckpointError: the file cannot be read, would run code, or does not fit the object.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.ckpt"
        >>> saved, loaded = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> torch_save(saved, path)
        >>> torch_recovery(nn.DataParallel(loaded), path, end_of_epoch=True)
        >>> torch.equal(saved.weight, loaded.weight)
        True
    """
    state = (
        _load_to_keep(path)
        if isinstance(obj, Optimizer)
        else safe_load(path, mmap=_copies_what_it_loads(obj))
    )
    try:
        if isinstance(obj, nn.Module):
            inner = unwrap(obj)
            inner.load_state_dict(_for_module(inner, state))
        elif isinstance(obj, Optimizer):
            obj.load_state_dict(_for_optimizer(obj, state))
        else:
            obj.load_state_dict(state)
    except Exception as error:
        raise _misfit(obj, path, error, _way_out(obj, state)) from error


def torch_parameter_transfer(obj: nn.Module, path: Path) -> None:
    """Load the parameters of a module that the file has; say which are missing and which are not
    used.

    Args:
        obj: the module.
        path: a file that holds a module's ``state_dict``.

    Raises:
        CheckpointError: the file cannot be read or would run code, a shape differs, or it has none
            of the parameters.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.ckpt"
        >>> torch_save(nn.Linear(2, 1), path)
        >>> torch_parameter_transfer(nn.Linear(2, 1), path)
    """
    state = safe_load(path, mmap=_copies_what_it_loads(obj))
    inner = unwrap(obj)
    try:
        keys = inner.load_state_dict(_for_module(inner, state), strict=False)
    except Exception as error:
        raise _misfit(obj, path, error) from error
    name = type(inner).__name__
    if keys.missing_keys and len(keys.missing_keys) == len(inner.state_dict()):
        raise CheckpointError(
            f"{path} has none of the parameters of this {name}, such as {keys.missing_keys[0]!r}; "
            f"it has {', '.join(keys.unexpected_keys[:4]) or 'nothing'}. Save the state_dict of "
            f"{with_article(name)} alone."
        )
    for key in keys.missing_keys:
        logger.warning("%s has no %s: this parameter of the %s keeps its value.", path, key, name)
    for key in keys.unexpected_keys:
        logger.warning("%s has %s, which the %s does not have: not used.", path, key, name)


def map_old_state_dict_weights(
    state_dict: MutableMapping[str, torch.Tensor],
    mapping: Mapping[str, str],
) -> MutableMapping[str, torch.Tensor]:
    """Rename the entries of an old ``state_dict``: wherever a name has a text, put another one in
    its place.

    Args:
        state_dict: tensors by name; changed in place.
        mapping: the new text for each old one, in the order in which they are applied. A text may
            stand anywhere in a name, also inside of a word.

    Returns:
        ``state_dict``, in the same order.

    Raises:
        CheckpointError: two entries would have the same name; nothing is changed then.

    Ranks: local.

    Example:
        >>> map_old_state_dict_weights({"enc.atn.weight": torch.ones(1)}, {".atn": ".attn"})
        {'enc.attn.weight': tensor([1.])}
    """
    renamed: dict[str, torch.Tensor] = {}
    for old, value in state_dict.items():
        new = old
        for before, after in mapping.items():
            new = new.replace(before, after)
        if new in renamed:
            raise CheckpointError(
                f"two entries of a state_dict, {old!r} and one before it, would be named {new!r}."
            )
        renamed[new] = value
    state_dict.clear()
    state_dict.update(renamed)
    return state_dict


def _copies_what_it_loads(obj: Any) -> bool:
    """Say whether ``load_state_dict`` copies every tensor that it is given, as torch's own modules
    do.
    """
    return isinstance(obj, nn.Module) and not any(
        vars(one).get("_load_state_dict_pre_hooks", True)
        or any(not _is_torchs(getattr(one, name)) for name in _LOADING_METHODS)
        # they keep the scales that are given
        or any(buffer.is_quantized for buffer in one.buffers(recurse=False))
        for one in unwrap(obj).modules()
    )


def _is_torchs(method: Callable[..., object]) -> bool:
    return (getattr(method, "__module__", None) or "").startswith("torch.nn.")


_DAMAGED = frozenset({"UnpicklingError", "EOFError", "KeyError", "BadZipFile"})
_VALUES = (
    str,
    bool,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
)
_LOADING_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")


def safe_load(
    path: Path,
    map_location: Any = "cpu",
    *,
    mmap: bool = False,
) -> Any:
    """Load a file of ``torch.save`` without running any code from it, whatever the environment
    says.

    Args:
        path: the file.
        map_location: where tensors go, as in ``torch.load``.
        mmap: the tensors may be pages of the file, which costs no memory and a third of the time:
            for a caller that copies them at once. A file that is not as ``torch.save`` writes it is
            read all the same.

    Returns:
        What the file holds: tensors, numbers, strings, plain containers, and the types that were
        allowed with ``torch.serialization.add_safe_globals``.

    Raises:
        CheckpointError: the file cannot be read, or holds something else. It is not retried with
            unsafe pickling.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.ckpt"
        >>> torch.save({"step": 3}, path)
        >>> safe_load(path)
        {'step': 3}
    """
    try:
        mapped = mmap and _can_be_mapped(path)
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if type(error).__name__ in _DAMAGED:  # torch's words are about torch.load
            reason = "it is damaged, or was not written by torch.save"
            with contextlib.suppress(Exception):  # of a damaged file
                if names := torch.serialization.get_unsafe_globals_in_checkpoint(path):
                    reason = (
                        f"it names {', '.join(sorted(names))}, and loading those would run code. "
                        "If you trust the file, allow them with "
                        "torch.serialization.add_safe_globals"
                    )
        raise CheckpointError(f"cannot load {path}: {reason}.") from error


def _load_to_keep(path: Path) -> Any:
    """Load as :func:`safe_load` does; plain tensors, if they are large, by mapping the file and
    copying in threads.
    """
    sizes: list[int] = []
    # of a damaged file safe_load tells
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        sizes = sorted(
            one.compress_size
            for one in archive.infolist()
            if "/data/" in one.filename and one.file_size
        )
    state = None
    if sum(sizes) > len(sizes) * LEAST_MEAN_BYTES:
        # no thread, no memory, or a damaged file
        with contextlib.suppress(CheckpointError, RuntimeError):
            state = _load_in_threads(path, sizes)
    return safe_load(path) if state is None else state


def _load_in_threads(path: Path, sizes: list[int]) -> Any:
    """Return the state with memory of its own, shared as before; None unless its storages are
    plain, of these sizes.
    """
    state = safe_load(path, mmap=True)
    tensors = _plain_tensors(state) or []
    storages = [tensor.untyped_storage() for tensor in tensors]
    places = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
    different = dict(zip(places, storages, strict=True))
    # a mapping does not look whether they fit the file
    if sorted(size for _, size in different if size) != sizes:
        return None
    with ThreadPoolExecutor(FILE_THREADS) as pool:
        own = dict(
            zip(
                different,
                pool.map(_copy, different.values()),
                strict=True,
            )
        )
    for tensor, place in zip(tensors, places, strict=True):
        tensor.set_(
            own[place],
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
    return state


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    old = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    own = torch.empty(
        old.shape,
        dtype=torch.uint8,
        device="cpu",
    )
    np.copyto(own.numpy(), old.numpy())  # lets other threads run, and starts none
    return own.untyped_storage()


def _plain_tensors(state: object) -> list[torch.Tensor] | None:
    """Return the tensors of a state, or None if something in it may share the memory of a tensor
    unseen.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    todo: list[Any] = [state]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) is dict:
            todo += [*one.keys(), *one.values()]
        elif type(one) in (list, tuple):
            todo += one
        elif type(one) is torch.Tensor and _is_plain(one):
            found.append(one)
        elif type(one) not in _VALUES:
            return None
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    special = tensor.is_nested or tensor.is_quantized or tensor.requires_grad or vars(tensor)
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not special


def _can_be_mapped(path: Path) -> bool:
    """Say whether a file is as ``torch.save`` writes it, and its file system can map it.

    It is read into the page cache, where a disk that fails raises; a page of a mapping would end
    the process.
    """
    if torch.serialization.get_default_mmap_options() != mmap.MAP_PRIVATE:
        return False  # torch would write into the file, to swap the bytes of another machine's
    block = bytearray(BLOCK_BYTES)
    with Path(path).open("rb", buffering=0) as file:
        while file.readinto(block):
            pass
        with (
            contextlib.suppress(OSError, UnicodeError, zipfile.BadZipFile),
            zipfile.ZipFile(path) as archive,
        ):
            str(path).encode()  # torch maps no file of another name
            mmap.mmap(
                file.fileno(),
                1,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ,
            ).close()
            return all(one.compress_type == zipfile.ZIP_STORED for one in archive.infolist())
    return False


ON_META = (
    "it is on the meta device, without values. The Brain gives it values when it is made, with "
    "--strategy=fsdp when fit begins: {} it after that, in on_fit_start after "
    "super().on_fit_start()."
)


def _way_out(obj: Any, state: Any) -> str:
    """Say how to go on where the state of a checkpoint does not fit an object: also with another
    head or optimizer.
    """
    if isinstance(obj, nn.Module):
        return FROM_WEIGHTS + OTHER_LAYERS
    if not isinstance(obj, Optimizer):
        return START_ANEW
    saved = _group_sizes(state)
    made = _group_sizes(obj.state_dict())
    if not saved or saved == made:
        return FROM_WEIGHTS
    later = LATER_GROUPS if len(saved) > len(made) else ""
    return f" {GROUPS.format(saved, made)}{later}{FROM_WEIGHTS}"


def _group_sizes(state: Any) -> list[int]:
    groups = state.get("param_groups", []) if isinstance(state, Mapping) else []
    return [len(group["params"]) for group in groups]


def _misfit(
    obj: Any,
    path: Path,
    error: Exception,
    advice: str = "",
) -> CheckpointError:
    lines = str(error).splitlines()  # of a module, one for each parameter
    if len(lines) > MOST_MISFITS:
        lines[MOST_MISFITS:] = [f"\t... and {len(lines) - MOST_MISFITS} more"]
    text = "\n".join(lines).rstrip(". ")
    kind = CheckpointError
    # a fault of the recipe, or no memory
    if type(error) not in (RuntimeError, ValueError, CheckpointError):
        text = f"{type(error).__name__}: {text}"
        advice = ""
    elif isinstance(obj, (nn.Module, Optimizer)):
        kind = CheckpointUsageError
    return kind(f"{path} does not fit this {type(unwrap(obj)).__name__}: {text}.{advice}")


# ---------------------------------------------------------------------------------------- wrappers


def plain_key(module: nn.Module | None, key: str) -> str:
    """Drop from a state's key the names that wrappers inside ``module`` put in, and no other.

    Args:
        module: whose state the key is of.
        key: such as ``"net.module.weight"``.

    Returns:
        The key without what DDP, DataParallel and ``torch.compile`` put in.

    Ranks: local.

    Example:
        >>> plain_key(nn.ModuleDict({"net": nn.DataParallel(nn.Linear(1, 1))}), "net.module.weight")
        'net.weight'
    """
    kept = []
    for part in key.split("."):
        if module is None or part != inner_name(module):
            kept.append(part)
        children = {} if module is None else children_of(module)
        module = children[part] if part in children else None  # noqa: SIM401 -- a script module's dict has no get
    return ".".join(kept)


def _loose_key(key: str) -> str:
    """Drop whatever could be a wrapper's name, for files whose module is not at hand."""
    return ".".join(part for part in key.split(".") if part not in {"module", "_orig_mod"})


def _renamed(state: Any, rename: Callable[[str], str]) -> Any:
    renamed = OrderedDict((rename(name), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        vars(renamed)["_metadata"] = {rename(name): value for name, value in metadata.items()}
    return renamed


def _unwrapped_state(module: nn.Module) -> Any:
    inner = unwrap(module)
    return _renamed(inner.state_dict(), functools.partial(plain_key, inner))


def _for_module(inner: nn.Module, state: Any) -> Any:
    """Give the entries of a file's state the names that ``inner`` has for them; divide them where
    it is divided.
    """
    own = inner.state_dict()
    if _has(own, _is_on_meta):
        raise ValueError(ON_META.format("load"))  # torch would load nothing
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it holds {kind_of(state)} where a module's state was expected")
    plain: dict[str, str] = {}
    loose: dict[str, list[str]] = {}
    for name in [*own, *getattr(own, "_metadata", ())]:
        plain[plain_key(inner, name)] = name
        loose.setdefault(_loose_key(name), []).append(name)

    def own_name(name: str) -> str:
        alike = loose.get(_loose_key(name), [])
        return plain.get(name, alike[0] if len(alike) == 1 and alike[0] not in state else name)

    renamed = _renamed(state, own_name)
    # torch notes there whether a caller once asked
    for known in (getattr(state, "_metadata", None) or {}).values():
        # for new parameters, which no optimizer would have
        known.pop("assign_to_params_buffers", None)
    for name, value in renamed.items():
        renamed[name] = sharded_like(value, own.get(name))
    return renamed


def _for_optimizer(optimizer: Optimizer, state: Any) -> Any:
    """Divide what the state has of each parameter as the parameter is divided; which kernel steps
    is this run's own.
    """
    known = optimizer.param_groups
    saved = state["param_groups"]
    if len(known) == len(saved) and "fused" in optimizer.defaults:
        kernels = [{**old, "fused": new["fused"]} for old, new in zip(saved, known, strict=True)]
        state = {**state, "param_groups": kernels}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    own = dict(zip(numbers, parameters, strict=True))
    divided = {
        number: {name: sharded_like(value, own.get(number)) for name, value in known.items()}
        for number, known in state["state"].items()
    }
    return {**state, "state": divided}


_TORCHS_OWN = (nn.Module, Optimizer, LRScheduler, ReduceLROnPlateau, GradScaler)
DEFAULT_SAVE_HOOKS.update(dict.fromkeys(_TORCHS_OWN, torch_save))
DEFAULT_LOAD_HOOKS.update(dict.fromkeys(_TORCHS_OWN, torch_recovery))
DEFAULT_TRANSFER_HOOKS[nn.Module] = torch_parameter_transfer
