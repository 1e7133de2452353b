"""Paths into the mirror of an object store. A file has one place in the store, the same for all
machines, and a path of its own on each machine.

A path of rank 0 says nothing on another machine. So what travels to other ranks is the place, and
each makes its own path of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def plain_path(path: str | os.PathLike[str]) -> Path:
    """Return a path as it is compared with others: absolute, and without ``..``."""
    return Path(os.path.normpath(Path(path).absolute()))


@dataclass(frozen=True)
class StorePlace:
    """A path that travels.

    Attributes:
        url: of what the path stands for in the store.
        path: on the machine that sends it: for a process there that knows no mirrors.
    """

    url: str
    path: Path


class Places:
    """Which folders of this machine stand for which folders of stores.

    State: as long as the process.

    Example:
        >>> here, there = Places(), Places()
        >>> here.register(Path("/tmp/a"), "s3://bucket/run")
        >>> there.register(Path("/scratch/b"), "s3://bucket/run")
        >>> there.arrived(here.sent(Path("/tmp/a/save/CKPT+one")))
        PosixPath('/scratch/b/save/CKPT+one')
    """

    def __init__(self) -> None:
        self._urls: dict[Path, str] = {}

    def register(
        self,
        root: Path,
        url: str,
    ) -> None:
        """Note that a folder, with all that is in it, stands for a URL."""
        self._urls[plain_path(root)] = url

    def forget(self, root: Path) -> None:
        """Undo :meth:`register`."""
        self._urls.pop(plain_path(root), None)

    def sent(self, path: Path) -> Path | StorePlace:
        """Return what travels to other ranks in the place of a path; most paths travel as they
        are.
        """
        plain = plain_path(path)
        roots = [root for root in self._urls if plain.is_relative_to(root)]
        if not roots:
            return path
        nearest = max(roots, key=lambda root: len(root.parts))
        inside = plain.relative_to(nearest).parts
        return StorePlace("/".join([self._urls[nearest], *inside]), path)

    def arrived(self, given: Path | StorePlace) -> Path:
        """Return the path of this machine for what :meth:`sent` returned on another one."""
        if not isinstance(given, StorePlace):
            return given
        roots = [
            (url, root)
            for root, url in self._urls.items()
            if given.url == url or given.url.startswith(f"{url}/")
        ]
        if not roots:
            return given.path
        url, root = max(roots, key=lambda one: len(one[0]))
        inside = given.url[len(url) :].strip("/")
        return root / inside if inside else root


PLACES = Places()
