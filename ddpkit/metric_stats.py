"""Scores of samples: the mean, the lowest and the highest, the same on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from torch import Tensor

from ddpkit.distributed import gather_objects, if_main_process
from ddpkit.errors import ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.metrics import Reducing

__all__ = ["MetricStats"]

logger = get_logger(__name__)


class MetricStats(Reducing):
    """Collects a score for each sample, and says what they come to over all ranks.

    Where each rank sees a part of the data (training; evaluation with ``shard_evaluation``), every
    sample counts once; where each rank sees all of it, nothing is gathered. Samples repeated to
    keep step are left out. Scores stay on their device until they are summarized.

    Args:
        metric: gives one score per sample, shape ``(samples,)``, of what :meth:`append` is given;
            without ``batch_eval``, the score of one sample, of its prediction and its target.
        n_jobs: threads that compute the scores of a batch; only without ``batch_eval``.
        batch_eval: whether ``metric`` is given the whole batch.

    Attributes:
        ids: of this rank's samples.
        summary: of all ranks, from the last :meth:`summarize`; empty when something was appended
            since.

    Ranks: local, but :meth:`summarize`.

    State: none in checkpoints: after a resume in the middle of a stage the scores count only the
    batches since.

    Example:
        >>> import torch
        >>> stats = MetricStats(lambda predictions, targets: (predictions - targets).abs().mean(1))
        >>> stats.append(
        ...     ["a", "b"], torch.tensor([[1.0], [2.0]]), targets=torch.tensor([[1.0], [4.0]])
        ... )
        >>> stats.summarize("average"), stats.summarize("max_id")
        (1.0, 'b')
    """

    growing_lists = frozenset({"ids", "_scores"})

    def __init__(
        self,
        metric: Callable[..., Any],
        n_jobs: int = 1,
        batch_eval: bool = True,
    ) -> None:
        super().__init__()
        self.metric = metric
        self.n_jobs = n_jobs
        self.batch_eval = batch_eval
        self.clear()

    def clear(self) -> None:
        """Forget everything. Call it on every rank."""
        self._forget()
        self.ids: list[Any] = []
        self.summary: dict[str, Any] = {}
        self._scores: list[Any] = []

    @property
    def scores(self) -> list[float]:
        """Those of this rank's samples. Waits for the device."""
        batches = (batch.tolist() if isinstance(batch, Tensor) else batch for batch in self._scores)
        return [float(score) for batch in batches for score in batch]

    def append(
        self,
        ids: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Take in the samples of a batch.

        Args:
            ids: one per sample: a list, or a tensor of whole numbers.
            args: of the metric.
            kwargs: likewise. Without ``batch_eval``: ``predict`` and ``target``, and perhaps
                ``lengths``, the part of each that is not padding.

        Raises:
            DataError: not one score per sample.
        """
        if not self._counts():
            return
        scores = (
            self.metric(*args, **kwargs) if self.batch_eval else self._one_by_one(*args, **kwargs)
        )
        if isinstance(scores, Tensor):
            scores = scores.detach().flatten()
        if not hasattr(scores, "__len__") or len(scores) != len(ids):
            given = repr(scores)[:60]
            raise DataError(
                f"MetricStats: the metric gave {given} for {len(ids)} samples: return one score "
                "for each."
            )
        self.ids.extend(ids.tolist() if isinstance(ids, Tensor) else ids)
        self._scores.append(scores)
        self.summary = {}

    def _one_by_one(
        self,
        *,
        predict: Any,
        target: Any,
        lengths: Any = None,
    ) -> list[float]:
        pairs: Iterable[Any] = zip(predict, target, strict=True)
        if lengths is not None:
            ends = (lengths * predict.shape[1]).round().int().tolist()
            pairs = [
                (value[:end].cpu(), other[:end].cpu())
                for (value, other), end in zip(pairs, ends, strict=True)
            ]
        with ThreadPoolExecutor(self.n_jobs) as threads:
            return [float(score) for score in threads.map(lambda pair: self.metric(*pair), pairs)]

    def summarize(self, field: str | None = None) -> Any:
        """Say what the scores of all ranks come to. Waits for the device.

        Args:
            field: one of ``average``, ``min_score``, ``min_id``, ``max_score`` and ``max_id``;
                None: all of them.

        Returns:
            The field, or a dict; the same on every rank. Of equal scores the id counts that comes
            first in the alphabet, and the mean is rounded once, so that neither depends on the
            order. Lowest and highest leave NaN out if there is anything else.

        Raises:
            DataError: no rank has a score.
            ConfigError: scores of stages in which the data was divided and of others.
            LaunchError: in main-only code, where the other ranks' part would be missing.

        Ranks: collective where each rank has seen a part of the data, else local. Call it on every
        rank.
        """
        parts = gather_objects(self._pairs) if self._reduces(None) else [self._pairs()]
        pairs = [pair for part in parts for pair in part]
        if not pairs:
            raise DataError(
                "MetricStats: there is nothing to summarize: append the samples of a batch first."
            )
        known = [pair for pair in pairs if not math.isnan(pair[0])] or pairs
        lowest = min(known, key=lambda pair: (pair[0], str(pair[1])))
        highest = min(known, key=lambda pair: (-pair[0], str(pair[1])))
        scores = [score for score, _ in pairs]
        # fsum is exact, but raises where an infinity meets another one
        total = math.fsum(scores) if all(map(math.isfinite, scores)) else sum(scores)
        self.summary = {
            "average": total / len(pairs),
            "min_score": lowest[0],
            "min_id": lowest[1],
            "max_score": highest[0],
            "max_id": highest[1],
        }
        return self.summary if field is None else self.summary[field]

    def _pairs(self) -> list[tuple[float, Any]]:
        return list(zip(self.scores, self.ids, strict=True))

    def write_stats(self, filestream: TextIO, verbose: bool = False) -> None:
        """Write the summary as text, on the main process.

        Args:
            filestream: open for writing.
            verbose: log it, too.

        Raises:
            ConfigError: other ranks have scores that :meth:`summarize` has not gathered: call it on
                every rank first.

        Ranks: any; only the main process writes.
        """
        if not if_main_process():
            return
        if not self.summary:
            if self._reduces(None):
                raise ConfigError(
                    "MetricStats.write_stats: the other ranks have scores of their own, and were "
                    "not asked for them. Call summarize() on every rank first, and write_stats "
                    "after it."
                )
            self.summarize()
        text = (
            "Average score: {average}\nMin error: {min_score} id: {min_id}\nMax error: "
            "{max_score} id: {max_id}\n"
        )
        filestream.write(text.format(**self.summary))
        if verbose:
            logger.info("%s", text.format(**self.summary))
