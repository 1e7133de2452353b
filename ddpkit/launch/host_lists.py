"""Slurm's short ways of writing many hosts and many numbers, spelt out.

``scontrol show hostnames`` does the same, where there is a ``scontrol``: inside a container there often is none.

Source: https://slurm.schedmd.com/scontrol.html , "hostlist expression"; the counts with ``(x3)`` are those of
``SLURM_TASKS_PER_NODE`` in https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES .
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from ddpkit.errors import LaunchError

MOST_NAMES = 1 << 20

_PIECE = re.compile(r"[^\[\],]+|\[[^\[\]]*\]")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_host_list(text: str) -> list[str]:
    """Spell out a list of hosts, in its order.

    Args:
        text: such as ``"gpu[01-03,07],cpu-a[1-2]"``; brackets may stand anywhere in a name, and several times.

    Returns:
        The names. A number keeps the zeros that stand before it.

    Raises:
        LaunchError: the text is no such list, or one of more than a million names.

    Ranks: local.

    Example:
        >>> expand_host_list("gpu[01-03,07],cpu-a[1-2]")
        ['gpu01', 'gpu02', 'gpu03', 'gpu07', 'cpu-a1', 'cpu-a2']
        >>> expand_host_list("rack[1-2]node[8-9]")
        ['rack1node8', 'rack1node9', 'rack2node8', 'rack2node9']
    """
    names: list[str] = []
    for pieces in _entries(text):
        choices = [_choices(piece, text) for piece in pieces]
        for combination in itertools.product(*choices):
            names.append("".join(combination))
            if len(names) > MOST_NAMES:
                raise _no_list(text, f"it names more than {MOST_NAMES} hosts")
    return names


def expand_counts(text: str) -> list[int]:
    """Spell out one number per node.

    Args:
        text: such as ``"4(x2),1"``: twice 4, then 1.

    Returns:
        The numbers.

    Raises:
        LaunchError: the text is no such list.

    Ranks: local.

    Example:
        >>> expand_counts("4(x2),1")
        [4, 4, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None or int(found[2] or 1) > MOST_NAMES:
            raise _no_list(text, f"{part!r} is no count such as 4 or 4(x2)")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _entries(text: str) -> Iterator[list[str]]:
    """Part the list at its outer commas, and each entry into names and brackets."""
    entry: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == ",":
            if not entry:
                raise _no_list(text, "an entry is empty")
            yield entry
            entry, at = [], at + 1
            continue
        piece = _PIECE.match(text, at)
        if piece is None:
            raise _no_list(text, f"the bracket at character {at + 1} has no partner")
        entry.append(piece[0])
        at = piece.end()
    if not entry:
        raise _no_list(text, "an entry is empty")
    yield entry


def _choices(piece: str, text: str) -> list[str]:
    """What may stand in one place of a name."""
    if not piece.startswith("["):
        return [piece]
    names: list[str] = []
    for part in piece[1:-1].split(","):
        found = _NUMBERS.fullmatch(part.strip())
        if found is None:
            raise _no_list(text, f"{part!r} is neither a number nor a range such as 1-4")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last - first >= MOST_NAMES:
            raise _no_list(text, f"the range {part!r} is empty or far too long")
        names += [f"{number:0{len(found[1])}d}" for number in range(first, last + 1)]
    return names


def _no_list(text: str, reason: str) -> LaunchError:
    return LaunchError(
        f"{text!r} is no list of Slurm's that ddpkit can read: {reason}. "
        "Set MASTER_ADDR to the host of task 0, such as: "
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    )
