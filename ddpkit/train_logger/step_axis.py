"""Where values stand on the x axis of a logger: at optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.reporting import Current, Stats, plain

if TYPE_CHECKING:
    from collections.abc import Mapping


class StepAxis:
    """The steps at which one logger writes.

    In the hooks of a stage these are the optimizer steps of the weights: in a test those of the
    checkpoint that was loaded. After them it is the last such step. In a script without a Brain it
    is the epoch, if the statistics have one.

    Ranks: local.

    Example:
        >>> StepAxis().step_of({"epoch": 3}), StepAxis().step_of({})
        (3, None)
    """

    def __init__(self) -> None:
        self._last: int | None = None

    def step_of(self, meta: Stats) -> int | None:
        """Return the step for statistics; None if nothing says it.

        Args:
            meta: what the statistics belong to.
        """
        step = Current.optimizer_step()
        if step is not None:
            self._last = step
        if self._last is not None:
            return self._last
        epoch = plain(meta.get("epoch"))
        return epoch if isinstance(epoch, int) else None


def flat(meta: Stats, stages: Mapping[str, Stats], separator: str) -> dict[str, Any]:
    """Return plain values by one name each, such as ``train_loss``.

    Args:
        meta: what they belong to; under its own names.
        stages: values by stage.
        separator: between a stage and a name.

    Ranks: local.

    Example:
        >>> flat({"epoch": 1}, {"train": {"loss": 0.5}}, "/")
        {'epoch': 1, 'train/loss': 0.5}
    """
    values = {
        f"{stage}{separator}{name}": value
        for stage, stats in stages.items()
        for name, value in stats.items()
    }
    return {str(name): plain(value) for name, value in {**meta, **values}.items()}
