"""Ends a training that does not get better."""

from __future__ import annotations

import contextlib
import difflib
import math
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.parts.part import Part
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = get_logger(__name__)

MODES = ("min", "max")


class EarlyStopping(Part):
    """Ends a training when a value has not become better for some validations in a row.

    A value is better if it is smaller (``mode="min"``) or larger (``"max"``) than the best one so
    far by more than ``min_change``. One that is not finite never is. One that equals the best is no
    better; but its epoch is then the best one, as the newest of equal checkpoints is.

    A run that has stopped and is started again says so, and trains nothing; with more ``patience``
    it goes on. A further call of ``fit`` in the same script is another training, in which all is
    counted anew.

    Args:
        metric: the name of a value that the recipe logs in the validation, as in
            ``self.log("accuracy", ...)``; ``"loss"``: the mean loss of the validation.
        mode: ``"min"`` or ``"max"``.
        patience: how many validations in a row may be no better, at least 1.
        min_change: how much better counts, in the unit of the value.
        warmup: validations at the start that are not looked at.

    Attributes:
        best: the best value so far; None before the first.
        best_epoch: the last epoch that had it; 0 before the first.
        waited: validations since the value has become better.

    Raises:
        ConfigError: an argument cannot be used; or, in the first validation, the recipe has logged
            nothing under that name.

    Ranks: all; each sees the same means.

    State: the best value, its epoch, and how many validations there have been since.

    Example:
        >>> EarlyStopping("accuracy", mode="max", patience=5).waited
        0
    """

    def __init__(
        self,
        metric: str = "loss",
        mode: str = "min",
        patience: int = 3,
        min_change: float = 0.0,
        warmup: int = 0,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(
                f"EarlyStopping: mode={mode!r} must be 'min', for a value that gets smaller, or "
                "'max', for one that gets larger."
            )
        self.metric = _name(metric)
        self.mode = mode
        self.patience = _whole("patience", patience, least=1)
        self.min_change = _least_change(min_change)
        self.warmup = _whole("warmup", warmup, least=0)
        self._is_of_earlier_call = False  # whether what was counted is of a call that is over
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.best: float | None = None
        self.best_epoch = 0
        self.waited = 0
        self.seen = 0

    @contextlib.contextmanager
    def around_fit(self, brain: Any) -> Iterator[None]:
        """Return a context after which a further call of ``fit`` counts anew, unless it goes on
        from a checkpoint.
        """
        try:
            yield
        finally:
            self._is_of_earlier_call = True

    def start_rows(self, brain: Any) -> Mapping[str, str]:
        """Return one row: when the training ends."""
        best = (
            "" if self.best is None else f"; best so far {self.best:g} in epoch {self.best_epoch}"
        )
        row = (
            f"after {self.patience} validations in which {self.metric} is no "
            f"{'smaller' if self.mode == 'min' else 'larger'}{best}"
        )
        return {"stops": row}

    def on_fit_start(self, brain: Any) -> None:
        """Count anew in a further call; end at once where an earlier start of this one has stopped
        for good.
        """
        if self._is_of_earlier_call:
            self._begin_anew()
        self._is_of_earlier_call = False
        if self._is_exhausted():
            brain.stop_training(
                f"{self._why()} before this start. Give more patience than {self.patience} to go on"
            )

    def on_stage_end(
        self,
        brain: Any,
        stage: Stage,
        stage_loss: float,
        epoch: int | None,
    ) -> None:
        """Look at the value of a validation of the training."""
        if stage is not Stage.VALID or epoch is None:
            return
        self.seen += 1
        value = self._value(brain.logged, stage_loss)
        if self.seen <= self.warmup:
            return
        if self._is_better(value):
            self.best = value
            self.best_epoch = epoch
            self.waited = 0
            return
        if value == self.best:
            self.best_epoch = epoch
        self.waited += 1
        if self._is_exhausted():
            brain.stop_training(self._why())

    def _value(self, logged: Mapping[str, float], stage_loss: float) -> float:
        if self.metric == "loss" and "loss" not in logged:
            return stage_loss
        if self.metric not in logged:
            names = ", ".join(sorted(logged)) or "nothing"
            near = difflib.get_close_matches(self.metric, ["loss", *logged], n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"EarlyStopping: metric={self.metric!r} was not logged in the validation; it has "
                f"logged {names}.{meant} Call self.log({self.metric!r}, ...) for its batches, or "
                "give another metric; 'loss' is the loss of the validation."
            )
        return logged[self.metric]

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_change

    def _is_exhausted(self) -> bool:
        return self.waited >= self.patience

    def _why(self) -> str:
        best = "never was a finite number" if self.best is None else f"was {self.best:g}"
        return (
            f"{self.metric} has not become better in {self.waited} validations (its best "
            f"{best}{f', last in epoch {self.best_epoch}' if self.best_epoch else ''})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its epoch, and the validations since."""
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "waited": self.waited,
            "seen": self.seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them over."""
        self.best = state["best"]
        self.best_epoch = int(state["best_epoch"])
        self.waited = int(state["waited"])
        self.seen = int(state["seen"])
        self._is_of_earlier_call = False


def _whole(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"EarlyStopping: {name}={value!r} must be a whole number >= {least}.")
    return value


def _name(metric: Any) -> str:
    if not isinstance(metric, str) or not metric:
        raise ConfigError(
            f"EarlyStopping: metric={metric!r} is no name. Give the name of a value that the "
            "recipe logs in the validation, or 'loss'."
        )
    return metric


def _least_change(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value < math.inf:
        raise ConfigError(f"EarlyStopping: min_change={value!r} must be a number, 0 or more.")
    return float(value)
