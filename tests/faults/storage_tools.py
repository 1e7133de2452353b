"""What the tests of storage faults share: a run whose every value says its step, and watched file
operations.

A trial runs in a process that is forked from one that has imported torch (a worker of ``RankPool``
without a process group), so it costs some tens of milliseconds and may be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from ddpkit.checkpointing import storage
from ddpkit.checkpointing.storage import FileOperations
from ddpkit.checkpoints import (
    Checkpointer,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)

MODES = ("sync", "async")
NOT_COMMITTED = (".tmp-", ".trash-")


# ----------------------------------------------------------------------------------- stamped states


@register_checkpoint_hooks
class Text:
    """Saves itself as a small text, written in two halves and past every seam, as a user's class
    does.
    """

    value = -1

    @mark_as_saver
    def save(self, path):
        text = f"{self.value}\n" * 40
        with path.open("w") as handle:
            handle.write(text[:50])
            handle.flush()
            reach("half of a text")
            handle.write(text[50:])

    @mark_as_loader
    def load(self, path, end_of_epoch):
        lines = set(path.read_text().split("\n")) - {""}
        if len(lines) != 1 or path.read_text().count("\n") != 40:
            raise ValueError(f"torn text: {path.read_text()!r}")
        self.value = int(lines.pop())


@register_checkpoint_hooks
class Folder:
    """Saves itself as a folder with a folder in it."""

    value = -1

    @mark_as_saver
    def save(self, path):
        path.mkdir()
        (path / "first.txt").write_text(str(self.value))
        reach("half of a folder")
        (path / "deep").mkdir()
        torch.save(torch.full((5,), float(self.value)), path / "deep" / "second.pt")

    @mark_as_loader
    def load(self, path, end_of_epoch):
        first = float((path / "first.txt").read_text())
        second = set(torch.load(path / "deep" / "second.pt", weights_only=True).tolist())
        if second != {first}:
            raise ValueError(f"torn folder: {first}, {second}")
        self.value = int(first)


class Run:
    """A model, Adam, a text and a folder; every value in them is the step that :meth:`stamp` was
    given last.
    """

    width = 16

    def __init__(self, width=None):
        width = width or self.width
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.text = Text()
        self.folder = Folder()
        self.stamp(-1)

    def tensors(self):
        moments = [part for state in self.optimizer.state.values() for part in state.values()]
        return [*self.model.state_dict().values(), *moments]

    def stamp(self, step):
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(step)
        self.text.value = self.folder.value = step
        return step

    def step(self):
        """Return the one step that all values hold; anything else is a torn state."""
        steps = {value for tensor in self.tensors() for value in tensor.flatten().tolist()}
        steps |= {self.text.value, self.folder.value}
        if len(steps) != 1:
            raise AssertionError(f"torn: the values are of the steps {sorted(steps)}")
        return int(steps.pop())

    def checkpointer(self, folder, mode="sync"):
        objects = {
            "model": self.model,
            "optimizer": self.optimizer,
            "text": self.text,
            "folder": self.folder,
        }
        checkpointer = Checkpointer(folder, objects)
        checkpointer.asynchronous = mode == "async"
        return checkpointer


def save(run, checkpointer, step, name=None, num_to_keep=2):
    """Save a step so that it is the newest, whatever the clock says; on return it is
    acknowledged.
    """
    run.stamp(step)
    checkpointer.save_and_keep_only(
        meta={"unixtime": 1000.0 + step, "step": step},
        name=name,
        num_to_keep=num_to_keep,
    )
    checkpointer.wait()


def recovered(folder):
    """Recover with new objects and return the step; None where there is nothing to recover."""
    run = Run()
    found = run.checkpointer(folder).recover_if_possible()
    if found is None:
        return None
    if found.meta["step"] != run.step():
        raise AssertionError(f"{found.path} says step {found.meta['step']} and holds {run.step()}")
    return run.step()


def steps_of(folder):
    """Load every checkpoint of a folder; return their steps, best first. Each must be whole."""
    run = Run()
    checkpointer = run.checkpointer(folder)
    steps = []
    for found in checkpointer.find_checkpoints():
        checkpointer.load_checkpoint(found)
        if found.meta["step"] != run.step():
            raise AssertionError(
                f"{found.path} says step {found.meta['step']} and holds {run.step()}"
            )
        steps.append(run.step())
    return steps


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir() if not path.is_symlink())


def leftovers(folder):
    return [name for name in names(folder) if name.startswith(NOT_COMMITTED)]


class Warnings(logging.Handler):
    """Collects what the library warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("ddpkit").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("ddpkit").removeHandler(self)


