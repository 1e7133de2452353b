"""A checkpoint into an S3 server and back: megabytes per second and memory, beside plain s3fs.

    python benchmarks/object_store.py --megabytes 400  # into moto's server, which it starts
    python benchmarks/object_store.py --url s3://bucket/folder  # into a store that is there

moto's server is written in Python, and is the slower side. Each copy runs in a process of its own,
which tells how far its memory has risen. Both ways take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

FILES = ("model.ckpt", "optimizer.ckpt", "brain.ckpt")
SHARES = (0.33, 0.66, 0.01)
WAYS = ("ddpkit put", "s3fs put", "ddpkit get", "s3fs get")


def make_checkpoint(folder, megabytes):
    from ddpkit.checkpointing.storage import META_MARK, META_NAME, commit_staging, make_staging

    final = folder / "CKPT+bench"
    staging = make_staging(final)
    (staging / META_NAME).write_text(f"{META_MARK}unixtime: 1.0\n")
    for name, share in zip(FILES, SHARES, strict=True):
        with (staging / name).open("wb") as handle:
            for _ in range(max(1, round(megabytes * share))):
                handle.write(os.urandom(1 << 20))
    commit_staging(staging, final)
    return final


def rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def copy(way, url, local):
    """Do one copy in this process; print its seconds and how far the memory has risen."""
    import s3fs

    from ddpkit.checkpointing import ObjectFolder

    filesystem = s3fs.S3FileSystem(use_listings_cache=False)
    filesystem.ls(url.removeprefix("s3://").partition("/")[0])  # it has its connection
    folder = ObjectFolder(url)
    folder.names()
    plain = f"{url}/plain/"
    steps = {
        "ddpkit put": lambda: folder.put(local),
        "s3fs put": lambda: filesystem.put(f"{local}/", plain, recursive=True),
        "ddpkit get": lambda: folder.get(local.name, local.parent / "ddpkit"),
        "s3fs get": lambda: filesystem.get(plain, f"{local.parent}/s3fs/", recursive=True),
    }
    before = rss()
    begin = time.perf_counter()
    steps[way]()
    print(json.dumps([time.perf_counter() - begin, rss() - before]))


def measured(way, url, local, environment):
    words = [sys.executable, __file__, "--way", way, "--url", url, "--local", str(local)]
    output = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return json.loads(output.stdout.splitlines()[-1])


@contextlib.contextmanager
def store(url):
    if url:
        yield url, dict(os.environ)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.s3_server import s3_server

    with s3_server() as server:
        yield server.folder(), {**os.environ, **server.environment}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", default="")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--local", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        copy(given.way, given.url, given.local)
        return
    found = {way: [] for way in WAYS}
    with store(given.url) as (url, environment), tempfile.TemporaryDirectory() as name:
        local = make_checkpoint(Path(name), given.megabytes)
        size = sum(path.stat().st_size for path in local.iterdir())
        for _ in range(given.rounds):
            place = f"{url}/{uuid.uuid4().hex}"
            (local.parent / "ddpkit").mkdir()
            for way in WAYS:
                found[way].append(measured(way, place, local, environment))
                print(way, *found[way][-1], file=sys.stderr, flush=True)
            for copied in ("ddpkit", "s3fs"):
                shutil.rmtree(local.parent / copied)
    print(f"{size / 1e6:.0f} MB in {len(FILES)} files, {given.rounds} rounds, medians")
    for way in WAYS:
        seconds, memory = (statistics.median(column) for column in zip(*found[way], strict=True))
        print(f"{way:>10}: {size / seconds / 1e6:7.1f} MB/s, {memory / 1e6:6.0f} MB above")


if __name__ == "__main__":
    main()
