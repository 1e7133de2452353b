"""Small checkpoints whose every file says its step, for tests of stores."""

from __future__ import annotations

from ddpkit.checkpointing.storage import META_MARK, META_NAME, commit_staging, make_staging, verify

FILES = ("brain.ckpt", "model.ckpt", "deep/er/part.bin", "empty.ckpt")


def content(file, step, size):
    return b"" if file == "empty.ckpt" else f"{file} {step} ".encode() * size


def make(folder, name, step, size=50):
    """Save a checkpoint on this disk."""
    folder.mkdir(exist_ok=True)
    final = folder / name
    staging = make_staging(final)
    (staging / META_NAME).write_text(f"{META_MARK}unixtime: {1000.0 + step}\nstep: {step}\n")
    for file in FILES:
        (staging / file).parent.mkdir(parents=True, exist_ok=True)
        (staging / file).write_bytes(content(file, step, size))
    commit_staging(staging, final)
    return final


def step_of(path, size=50):
    """Return the one step that all files of a checkpoint of this disk say."""
    assert verify(path) == []
    meta = (path / META_NAME).read_text()
    step = int(meta.partition("step:")[2])
    for file in FILES:
        assert (path / file).read_bytes() == content(file, step, size), f"torn: {path / file}"
    return step
