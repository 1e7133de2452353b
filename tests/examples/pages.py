"""Reads pages of Markdown: the files that they show, the commands, and what these print."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys

from tests.launching import BIN, Run

BLOCK = re.compile(
    r"^```(?P<language>yaml|python|console)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

# What differs from one start to the next, or from one machine to the next.
SET_ASIDE = (
    (re.compile(r"CKPT\+\d{4}-\S+"), "CKPT+date"),
    (re.compile(r"\b[\d.]+ s\b"), "seconds"),
    (re.compile(r"\brun [\d:]+\+? left"), "time"),
    (re.compile(r"^(  versions +).*"), r"\1"),
    (re.compile(r"^(  launcher .* on ).*"), r"\1host"),
)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
# Another kind of CPU rounds otherwise, which grows with the steps: so far may a number be from the
# one that is shown, besides what its last digit leaves open. A number without a point is a count,
# and the same everywhere.
RELATIVE = 1e-2


def sessions(text):
    """Part a console block into commands and the lines that are shown below each."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield shlex.split(command), [line for line in shown if line != "..."]


def parted(line):
    """Part a line into its words and its numbers, without what differs at every start."""
    for pattern, instead in SET_ASIDE:
        line = pattern.sub(instead, line)
    return NUMBER.sub("0", line), NUMBER.findall(line)


def is_number(printed, shown):
    """Say whether a number that is printed is the one that is shown: a count exactly, another to
    its digits.
    """
    mantissa, _, exponent = shown.partition("e")
    if "." not in mantissa:
        return printed == shown
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(printed) - float(shown)) <= 1.01 * last_digit + RELATIVE * abs(float(shown))


def is_line(printed, shown):
    """Say whether a line that is printed is the one that is shown; each is parted."""
    return printed[0] == shown[0] and all(map(is_number, printed[1], shown[1]))


def compare(shown, run):
    """See that a run has printed the lines that are shown; on each stream in their order."""
    streams = [[parted(line) for line in text.splitlines()] for text in (run.out, run.err)]
    for line in shown:
        wanted = parted(line)
        for stream in streams:
            place = next(
                (number for number, printed in enumerate(stream) if is_line(printed, wanted)),
                None,
            )
            if place is not None:
                del stream[: place + 1]
                break
        else:
            raise AssertionError(
                f"{shlex.join(run.command)} does not print: {line}\n{run.out}\n{run.err}"
            )


def run(words, shown, folder, **options):
    """Run a command, and see that it prints the lines that are shown."""
    program = (
        sys.executable
        if words[0] == "python"
        else shutil.which(words[0], path=f"{BIN}:{os.defpath}")
    )
    run = Run([program, *words[1:]], folder, **options).wait()
    assert run.code == 0, run.tail()
    compare(shown, run)
    return run
