"""Counters that say which epoch it is, remember it across restarts, and may stop early."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = ["EpochCounter", "EpochCounterWithStopper"]

logger = get_logger(__name__)


@register_checkpoint_hooks
class EpochCounter:
    """Counts epochs from 1 to ``limit`` and goes on where it was after a restart.

    A counter that is done yields nothing, so a second start of a finished run does no work; it says
    so.

    Args:
        limit: number of epochs, at least 0.

    Attributes:
        current: the epoch that was yielded last; 0 before the first.
        limit: as given; may be changed to train longer.

    Raises:
        ConfigError: ``limit`` is not a whole number or is negative.

    Ranks: local; every rank counts.

    State: saves ``current`` as a plain integer. Loaded from a checkpoint made at the end of an
    epoch it continues with the next, from one made within an epoch it does that epoch again. Where
    ``fit`` counts with another counter, the epoch is not of this one, and it stays where it was.

    Example:
        >>> counter = EpochCounter(3)
        >>> list(counter), counter.current, list(counter)
        ([1, 2, 3], 3, [])
    """

    should_stop = False  # of a subclass that stops before the limit

    def __init__(self, limit: int) -> None:
        self.current = 0
        self.limit = _count(limit, "limit")
        self._has_counted = False
        # the epoch that a checkpoint was made in the middle of, until it is counted again
        self._unfinished = 0
        self._is_running = True  # not while a call of fit counts with another one

    def __iter__(self) -> EpochCounter:
        return self

    def __next__(self) -> int:
        if self.should_stop or self.current >= self.limit:
            if self.current and not self._has_counted:
                logger.announce("%s", self._why_done())
            raise StopIteration
        self.current += 1
        self._has_counted = True
        self._unfinished = 0
        logger.info("Going into epoch %d", self.current)
        return self.current

    def note_running(self, *, is_running: bool) -> None:
        """Note whether the present epochs are of this counter: the middle of another one's sets it
        back by nothing.

        Args:
            is_running: False while a call of ``fit`` counts with another one.

        Ranks: local; every rank notes it.
        """
        self._is_running = is_running

    def leave_unfinished(self) -> None:
        """Leave the epoch that a checkpoint was made in the middle of, where the training has ended
        there: it is not begun again, and stays the one that was yielded last.

        Ranks: local; every rank leaves it.
        """
        if self._unfinished:
            self.current = self._unfinished
            self._unfinished = 0

    def _why_done(self) -> str:
        """Say why nothing is left to train when a run is started again."""
        return (
            f"Epoch {self.current} is done already, of {self.limit} at most: nothing is left to "
            "train."
        )

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(str(self._to_save()), encoding="utf-8")

    def _to_save(self) -> int:
        """Return the epoch that has been counted; before it is counted again, the one that a
        checkpoint has begun.
        """
        return self._unfinished if self.current == self._unfinished - 1 else self.current

    def _go_on_from(self, epoch: int, *, end_of_epoch: bool) -> None:
        """Go on after an epoch, or with it."""
        is_done = end_of_epoch or not self._is_running
        self.current = epoch if is_done else max(epoch - 1, 0)  # 0: of a later call of fit
        self._unfinished = 0 if is_done else epoch

    @mark_as_loader
    def _recover(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        saved = _read(path, int, "the number of an epoch")
        self._go_on_from(saved, end_of_epoch=end_of_epoch)


@register_checkpoint_hooks
class EpochCounterWithStopper(EpochCounter):
    """An epoch counter that stops when a metric has not improved for some epochs.

    After each validation call :meth:`update_metric`. What happens up to epoch ``limit_warmup`` does
    not count, neither as a best score nor as an epoch without improvement. A metric improves when
    it is better than the best one by more than ``min_delta`` times the best one's size; NaN and
    infinities never are.

    All ranks decide from the main process's numbers, so none goes on when another stops.

    Args:
        limit: number of epochs at most.
        limit_to_stop: number of epochs in a row without improvement after which to stop, at least 0
            (which is the same as 1).
        limit_warmup: number of epochs at the start that do not count, at least 0.
        direction: ``"min"`` if smaller is better, ``"max"`` if larger is.

    Attributes:
        best_limit: the epoch of the best score; 0 while there is none.
        best_score: the best metric so far; an infinity while there is none.
        should_stop: whether patience is exhausted.
        min_delta: smallest improvement that counts, relative to the best score.

    Raises:
        ConfigError: a limit is not a whole number or is negative, or the direction is unknown.

    Ranks: iterating is for all ranks, or for the main process alone: the others take over its state
    at each epoch's start.

    State: saves epoch, best epoch, best score, whether to stop, and the patience that decided it,
        as YAML; SpeechBrain's files can be read. A run that has stopped goes on when it is started
        again with more patience (``limit_to_stop`` or ``limit_warmup``), and else says why it does
        not.

    Example:
        >>> counter = EpochCounterWithStopper(10, limit_to_stop=2, limit_warmup=0, direction="max")
        >>> for epoch in counter:
        ...     counter.update_metric(min(epoch, 3))  # flat from epoch 3 on
        >>> counter.current, counter.best_limit, counter.best_score
        (5, 3, 3.0)
    """

    min_delta = 1e-6

    def __init__(
        self,
        limit: int,
        limit_to_stop: int,
        limit_warmup: int,
        direction: str,
    ) -> None:
        super().__init__(limit)
        self.limit_to_stop = _count(limit_to_stop, "limit_to_stop")
        self.limit_warmup = _count(limit_warmup, "limit_warmup")
        if direction not in {"min", "max"}:
            raise ConfigError(
                f"direction={direction!r}: say 'min' if smaller metrics are better, 'max' if "
                "larger ones are."
            )
        self.direction = direction
        self.best_limit = 0
        self.best_score = math.inf if direction == "min" else -math.inf
        self.should_stop = False

    def __next__(self) -> int:
        from ddpkit.distributed import run_on_main

        # Taking over main's state here, and not only its metrics below, keeps the ranks together
        # also where a recipe computes the metric on the main process and updates the counter there
        # alone.
        state = run_on_main(lambda: (self.best_limit, self.best_score, self.should_stop))
        if state is not None:
            self.best_limit, self.best_score, self.should_stop = state
        return super().__next__()

    def update_metric(self, current_metric: float) -> None:
        """Take in the metric of the epoch that has just been validated.

        Args:
            current_metric: a number, or a tensor or array of one element. The main process's
                counts, on all ranks.

        Raises:
            ConfigError: it is not a number.

        Ranks: all, or the main process alone (the others then learn of it when the next epoch
        starts).

        State: ``best_score``, ``best_limit``, ``should_stop``.
        """
        from ddpkit.distributed import run_on_main

        metric = run_on_main(_number, args=[current_metric])
        if metric is None or self.current <= self.limit_warmup:
            return
        if self._is_improvement(metric):
            self.best_limit = self.current
            self.best_score = metric
            self.should_stop = False
            return
        self.should_stop = self._is_exhausted(self.current)
        if self.should_stop:
            epochs = self._epochs_without_improvement(self.current)
            logger.info(
                "%d epochs without improvement over %g: patience is exhausted.",
                epochs,
                self.best_score,
            )

    def _epochs_without_improvement(self, epoch: int) -> int:
        return epoch - max(self.best_limit, self.limit_warmup)

    def _is_exhausted(self, epoch: int) -> bool:
        return self._epochs_without_improvement(epoch) >= max(self.limit_to_stop, 1)

    def _why_done(self) -> str:
        epochs = self._epochs_without_improvement(self.current)
        if not self.should_stop or not self._is_exhausted(self.current):
            return super()._why_done()
        return (
            f"The run was stopped early after epoch {self.current}: {epochs} epochs without "
            f"improvement over {self.best_score:g} of epoch {self.best_limit}, and "
            f"limit_to_stop={self.limit_to_stop}. To go on, give a larger limit_to_stop."
        )

    def _decide_again(self, epoch: int, patience: Any) -> None:
        """Decide again whether to stop, if a run that was stopped is started with another patience.

        Args:
            epoch: after which it was stopped.
            patience: ``[limit_to_stop, limit_warmup]`` of that run; None in a file of an earlier
                version.
        """
        if not self.should_stop or patience == [self.limit_to_stop, self.limit_warmup]:
            return
        self.should_stop = self._is_exhausted(epoch)
        if not self.should_stop:
            logger.announce(
                "The run was stopped early after epoch %d. With limit_to_stop=%d it goes on, of "
                "%d epochs at most.",
                epoch, self.limit_to_stop, self.limit,
            )  # fmt: skip

    def _is_improvement(self, metric: float) -> bool:
        if not math.isfinite(metric):
            return False
        if not math.isfinite(self.best_score):
            return True
        gain = self.best_score - metric if self.direction == "min" else metric - self.best_score
        return gain > self.min_delta * abs(self.best_score)

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        from ddpkit.base import dump_plain_yaml

        state = {
            "current_epoch": self._to_save(),
            "best_epoch": self.best_limit,
            "best_score": self.best_score,
            "should_stop": self.should_stop,
            "patience": [self.limit_to_stop, self.limit_warmup],
        }
        Path(path).write_text(dump_plain_yaml(state), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        from ddpkit.base import load_plain_yaml

        def parse(text: str) -> tuple[int, int, float, bool, Any]:
            saved = load_plain_yaml(text)
            if type(saved) is int:  # SpeechBrain saves a stopper as if it were a plain counter
                logger.warning("%s holds the epoch and no best score: patience begins anew.", path)
                return saved, self.best_limit, self.best_score, self.should_stop, None
            score = float(saved["best_score"])
            epochs = int(saved["current_epoch"]), int(saved["best_epoch"])
            return *epochs, score, bool(saved["should_stop"]), saved.get("patience")

        found = _read(path, parse, "a stopper's YAML")
        epoch, self.best_limit, self.best_score, self.should_stop, patience = found
        self._decide_again(epoch, patience)
        self._go_on_from(epoch, end_of_epoch=end_of_epoch)


def _read(
    path: str | os.PathLike[str],
    parse: Callable[[str], Any],
    expected: str,
) -> Any:
    text = Path(path).read_text(encoding="utf-8")
    try:
        return parse(text)
    except (ValueError, TypeError, KeyError, CheckpointError) as error:
        raise CheckpointError(
            f"{str(path)!r} holds {text[:60]!r} where {expected} was expected; it was written by "
            "something else or is damaged. Remove that checkpoint to use an older one."
        ) from error


def _number(metric: Any) -> float:
    try:
        return float(metric.item() if hasattr(metric, "item") else metric)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"current_metric={metric!r} is not a number; give the one metric that decides when to "
            "stop."
        ) from error


def _count(value: Any, name: str) -> int:
    if not (isinstance(value, (int, float)) and value >= 0 and float(value).is_integer()):
        raise ConfigError(f"{name}={value!r} must be a whole number, 0 or more: it counts epochs.")
    return int(value)
