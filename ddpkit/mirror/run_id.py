"""The name of the run that the checkpoints of a folder belong to. A run gets it at its first start,
in the store and on the machine.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from ddpkit.base import replacing

RUN_FILE = ".run.json"


def new_id() -> str:
    """Return a name that no other run has."""
    return uuid.uuid4().hex


def encoded(run: str) -> bytes:
    """Return the content of the file.

    Example:
        >>> decoded(encoded("a1"))
        'a1'
    """
    return (json.dumps({"run": run}) + "\n").encode()


def decoded(data: bytes) -> str | None:
    """Return the run that a file names; None where it names none."""
    try:
        found = json.loads(data)["run"]
    except (ValueError, LookupError, TypeError):
        return None
    return str(found)


def read_local(folder: Path) -> str | None:
    """Return the run that a folder of this machine is of; None where nothing says so."""
    try:
        return decoded((folder / RUN_FILE).read_bytes())
    except OSError:
        return None


def write_local(
    folder: Path,
    run: str,
) -> None:
    """Note the run of a folder of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / RUN_FILE) as unfinished:
        unfinished.write_bytes(encoded(run))
