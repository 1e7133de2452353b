"""What differs between two runs besides what they have computed: labels, options, files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpkit.options import NUMBERS, OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpkit.see.diff.hashed_run import HashedRun

#: What a difference means.
NO_EQUAL_BITS = "no equal bits can be expected"
OTHER_TRAINING = "it changes the numbers of a training"
MAY_MATTER = "it may matter"
SCRIPT = "SHA-256 of the script"
_NUMBERS = frozenset(
    option.name
    for option in OPTIONS
    if option.changes_numbers or (option.changes_numbers is None and option.group in NUMBERS)
)
_OF_START = ("python", "numpy", "ddpkit")
# They change no number of a step.
_NOT_TOLD = frozenset({"hash_every", "measure_steps", "noprogressbar", "debug_persistently"})
_FACTOR = "grad_accumulation_factor"
#: The key of a YAML that says where a run is, and not what it is.
_PLACE = "output_folder"


@dataclass(frozen=True)
class Circumstance:
    """Something that two runs have in different ways.

    Attributes:
        name: of the label, the option or the file.
        values: of either run.
        meaning: of the difference, in words.

    Ranks: local.
    """

    name: str
    values: tuple[Any, Any]
    meaning: str


def circumstances(
    one: HashedRun,
    other: HashedRun,
    steps: Iterable[int],
) -> list[Circumstance]:
    """Return what differs between two runs besides what they have computed; what matters most comes
    first.

    Args:
        one: of the runs.
        other: likewise.
        steps: optimizer steps that both have recorded, up to the first that differs.

    Ranks: local.
    """
    return [
        *_labels(one, other, steps),
        *_processes(one, other),
        *_options(one, other),
        *_overrides(one, other),
        *_files(one, other),
    ]


def unknown_circumstances(one: HashedRun, other: HashedRun) -> list[str]:
    """Return the events that the log of one of two runs lacks, whose contents are not compared.

    Args:
        one: of the runs.
        other: likewise.

    Ranks: local.
    """
    found = []
    if bool(one.fit) != bool(other.fit):
        found.append("fit")
    if bool(one.start) != bool(other.start):
        found.append("start")
    return found


def _differences(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    meaning: str,
    prefix: str = "",
) -> list[Circumstance]:
    found = []
    for name in sorted({*one, *other}):
        values = one.get(name), other.get(name)
        if values[0] != values[1]:
            found.append(Circumstance(f"{prefix}{name}", values, meaning))
    return found


def _labels(
    one: HashedRun,
    other: HashedRun,
    steps: Iterable[int],
) -> list[Circumstance]:
    """Return labels that differ in a step. A run may have gone on on another machine since."""
    found: dict[str, Circumstance] = {}
    for step in steps:
        records = one.steps[step], other.steps[step]
        ones, others = (record.get("labels", {}) for record in records)
        for row in _differences(ones, others, NO_EQUAL_BITS):
            found.setdefault(row.name, row)
    return list(found.values())


def _processes(one: HashedRun, other: HashedRun) -> list[Circumstance]:
    """Return the number of processes, unless both runs promise the same bits on any."""
    if not (one.fit and other.fit):
        return []
    numbers = one.fit.get("world_size"), other.fit.get("world_size")
    if numbers[0] == numbers[1] or (_has_same_bits(one) and _has_same_bits(other)):
        return []
    return [Circumstance("processes", numbers, NO_EQUAL_BITS)]


def _has_same_bits(run: HashedRun) -> bool:
    last = max(run.steps)
    return run.steps[last].get("same_bits") is True


def _options_of(run: HashedRun) -> dict[str, Any]:
    """Return the options of a run that are not their defaults."""
    found = dict(run.fit.get("options") or {})
    # Among the options it is that of a process, which may follow from their number.
    factor = run.fit.get(_FACTOR)
    if factor is None:
        return found
    found.pop(_FACTOR, None)
    if factor > 1:
        found[_FACTOR] = factor
    return found


def _options(one: HashedRun, other: HashedRun) -> list[Circumstance]:
    if not one.fit or not other.fit:
        return []
    found = []
    for difference in _differences(_options_of(one), _options_of(other), MAY_MATTER, "--"):
        name = difference.name.removeprefix("--")
        if name in _NOT_TOLD:
            continue
        meaning = OTHER_TRAINING if name in _NUMBERS else MAY_MATTER
        found.append(Circumstance(difference.name, difference.values, meaning))
    return sorted(found, key=lambda row: row.meaning != OTHER_TRAINING)


def _overrides(one: HashedRun, other: HashedRun) -> list[Circumstance]:
    """Return what either run has put in the place of values of its YAML, where that differs."""
    values = []
    for run in (one, other):
        given = run.start.get("overrides")
        if given is None:  # an earlier ddpkit has recorded none
            return []
        named = dict(given)
        named.pop(_PLACE, None)
        values.append(named)
    return _differences(values[0], values[1], MAY_MATTER, "--")


def _files(one: HashedRun, other: HashedRun) -> list[Circumstance]:
    """Return versions, the recipe's commit, its script and its YAML, where they differ."""
    if not one.start or not other.start:
        return []
    found = _differences(_facts(one), _facts(other), MAY_MATTER)
    if "script" in one.start and "script" in other.start:
        return found
    return [row for row in found if row.name != SCRIPT]  # likewise


def _facts(run: HashedRun) -> dict[str, Any]:
    environment = run.start.get("environment") or {}
    found = {}
    for name in _OF_START:
        found[name] = environment.get(name)
    git = environment.get("git") or {}
    found["git commit"] = git.get("commit")
    found["files changed since"] = git.get("dirty")
    yaml = run.start.get("yaml") or {}
    found["SHA-256 of the YAML"] = yaml.get("sha256")
    script = run.start.get("script") or {}
    found[SCRIPT] = script.get("sha256")
    return found
