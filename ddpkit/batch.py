"""Batches of samples that are dicts, whose tensors differ in length.

:class:`PaddedBatch` is a ``collate_fn``. A dataset that offers ``set_output_keys`` and a
``pipeline``, as SpeechBrain's ``DynamicItemDataset`` does, gets it without being asked from
``ddpkit.dataloader.shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_convert

from ddpkit.errors import DataError

__all__ = ["BatchsizeGuesser", "PaddedBatch", "PaddedData", "batch_pad_right"]

_to_tensors: Callable[[Any], Any] = default_convert  # which has no types


class PaddedData(NamedTuple):
    """Tensors of different lengths as one.

    Attributes:
        data: shape ``(samples, longest, ...)``.
        lengths: shape ``(samples,)``; the part of ``longest`` that is not padding, from 0 to 1.

    Ranks: local.

    Example:
        >>> data, lengths = PaddedData(*batch_pad_right([torch.ones(2), torch.ones(1)]))
        >>> lengths
        tensor([1.0000, 0.5000])
    """

    data: Tensor
    lengths: Tensor


def batch_pad_right(
    tensors: Sequence[Tensor],
    mode: str = "constant",
    value: float = 0,
) -> tuple[Tensor, Tensor]:
    """Stack tensors whose first dimensions differ, padded at the end.

    Args:
        tensors: shape ``(length, ...)`` each; alike but for ``length``. Without dimensions they are
            stacked.
        mode: of :func:`torch.nn.functional.pad`.
        value: of the padding.

    Returns:
        The tensor, shape ``(samples, longest, ...)``, and each one's part of ``longest``, shape
        ``(samples,)``.

    Raises:
        DataError: no tensors, or they differ in more than the first dimension.

    Ranks: local.

    Example:
        >>> batch_pad_right([torch.tensor([1, 2]), torch.tensor([3])], value=-100)
        (tensor([[   1,    2],
                [   3, -100]]), tensor([1.0000, 0.5000]))
    """
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({(len(shape), shape[1:]) for shape in shapes}) != 1:
        raise DataError(
            f"shapes {shapes[:8]} cannot be padded: tensors may differ in their first dimension "
            "only."
        )
    lengths = [shape[0] if shape else 1 for shape in shapes]
    longest = max(lengths)
    behind = [0, 0] * (len(shapes[0]) - 1)
    padded = [
        tensor
        if length == longest
        else torch.nn.functional.pad(
            tensor,
            [*behind, 0, longest - length],
            mode,
            value,
        )
        for tensor, length in zip(tensors, lengths, strict=True)
    ]
    return torch.stack(padded), torch.tensor(
        [length / longest if longest else 1.0 for length in lengths]
    )


class PaddedBatch:
    """A batch of samples that are dicts: each key is an attribute, and tensors are padded to one
    length.

    A ``collate_fn``; its arguments are set with ``functools.partial(PaddedBatch,
    padded_keys=["sig"])``. A key gives :class:`PaddedData` if it is padded; else a tensor, if its
    values are numbers or tensors of one shape; else a list.

    Args:
        examples: one mapping per sample, all with the keys of the first.
        padded_keys: the keys to pad; default: all keys with tensors.
        device_prep_keys: the keys that :meth:`to` and :meth:`pin_memory` move; default: all keys
            with tensors.
        padding_func: takes a list of tensors; returns the padded tensor and the relative lengths.
        padding_kwargs: of ``padding_func``.
        per_key_padding_kwargs: of ``padding_func`` for some keys, in place of ``padding_kwargs``.
        apply_default_convert: make tensors of numpy's arrays first.
        nonpadded_stack: stack what is not padded, where that is possible.

    Raises:
        DataError: no samples, one that is not a mapping, a key that is also the name of a method,
            or what cannot be padded. The message names the key.
        KeyError: a sample lacks a key of the first.

    Ranks: local. ddpkit counts a batch as :attr:`batchsize` samples, padding or not.

    Example:
        >>> samples = [
        ...     {"id": "a", "sig": torch.ones(1), "label": 3},
        ...     {"id": "b", "sig": torch.ones(2), "label": 4},
        ... ]
        >>> batch = PaddedBatch(samples).to("cpu")
        >>> batch.sig.data, batch.sig.lengths
        (tensor([[1., 0.],
                [1., 1.]]), tensor([0.5000, 1.0000]))
        >>> batch.id, batch["label"], len(batch)
        (['a', 'b'], tensor([3, 4]), 2)
        >>> ids, (signals, lengths), labels = batch
    """

    def __init__(  # noqa: PLR0913, PLR0917 -- the signature that recipes know
        self,
        examples: Sequence[Mapping[str, Any]],
        padded_keys: Sequence[str] | None = None,
        device_prep_keys: Sequence[str] | None = None,
        padding_func: Callable[..., tuple[Tensor, Tensor]] = batch_pad_right,
        padding_kwargs: Mapping[str, Any] | None = None,
        per_key_padding_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        apply_default_convert: bool = True,
        nonpadded_stack: bool = True,
    ) -> None:
        if not examples or not all(isinstance(example, Mapping) for example in examples):
            raise DataError(
                f"PaddedBatch takes a list of dicts, one per sample, and not {examples!r:.60}."
            )
        self.__length = len(examples)
        self.__keys = list(examples[0])
        self.__moved: list[str] = []
        for key in self.__keys:
            if hasattr(self, key):
                raise DataError(
                    f"PaddedBatch has an attribute {key!r} of its own: give this key another name."
                )
            values: Any = [example[key] for example in examples]
            if apply_default_convert:
                values = _to_tensors(values)
            if _is_chosen(key, padded_keys, values):
                options = (per_key_padding_kwargs or {}).get(key, padding_kwargs or {})
                values = PaddedData(*_padded(key, values, padding_func, options))
            elif nonpadded_stack:
                values = _stacked(values)
            if _is_chosen(key, device_prep_keys, values):
                self.__moved.append(key)
            setattr(self, key, values)

    def __len__(self) -> int:
        return self.__length

    @property
    def batchsize(self) -> int:
        """The number of samples."""
        return self.__length

    def __getitem__(self, key: str) -> Any:
        if key not in self.__keys:
            raise KeyError(f"{key!r} is not among the batch's keys {self.__keys}")
        return getattr(self, key)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the batch has no {name!r}: its keys are {vars(self).get('_PaddedBatch__keys', [])}"
        )

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the values of the keys, in the order of the first sample's."""
        return (getattr(self, key) for key in self.__keys)

    def at_position(self, pos: int) -> Any:
        """Return the value of the key at a position.

        Args:
            pos: among the first sample's keys.
        """
        return getattr(self, self.__keys[pos])

    def to(self, *args: Any, **kwargs: Any) -> PaddedBatch:
        """Move or cast the tensors in place; lengths too.

        Args:
            args: as for :meth:`torch.Tensor.to`.
            kwargs: likewise.

        Returns:
            The batch itself.
        """
        return self.__each("to", *args, **kwargs)

    def pin_memory(self) -> PaddedBatch:
        """Move the tensors to pinned memory in place, as a loader with ``pin_memory=True`` does.

        Returns:
            The batch itself.
        """
        return self.__each("pin_memory")

    def __each(
        self,
        method: str,
        *args: Any,
        **kwargs: Any,
    ) -> PaddedBatch:
        for key in self.__moved:
            setattr(
                self,
                key,
                _each(
                    getattr(self, key),
                    method,
                    methodcaller(method, *args, **kwargs),
                ),
            )
        return self


