"""Disks for tests: read-only, small, full. They are mounted, as nothing else stops root from
writing.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def mounted(folder: Path, *words: str) -> Iterator[Path]:
    """Return a context in which a file system is mounted at a folder that is made for it."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", *words, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"this test mounts a file system, and cannot here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, leave: int = 0) -> None:
    """Fill the disk of a folder, but for some pages of 4,096 bytes."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - leave * 4096)
