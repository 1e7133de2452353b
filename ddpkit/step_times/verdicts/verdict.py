"""One finding about a run: what, by how much, what to try."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One finding about a run.

    Attributes:
        kind: its name, such as ``"late_rank"``.
        what: a sentence that says what was found.
        how_much: a sentence with the measured figures.
        advice: a sentence or more that say what to try; ``"try"`` in the event.
        rank: of whom it is; None: of all alike.
        host: name of that rank's machine; None where that is not known.
        phase: of the step; None where it is about more than one phase.
        seconds: lost in a step; None where there is no such figure.
        share: of a step, 0 to 1; None likewise.

    Example:
        >>> Verdict(kind="slow_data", what="Slow.", how_much="By half.", advice="Hurry.").line()
        'Slow. By half. Hurry.'
    """

    kind: str
    what: str
    how_much: str
    advice: str
    rank: int | None = None
    host: str | None = None
    phase: str | None = None
    seconds: float | None = None
    share: float | None = None

    @property
    def subject(self) -> tuple[str, int | None, str | None]:
        """What it is about: a finding with the same subject says nothing new."""
        return self.kind, self.rank, self.phase

    def line(self) -> str:
        """Return it as a line of the log."""
        return f"{self.what} {self.how_much} {self.advice}"

    def event(self) -> dict[str, object]:
        """Return the fields of its event in the run's log, without those that are not known."""
        fields: dict[str, object] = {
            "kind": self.kind,
            "rank": self.rank,
            "host": self.host,
            "phase": self.phase,
            "seconds": self.seconds,
            "share": self.share,
            "what": self.what,
            "how_much": self.how_much,
            "try": self.advice,
        }
        return {name: value for name, value in fields.items() if value is not None}
