"""What is said of a run in which nothing stood out, and on what figures that rests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.step_times.phases import DATA, EXCHANGE
from ddpkit.step_times.verdicts.wording import duration, percent

if TYPE_CHECKING:
    from ddpkit.step_times.verdicts.history import Stretch


def words_of_no_verdict(
    seconds: float,
    step: float,
    data: float,
    exchange: float | None = None,
    busy: str = "",
) -> str:
    """Return the sentences that stand where a verdict would.

    Args:
        seconds: of the training that were looked at.
        step: seconds of a typical step.
        data: seconds of it in which a rank waits for its batch.
        exchange: seconds of it in which a rank waits for the others; None: there are no others.
        busy: a sentence about a busy machine, if it is one.

    Example:
        >>> words_of_no_verdict(42.0, 0.1, 0.003).partition(". ")
        ('No verdict: nothing stood out in 42 s of training', '. ',
         'A step took 100 ms; 3 % of it waited for data.')
    """
    waits = f"{percent(data / max(step, 1e-9))} of it waited for data"
    if exchange is not None:
        waits += f", {percent(exchange / max(step, 1e-9))} for the other ranks"
    if busy:
        busy = f" {busy} That hides a rank that is a little late."
    return (
        f"No verdict: nothing stood out in {seconds:.0f} s of training. A step took "
        f"{duration(step)}; {waits}.{busy}"
    )


class FiguresOfRun:
    """Sums over the stretches of a run, of which the sentences are made.

    Ranks: local.
    """

    def __init__(self) -> None:
        self.stretches = 0
        self._seconds = 0.0
        self._windows = 0
        self._step = 0.0
        self._data = 0.0
        self._exchange = 0.0
        self._is_alone = True
        self._busy = ""

    def note(self, stretch: Stretch) -> None:
        """Take in a stretch; each counts by its windows."""
        windows = stretch.windows
        self.stretches += 1
        self._seconds += stretch.seconds
        self._windows += windows
        self._step += windows * stretch.step
        self._data += windows * float(stretch.of_phase(DATA).mean())
        self._exchange += windows * float(stretch.of_phase(EXCHANGE).mean())
        self._is_alone = stretch.last.world_size == 1
        self._busy = "" if self._is_alone else stretch.busy_words(0)

    def words(self) -> str:
        """Return the sentences; there was a stretch."""
        return words_of_no_verdict(
            self._seconds,
            self._step / self._windows,
            self._data / self._windows,
            None if self._is_alone else self._exchange / self._windows,
            self._busy,
        )
