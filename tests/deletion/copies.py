"""Copies of the repository, from which features can be taken."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.trial import write

from .features import ROOT, Feature, made_unimportable


def copy_of_files(folder: Path, root: Path = ROOT) -> Path:
    """Copy the files that git knows, and those that it would take up."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


class Copy:
    """A copy of the repository, from which features can be taken.

    Args:
        folder: of the copy.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._whole: dict[str, bytes] = {}

    def take_away(self, gone: Sequence[Feature]) -> None:
        """Make these files unimportable, and put all others back."""
        wanted = {feature.path for feature in gone}
        for path in self._whole.keys() - wanted:
            write(self.folder / path, self._whole.pop(path))
        for path in sorted(wanted - self._whole.keys()):
            self._whole[path] = (self.folder / path).read_bytes()
            write(self.folder / path, made_unimportable(self._whole[path].decode()).encode())
