"""Reads the blocks that a run prints when it begins."""

from __future__ import annotations

NAME = slice(2, 13)


def block_rows(text):
    """Return the rows of all blocks in a text, by name; the lines of a row are joined, and paths in
    them.
    """
    rows = {}
    name = ""
    for line in text.splitlines():
        if not line.startswith("  "):
            continue
        if line[NAME].strip():
            name = line[NAME].strip()
            rows[name] = line[NAME.stop :]
        else:
            joint = "" if rows[name].endswith("/") else " "
            rows[name] += joint + line[NAME.stop :]
    return rows
