"""Reads pages of Markdown: the files that they show, the commands, and what these print."""

from __future__ import annotations

import re
import shlex
import sys

from tests.launching import BIN, Run

BLOCK = re.compile(r"^```(?P<language>yaml|python|console)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+")


def sessions(text):
    """Part a console block into commands and the lines that are shown below each."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield shlex.split(command), [line for line in shown if line != "..."]


def without_numbers(lines):
    """Another machine rounds otherwise, and at another time of the day."""
    return [NUMBER.sub("0", line) for line in lines]


def run(words, shown, folder, **options):
    """Run a command, and see that it prints the lines that are shown, numbers aside; on each stream in their order."""
    program = sys.executable if words[0] == "python" else str(BIN / words[0])
    run = Run([program, *words[1:]], folder, **options).wait()
    assert run.code == 0, run.tail()
    streams = [without_numbers(text.splitlines()) for text in (run.out, run.err)]
    for line in without_numbers(shown):
        stream = next((stream for stream in streams if line in stream), None)
        assert stream is not None, f"{shlex.join(words)} does not print, in this order: {line}\n{run.out}\n{run.err}"
        del stream[: stream.index(line) + 1]
    return run
