"""How one object is saved and loaded: the hooks of torch's own objects.

A *hook* saves or loads one object: ``save(obj, path)``, ``load(obj, path, end_of_epoch)``,
``transfer(obj, path)``. The tables :data:`DEFAULT_SAVE_HOOKS`, :data:`DEFAULT_LOAD_HOOKS` and
:data:`DEFAULT_TRANSFER_HOOKS` map classes to hooks; any code may add to them. How the hook of an
object is found, says :mod:`ddpkit.checkpointing.hook_lookup`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    OWN_PART,
    gather_whole,
    is_sharded,
    map_values,
    sharded_like,
    unwrap,
    with_article,
)
from ddpkit.checkpointing.base_weights import base_of
from ddpkit.checkpointing.file_loading import load_file, load_lazily
from ddpkit.checkpointing.misfits import MOST_MISFITS, misfit, way_out
from ddpkit.checkpointing.module_state import (
    ON_META,
    copies_what_it_loads,
    has_any,
    is_on_meta,
    state_for_module,
)
from ddpkit.checkpointing.shard_files import (
    ShardError,
    has_shards,
    is_sharded_file,
    open_state,
    whole_tensors,
)
from ddpkit.checkpointing.state_names import unwrapped_state
from ddpkit.checkpointing.storage import write_file
from ddpkit.checkpointing.threaded_loading import load_to_keep
from ddpkit.checkpointing.unchecked_load import UncheckedLoad, finish
from ddpkit.checkpointing.weights_by_name import load_by_name, load_without_base
from ddpkit.distributed import get_rank, main_process_only, require_all_ranks
from ddpkit.errors import CheckpointError, CheckpointUsageError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from pathlib import Path

logger = get_logger(__name__)


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
        >>> from pathlib import Path
        >>> from ddpkit.checkpoints import safe_load
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
        return unwrapped_state(obj)
    return map_values(
        obj.state_dict(),
        lambda value: value.item() if isinstance(value, np.generic) else value,
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
        if has_any(state, is_sharded):
            require_all_ranks("whole_state_dict")
            found[name] = map_values(
                state,
                lambda value: gather_whole(value, keep=keep) if is_sharded(value) else value,
            )
    return found


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
            code, or sharded tensors, or tensors without values.
        OSError: the file cannot be written.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from ddpkit.checkpoints import safe_load
        >>> path = Path(tempfile.mkdtemp()) / "a.ckpt"
        >>> _ = write_state({"step": 3}, path)
        >>> safe_load(path)
        {'step': 3}
    """
    if has_any(state, is_on_meta):
        raise CheckpointError(ON_META.format("save"))
    if has_any(state, is_sharded):
        raise CheckpointError(
            "each rank has a part of its tensors (DTensor), and only the main process saves. Save "
            "it with the Brain's checkpointer, on every rank; or save what "
            "ddpkit.checkpoints.whole_state_dict gives, called on every rank."
        )
    return write_loadable(state, path)


def write_loadable(state: Any, path: Path) -> str:
    """Write a file as :func:`write_state` does, whatever tensors are in it."""
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


def torch_recovery(obj: Any, path: Path, end_of_epoch: bool) -> None:
    """Load what :func:`torch_save` wrote; a module must match exactly, wrapped or not.

    Args:
        obj: a module, or anything with ``load_state_dict``.
        path: the file.
        end_of_epoch: not needed here.

    Raises:
        CheckpointError: the file cannot be read, would run code, or does not fit the object.

    Ranks: local; all, if the file leaves out base weights that are divided over the ranks.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "model.ckpt"
        >>> saved, loaded = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> torch_save(saved, path)
        >>> torch_recovery(nn.DataParallel(loaded), path, end_of_epoch=True)
        >>> torch.equal(saved.weight, loaded.weight)
        True
    """
    finish(recover(obj, path, end_of_epoch))


