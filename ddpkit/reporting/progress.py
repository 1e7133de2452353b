"""The progress bar: main process only, on stderr, refreshed by time; a log line now and then without a terminal.

The only module that imports tqdm.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from typing_extensions import Self

logger = get_logger(__name__)

LINE_SECONDS = 30.0
# tqdm's own, less its rate in batches: the rate that is shown is samples/s, and all of it fits into 80 columns.
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class ProgressBar:
    """Shows how far a stage has come; told so about once a second, never once a step.

    Args:
        label: such as ``"epoch 3 train"``.
        total: steps of the stage; None when unknown.
        initial: steps done already.
        enable: False shows nothing at all.
        colour: tqdm's name of a colour, or None.

    Attributes:
        partial: the numbers told so far are of this process's part only: the loss is not shown.

    Ranks: main only; make it with ``enable=False`` on the others.

    Example:
        >>> with ProgressBar("epoch 1 train", total=10, enable=False) as bar:
        ...     bar.show(5, loss=0.5, samples=40)
    """

    def __init__(
        self, label: str, total: int | None, *, initial: int = 0, enable: bool = True, colour: str | None = None
    ) -> None:
        self.label, self.total, self.initial = label, total, initial
        self.enable = enable
        self.partial = False
        self._started = self._last_line = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if enable and sys.stderr is not None and sys.stderr.isatty():
            columns, rows = _terminal_size()
            self._bar = tqdm(
                total=total,
                initial=initial,
                desc=label,
                colour=colour,
                dynamic_ncols=bool(columns and rows),
                ncols=columns or 80,  # a terminal that does not know its size says 0, and tqdm would show nothing
                nrows=rows or 24,
                bar_format=BAR if total else None,
                unit="batch",
                file=sys.stderr,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def show(self, step: int, loss: float | None = None, samples: float = 0.0) -> None:
        """Show the state of the stage.

        Args:
            step: steps done.
            loss: mean over all ranks so far; None leaves it out.
            samples: samples seen since the bar began, over all ranks.
        """
        if not self.enable:
            return
        loss = None if self.partial else loss
        now = time.monotonic()
        rate = samples / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            facts = {} if loss is None else {"loss": f"{loss:.4g}"}
            self._bar.set_postfix({**facts, "samples/s": tqdm.format_sizeof(rate)}, refresh=False)
            self._bar.refresh()
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            logger.info("%s", self._line(step, loss, rate, now))

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, step: int, loss: float | None, rate: float, now: float) -> str:
        parts = [f"{self.label}: batch {step}" + (f"/{self.total}" if self.total else "")]
        if loss is not None:
            parts.append(f"loss {loss:.4g}")
        parts.append(f"{tqdm.format_sizeof(rate)} samples/s")
        done = step - self.initial
        if self.total and done > 0:
            left = (now - self._started) / done * (self.total - step)
            parts.append(f"{tqdm.format_interval(left)} left")
        return ", ".join(parts)


def _terminal_size() -> tuple[int, int]:
    """Return columns and rows of the terminal; zeros where it does not know them."""
    try:
        return os.get_terminal_size(sys.stderr.fileno())
    except OSError:  # something that calls itself a terminal without being a file
        return 0, 0
