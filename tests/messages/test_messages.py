"""Every text that the library shows is in the snapshot."""

from __future__ import annotations

import difflib

from tests.messages.collecting import OTHERS, SNAPSHOT, messages_of, shown, snapshot

SOURCE = '''
"""A docstring of a module is no message."""

UNUSED = "two words"
TOLD = (
    "%s was left out: "
    "nobody needs it."
)


def check(name, value, more):
    """A docstring of a function is no message."""
    if value < 0:
        raise ConfigError(f"{name}={value!r} is below zero. " + "Give more." * more + " " + more)
    logger.warning_once(TOLD, name)
    return "all is well" if value else "NOT_A WORD_OF get_prose"
'''


def test_the_messages_are_those_of_the_snapshot():
    """Read the difference as a user would; then ``make messages`` writes the snapshot anew."""
    before = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    difference = difflib.unified_diff(before, snapshot().splitlines(), "before", "now", lineterm="")
    lines = list(difference)
    assert not lines, "\n".join(["Texts have changed. `make messages` notes it.", *lines])


def test_messages_are_found_by_what_they_are_given_to():
    assert list(messages_of(SOURCE)) == [
        ("logger.warning_once", "%s was left out: nobody needs it."),
        ("ConfigError", "{name}={value!r} is below zero. {'Give more.' * more} {more}"),
        (OTHERS, "all is well"),
    ]


def test_each_sentence_has_a_line_which_may_go_on():
    long = "It is as long as a line can be, " * 4
    expected = ["batch_size={size!r} is 1.5 at least.", "{name} is not."]
    assert shown(" ".join(expected)).splitlines() == expected
    assert [line[:4] for line in shown(f"{long}or more. So.").splitlines()] == [
        "It i",
        "    ",
        "So.",
    ]