# ---------------------------------------------------------------------------------------- processes


def forked(function, *args):
    """Run a function in a child; return what it returned, or raise what it raised.

    A child that was killed, as it may do itself, returns None.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(_outcome(function, args), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    if not content:
        raise AssertionError(f"a child ended with status {status}")
    value, trace = pickle.loads(content)
    if trace is not None:
        raise AssertionError(trace)
    return value


def _outcome(function, args):
    try:
        return function(*args), None
    except BaseException:  # noqa: BLE001 -- raised again by the parent
        return None, traceback.format_exc()


def die():
    """End as after ``kill -9``, with all that this process has started."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def obey_permissions():
    """Let permissions hold for this process even when it is root's: it gives up the right to pass
    over them.
    """
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    if libc.capget(header, rights):
        raise OSError(ctypes.get_errno(), "capget")
    rights[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capset(header, rights):
        raise OSError(ctypes.get_errno(), "capset")


@contextlib.contextmanager
def without_waiting():
    """Do not wait for the disk: a killed process leaves to the kernel what it has written, waited
    for or not.
    """
    with mock.patch("os.fsync", return_value=None):
        yield


@contextlib.contextmanager
def new_folder():
    """Make a folder and remove it at the end, whatever permissions are in it."""
    folder = Path(tempfile.mkdtemp(prefix="ddpkit-faults-"))
    try:
        yield folder
    finally:
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------- watched operations


class Plan:
    """Counts the points that a save reaches, in the order in which it does; at one of them
    something happens.
    """

    def __init__(self, at=None, action=die):
        self.at = at
        self.action = action
        self.points = []
        self.lock = threading.RLock()

    def reach(self, point):
        with self.lock:
            self.points.append(point)
            if self.at == len(self.points):
                self.action()


_active = []


def reach(point):
    """Tell the plan in force, if there is one, that a point is reached."""
    if _active:
        _active[-1].reach(point)


@contextlib.contextmanager
def watched(plan, files):
    """Put a plan in force and stand these file operations in for the library's."""
    before = storage.FILES
    storage.FILES = files
    _active.append(plan)
    try:
        yield plan
    finally:
        _active.remove(plan)
        storage.FILES = before


OPERATIONS = sorted(name for name in vars(FileOperations) if not name.startswith("_"))


class WatchedFiles(FileOperations):
    """File operations that tell :meth:`around` what they are about to do; a test overrides that."""

    def around(self, name, operation, args):
        return operation(*args)


def _watch(name):
    def watch(self, *args, **options):
        real = getattr(super(WatchedFiles, self), name)
        return self.around(name, lambda *given: real(*given, **options), args)

    return watch


for _name in OPERATIONS:
    setattr(WatchedFiles, _name, _watch(_name))


class HalfHandle:
    """A handle that tells the plan when half of what it is given is written."""

    def __init__(self, handle):
        self._handle = handle

    def write(self, content):
        view = memoryview(content).cast("B")
        half = len(view) // 2
        self._handle.write(view[:half])
        self._handle.flush()
        reach(f"half of {len(view)} bytes")
        self._handle.write(view[half:])
        return len(view)

    def __getattr__(self, name):
        return getattr(self._handle, name)


def through(wrap, args):
    """Return the arguments of a ``write`` whose writer is given ``wrap(handle)`` instead of the
    handle.
    """
    return [
        (lambda handle, writer=one: writer(wrap(handle))) if callable(one) else one for one in args
    ]


class CrashingFiles(WatchedFiles):
    """Reaches a point before and after each operation and in the middle of each write."""

    def around(self, name, operation, args):
        reach(f"before {name}")
        result = operation(*(through(HalfHandle, args) if name == "write" else args))
        reach(f"after {name}")
        return result


CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


def watch_changes(folder):
    """Reach a point before each change in a folder that Python makes from now on in this process,
    seam or no seam.
    """
    inside = os.fspath(folder)

    def is_inside(path):
        return isinstance(path, (str, os.PathLike)) and str(path).startswith(inside)

    def hook(event, args):
        if event == "open":
            if is_inside(args[0]) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                reach("open")
        elif event in CHANGES:
            # as shutil.rmtree works
            in_open_folder = event in {"os.remove", "os.rmdir"} and args[-1] != -1
            if in_open_folder or is_inside(args[0]):
                reach(event)

    sys.addaudithook(hook)
