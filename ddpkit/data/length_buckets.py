"""Lengths of samples, and the buckets that samples of similar length share."""

from __future__ import annotations

import math
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddpkit.errors import BucketingError, ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

_MOST_SHOWN = 5


def positive_whole(name: str, value: Any, advice: str) -> None:
    """Raise an error unless a value is a whole number >= 1.

    Args:
        name: of the argument, for the message.
        value: given for it.
        advice: what to do, for the message.

    Raises:
        ConfigError: it is none.

    Ranks: local.

    Example:
        >>> positive_whole("num_buckets", 3, "One bucket is the least.")
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"{name}: {value!r} is not a positive whole number. {advice}")


def sample_lengths(
    dataset: Any, length_func: Callable[[Any], float] | None, lengths_list: Sequence[float] | None
) -> NDArray[np.float64]:
    """Return the length of every sample of a dataset, loading as little as possible.

    Args:
        dataset: with ``data`` (id -> entry) and ``data_ids``, unless ``lengths_list`` is given.
        length_func: length of an entry; None: its ``"duration"``.
        lengths_list: the lengths, if they are known.

    Returns:
        Shape ``(samples,)``, in the unit of ``length_func`` or ``lengths_list``.

    Raises:
        BucketingError: the lengths cannot be determined.
        ConfigError: ``lengths_list`` is as long as some other dataset.
        DataError: the dataset is empty, or a length is negative or not a number.

    Ranks: local; alike on every rank.

    Example:
        >>> sample_lengths(range(3), None, [4, 0, 2.5])
        array([4. , 0. , 2.5])
    """
    if lengths_list is None:
        if not _gives_entries(dataset):
            raise BucketingError(
                f"DynamicBatchSampler cannot know how long the samples of {type(dataset).__name__} are: length_func "
                "is asked about entries of a dataset with data and data_ids. Give lengths_list, one length per sample."
            )
        lengths_list = ask_items(dataset, length_func or (lambda item: item["duration"]), "DynamicBatchSampler")
    elif hasattr(dataset, "__len__") and len(dataset) != len(lengths_list):
        raise ConfigError(
            f"lengths_list has {len(lengths_list)} entries for the {len(dataset)} samples of "
            f"{type(dataset).__name__}. Give one length per sample, in the order of the dataset."
        )
    try:
        lengths = np.asarray(lengths_list, dtype=np.float64).reshape(len(lengths_list))
    except (TypeError, ValueError) as error:
        raise DataError(f"DynamicBatchSampler: the lengths are not one number per sample: {error}.") from error
    if not lengths.size:
        raise DataError("DynamicBatchSampler: there is no sample. Check the paths and filters that made the dataset.")
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths >= 0)))
    if bad.size:
        raise DataError(
            f"DynamicBatchSampler: sample {bad[0]} has length {lengths[bad[0]]} ({bad.size} such sample(s)). A length "
            "is a number, 0 or more."
        )
    return lengths


def ask_items(dataset: Any, question: Callable[[Any], Any], who: str) -> list[Any]:
    """Ask something of every item of a dataset, loading as little as possible.

    The entries behind the items are asked first, which loads nothing. A key that they lack is computed through
    ``output_keys_as``, and that key alone. Only where a dataset has neither are its items loaded.

    Args:
        dataset: its items are dicts.
        question: asked of an item; a key that it misses it shows by ``KeyError``.
        who: asks, for the messages.

    Returns:
        The answers, in the order of the dataset.

    Raises:
        DataError: the dataset is empty, or has no such key.

    Ranks: local.

    Example:
        >>> ask_items([{"label": "a"}, {"label": "b"}], lambda item: item["label"], "a test")
        ['a', 'b']
    """
    if not len(dataset):
        raise DataError(f"{who}: the dataset is empty. Check the paths and filters that made it.")
    keys: list[Any] = []
    while True:
        try:
            if not keys:
                return [question(item) for item in _entries(dataset)]
            with dataset.output_keys_as(list(keys)):
                return [question(dataset[index]) for index in range(len(dataset))]
        except KeyError as error:
            if not error.args or error.args[0] in keys or not hasattr(dataset, "output_keys_as"):
                raise DataError(f"{who}: {type(dataset).__name__} gives no {error}. Name a key it has.") from error
            keys += error.args


def upper_boundaries(
    max_batch_length: float, num_buckets: int | None, bucket_boundaries: Sequence[float] = ()
) -> NDArray[np.float64]:
    """Return the upper boundaries of the buckets, ascending.

    Args:
        max_batch_length: the last boundary, where they are computed.
        num_buckets: how many are computed.
        bucket_boundaries: the boundaries themselves; then the other arguments do not matter.

    Raises:
        BucketingError: neither is given.
        ConfigError: boundaries that are not ascending, or not above 0; or no positive number of buckets.

    Ranks: local.

    Source: quantiles of the log-normal distribution, ``exp(ndtri(k / (num_buckets + 1)))``, as in
    ``scipy.stats.lognorm`` with ``s=1``.

    Example:
        >>> upper_boundaries(10.0, 3).round(2)
        array([ 2.6 ,  5.09, 10.  ])
    """
    if len(bucket_boundaries):
        boundaries = np.asarray(bucket_boundaries, dtype=np.float64)
        if not (np.isfinite(boundaries).all() and boundaries[0] > 0 and (np.diff(boundaries) > 0).all()):
            raise ConfigError(
                f"bucket_boundaries={list(bucket_boundaries)[:_MOST_SHOWN]} must be lengths above 0, each greater than "
                "the one before. Samples of no length belong to the first bucket."
            )
        return boundaries
    if num_buckets is None:
        raise BucketingError(
            "DynamicBatchSampler was given neither num_buckets nor bucket_boundaries. Give one of them: more buckets "
            "mean less padding, and less chance in what meets in a batch."
        )
    positive_whole("num_buckets", num_buckets, "One bucket is the least.")
    levels = torch.arange(1, num_buckets + 1, dtype=torch.float64) / (num_buckets + 1)
    quantiles = torch.special.ndtri(levels).exp().numpy()
    scaled: NDArray[np.float64] = quantiles * (max_batch_length / quantiles[-1])
    scaled[-1] = max_batch_length
    return scaled


def samples_that_fit(
    max_batch_length: float, boundaries: NDArray[np.float64], max_batch_ex: int | None
) -> NDArray[np.int64]:
    """Return how many samples make a batch, for every bucket and for what is longer than the last boundary.

    Args:
        max_batch_length: how long the samples of a batch may be together.
        boundaries: of the buckets, shape ``(buckets,)``.
        max_batch_ex: samples of a batch, at most.

    Returns:
        Shape ``(buckets + 1,)``; the last is 1.

    Ranks: local.

    Example:
        >>> samples_that_fit(10.0, np.array([2.0, 3.0, 20.0]), max_batch_ex=4)
        array([4, 3, 1, 1])
    """
    limit = math.inf if max_batch_ex is None else max_batch_ex
    fitting = [int(min(limit, max(1.0, max_batch_length / one))) for one in boundaries.tolist()]
    return np.array([*fitting, 1])


def _gives_entries(dataset: Any) -> bool:
    return hasattr(dataset, "data") and hasattr(dataset, "data_ids")


def _entries(dataset: Any) -> Iterator[Any]:
    """Yield what can be asked without loading; an empty dict, where keys must be named, makes the question name one."""
    if _gives_entries(dataset):
        return (dataset.data[one] for one in dataset.data_ids)
    if hasattr(dataset, "output_keys_as"):
        return iter([{}])
    return (dataset[index] for index in range(len(dataset)))
