"""What differs between two runs besides what they have computed: labels, options, files.

A run may have been started several times, each time with other options. All starts are compared
that have made a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpkit.options import NUMBERS, OPTIONS
from ddpkit.see.diff.sections import sections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddpkit.see.diff.hashed_run import HashedRun
    from ddpkit.see.diff.sections import Section, Side
    from ddpkit.see.report.records import Record

#: What a difference means.
NO_EQUAL_BITS = "no equal bits can be expected"
OTHER_TRAINING = "it changes the numbers of a training"
MAY_MATTER = "it may matter"
_MEANINGS = (NO_EQUAL_BITS, OTHER_TRAINING, MAY_MATTER)  # what matters most comes first
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
        steps: the first and the last optimizer step of each stretch that it holds for; empty: it
            holds for all that are compared.

    Ranks: local.
    """

    name: str
    values: tuple[Any, Any]
    meaning: str
    steps: tuple[tuple[int, int], ...] = ()


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
    compared = sections(one, other, steps)
    found = []
    for of_section in (_labels, _processes, _options, _overrides, _files):
        found += _over(compared, of_section)
    return sorted(found, key=lambda row: _MEANINGS.index(row.meaning))


def _over(
    compared: list[Section],
    of_section: Callable[[Side, Side], list[Circumstance]],
) -> list[Circumstance]:
    """Return what differs in any section, with the steps where it does."""
    rows: list[Circumstance] = []
    stretches: list[list[tuple[int, int]]] = []
    for section in compared:
        for row in of_section(*section.sides):
            if row not in rows:
                rows.append(row)
                stretches.append([])
            number = rows.index(row)
            _add_stretch(stretches[number], section)
    everything = [(compared[0].first, compared[-1].last)]
    found = []
    for row, steps in zip(rows, stretches, strict=True):
        if steps == everything:
            found.append(row)
        else:
            found.append(replace(row, steps=tuple(steps)))
    return found


def _add_stretch(steps: list[tuple[int, int]], section: Section) -> None:
    first = section.first
    if steps and steps[-1][1] + 1 == first:
        first, _ = steps.pop()
    steps.append((first, section.last))


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


def _labels(one: Side, other: Side) -> list[Circumstance]:
    """Return labels that differ. A run may have gone on on another machine since."""
    return _differences(one.labels, other.labels, NO_EQUAL_BITS)


def _processes(one: Side, other: Side) -> list[Circumstance]:
    """Return the number of processes, unless both runs promise the same bits on any."""
    fits = one.call.fit, other.call.fit
    numbers = fits[0].get("world_size"), fits[1].get("world_size")
    if not all(fits) or numbers[0] == numbers[1] or (one.same_bits and other.same_bits):
        return []
    return [Circumstance("processes", numbers, NO_EQUAL_BITS)]


def _options_of(fit: Record) -> dict[str, Any]:
    """Return the options of a call of ``fit`` that are not their defaults."""
    found = dict(fit.get("options") or {})
    # Among the options it is that of a process, which may follow from their number.
    factor = fit.get(_FACTOR)
    if factor is None:
        return found
    found.pop(_FACTOR, None)
    if factor > 1:
        found[_FACTOR] = factor
    return found


def _options(one: Side, other: Side) -> list[Circumstance]:
    fits = one.call.fit, other.call.fit
    if not all(fits):
        return []
    found = []
    ones, others = map(_options_of, fits)
    for difference in _differences(ones, others, MAY_MATTER, "--"):
        name = difference.name.removeprefix("--")
        if name in _NOT_TOLD:
            continue
        meaning = OTHER_TRAINING if name in _NUMBERS else MAY_MATTER
        found.append(replace(difference, meaning=meaning))
    return found


def _overrides(one: Side, other: Side) -> list[Circumstance]:
    """Return what either run has put in the place of values of its YAML, where that differs."""
    values = []
    for side in (one, other):
        given = side.call.start.get("overrides")
        if given is None:  # an earlier ddpkit has recorded none
            return []
        named = dict(given)
        named.pop(_PLACE, None)
        values.append(named)
    return _differences(values[0], values[1], MAY_MATTER, "--")


def _files(one: Side, other: Side) -> list[Circumstance]:
    """Return versions, the recipe's commit, its script and its YAML, where they differ."""
    starts = one.call.start, other.call.start
    if not all(starts):
        return []
    found = _differences(_facts(starts[0]), _facts(starts[1]), MAY_MATTER)
    if all("script" in start for start in starts):
        return found
    return [row for row in found if row.name != SCRIPT]  # likewise


def _facts(start: Record) -> dict[str, Any]:
    environment = start.get("environment") or {}
    found = {}
    for name in _OF_START:
        found[name] = environment.get(name)
    git = environment.get("git") or {}
    found["git commit"] = git.get("commit")
    found["files changed since"] = git.get("dirty")
    yaml = start.get("yaml") or {}
    found["SHA-256 of the YAML"] = yaml.get("sha256")
    script = start.get("script") or {}
    found[SCRIPT] = script.get("sha256")
    return found
