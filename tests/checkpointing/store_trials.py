"""What the trials of kills near uploads share: a run that saves, uploads, replaces and deletes, and
what must be found in its store however it ended.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ddpkit.checkpointing import ObjectFolder
from ddpkit.object_store import Objects, StoreLock
from tests.stored_checkpoints import make, step_of

KEPT = 2
LAST = 4000


def name_of(step):
    """Each third step has the name that the third before it had."""
    return "CKPT+best" if step % 3 == 0 else f"CKPT+{step:04d}"


def run(url, options, disk, size, acknowledge, last=LAST):
    """Go on from what the store has; acknowledge the lock, as step -1, and each step."""
    lock = StoreLock(url, storage_options=options)
    with lock.hold():
        acknowledge(-1)
        folder = ObjectFolder(url, options)
        folder.clean(lock)
        for path in disk.glob("CKPT*"):
            shutil.rmtree(path)
        step = max((folder.meta(name)["step"] for name in folder.names()), default=0)
        delete_old(folder, lock)
        while step < last:
            step += 1
            folder.put(make(disk, name_of(step), step, size), lock.require)
            acknowledge(step)
            delete_old(folder, lock)
            shutil.rmtree(disk / name_of(step))


def delete_old(folder, lock):
    for name in sorted(set(folder.names()) - {"CKPT+best"})[:-KEPT]:
        lock.require()
        folder.delete(name)


def run_and_tell(pipe, url, options, disk, size, last=LAST):
    """As :func:`run`, in a process that may be killed: it acknowledges by a pipe or a file."""
    run(url, options, Path(disk), size, lambda step: os.write(pipe, f"{step}\n".encode()), last)


def kept_of(step):
    """The steps in a store when a run has acknowledged one and deleted the old ones."""
    best = step - step % 3
    others = [each for each in range(1, step + 1) if each % 3][-KEPT:]
    return {*others, *([best] if best else [])}


def judge(url, options, into, acknowledged, size):
    """Load every checkpoint that is found; return their steps.

    Raises:
        AssertionError: one is torn, the acknowledged one is missing, or an earlier one that was not
            to be deleted.
    """
    folder = ObjectFolder(url, options)
    steps = set()
    for name in folder.names():
        steps.add(step_of(folder.get(name, into), size))
    newest = max(steps, default=0)
    # the next one may be complete, and not yet acknowledged
    assert newest in {acknowledged, acknowledged + 1}, f"{sorted(steps)} after {acknowledged}"
    # and what goes for it may be deleted
    lost = (kept_of(acknowledged) & kept_of(newest)) - steps
    assert not lost, f"lost {sorted(lost)} of {sorted(steps)} after {acknowledged}"
    return steps


def leftovers(url, options):
    """What no checkpoint of a store needs, once a run has cleaned it."""
    lock = StoreLock(url, storage_options=options)
    folder = ObjectFolder(url, options)
    with lock.hold():
        folder.clean(lock)
    objects = Objects(url, options)
    manifests = [name for name in objects.sizes() if name.endswith("/manifest.json")]
    whole = {name.partition("/")[0] for name in manifests}
    assert len(whole) == len(folder.names())
    return [
        name for name in objects.sizes() if name.partition("/")[0] not in {*whole, ".index.json"}
    ]