class BatchsizeGuesser:
    """Returns the number of samples of a batch as ddpkit counts them, and 1 where nothing tells.

    Ranks: local.

    Example:
        >>> (
        ...     BatchsizeGuesser()(PaddedBatch([{"x": 1}, {"x": 2}])),
        ...     BatchsizeGuesser()([torch.zeros(3, 2)]),
        ... )
        (2, 3)
    """

    def __call__(self, batch: Any) -> int:
        """Return the number of samples.

        Args:
            batch: a :class:`PaddedBatch`, a tensor, or a list, tuple or dict with one in it.
        """
        from ddpkit.data import guess_batch_size

        return guess_batch_size(batch)


def _is_chosen(key: str, keys: Sequence[str] | None, values: Any) -> bool:
    return isinstance(values[0], Tensor) if keys is None else key in keys


def _padded(
    key: str,
    values: Any,
    padding_func: Callable[..., Any],
    options: Mapping[str, Any],
) -> Any:
    try:
        return padding_func(values, **options)
    except (DataError, AttributeError, TypeError) as error:
        raise DataError(
            f"the key {key!r} of a batch must hold tensors that can be padded: {error}"
        ) from error


def _stacked(values: list[Any]) -> Any:
    """Make a tensor of numbers or of tensors of one shape; leave anything else as it is."""
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(values) if len({value.shape for value in values}) == 1 else values
    if all(isinstance(value, (int, float)) for value in values):
        wide = torch.float64 if any(isinstance(value, float) for value in values) else None
        return torch.tensor(values, dtype=wide)
    return values


def _each(value: Any, method: str, call: Callable[[Any], Any]) -> Any:
    """Call a method of whatever has it, inside of mappings and sequences too."""
    if hasattr(value, method):
        return call(value)
    if isinstance(value, Mapping):
        return {key: _each(inner, method, call) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(inner, method, call) for inner in value))
    return (
        type(value)(_each(inner, method, call) for inner in value)
        if isinstance(value, (list, tuple))
        else value
    )
