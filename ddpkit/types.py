"""The few types that everything shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FitResult", "Stage", "Stateful"]


class Stage(Enum):
    """What the loop is doing: handed to every hook.

    Example:
        >>> Stage.TRAIN.name, Stage.VALID.value, Stage.TEST.value
        ('TRAIN', 2, 3)
    """

    TRAIN = auto()
    VALID = auto()
    TEST = auto()


@dataclass(frozen=True, repr=False)
class FitResult:
    """What a call of ``fit`` did; the same on every rank.

    A run that is asked to stop, or that fails, raises and returns none.

    Attributes:
        reason: why it ended. ``"epochs"``: the epoch counter had no more; ``"early_stop"``: it
            stopped because its metric did not improve (``should_stop``);
            ``"optimizer_step_limit"``; ``"debug"``: ``debug_epochs`` are over. Without any
            training: ``"done_before"``: a checkpoint says that the epochs, or this call, were over
            already; ``"test_only"``.
        epochs: that ended in this call; not those before a restart. With ``"optimizer_step_limit"``
            the last may be unfinished: a run with a larger limit goes on inside of it.
        optimizer_steps: updates since the run began, those before a restart and of earlier calls
            included.
        train_loss: mean over the last epoch's training, over all ranks; None if none ended in this
            call.
        valid_loss: mean over the last validation, over all ranks; None if there was none in this
            call.
        logged: what the recipe has logged with ``self.log`` in the last epoch, by stage
            (``"train"``, ``"valid"``) and name, over all ranks; may be empty.
        newest_checkpoint: the checkpoint that was saved last; None without any. Of the best,
            ``checkpointer.find_checkpoint(min_key=...)`` tells. The path is valid on the main
            process.

    Ranks: local.

    Example:
        >>> FitResult("epochs", epochs=3, optimizer_steps=12, train_loss=0.25)
        FitResult(reason='epochs', epochs=3, optimizer_steps=12, train_loss=0.25)
    """

    reason: str
    epochs: int = 0
    optimizer_steps: int = 0
    train_loss: float | None = None
    valid_loss: float | None = None
    newest_checkpoint: Path | None = None
    logged: dict[str, dict[str, float]] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        """Leave out what there is not."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        shown = [
            f"{name}={(str(value) if 'checkpoint' in name else value)!r}"
            for name, value in given.items()
            if value != {}
        ]
        return f"FitResult({', '.join(shown)})"


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``: it can be checkpointed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain containers, numbers, strings and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state that :meth:`state_dict` returned."""
