"""Checkpoints in shards, made by one process that plays all the ranks."""

from __future__ import annotations

import shutil

import torch

from ddpkit.base import map_named
from ddpkit.checkpointing import storage
from ddpkit.checkpointing.file_loading import safe_load
from ddpkit.checkpointing.hooks import write_loadable
from ddpkit.checkpointing.shard_files import sharded_file
from ddpkit.checkpointing.shard_writing import write_shards


def write_sharded(staging, name, state, count):
    """Write a state as so many ranks do; tensors with rows are divided as ``torch.chunk`` does."""
    rows = [{} for _ in range(count)]
    firsts = [{} for _ in range(count)]

    def divided(key, value):
        if not value.ndim:
            return value
        size = -(-value.shape[0] // count)
        for rank in range(count):
            first = min(rank * size, value.shape[0])
            rows[rank][key] = value[first : first + size]
            firsts[rank][key] = first
        return value.to("meta")

    skeleton = map_named(state, divided)
    reports = [
        write_shards(staging, {name: rows[rank]}, {name: firsts[rank]}, rank, count)[name]
        for rank in range(count)
    ]
    path = staging / f"{name}.ckpt"
    write_loadable(sharded_file(skeleton, reports), path)
    return path


def save_sharded(folder, states, count, meta="unixtime: 1.5\n", name="CKPT+one"):
    """Commit a checkpoint of states in shards, by recoverable; return its directory."""
    final = folder / name
    staging = storage.make_staging(final)
    (staging / storage.META_NAME).write_text(storage.META_MARK + meta)
    for recoverable, state in states.items():
        write_sharded(staging, recoverable, state, count)
    storage.commit_staging(staging, final, world_size=count)
    return final


def state_of_many_kinds():
    """A state with all that a tensor in shards can be."""
    draw = torch.Generator().manual_seed(3)
    wide = torch.randn(7, 5, generator=draw)
    return {
        "wide": wide,
        "half": wide.to(torch.bfloat16),
        "eight": wide.to(torch.float8_e4m3fn),
        "double": wide.double(),
        "complex": torch.complex(wide, wide),
        "complex double": torch.complex(wide.double(), wide.double()),
        "flags": wide > 0,
        "numbers": torch.arange(3, dtype=torch.int16),
        "one row": torch.ones(1, 2),
        "no row": torch.ones(0, 2),
        "no column": torch.ones(4, 0),
        "transposed": wide.t(),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": wide * 2}},
    }


def put_in_shards(checkpoint, recoverables, count):
    """Write a checkpoint anew, with the states of some recoverables in shards."""
    states = {name: safe_load(checkpoint / f"{name}.ckpt") for name in recoverables}
    staging = storage.make_staging(checkpoint)
    for path in checkpoint.iterdir():
        if path.name == storage.MANIFEST_NAME or path.name.removesuffix(".ckpt") in recoverables:
            continue
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, staging / path.name)
    for name, state in states.items():
        write_sharded(staging, name, state, count)
    storage.commit_staging(staging, checkpoint, world_size=count)
