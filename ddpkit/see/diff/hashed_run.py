"""The records of hashes that a run has left, and what it ran on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpkit.errors import ConfigError
from ddpkit.parts import CHAIN_VERSION, chained
from ddpkit.see.report.records import Record, Unread, read_records
from ddpkit.see.report.run_files import RunFiles

NO_HASHES = (
    "RUN={!r} has no record of hashes: it was run without --hash_every. Run it with "
    "--hash_every=1, or with the N of the other run."
)
CHANGED = "the record of step {} does not fit to its own chain: it was changed after the run"
NEWER = (
    "the record of step {} was written by a newer version of ddpkit, and its chain cannot be "
    "checked: update ddpkit here"
)
MISSING = "the record before that of step {} is missing"
OTHERWISE = "step {} was recorded twice, with other {}: a restart has not repeated it to the bit"
#: Of a record what is compared, in the order in which a step comes to it.
FIELDS = (
    "samples",
    "loss",
    "gradients",
    "settings",
    "optimizer",
    "weights",
    "average",
    "schedule",
)
#: What records have only from a version on; those without a version are of 1.
SINCE = {"average": 2, "schedule": 2}


@dataclass
class HashedRun:
    """The records of hashes of a run.

    Attributes:
        label: of the run, in words.
        steps: the last record of each optimizer step that has one.
        start: the event of its last start; empty without one.
        fit: the event of its last call of ``fit``; likewise.
        checkpoints: the directory of each, by the optimizer step at which it was saved; that of
            another run, too, from which this one has gone on.
        begins_anew: whether its first call of ``fit`` went on from nothing.
        problems: what does not fit in its records, in words.

    Ranks: local.

    Example:
        >>> HashedRun("results/1").steps
        {}
    """

    label: str
    steps: dict[int, Record] = field(default_factory=dict)
    start: Record = field(default_factory=dict)
    fit: Record = field(default_factory=dict)
    checkpoints: dict[int, str] = field(default_factory=dict)
    begins_anew: bool = True
    problems: list[str] = field(default_factory=list)
    _chains: set[str] = field(default_factory=set)

    def add(self, record: Record) -> None:
        """Take in an event; one of another kind is left out.

        Args:
            record: of the run's log, in their order.
        """
        kind = record["event"]
        if kind == "start":
            self.start = record
        elif kind == "fit":
            self._add_fit(record)
        elif kind == "checkpoint":
            step = record.get("optimizer_step")
            if isinstance(step, int):
                self.checkpoints[step] = str(record.get("path"))
        elif kind == "hash":
            self._add_hash(record)

    def _add_fit(self, record: Record) -> None:
        before = record.get("resumed_from")
        if before:
            self.checkpoints.setdefault(before["optimizer_step"], str(before["checkpoint"]))
            if not self.fit:
                self.begins_anew = False
        self.fit = record

    def _add_hash(self, record: Record) -> None:
        step = record["step"]
        previous = record["previous"]
        if version_of(record) > CHAIN_VERSION:
            self.problems.append(NEWER.format(step))
        elif chained(previous, record) != record["chain"]:
            self.problems.append(CHANGED.format(step))
        elif previous and previous not in self._chains:
            self.problems.append(MISSING.format(step))
        self._chains.add(record["chain"])
        before = self.steps.get(step)
        if before is not None:
            differ = differing(before, record)
            if differ:
                self.problems.append(OTHERWISE.format(step, " and ".join(differ)))
        self.steps[step] = record

    def checkpoint_before(self, step: int) -> tuple[int, str] | None:
        """Return the newest checkpoint from which a run makes a step again: the optimizer step at
        which it was saved, and its directory; None where that is the beginning.

        Args:
            step: number of an optimizer step.
        """
        earlier = [number for number in self.checkpoints if number < step]
        if not earlier:
            return None
        newest = max(earlier)
        return newest, self.checkpoints[newest]


def version_of(record: Record) -> int:
    """Return the version of a record of hashes.

    Ranks: local.

    Example:
        >>> version_of({"step": 1})
        1
    """
    version: int = record.get("version", 1)
    return version


def not_compared(one: Record, other: Record) -> list[str]:
    """Return the fields that one of two records is too old to have, and the other has.

    Ranks: local.

    Example:
        >>> not_compared({"step": 1}, {"step": 1, "version": 2, "average": "a", "schedule": None})
        ['average']
    """
    older = min(version_of(one), version_of(other))
    return [
        name
        for name, since in SINCE.items()
        if older < since and (one.get(name) or other.get(name)) is not None
    ]


def differing(one: Record, other: Record) -> list[str]:
    """Return which fields of two records of one step differ, in the order in which a step comes to
    them. What one of them is too old to have is not compared.

    Ranks: local.

    Example:
        >>> differing({"loss": 0.5, "weights": "a"}, {"loss": 0.5, "weights": "b"})
        ['weights']
    """
    left_out = not_compared(one, other)
    return [name for name in FIELDS if name not in left_out and one.get(name) != other.get(name)]


def read_hashes(files: RunFiles) -> HashedRun:
    """Read the records of hashes of a run.

    Args:
        files: of the run.

    Raises:
        ConfigError: the log cannot be read, is none, or has no such records.

    Ranks: local.
    """
    run = HashedRun(files.label)
    for record in read_records(files.metrics, Unread()):
        try:
            run.add(record)
        except (KeyError, TypeError) as error:
            kind: Any = record["event"]
            raise ConfigError(
                f"{str(files.metrics)!r} has an event {kind!r} that ddpkit has not written: "
                f"{type(error).__name__}: {error}."
            ) from error
    if not run.steps:
        raise ConfigError(NO_HASHES.format(str(files.folder)))
    return run
