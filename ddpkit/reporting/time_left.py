"""How long a call of ``fit`` still takes, estimated from the epochs that it has finished."""

from __future__ import annotations

import time
from typing import NamedTuple


class Estimate(NamedTuple):
    """An estimated time.

    Attributes:
        seconds: the estimate.
        is_least: whether something is not counted yet, such as a validation that has never been
            made.

    Example:
        >>> Estimate(60.0, is_least=False).seconds
        60.0
    """

    seconds: float
    is_least: bool


class _Epoch(NamedTuple):
    """What a finished epoch took, in seconds: its training, and all of it up to the next one."""

    training: float
    whole: float


class TimeLeft:
    """Estimates the time left of a call of ``fit``.

    A finished epoch counts with all that belongs to it: training, validation, hooks and saves. The
    first one is left out once there are others: kernels are compiled in it, and caches are cold. Of
    the present stage the part that is done tells what is left of it.

    Args:
        last: number of the last epoch; None where it is not known: then there is no estimate.
        validates: whether a validation follows each training.

    Ranks: local; the main process shows it.

    Example:
        >>> left = TimeLeft(last=3)
        >>> left.begin_training(epoch=1)
        >>> left.estimate(0.5).seconds < 1.0, TimeLeft().estimate(0.5)
        (True, None)
    """

    def __init__(
        self,
        last: int | None = None,
        *,
        validates: bool = False,
    ) -> None:
        self.last = last
        self._validates = validates
        self._finished: list[_Epoch] = []
        self._epoch: int | None = None
        self._done_before: float | None = 0.0
        self._epoch_began = self._stage_began = 0.0
        self._training: float | None = None  # seconds it took in this epoch, once it is over

    def begin_training(self, epoch: int, done: float | None = 0.0) -> None:
        """Note that an epoch begins, and that the one before it is over.

        Args:
            epoch: its number.
            done: the part of its training that was done before a restart, 0 to 1; None: an unknown
                part.
        """
        now = time.monotonic()
        # Of an epoch that a restart has cut, this process has made a part only.
        if self._epoch is not None and self._done_before == 0.0:
            whole = now - self._epoch_began
            self._finished.append(
                _Epoch(whole if self._training is None else self._training, whole)
            )
        self._epoch = epoch
        self._done_before = done
        self._training = None
        self._epoch_began = self._stage_began = now

    def begin_validation(self) -> None:
        """Note that the training of the epoch is over, and its validation begins."""
        now = time.monotonic()
        if self._training is None:  # else it has several sets, and this is not the first
            self._training = now - self._stage_began
        self._stage_began = now

    def estimate(self, done: float | None) -> Estimate | None:
        """Estimate the time left of the call.

        Args:
            done: the part of the present stage that is done, 0 to 1; None: not known.

        Returns:
            The estimate; None where the number of epochs is not known, or nothing tells how long
            one takes.
        """
        if self.last is None or self._epoch is None:
            return None
        later = max(self.last - self._epoch, 0)
        if self._finished:
            typical = self._typical()
            return Estimate(
                self._left_of_epoch(done, typical) + later * typical.whole,
                is_least=False,
            )
        return self._from_first_epoch(done, later)

    def _left_of_epoch(self, done: float | None, typical: _Epoch) -> float:
        """Return the seconds left of this epoch, where finished ones are known."""
        in_training = self._training is None
        stage = self._stage_took(done)
        if stage is None or done is None:
            return max(typical.whole - (time.monotonic() - self._epoch_began), 0.0)
        rest = typical.whole - typical.training if in_training else 0.0
        return stage * (1.0 - done) + rest

    def _from_first_epoch(self, done: float | None, later: int) -> Estimate | None:
        """Estimate from the stages of the first epoch."""
        stage = self._stage_took(done)
        if stage is None or done is None:
            return None
        left = stage * (1.0 - done)
        if self._training is None:
            return Estimate(left + later * stage, is_least=self._validates)
        if self._done_before is None:
            return None
        training = self._training / max(1.0 - self._done_before, 1e-9)
        return Estimate(left + later * (training + stage), is_least=False)

    def _stage_took(self, done: float | None) -> float | None:
        """Return the seconds that the whole present stage takes at its speed so far; None where
        nothing tells.
        """
        before = self._done_before if self._training is None else 0.0
        if done is None or before is None or done <= before:
            return None
        return (time.monotonic() - self._stage_began) / (done - before)

    def _typical(self) -> _Epoch:
        """Return the mean of the finished epochs."""
        counted = self._finished[1:] or self._finished
        number = len(counted)
        training = sum(epoch.training for epoch in counted) / number
        return _Epoch(training, sum(epoch.whole for epoch in counted) / number)
