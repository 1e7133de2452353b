"""A model of a disk that loses its power: what was not waited for may be missing.

After a write without ``fsync`` a file may hold what it held before, nothing, a part, all, or zeros.
After a change of a directory's entries without ``fsync`` of the directory each change may be
missing, whatever became of the others. What was waited for is there. (File systems promise more
than this; the order in which they keep it differs. After Pillai et al., "All File Systems Are Not
Created Equal", OSDI 2014.)
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from tests.faults.storage_tools import WatchedFiles

ALL_SUBSETS_UP_TO = 4  # pending changes of one directory; of more, each prefix and each one missing


@dataclass(eq=False)
class File:
    """A file: its content as processes see it, and as the disk surely has it."""

    now: bytes = b""
    sure: bytes = b""

    def states(self):
        """List what may be found, the newest first."""
        if self.now == self.sure:
            return [self.now]
        half = len(self.now) // 2
        return list(
            dict.fromkeys([self.now, self.sure, b"", self.now[:half], bytes(len(self.now))])
        )


@dataclass(eq=False)
class Directory:
    """A directory: its entries as processes see them, as the disk surely has them, and the changes
    between.
    """

    now: dict = field(default_factory=dict)
    sure: dict = field(default_factory=dict)
    # of (name that goes or None, name that comes or None, node)
    pending: list = field(default_factory=list)

    def change(self, goes, comes, node):
        self.pending.append((goes, comes, node))
        _apply(self.now, goes, comes, node)

    def states(self):
        """List the trees that may be found, the newest first: dictionaries of dictionaries and
        bytes.
        """
        found = []
        for chosen in _subsets(self.pending):
            entries = dict(self.sure)
            for change in chosen:
                _apply(entries, *change)
            found += _trees(entries)
        return found


def _apply(entries, goes, comes, node):
    if goes is not None and (comes is None or entries.get(goes) is node):
        entries.pop(goes, None)
    if comes is not None:
        entries[comes] = node


def _subsets(changes):
    size = len(changes)
    if size <= ALL_SUBSETS_UP_TO:
        return [
            chosen
            for count in range(size, -1, -1)
            for chosen in itertools.combinations(changes, count)
        ]
    prefixes = [changes[:count] for count in range(size, -1, -1)]
    return prefixes + [changes[:one] + changes[one + 1 :] for one in range(size - 1)]


def _trees(entries):
    """Combine the states of the entries: all newest, all oldest, and each one in each state among
    newest ones.
    """
    states = {name: node.states() for name, node in entries.items()}
    for name in states:
        if name.startswith(".tmp-") or (
            name.startswith(".trash-") and not name.startswith(".trash-of-")
        ):
            states[name] = states[name][:1]  # nobody looks into these
    newest = {name: found[0] for name, found in states.items()}
    oldest = {name: found[-1] for name, found in states.items()}
    singles = [newest | {name: one} for name, found in states.items() for one in found[1:]]
    return [newest, oldest, *singles]


class Disk:
    """The disk under one folder. Whatever way a file is changed, :meth:`look` notices; the rest is
    told.

    Args:
        folder: the folder.
        ignored: names that are left out.

    Attributes:
        moments: every state that a loss of power could leave, with the step that had been
            acknowledged by then.
    """

    def __init__(self, folder, ignored=frozenset()):
        self.folder = folder
        self.ignored = ignored
        self.root = Directory()
        self.acknowledged = None
        self.moments = {}
        self.lock = threading.RLock()

    def look(self):
        """Take note of what was changed since the last look, and of what could be lost at this
        moment.
        """
        with self.lock:
            self._compare(self.folder, self.root)
            self._note()

    def _note(self):
        for tree in self.root.states():
            self.moments.setdefault((_frozen(tree), self.acknowledged), tree)

    def _compare(self, path, node):
        # a link that is lost is made again by the next save
        found = {
            entry.name: entry
            for entry in path.iterdir()
            if entry.name not in self.ignored and not entry.is_symlink()
        }
        for name in set(node.now) - set(found):
            node.change(name, None, node.now[name])
        for name, entry in sorted(found.items()):
            if name not in node.now:
                node.change(None, name, Directory() if entry.is_dir() else File())
            known = node.now[name]
            if isinstance(known, Directory):
                self._compare(entry, known)
            else:
                known.now = entry.read_bytes()

    def trees(self):
        """List every state once, whatever had been acknowledged by then."""
        return list({frozen: tree for (frozen, _), tree in self.moments.items()}.values())

    def node(self, path):
        node = self.root
        for part in path.relative_to(self.folder).parts:
            node = node.now[part]
        return node

    def synced_file(self, path):
        self.look()
        node = self.node(path)
        node.sure = node.now

    def synced_directory(self, path):
        self.look()
        node = self.node(path)
        node.sure = dict(node.now)
        node.pending = []

    def renamed(self, source, target):
        parent = self.node(source.parent)
        parent.change(source.name, target.name, parent.now[source.name])


def _frozen(tree):
    return frozenset(
        (name, _frozen(one) if isinstance(one, dict) else one) for name, one in tree.items()
    )


def materialize(tree, folder):
    """Write a tree into a new folder."""
    folder.mkdir()
    for name, one in tree.items():
        if isinstance(one, dict):
            materialize(one, folder / name)
        else:
            (folder / name).write_bytes(one)


class RecordingFiles(WatchedFiles):
    """File operations that a disk takes note of; those of which ``forget(name, path)`` is true are
    not done.
    """

    def __init__(self, disk, forget=lambda name, path: False):
        self.disk = disk
        self.forget = forget

    def around(self, name, operation, args):
        with self.disk.lock:
            self.disk.look()
            if self.forget(name, args[0]):
                return None
            result = operation(*args)
            if name == "rename":
                self.disk.renamed(*args)
            elif name == "sync_file":
                self.disk.synced_file(args[0])
            elif name == "sync_directory":
                self.disk.synced_directory(args[0])
            self.disk.look()
            return result
