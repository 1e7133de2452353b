"""``stopped.json``, the note of a run that has stopped.

torchrun turns every exit code into 1, so a script that decides whether to start the run again reads
the note.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import replacing

if TYPE_CHECKING:
    from collections.abc import Mapping

MARKER = "stopped.json"


def write_marker(folder: Path, facts: Mapping[str, Any]) -> None:
    """Leave word in a folder of why and where a run has stopped.

    Args:
        folder: of the run; made if it is not there.
        facts: plain values.

    Raises:
        OSError: it cannot be written.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_marker(folder, {"reason": "SIGTERM", "exit_code": 143})
        >>> json.loads((folder / MARKER).read_text())["exit_code"]
        143
    """
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / MARKER) as unfinished:
        unfinished.write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")


def remove_marker(folder: Path) -> None:
    """Take away what an earlier run has left: this one is running.

    Ranks: main only.
    """
    # a read-only file system refuses to delete even what is not there
    if (folder / MARKER).exists():
        (folder / MARKER).unlink(missing_ok=True)
