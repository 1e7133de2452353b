"""Weights in a file of safetensors or of torch, whoever has written it; no code of it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import StoredTensor, kind_of
from ddpkit.checkpointing.file_loading import load_lazily, safe_load
from ddpkit.errors import CheckpointError, CheckpointUsageError, MissingExtraError

if TYPE_CHECKING:
    from pathlib import Path

SAFETENSORS = ".safetensors"
#: Entries under which others keep the weights, beside much else, in a file of torch.
INNER_STATES = ("state_dict", "model_state_dict", "model")
#: An entry beside the weights of an average that is none of them: how often it was updated. torch's
#: ``AveragedModel`` has it, too.
UPDATES_OF_AVERAGE = "n_averaged"
MOST_NAMES = 6


def read_weights(
    path: Path,
    *,
    mmap: bool = False,
    lazily: bool = False,
) -> Mapping[str, Any]:
    """Read the weights in a file.

    Args:
        path: of safetensors, if it ends so; else of ``torch.save``: a ``state_dict``, or a dict
            with one under ``state_dict``, ``model_state_dict`` or ``model``.
        mmap: as in :func:`~ddpkit.checkpointing.file_loading.safe_load`.
        lazily: leave tensors in their shards, as
            :class:`~ddpkit.base.states.StoredTensor`.

    Returns:
        Tensors by name; a state may have other entries, too.

    Raises:
        CheckpointError: the file cannot be read, would run code, or holds no weights.
        MissingExtraError: safetensors is not installed.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp(), "a.pt")
        >>> torch.save({"state_dict": {"weight": torch.ones(1)}, "epoch": 3}, path)
        >>> read_weights(path)
        {'weight': tensor([1.])}
    """
    if path.suffix == SAFETENSORS:
        return _read_safetensors(path)
    value = load_lazily(path, mmap=mmap) if lazily else safe_load(path, mmap=mmap)
    if not isinstance(value, Mapping):
        raise CheckpointUsageError(f"{path} holds {kind_of(value)}, and no weights by name.")
    if _is_state(value):
        return value
    inner = next((value[name] for name in INNER_STATES if _is_state(value.get(name))), None)
    if inner is None:
        names = ", ".join(map(repr, list(value)[:MOST_NAMES]))
        raise CheckpointUsageError(
            f"{path} holds no weights by name. Its entries are {names or 'none'}, and the weights "
            f"would stand at the top, or under {' or '.join(map(repr, INNER_STATES))}. Save the "
            "state_dict of the module alone."
        )
    weights: Mapping[str, Any] = inner
    return weights


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(
        isinstance(name, str) and isinstance(entry, (torch.Tensor, StoredTensor))
        for name, entry in value.items()
    )


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error}: {path} needs it. Run `pip install safetensors`."
        ) from error
    try:
        weights: Mapping[str, Any] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot load {path}: {error}.") from error
    return weights
