"""Names in the state of a module, without what wrappers have put in."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ddpkit.base import children_of, inner_name, unwrap
from ddpkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    import torch
    from torch import nn


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
        >>> import torch
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


def plain_key(module: nn.Module | None, key: str) -> str:
    """Drop from a state's key the names that wrappers inside ``module`` put in, and no other.

    Args:
        module: whose state the key is of.
        key: such as ``"net.module.weight"``.

    Returns:
        The key without what DDP, DataParallel and ``torch.compile`` put in.

    Example:
        >>> from torch import nn
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


def loose_key(key: str) -> str:
    """Drop whatever could be a wrapper's name, for files whose module is not at hand."""
    return ".".join(part for part in key.split(".") if part not in {"module", "_orig_mod"})


def rename_keys(state: Any, rename: Callable[[str], str]) -> Any:
    """Return a module's state with other names, in its versions of modules too."""
    renamed = OrderedDict((rename(name), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        vars(renamed)["_metadata"] = {rename(name): value for name, value in metadata.items()}
    return renamed


def unwrapped_state(module: nn.Module) -> Any:
    """Return a module's state without the names that wrappers put in."""
    inner = unwrap(module)
    return rename_keys(inner.state_dict(), functools.partial(plain_key, inner))
