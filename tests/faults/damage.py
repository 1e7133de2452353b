"""Damage to the files of a checkpoint, drawn at random: what disks, copies and people do."""

from __future__ import annotations

import os
import shutil

from tests.faults.storage_tools import names


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def truncate(draw, path, other):
    size = path.stat().st_size
    os.truncate(path, draw.randrange(size))
    return [path]


def flip_a_bit(draw, path, other):
    content = bytearray(path.read_bytes())
    bit = draw.randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return [path]


def zero_a_block(draw, path, other):
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)
    return [path]


def grow(draw, path, other):
    with path.open("ab") as handle:
        handle.write(bytes(draw.randrange(1, 100)))
    return [path]


def empty(draw, path, other):
    os.truncate(path, 0)
    return [path]


def delete(draw, path, other):
    path.unlink()
    return [path]


def forbid(draw, path, other):
    path.chmod(0)
    return [path]


def swap_within(draw, path, other):
    """Exchange two files of the same checkpoint."""
    second = draw.choice([one for one in files_of(path.parent) if one != path] or [path])
    mine = path.read_bytes()
    its = second.read_bytes()
    path.write_bytes(its)
    second.write_bytes(mine)
    return [path, second]


def swap_across(draw, path, other):
    """Put in the file of this name of an older checkpoint."""
    shutil.copyfile(other, path)
    return [path]


def become_a_folder(draw, path, other):
    path.unlink()
    path.mkdir()
    return [path]


# How often each is drawn.
KINDS = {
    flip_a_bit: 10,
    truncate: 5,
    delete: 2,
    empty: 2,
    zero_a_block: 2,
    swap_within: 2,
    swap_across: 2,
    grow: 2,
    forbid: 2,
    become_a_folder: 1,
}


def half_delete(draw, checkpoint):
    """Delete a number of the files of a checkpoint, as a removal that was interrupted does."""
    files = files_of(checkpoint)
    gone = draw.sample(files, draw.randrange(1, len(files)))
    for path in gone:
        path.unlink()
    return gone


def forbid_the_folder(draw, checkpoint):
    checkpoint.chmod(0)
    return [checkpoint]


def damage(draw, checkpoint, older):
    """Damage a checkpoint; return what was done, and to which files."""
    whole = draw.random()
    if whole < 0.08:
        return "half_delete", half_delete(draw, checkpoint)
    if whole < 0.1:
        return "forbid_the_folder", forbid_the_folder(draw, checkpoint)
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    path = draw.choice(files_of(checkpoint))
    return kind.__name__, kind(draw, path, older / path.relative_to(checkpoint))


def restore(checkpoint, pristine):
    """Make a checkpoint what it was."""
    if checkpoint.exists():
        for path in [checkpoint, *checkpoint.rglob("*")]:
            path.chmod(0o700)
        shutil.rmtree(checkpoint)
    shutil.copytree(pristine, checkpoint)


def listing(folder):
    """Return the names below a folder, where they may be looked at."""
    try:
        return {
            name: listing(folder / name) if (folder / name).is_dir() else None
            for name in names(folder)
        }
    except PermissionError:
        return "forbidden"
