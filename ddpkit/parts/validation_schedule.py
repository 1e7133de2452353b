"""When a training validates: every so many optimizer steps or epochs, or before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.parts.part import Part

if TYPE_CHECKING:
    from collections.abc import Mapping


class ValidationSchedule(Part):
    """Has ``fit`` validate every so many optimizer steps, every so many epochs, or before the first
    step.

    Only what is given is done: with ``every_steps`` alone the end of an epoch has no validation. A
    validation between two steps leaves the training as it was.

    Args:
        every_steps: validate at each multiple of so many optimizer steps of the run.
        every_epochs: validate after each epoch whose number is a multiple of this. None: after
            none, if ``every_steps`` is given; else after each.
        before_first: validate before the first optimizer step of the run.
        batches: how many batches of each set and process a validation between two steps has, and
            that before the first step: the first ones. None: all. The validation that
            ``every_epochs`` asks for has all.

    Raises:
        ConfigError: an argument cannot be used, or none says when to validate.

    Ranks: all; each counts the same steps.

    State: none. A checkpoint holds the optimizer step of the last validation in any case.

    Example:
        >>> ValidationSchedule(every_steps=500, batches=20).every_steps
        500
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        before_first: bool = False,
        batches: int | None = None,
    ) -> None:
        self.every_steps = _count("every_steps", every_steps)
        self.every_epochs = _count("every_epochs", every_epochs)
        self.batches = _count("batches", batches)
        if not isinstance(before_first, bool):
            raise ConfigError(
                f"ValidationSchedule: before_first={before_first!r} must be True or False."
            )
        self.before_first = before_first
        if every_steps is None and every_epochs is None and not before_first:
            raise ConfigError(
                "ValidationSchedule was not told when to validate. Give every_steps, every_epochs "
                "or before_first=True; without the part there is a validation after each epoch."
            )
        if batches is not None and every_steps is None and not before_first:
            raise ConfigError(
                f"ValidationSchedule: batches={batches!r} has no effect: it is for validations "
                "between two steps, and the validation after an epoch has all batches. Give "
                "every_steps or before_first=True, too, or leave batches out."
            )

    def start_rows(self, brain: Any) -> Mapping[str, str]:
        """Return one row: when the run validates."""
        part = "" if self.batches is None else f" on {self.batches} batches of each process"
        times = []
        if self.before_first:
            times.append(f"before the first step{part}")
        if self.every_steps is not None:
            times.append(f"every {self.every_steps} optimizer steps{part}")
        if self.every_epochs is not None:
            times.append(f"after every {self.every_epochs} epochs")
        elif self.every_steps is None:
            times.append("after each epoch")
        return {"validates": ", ".join(times)}

    def is_validation_due(self, brain: Any, moment: str) -> int | None:
        """Say whether a multiple has come since the last validation."""
        if moment == "start":
            return self._on_part() if self.before_first else None
        if moment == "step":
            return self._on_part() if self._has_come_to_multiple(brain) else None
        if self.every_epochs is not None:
            return bool(brain.progress.epoch % self.every_epochs == 0)
        return None if self.every_steps is None else False

    def _on_part(self) -> int:
        return True if self.batches is None else self.batches

    def _has_come_to_multiple(self, brain: Any) -> bool:
        every = self.every_steps
        if every is None:
            return False
        progress = brain.progress
        last = max(progress.validated_at, 0) // every
        # On a GPU the last step may not be counted yet, and to ask costs a wait.
        if (progress.optimizer_step + (progress.pending is not None)) // every <= last:
            return False
        return bool(brain.optimizer_step // every > last)


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"ValidationSchedule: {name}={value!r} must be a whole number >= 1, or left out."
        )
    return value
