"""What ``diff`` says of two runs, in lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.see.diff.circumstances import (
    NO_EQUAL_BITS,
    OTHER_TRAINING,
    unknown_circumstances,
)
from ddpkit.see.diff.first_difference import BY_MODULE, equal_fields
from ddpkit.see.diff.hashed_run import FIELDS

if TYPE_CHECKING:
    from ddpkit.see.diff.circumstances import Circumstance
    from ddpkit.see.diff.first_difference import Comparison

NAMED = 6  # modules of a line
LONGEST = 40  # letters of a value; of a longer one, such as a digest, the first
SHOWN = 12
WORDS = {
    "samples": "samples",
    "loss": "loss",
    "gradients": "gradients",
    "settings": "settings",
    "optimizer": "states",
    "weights": "weights",
    "average": "averages",
    "schedule": "scheduler",
}
IN_SENTENCES = {"average": "averaged weights", "schedule": "the scheduler's state"}
#: By what differs first in a step whose step before is equal.
MEANINGS = {
    "samples": (
        "The step was made of other samples. Look at the seed, the length and the order of the "
        "data, and the batch size."
    ),
    "loss": (
        "With equal indices of samples the loss is another: what the samples hold, the forward "
        "pass (dropout, augmentation, kernels), the loss, or weights that were changed since the "
        "record before."
    ),
    "gradients": (
        "With an equal loss the gradients are others: the backward pass, what was added to the "
        "gradients or averaged; or a forward pass, where the loss was rounded to the same number."
    ),
    "settings": (
        "With equal gradients the optimizers' settings are others, such as a learning rate: look "
        "at the schedule."
    ),
    "optimizer": (
        "With equal gradients and settings the optimizers' states are others: clipping, the "
        "optimizer's own step, or bits that were changed in memory."
    ),
    "weights": (
        "With equal gradients, settings and states the weights are others: clipping, the "
        "optimizer's own step, or something that has changed weights after it, a flipped bit of "
        "the memory too."
    ),
    "average": (
        "With equal weights the averaged weights are others: the decay, which steps are averaged, "
        "or bits that were changed in memory."
    ),
    "schedule": (
        "With equal weights and settings the scheduler's state is another: look at its arguments, "
        "and at what steps it."
    ),
}
EQUAL = "Equal to the last bit: all {} optimizer steps that both have recorded, up to step {}."
TOO_OLD = (
    "Not compared: {}. The records of {} are older than that: run it again with this version of "
    "ddpkit."
)
EQUAL_ONCE = "Equal to the last bit: the one optimizer step that both have recorded, step {}."
FURTHER = (
    "{} has {} after step {}, of steps that the other has not recorded: it has ended, was killed, "
    "has skipped them, or has another --hash_every."
)
NOT_EXACT = (
    "The steps between have no record: the first difference is in one of them. Records of the step "
    "itself tell what of it was first."
)
AGAIN = "To see each step, add --replay, which runs both again with --hash_every=1 from here:"
ALIKE = (
    "Labels, options, overrides, the files of the recipe and versions of the two runs are the same."
)
ALIKE_BEFORE = "Labels, options and versions of the two runs are the same."
NOT_GIVEN = "not given"
IN_STEPS = " in optimizer {} {}"
NO_EVENT = "Not compared: {1}. The log of one run has no event {0!r}."
LACKING = {
    "fit": "options and the number of processes",
    "start": "overrides, files of the recipe and versions",
}
FROM_BEGINNING = "{}: from the beginning"
FROM_START = "{}: from the beginning, as no checkpoint of step {} or before it is there"
FROM_CHECKPOINT = "{}: from {} (step {})"


def lines_of(comparison: Comparison) -> list[str]:
    """Return what is said of two runs.

    Args:
        comparison: of them.

    Ranks: local.
    """
    one, other = comparison.runs
    lines = [f"A: {one.label}", f"B: {other.label}"]
    for name, run in (("A", one), ("B", other)):
        lines += [f"{name}: {words}." for words in [*run.problems, *run.notes]]
    lines.append("")
    if comparison.step is None:
        lines += _equal(comparison)
    else:
        lines += _different(comparison, comparison.step)
    return [*lines, *_besides(comparison)]


def _equal(comparison: Comparison) -> list[str]:
    steps = comparison.common
    last = steps[-1]
    lines = [EQUAL_ONCE.format(last) if steps == [last] else EQUAL.format(len(steps), last)]
    for name, run in zip("AB", comparison.runs, strict=True):
        more = sum(step > last for step in run.steps)
        if more:
            records = "1 further record" if more == 1 else f"{more} further records"
            lines.append(FURTHER.format(name, records, last))
    return [*lines, *_too_old(comparison)]


def _too_old(comparison: Comparison) -> list[str]:
    """Say what records of an earlier version do not have."""
    missing = comparison.not_compared
    if not missing:
        return []
    words = " and ".join(IN_SENTENCES[name] for name in missing)
    first, other = comparison.values("version")
    return [TOO_OLD.format(words, "A" if (first or 1) < (other or 1) else "B")]


def _different(comparison: Comparison, step: int) -> list[str]:
    lines = difference_lines(comparison, step)
    if not comparison.is_exact:
        lines += ["", AGAIN, *_starts(comparison)]
    return lines


def difference_lines(comparison: Comparison, step: int) -> list[str]:
    """Return what is said of a step that differs.

    Args:
        comparison: of two runs.
        step: the first that differs.

    Ranks: local.
    """
    before = comparison.equal_before
    first = comparison.differ[0]
    since = "from the first record on" if before is None else f"step {before} is equal"
    lines = [f"The runs differ at optimizer step {step}; {since}."]
    if comparison.is_exact:
        lines.append(f"First in it: {_named(comparison, first)}. {MEANINGS[first]}")
    else:
        lines.append(NOT_EXACT)
    lines.append("")
    equal = equal_fields(comparison)
    for name in FIELDS:
        if name in equal and comparison.values(name) == (None, None):
            continue  # neither run has it
        state = "equal" if name in equal else f"differ{_detail(comparison, name)}"
        if name in comparison.not_compared:
            state = "not compared"
        lines.append(f"  {WORDS[name]:10} {state}")
    return [*lines, *_too_old(comparison)]


def _named(comparison: Comparison, name: str) -> str:
    """Return the name of a field, and of the first module in which it differs."""
    modules = comparison.modules.get(name, [])
    return f"{WORDS[name]} of {modules[0]}" if modules else WORDS[name]


def _detail(comparison: Comparison, name: str) -> str:
    if name == "loss":
        one, other = comparison.values(name)
        return f": {one!r} and {other!r}"
    if name not in BY_MODULE:
        return ""
    modules = comparison.modules.get(name, [])
    shown = ", ".join(modules[:NAMED])
    more = len(modules) - NAMED
    if more > 0:
        shown += f" and {more} more"
    return f": {shown}" if shown else ""


def _starts(comparison: Comparison) -> list[str]:
    """Say from where each run would make the steps again."""
    equal = comparison.equal_before
    lines = []
    for name, run in zip("AB", comparison.runs, strict=True):
        found = next(run.checkpoints_up_to(equal or 0), None)
        if found is not None:
            step, path = found
            words = FROM_CHECKPOINT.format(name, path, step)
        elif equal is None:
            words = FROM_BEGINNING.format(name)
        else:
            words = FROM_START.format(name, equal)
        lines.append(f"  {words}")
    return lines


def _besides(comparison: Comparison) -> list[str]:
    rows = comparison.besides
    unknown = unknown_circumstances(*comparison.runs)
    lines = [""]
    lines += [NO_EVENT.format(event, LACKING[event]) for event in unknown]
    if not rows:
        # what is unknown is not the same
        return lines if unknown else ["", _alike(comparison)]
    meanings = {row.meaning for row in rows}
    lines.append("Besides, these differ:")
    for row in rows:
        nothing = NOT_GIVEN if row.name.startswith("--") else str(None)
        one, other = (_short(value, nothing) for value in row.values)
        lines.append(f"  {row.name}: {one} and {other}{_in_steps(row)} ({row.meaning})")
    if comparison.step is not None and NO_EQUAL_BITS in meanings:
        lines.append("So the two runs cannot be expected to be equal.")
    elif comparison.step is not None and OTHER_TRAINING in meanings:
        lines.append("So the two runs are two different trainings.")
    return lines


def _in_steps(row: Circumstance) -> str:
    """Say in which steps a difference was, where it was not in all."""
    if not row.steps:
        return ""
    stretches = []
    for first, last in row.steps:
        stretches.append(str(first) if first == last else f"{first} to {last}")
    shown = ", ".join(stretches[:NAMED])
    more = len(stretches) - NAMED
    if more > 0:
        shown += f" and {more} more"
    steps = "step" if shown.isdigit() else "steps"
    return IN_STEPS.format(steps, shown)


def _alike(comparison: Comparison) -> str:
    """Say what is the same; records of an earlier ddpkit have neither overrides nor script."""
    for run in comparison.runs:
        for calls in run.calls.values():
            if any("overrides" not in call.start for call in calls):
                return ALIKE_BEFORE
    return ALIKE


def _short(value: Any, nothing: str) -> str:
    text = nothing if value is None else str(value)
    return f"{text[:SHOWN]}..." if len(text) > LONGEST else text
