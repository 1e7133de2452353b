"""What differs between two runs besides what they have computed: labels, options, files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpkit.options import NUMBERS, OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.see.diff.hashed_run import HashedRun

#: What a difference means.
NO_EQUAL_BITS = "no equal bits can be expected"
OTHER_TRAINING = "it changes the numbers of a training"
MAY_MATTER = "it may matter"
_NUMBERS = frozenset(
    option.name
    for option in OPTIONS
    if option.changes_numbers or (option.changes_numbers is None and option.group in NUMBERS)
)
_OF_START = ("python", "numpy", "ddpkit")
# They are told by what they change.
_NOT_TOLD = frozenset({"hash_every", "measure_steps", "noprogressbar", "debug_persistently"})


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


def circumstances(one: HashedRun, other: HashedRun) -> list[Circumstance]:
    """Return what differs between two runs besides what they have computed; what matters most comes
    first.

    Args:
        one: of the runs.
        other: likewise.

    Ranks: local.
    """
    return [
        *_labels(one, other),
        *_processes(one, other),
        *_options(one, other),
        *_files(one, other),
    ]


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


def _labels(one: HashedRun, other: HashedRun) -> list[Circumstance]:
    return _differences(_last_labels(one), _last_labels(other), NO_EQUAL_BITS)


def _last_labels(run: HashedRun) -> Mapping[str, Any]:
    last = max(run.steps)
    labels: Mapping[str, Any] = run.steps[last].get("labels", {})
    return labels


def _processes(one: HashedRun, other: HashedRun) -> list[Circumstance]:
    """Return the number of processes, unless both runs promise the same bits on any."""
    numbers = one.fit.get("world_size"), other.fit.get("world_size")
    if numbers[0] == numbers[1] or (_has_same_bits(one) and _has_same_bits(other)):
        return []
    return [Circumstance("processes", numbers, NO_EQUAL_BITS)]


def _has_same_bits(run: HashedRun) -> bool:
    last = max(run.steps)
    return run.steps[last].get("same_bits") is True


def _options_of(run: HashedRun) -> dict[str, Any]:
    found = run.fit.get("options") or run.start.get("options") or {}
    return dict(found)


def _options(one: HashedRun, other: HashedRun) -> list[Circumstance]:
    found = []
    for difference in _differences(_options_of(one), _options_of(other), MAY_MATTER, "--"):
        name = difference.name.removeprefix("--")
        if name in _NOT_TOLD:
            continue
        meaning = OTHER_TRAINING if name in _NUMBERS else MAY_MATTER
        found.append(Circumstance(difference.name, difference.values, meaning))
    return sorted(found, key=lambda row: row.meaning != OTHER_TRAINING)


def _files(one: HashedRun, other: HashedRun) -> list[Circumstance]:
    """Return versions, the recipe's commit and its YAML, where they differ."""
    return _differences(_facts(one), _facts(other), MAY_MATTER)


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
    return found
