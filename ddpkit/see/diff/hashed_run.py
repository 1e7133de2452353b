"""The records of hashes that a run has left, and what it ran on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.object_store import is_url
from ddpkit.parts import CHAIN_VERSION, chained
from ddpkit.see.report.records import Record, Unread, read_records
from ddpkit.see.report.run_files import RunFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

NO_HASHES = "{!r} has no record of hashes: {}. {}"
NOT_ASKED = "the run was started without --hash_every"
TOO_RARE = "the run was started with --hash_every={}, and has made fewer optimizer steps"
NOT_BEGUN = "no training has begun in it"
RUN_AGAIN = "Run it with --hash_every=1, or with the N of the other run."
NOT_WRITTEN = (
    "{!r} has an event {!r} that ddpkit has not written: {}. Without its line the rest is compared."
)
UNREAD = "{} of its log cannot be read, and {} left out"
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
#: Of what kind fields of events are, where they are there. More is not read.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "hash": {
        "step": int,
        "version": int,
        "previous": str,
        "chain": str,
        "modules": dict,
        "labels": dict,
    },
    "fit": {
        "options": dict,
        "world_size": int,
        "grad_accumulation_factor": int,
        "optimizer_step": int,
        "resumed_from": dict | None,
    },
    "start": {
        "options": dict,
        "environment": dict | None,
        "yaml": dict | None,
        "script": dict | None,
        "overrides": dict | None,
    },
}


@dataclass(frozen=True, eq=False)  # the same call, and not an equal one
class Call:
    """A call of ``fit``.

    Attributes:
        before: optimizer steps that the run had made before it.
        start: the event of its start; empty without one.
        fit: its own event; likewise.

    Ranks: local.

    Example:
        >>> Call().before
        0
    """

    before: int = 0
    start: Record = field(default_factory=dict)
    fit: Record = field(default_factory=dict)

    def after(self, calls: Iterable[Call]) -> tuple[Call, ...]:
        """Return the calls whose steps still count once this one has begun.

        Args:
            calls: before it. One that had gone further than where this one goes on counts up to
                there.
        """
        counting = [call for call in calls if call.before < self.before]
        return (*counting, self)


@dataclass
class HashedRun:
    """The records of hashes of a run.

    Attributes:
        label: of the run, in words.
        steps: the last record of each optimizer step that has one.
        start: the event of its last start; empty without one.
        fit: the event of its last call of ``fit``; likewise.
        calls: by step of a record: the calls of ``fit`` that have made the steps up to it.
        checkpoints: the directory of each, by the optimizer step at which it was saved; that of
            another run, too, from which this one has gone on.
        begins_anew: whether its first call of ``fit`` went on from nothing.
        problems: what does not fit in its records, in words.
        notes: what else is said of it.
        folder: where it is now; None: not known.

    Ranks: local.

    Example:
        >>> HashedRun("results/1").steps
        {}
    """

    label: str
    steps: dict[int, Record] = field(default_factory=dict)
    start: Record = field(default_factory=dict)
    fit: Record = field(default_factory=dict)
    calls: dict[int, tuple[Call, ...]] = field(default_factory=dict)
    checkpoints: dict[int, str] = field(default_factory=dict)
    begins_anew: bool = True
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None
    _chains: set[str] = field(default_factory=set)
    _calls: tuple[Call, ...] = ()  # as far as their steps still count

    def add(self, record: Record) -> None:
        """Take in an event; one of another kind is left out.

        Args:
            record: of the run's log, in their order.
        """
        kind = record["event"]
        _require_kinds(record, KINDS.get(kind, {}))
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
        call = Call(
            record.get("optimizer_step", 0),
            self.start,
            record,
        )
        self._calls = call.after(self._calls)

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
        self.calls[step] = self._calls or (Call(0, self.start),)

    def recorded_at(self, step: int) -> int:
        """Return the first step with a record from one on; the last one with a record where the run
        has ended before.
        """
        return min((other for other in self.steps if other >= step), default=max(self.steps))

    def calls_of_steps(self, after: int, last: int) -> list[Call]:
        """Return the calls of ``fit`` that have made some steps, in their order.

        Args:
            after: the optimizer step before them.
            last: of them.
        """
        calls = self.calls[self.recorded_at(last)]
        begun = [call for call in calls if call.before < last] or [calls[0]]
        ends = [*(call.before for call in begun[1:]), last]
        return [call for call, end in zip(begun, ends, strict=True) if end > after]

    def checkpoints_up_to(self, step: int) -> Iterator[tuple[int, Path]]:
        """Yield the checkpoints that are still there of a step and of those before it, the newest
        first: the optimizer step at which each was saved, and its directory.

        Args:
            step: number of an optimizer step.
        """
        for saved_at in sorted(self.checkpoints, reverse=True):
            if saved_at > step:
                continue
            folder = self._directory(self.checkpoints[saved_at])
            if folder is not None:
                yield saved_at, folder

    def _directory(self, path: str) -> Path | None:
        """Return where a checkpoint is: where it was saved, or in the run's folder if that was
        moved; None: it is no more.
        """
        if not is_url(path) and Path(path).is_dir():
            return Path(path)
        if self.folder is None:
            return None
        # The folder may have been copied from another machine, or down from a store.
        name = path.rstrip("/").rpartition("/")[2]
        found = sorted(self.folder.glob(f"**/{name}"))
        return found[0] if found else None


def _require_kinds(record: Record, kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if name in record and not isinstance(record[name], kind):
            raise TypeError(f"{name} is {record[name]!r}")


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
    run = HashedRun(files.label, folder=files.folder)
    unread = Unread()
    for record in read_records(files.metrics, unread):
        try:
            run.add(record)
        except (KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                NOT_WRITTEN.format(
                    str(files.metrics),
                    record["event"],
                    reason,
                )
            ) from error
    if unread.lines:
        is_one = unread.lines == 1
        words = ("1 line", "is") if is_one else (f"{unread.lines} lines", "are")
        run.notes.append(UNREAD.format(*words))
    if not run.steps:
        raise ConfigError(NO_HASHES.format(str(files.metrics), _why_none(run), RUN_AGAIN))
    return run


def _why_none(run: HashedRun) -> str:
    """Say why a run has no records."""
    if not run.fit:
        return NOT_BEGUN
    every = run.fit.get("options", {}).get("hash_every")
    return TOO_RARE.format(every) if every else NOT_ASKED