def recover(obj: Any, path: Path, end_of_epoch: bool) -> UncheckedLoad | None:  # noqa: ARG001 -- every load hook has it
    """Load as :func:`torch_recovery` does; return a load whose base is still to be compared, if
    there is a base.

    Ranks: local.
    """
    if isinstance(obj, Optimizer) and hasattr(obj, OWN_PART):
        _load_own_part(obj, path)
        return None
    content = _content(obj, path)
    state = open_state(path, content)

    def whole(opened: Any) -> Any:
        # what is not in shards may hold itself, and is handed over as it is
        return whole_tensors(opened) if is_sharded_file(content) else opened

    try:
        if isinstance(obj, nn.Module):
            return _load_module(unwrap(obj), state, path)
        if isinstance(obj, Optimizer):
            obj.load_state_dict(whole(_for_optimizer(obj, state)))
        elif getattr(obj, "takes_stored_tensors", False):
            obj.load_state_dict(state)
        else:
            obj.load_state_dict(whole(state))
    except (CheckpointUsageError, ShardError):
        raise
    except Exception as error:
        raise misfit(obj, path, error, way_out(obj, state)) from error
    return None


def _content(obj: Any, path: Path) -> Any:
    if isinstance(obj, Optimizer):
        return load_to_keep(path)
    return load_file(path, mmap=copies_what_it_loads(obj))


def _load_own_part(optimizer: Optimizer, path: Path) -> None:
    """Read those states of an optimizer that this rank owns, and no others: they may be many times
    as large.
    """
    is_mapped = not has_shards(path)
    state = open_state(path, load_file(path, mmap=is_mapped))
    try:
        own = getattr(optimizer, OWN_PART)(_for_optimizer(optimizer, state))
        # of a file that is mapped nothing is kept
        optimizer.load_state_dict(copy.deepcopy(own) if is_mapped else whole_tensors(own))
    except (CheckpointUsageError, ShardError):
        raise
    except Exception as error:
        raise misfit(optimizer, path, error, way_out(optimizer, state)) from error


def _load_module(inner: nn.Module, state: Any, path: Path) -> UncheckedLoad | None:
    """Load a state that must match exactly, but for a base that stands elsewhere."""
    base = base_of(state)
    if not base:
        inner.load_state_dict(state_for_module(inner, state))
        return None
    return UncheckedLoad(inner, base, load_without_base(inner, state), path)


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
        >>> from pathlib import Path
        >>> from ddpkit.checkpoints import safe_load
        >>> path = Path(tempfile.mkdtemp()) / "model.ckpt"
        >>> torch_save(nn.Linear(2, 1), path)
        >>> torch_parameter_transfer(nn.Linear(2, 1), path)
    """
    state = load_lazily(path, mmap=copies_what_it_loads(obj))
    inner = unwrap(obj)
    try:
        misfits = load_by_name(inner, state)
        if misfits.reshaped or misfits.based:
            raise CheckpointError("\n".join(misfits.lines(MOST_MISFITS)))
    except ShardError:
        raise
    except Exception as error:
        raise misfit(obj, path, error) from error
    name = type(inner).__name__
    if misfits.missing and len(misfits.missing) == len(inner.state_dict()):
        raise CheckpointError(
            f"{path} has none of the parameters of this {name}, such as "
            f"{next(iter(misfits.missing))!r}; it has "
            f"{', '.join(list(misfits.unexpected)[:4]) or 'nothing'}. Save the state_dict of "
            f"{with_article(name)} alone."
        )
    for key in misfits.missing:
        logger.warning("%s has no %s: this parameter of the %s keeps its value.", path, key, name)
    for key in misfits.unexpected:
        logger.warning("%s has %s, which the %s does not have: not used.", path, key, name)


def _for_optimizer(optimizer: Optimizer, state: Any) -> Any:
    """Divide what the state has of each parameter as the parameter is divided; which kernel steps
    is this run's own.
    """
    known = optimizer.param_groups
    saved = state["param_groups"]
    if len(known) == len(saved) and "fused" in optimizer.defaults:
        pairs = zip(saved, known, strict=True)
        groups = [{**old, "fused": new["fused"]} for old, new in pairs]
        state = {**state, "param_groups": groups}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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
