"""What a progress bar shows in how many columns: it leaves out what matters least where not all
fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpkit.reporting.time_left import Estimate

LEAST_BAR = 5  # columns
SHOWN_WAIT = 0.1  # share of a step above which the wait for data is shown
_MEASURED_BAR = 10  # columns that tqdm gives a bar where it knows no width
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt}"
_COUNT = "{desc}: {n_fmt}/{total_fmt}"
_OPEN_END = "{desc}: {n_fmt} batches"
_TIMES = "{elapsed}<{remaining}"


class BarFacts(NamedTuple):
    """What a bar shows beside the batches, each in words; an empty one is left out.

    Attributes:
        loss: such as ``"0.25"``.
        rate: the learning rate.
        speed: samples per second.
        left: time left of the whole run.
        data_wait: how much of a step the loop waits for data.

    Example:
        >>> BarFacts(loss="0.5", rate="0.1").words("rate", "loss", "left")
        ['lr=0.1', 'loss=0.5']
    """

    loss: str = ""
    rate: str = ""
    speed: str = ""
    left: str = ""
    data_wait: str = ""

    def words(self, *names: str) -> list[str]:
        """Return the facts of these names that there are, as the bar shows them.

        Args:
            names: of attributes, in the order in which they are shown.
        """
        shown = {
            "loss": f"loss={self.loss}" if self.loss else "",
            "rate": f"lr={self.rate}" if self.rate else "",
            "speed": f"samples/s={self.speed}" if self.speed else "",
            "left": self.left,
            "data_wait": self.data_wait,
        }
        return [shown[name] for name in names if shown[name]]


def left_in_words(estimate: Estimate | None) -> str:
    """Return the time left of the whole run in words; nothing where there is no estimate.

    Args:
        estimate: or None.

    Example:
        >>> from ddpkit.reporting.time_left import Estimate
        >>> (
        ...     left_in_words(Estimate(3723.4, is_least=False)),
        ...     left_in_words(Estimate(65.0, is_least=True)),
        ... )
        ('run 1:02:03 left', 'run 01:05+ left')
    """
    if estimate is None:
        return ""
    return f"run {tqdm.format_interval(estimate.seconds)}{'+' if estimate.is_least else ''} left"


def wait_in_words(share: float) -> str:
    """Return how much of a step waits for data in words; nothing where it is little.

    Args:
        share: 0 to 1.

    Example:
        >>> wait_in_words(0.234), wait_in_words(SHOWN_WAIT)
        ('data wait 23 %', '')
    """
    return f"data wait {100 * share:.0f} %" if share > SHOWN_WAIT else ""


def fitting_format(facts: BarFacts, meter: Mapping[str, Any]) -> str:
    """Return a format for tqdm's line that fits into its columns.

    Args:
        facts: what to show, as far as it fits.
        meter: as tqdm's ``format_dict`` gives it, with the width of the terminal as ``ncols``; None
            or 0: any width.

    Returns:
        The format. Of a terminal that is too narrow for the name and the count, as much as fits, as
        plain text.

    Example:
        >>> meter = {"n": 3, "total": 9, "elapsed": 1.0, "prefix": "train", "initial": 0}
        >>> fitting_format(BarFacts(loss="0.5", rate="0.1"), {**meter, "ncols": 80})
        '{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, loss=0.5, lr=0.1]'
        >>> fitting_format(BarFacts(loss="0.5", rate="0.1"), {**meter, "ncols": 30})
        '{desc}: {n_fmt}/{total_fmt} [loss=0.5, lr=0.1]'
    """
    columns = meter.get("ncols")
    formats = list(_formats(facts, has_end=bool(meter.get("total"))))
    for shown in formats if columns else formats[:1]:
        if not columns or _columns_of(shown, meter) <= columns:
            return shown
    text = tqdm.format_meter(**_unlimited(formats[-1], meter))
    return str(text[:columns]).replace("{", "{{").replace("}", "}}")


def _formats(facts: BarFacts, *, has_end: bool) -> Iterator[str]:
    """Yield the formats, from all to the least."""
    start, times = (_BAR, _TIMES) if has_end else (_OPEN_END, "{elapsed}")
    yield _joined(start, [times, *facts.words("loss", "rate", "speed", "data_wait", "left")])
    if facts.data_wait:
        yield _joined(start, [times, *facts.words("loss", "rate", "speed", "left")])
    # The time of the run tells more than that of the stage.
    own_time = [] if facts.left else [times]
    yield _joined(start, [*own_time, *facts.words("left", "loss", "rate", "speed")])
    yield _joined(start, [*own_time, *facts.words("left", "loss", "rate")])
    shortest = _COUNT if has_end else _OPEN_END
    yield _joined(shortest, facts.words("left", "loss", "rate"))
    yield _joined(shortest, facts.words("left", "loss"))
    yield _joined(shortest, facts.words("loss"))
    yield shortest


def _joined(start: str, words: list[str]) -> str:
    return f"{start} [{', '.join(words)}]" if words else start


def _columns_of(shown: str, meter: Mapping[str, Any]) -> int:
    """Return the least number of columns that a format takes."""
    spare = _MEASURED_BAR - LEAST_BAR if "{bar}" in shown else 0
    return len(tqdm.format_meter(**_unlimited(shown, meter))) - spare


def _unlimited(shown: str, meter: Mapping[str, Any]) -> dict[str, Any]:
    return {**meter, "bar_format": shown, "ncols": None, "colour": None}
