"""Averages of the states of one model, and of what several checkpoints have of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ddpkit.base import kind_of
from ddpkit.checkpointing.base_weights import BASE, base_of
from ddpkit.checkpointing.checkpoint import Checkpoint
from ddpkit.checkpointing.file_loading import safe_load
from ddpkit.errors import CheckpointError, ConfigError

MOST_NAMES = 4


def average_state_dicts(state_dicts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the parameters of several states of one model.

    Args:
        state_dicts: states with the same names and shapes; none is changed, and one at a time is
            held.

    Returns:
        A state whose floating-point and complex tensors are the means, in their own dtype (summed
        in at least float32). All else (counters, masks) is taken from the first state. Of states
        without their base (``trained_only``) it is what they hold.

    Raises:
        ConfigError: no state is given, names, shapes or bases differ, or a floating-point tensor
            has 8 bits or less.

    Ranks: local.

    Example:
        >>> average_state_dicts([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
        {'w': tensor([2.])}
    """
    first: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    sums: dict[str, torch.Tensor] = {}
    count = 0
    for count, state in enumerate(state_dicts, 1):
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"{kind_of(state)} cannot be averaged: states of modules are needed, by name."
            )
        own = {name: _shape_to_average(name, value) for name, value in state.items()}
        if count == 1:
            first = {
                name: value.detach().clone() if _is_tensor(value) else value
                for name, value in state.items()
            }
            sums = {
                name: _wide_copy(first[name]) for name, shape in own.items() if shape is not None
            }
            shapes = own
            continue
        _require_same_base(base_of(first), base_of(state))
        different = sorted({str(name) for name, _ in own.items() ^ shapes.items()})
        if different:
            raise ConfigError(
                f"the states differ in names or shapes: {different}. They are of other models."
            )
        for name, total in sums.items():
            total.add_(state[name].detach().to(total.device, total.dtype))
    if not count:
        raise ConfigError("average_state_dicts was given no state; at least one is needed.")
    averages = {name: value for name, value in first.items() if name != BASE}
    for name, total in sums.items():
        averages[name] = (total / count).to(first[name].dtype)
    return averages


def _require_same_base(first: Mapping[str, str], other: Mapping[str, str]) -> None:
    different = sorted({name for name, _ in first.items() ^ other.items()})
    if different:
        shown = ", ".join(different[:MOST_NAMES])
        raise ConfigError(
            f"the states hold what was trained on two bases, which differ in {len(different)} "
            f"weight(s): {shown}. Their mean would fit none."
        )


def _shape_to_average(name: str, value: Any) -> torch.Size | None:
    if is_code(value):
        raise ConfigError(
            f"{name} has 8 bits: such codes have no mean without their scales. Quantize the "
            "average."
        )
    return (
        value.shape
        if _is_tensor(value) and (value.is_floating_point() or value.is_complex())
        else None
    )


def is_code(value: Any) -> bool:
    """Say whether a tensor holds floating-point numbers of 8 bits or less, such as
    ``float8_e4m3fn``.

    Args:
        value: anything.

    Returns:
        Whether it does; such weights are quantized, with a scale stored elsewhere.

    Example:
        >>> is_code(torch.ones(2)), is_code(torch.ones(2).to(torch.float8_e5m2))
        (False, True)
    """
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize == 1
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _wide_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)


def average_checkpoints(
    checkpoint_list: Iterable[Checkpoint],
    recoverable_name: str,
    parameter_loader: Callable[..., Any] = safe_load,
    averager: Callable[[Iterable[Any]], Any] = average_state_dicts,
) -> Any:
    """Average one recoverable over several checkpoints.

    Args:
        checkpoint_list: such as ``Checkpointer.find_checkpoints`` returns, best first.
        recoverable_name: whose files to average.
        parameter_loader: called with a path and ``map_location="cpu"``.
        averager: called with the iterator of what was loaded.

    Returns:
        What ``averager`` returns: a ``state_dict``.

    Raises:
        CheckpointError: a checkpoint has no such recoverable, or its file cannot be loaded.
        ConfigError: no checkpoint given, or the checkpoints are of different models.

    Ranks: local.

    Example:
        >>> from pathlib import Path
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for weight in (1.0, 3.0):
        ...     torch.save({"w": torch.tensor([weight])}, folder / f"{weight}.ckpt")
        >>> saved = [Checkpoint(folder, {}, {"model": path}) for path in sorted(folder.iterdir())]
        >>> average_checkpoints(saved, "model")
        {'w': tensor([2.])}
    """

    def states() -> Iterator[Any]:
        for checkpoint in checkpoint_list:
            path = checkpoint.paramfiles.get(recoverable_name)
            if path is None:
                raise CheckpointError(
                    f"{checkpoint.path} has no file for {recoverable_name!r}; it has "
                    f"{sorted(checkpoint.paramfiles)}."
                )
            yield parameter_loader(path, map_location="cpu")

    return averager(states())
