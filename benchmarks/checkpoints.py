"""What a checkpoint costs: the stall of training, the whole write, and loading on two ranks.

    python -m benchmarks.checkpoints                     # 100 MB and 1 GB of state, in the folder for temporary files
    python -m benchmarks.checkpoints --folder /data/x    # on another disk
    python -m benchmarks.checkpoints --sizes 100         # MB
    python -m benchmarks.checkpoints --only_verified --cpu_time  # processor time of a verified load, on a busy machine

The state is that of a model with layers of 4 MiB. Everything is repeated in turn and the best and
the median are reported: what the machine can do, and what it did. `memcpy` is the copy of the state
into memory that has been written to before; `torch.save` is one file written through a Python
handle, and `fsync`. `asynchronous, whole` runs from the call until the checkpoint is committed.
`first` is the first save of a checkpointer, which must touch fresh memory. `verified load` is that
of one process: every byte is hashed first. `by hand` is `load_state_dict(torch.load(...))`. Each of
these runs in a process of its own, as a run that goes on does: the model, Adam's state, and both.
The hashing shares the cores with whatever else runs: the load of the machine stands beside it.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.checkpointing import verify as verify_checkpoint
from ddpkit.checkpoints import Checkpointer
from tests.rank_pool import RankPool

WIDTH = 1024


def make(megabytes: int) -> nn.Module:
    layers = max(1, round(megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def torch_save(state: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as handle:
        torch.save(state, handle)
        handle.flush()
        os.fsync(handle.fileno())


def measure_saving(megabytes: int, folder: Path, turns: int) -> dict[str, list[float]]:
    """Take turns, each time in another order, so that a machine or a disk that slows down slows all
    alike.
    """
    model = make(megabytes)
    state = model.state_dict()
    warm = [value.clone() for value in state.values()]
    plain = Checkpointer(folder, {"model": model})
    background = Checkpointer(folder, {"model": model})
    background.asynchronous = True
    times: dict[str, list[float]] = {}
    first_saves(model, folder, times)

    def note(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)

    def with_torch() -> None:
        note("torch.save + fsync", seconds(lambda: torch_save(state, folder / "plain")))
        (folder / "plain").unlink()

    def synchronous() -> None:
        note("synchronous", seconds(lambda: plain.save_checkpoint(name="a")))
        shutil.rmtree(folder / "CKPT+a")

    def asynchronous() -> None:
        start = time.perf_counter()
        background.save_checkpoint(name="b")
        note("asynchronous, stall, later", time.perf_counter() - start)
        background.wait()
        note("asynchronous, whole", time.perf_counter() - start)
        shutil.rmtree(folder / "CKPT+b")

    works = [with_torch, synchronous, asynchronous]
    with plain.hold_folder():  # as `fit` does
        background.save_checkpoint(name="b")
        background.wait()
        shutil.rmtree(folder / "CKPT+b")
        for turn in range(turns):
            note(
                "memcpy",
                seconds(lambda: [a.copy_(b) for a, b in zip(warm, state.values(), strict=True)]),
            )
            for work in works[turn % 3 :] + works[: turn % 3]:
                os.sync()
                work()
    return times


def first_saves(model: nn.Module, folder: Path, times: dict[str, list[float]]) -> None:
    for _ in range(4):
        checkpointer = Checkpointer(folder, {"model": model})
        checkpointer.asynchronous = True
        taken = seconds(lambda: checkpointer.save_checkpoint(name="c"))  # noqa: B023 -- called at once
        times.setdefault("asynchronous, stall, first", []).append(taken)
        checkpointer.asynchronous = False
        checkpointer.wait()
        shutil.rmtree(folder / "CKPT+c")


def measure_loading(megabytes: int, folder: str, turns: int) -> dict[str, list[float]]:
    """Run on every rank; the slowest rank counts."""
    model = make(megabytes)
    checkpointer = Checkpointer(folder, {"model": model})
    checkpointer.verify_mode = "off"
    saved = checkpointer.save_checkpoint()
    times: dict[str, list[float]] = {}
    for _ in range(turns):
        for mode in ("all", "broadcast"):
            checkpointer.load_mode = mode
            dist.barrier()
            taken = torch.tensor(seconds(lambda: checkpointer.load_checkpoint(saved)))
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times.setdefault(mode, []).append(taken.item())
    return times


WAYS = ("torch.load", "load by hand", "verification alone", "verified load")
PARTS = {"weights": ("model",), "Adam": ("optimizer",), "both": ("model", "optimizer")}


def save_for_resuming(megabytes: int, folder: Path) -> None:
    """Save checkpoints of a model, of Adam for it, whose state is twice as large, and of both."""
    model = make(megabytes)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    known = {"model": model, "optimizer": optimizer}
    for title, names in PARTS.items():
        Checkpointer(folder / title, {name: known[name] for name in names}).save_checkpoint()


def resume(megabytes: int, folder: Path, title: str, way: str) -> tuple[float, float]:
    """Load a checkpoint in a new process; return the seconds, and those of all its threads."""
    model = make(megabytes)
    known = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    objects: dict[str, Any] = {name: known[name] for name in PARTS[title]}
    checkpointer = Checkpointer(folder / title, objects)
    saved = checkpointer.find_checkpoint()
    assert saved is not None
    states = {name: saved.paramfiles[name] for name in objects}

    def verify() -> None:
        if verify_checkpoint(saved.path):
            raise ValueError("it is damaged")

    works: dict[str, Callable[[], object]] = {
        "torch.load": lambda: [torch.load(path, weights_only=True) for path in states.values()],
        "load by hand": lambda: [
            objects[name].load_state_dict(torch.load(path, weights_only=True))
            for name, path in states.items()
        ],
        "verification alone": verify,
        "verified load": lambda: checkpointer.load_checkpoint(saved),
    }
    start = time.perf_counter()
    cpu_start = time.process_time()
    works[way]()
    return time.perf_counter() - start, time.process_time() - cpu_start


def measure_resuming(
    megabytes: int,
    folder: Path,
    turns: int,
    cpu_time: bool,
) -> dict[str, dict[str, list[float]]]:
    """Take turns, each time in a new process, as a run that goes on does; the files are in the page
    cache.
    """
    save_for_resuming(megabytes, folder)
    times: dict[str, dict[str, list[float]]] = {title: {way: [] for way in WAYS} for title in PARTS}
    for _ in range(turns):
        for title, way in itertools.product(PARTS, WAYS):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                taken = pool.apply(resume, (megabytes, folder, title, way))
            times[title][way].append(taken[cpu_time])
    return times


def report(times: dict[str, list[float]], title: str = "") -> None:
    against = {
        "asynchronous, stall, first": "memcpy",
        "asynchronous, stall, later": "memcpy",
        "asynchronous, whole": "torch.save + fsync",
        "synchronous": "torch.save + fsync",
        "broadcast": "all",
        "verification alone": "load by hand",
        "verified load": "load by hand",
    }
    for name, values in times.items():
        best = min(values)
        median = statistics.median(values)
        base = against.get(name)
        line = f"  {title + name:32}{best * 1e3:10.1f} ms, median{median * 1e3:10.1f} ms"
        if base is not None:
            line += (
                f"{best / min(times[base]):8.2f} and "
                f"{median / statistics.median(times[base]):.2f} x {base}"
            )
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[100, 1000],
        help="of the state, MB",
    )
    parser.add_argument("--turns", type=int, default=6, help="how often everything is done")
    parser.add_argument(
        "--only_verified",
        action="store_true",
        help="measure the verified load alone",
    )
    parser.add_argument(
        "--cpu_time",
        action="store_true",
        help="measure that in processor time, of all threads",
    )
    parser.add_argument(
        "--folder",
        help="where checkpoints are written; default: the folder for temporary files",
    )
    arguments = parser.parse_args()
    for megabytes in arguments.sizes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            print(f"{megabytes} MB in {folder}")
            if not arguments.only_verified:
                report(measure_saving(megabytes, Path(folder), arguments.turns))
            for title, times in measure_resuming(
                megabytes,
                Path(folder),
                arguments.turns,
                arguments.cpu_time,
            ).items():
                report(times, f"{title}, ")
            print(f"  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        if arguments.only_verified:
            continue
        with (
            tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
            contextlib.closing(RankPool(timeout=600)) as pool,
        ):
            times = pool.run(measure_loading, megabytes, folder, arguments.turns, world_size=2)[0]
            report(times, "load on 2 ranks, ")


if __name__ == "__main__":
    main()
