"""A learning-rate schedule that steps with a run, and is saved and resumed with it."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


logger = get_logger(__name__)

NO_STEP_BEFORE = r"Detected call of `lr_scheduler\.step\(\)` before"  # torch's warning


class Schedule:
    """Steps a learning-rate scheduler, and saves its state in checkpoints.

    Args:
        scheduler: torch's, or an object with ``step``, ``state_dict`` and ``load_state_dict``.
        optimizer: the scheduler's.
        every: ``"step"`` or ``"epoch"``.
        total_steps: how many steps it was made for; None where that is not known.
        make: makes the scheduler for another number of steps; None: that number was not asked for.

    Attributes:
        stepped_at: the optimizer step after which the last epoch's step was made.
        keeps_own: whether it stays as the script has made it when a state is loaded; it then goes
            on by :meth:`go_on_as_made`.

    Ranks: local; alike on every rank.

    State: the scheduler's state, ``every``, ``total_steps`` and ``stepped_at``.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizer: Optimizer,
        every: str,
        total_steps: int | None,
        make: Callable[[int | None], Any] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizer = optimizer
        self.every = every
        self.total_steps = total_steps
        self.stepped_at = 0
        self.keeps_own = False
        self._make = make
        self._passed_over: Mapping[str, Any] = {}

    def __str__(self) -> str:
        """Say it in one line."""
        total = self.total_steps or "an unknown number"
        return f"{type(self.scheduler).__name__}, after each {self.every} (of {total})"

    @property
    def follows_loss(self) -> bool:
        """Whether each step needs the valid loss."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def after_step(self, stepped: Iterable[Optimizer]) -> None:
        """Step after an optimizer step, if that is when, and if the scheduler's own optimizer has
        stepped.

        Args:
            stepped: the optimizers that have.
        """
        if self.every == "step" and any(optimizer is self.optimizer for optimizer in stepped):
            self._step()

    def after_stage(
        self,
        stage: Stage,
        loss: float,
        optimizer_step: int,
    ) -> None:
        """Step after an epoch, if that is when: after training, or after validation where its loss
        is needed.

        An epoch counts once, also where a resumed run ends it again; one without an optimizer step
        does not count.

        Args:
            stage: that has ended.
            loss: its mean loss.
            optimizer_step: optimizer steps so far.
        """
        if self.every != "epoch" or stage is not (
            Stage.VALID if self.follows_loss else Stage.TRAIN
        ):
            return
        if optimizer_step != self.stepped_at:
            self.stepped_at = optimizer_step
            with warnings.catch_warnings():
                # An epoch that a resumed run ends without a step had its steps before: torch looks
                # at this process alone.
                warnings.filterwarnings("ignore", NO_STEP_BEFORE)
                self._step(*([loss] if self.follows_loss else []))

    def _step(self, *loss: float) -> None:
        try:
            self.scheduler.step(*loss)
        except ValueError as error:
            made = (
                ""
                if self._make is None
                else (f" was made for {_count(self.total_steps, self.every)} and")
            )
            raise ConfigError(
                f"{type(self.scheduler).__name__}{made} cannot go on: {error}. Train no longer "
                "than that, or use a schedule without an end."
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, ``every``, ``total_steps`` and ``stepped_at``."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "every": self.every,
            "total_steps": self.total_steps,
            "stepped_at": self.stepped_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with the length that the schedule had there; say so where the script
        has another.

        A function may have put the number of steps where no state has it. So it is called once
        more, with the number that it was called with when the checkpoint's run began.
        """
        if self.keeps_own:
            self._passed_over = state
            return
        total = state["total_steps"]
        every = state.get("every", self.every)
        has_length = self._make is not None
        if every != self.every or (has_length and total != self.total_steps):
            self._tell_length(total, every, has_length=has_length)
        if self._make is not None and total != self.total_steps:
            with _settings_kept(self.optimizer):
                self.scheduler = self._make(total)
        own = self.scheduler.state_dict()
        self.scheduler.load_state_dict(state["scheduler"])
        self._tell_settings(own, state["scheduler"])
        self.every = every
        self.total_steps = total
        self.stepped_at = state["stepped_at"]

    def go_on_as_made(self, made: int, optimizer_step: int) -> int:
        """Make the steps that the run has behind it, from the begin, as if it had always had this
        schedule.

        One that follows the loss begins anew: losses of the past are not known.

        Args:
            made: steps of the schedule, if a state that was passed over does not say it.
            optimizer_step: of the run.

        Returns:
            How many steps.

        Raises:
            ConfigError: the schedule ends before.
        """
        state, self._passed_over = self._passed_over, {}
        saved = state.get("scheduler")
        if state.get("every") == self.every and isinstance(saved, dict):
            made = saved.get("last_epoch", made)
        self.stepped_at = state.get("stepped_at", optimizer_step)
        if self.follows_loss:
            return 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NO_STEP_BEFORE)
            for _ in range(made):
                self._step()
        return made

    def _tell_length(
        self,
        total: int | None,
        every: str,
        *,
        has_length: bool,
    ) -> None:
        """Say that the schedule keeps its length, or the unit that it counts in."""
        name = type(self.scheduler).__name__
        before = f"{every}s"
        now = f"{self.every}s"
        if has_length:
            before = _count(total, every)
            now = _count(self.total_steps, self.every)
        logger.warning(KEEPS_LENGTH, name, before, now)

    def _tell_settings(self, own: Any, saved: Any) -> None:
        """Say which settings of the script have no effect, because a state has them, too."""
        if not (isinstance(own, dict) and isinstance(saved, dict)):
            return
        settings = inspect.signature(type(self.scheduler)).parameters.keys() - {"last_epoch"}
        names = sorted(settings & own.keys() & saved.keys())
        plain = [
            name
            for name in names
            if isinstance(own[name], (bool, int, float, str, list, tuple, type(None)))
        ]
        changed = [
            f"{name} {saved[name]} -> {own[name]}" for name in plain if saved[name] != own[name]
        ]
        if changed:
            logger.warning(
                KEEPS_SETTINGS,
                type(self.scheduler).__name__,
                ", ".join(changed),
            )


KEEPS_LENGTH = (
    "The schedule %s was made for %s, and this run has %s. It goes on as it was made. For a "
    "schedule of another length give --resume_with_new=schedule."
)
KEEPS_SETTINGS = (
    "The schedule %s has other settings than those with which the checkpoint's run began (%s), "
    "without effect: it goes on with the checkpoint's. --resume_with_new=schedule takes the "
    "script's."
)


def _count(number: int | None, what: str) -> str:
    """Return a number of steps or epochs in words."""
    return (
        f"an unknown number of {what}s"
        if number is None
        else (f"{number} {what}{'' if number == 1 else 's'}")
    )


@contextlib.contextmanager
def _settings_kept(optimizer: Optimizer) -> Iterator[None]:
    """Return a context after which an optimizer has the settings that it had: a new scheduler sets
    the first rates.
    """
    before = [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
        }
        for group in (
            {name: group[name] for name in group if name != "params"}
            for group in optimizer.param_groups
        )
    ]
    yield
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        for name, value in settings.items():
            if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                group[name].copy_(value)  # a step may have been compiled with this very tensor
            else:
                group[name] = value
