"""What a save of a divided model takes: memory above the shard, and seconds, gathered and in shards.

    python -m benchmarks.sharded_checkpoints                  # 400 MB of weights on two processes
    python -m benchmarks.sharded_checkpoints --megabytes 100 --ranks 3
    python -m benchmarks.sharded_checkpoints --adam           # with the states of Adam, twice the weights
    python -m benchmarks.sharded_checkpoints --strategy zero1 # the states of Adam alone: 800 MB

The model has layers of 4 MiB and is divided by ``fully_shard``. Both layouts are measured in turn, each
time in new processes: ``whole`` (``--ckpt_layout=whole``, decision 0018) gathers all on rank 0, ``shards``
has each rank write its own part (decision 0052). Memory is what the process holds that is no page of a
file (``RssAnon``), looked at every millisecond, above what it held before the save: its shard is in
that already. ``async`` is with the copy that lets training go on; its seconds are those of the whole
save. ``load`` is a load in new processes: where the states of an optimizer are not there yet, the rank's
own part of them is in its memory, too. Of the turns the median is told, and the load of the machine stands beside it.
"""  # noqa: E501

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.checkpointing import sharded_states, whole_states
from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import get_world_size
from ddpkit.strategies.base import WholeState
from ddpkit.strategies.zero1 import DividedOptimizers, states_of_divided
from tests.rank_pool import RankPool

WIDTH = 1024
LOOK_SECONDS = 0.001
LAYOUTS = {
    "whole": lambda objects: {
        name: WholeState(state) for name, state in whole_states(objects).items()
    },
    "shards": sharded_states,
}
DEALT = {
    "whole": functools.partial(states_of_divided, in_shards=False),
    "shards": functools.partial(states_of_divided, in_shards=True),
}
MODES = ("sync", "async", "load")

Row = tuple[str, str]


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def most_above(work: Callable[[], object]) -> int:
    """Return the most memory that some work has taken above what there was before, in bytes."""
    gc.collect()
    before = anonymous_bytes()
    most = before
    over = threading.Event()

    def look() -> None:
        nonlocal most
        while not over.wait(LOOK_SECONDS):
            most = max(most, anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return most - before


def make_dealt(megabytes: int, *, is_new: bool) -> dict[str, object]:
    """Make an optimizer of a model that each rank holds whole; the states are dealt out to them."""
    layers = max(1, round(megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    weights = [nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(layers)]
    optimizer = torch.optim.AdamW(weights)
    DividedOptimizers().divide({"optimizer": optimizer})
    if not is_new:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
    return {"optimizer": optimizer}


def make(megabytes: int, *, adam: bool) -> dict[str, object]:
    """Make a model of which each rank holds its rows, and the states of its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = max(1, round(megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(net.parameters())
    if adam:
        optimizer.step()
    optimizer.zero_grad()
    return {"net": net, "optimizer": optimizer} if adam else {"net": net}


def measure(
    folder: Path,
    options: argparse.Namespace,
    layout: str,
    mode: str,
) -> tuple[int, float]:
    """Save or load once; return bytes and seconds of this rank."""
    if options.strategy == "zero1":
        objects = make_dealt(options.megabytes, is_new=mode == "load")
    else:
        objects = make(options.megabytes, adam=options.adam)
    checkpointer = Checkpointer(folder, objects)
    checkpointer.divided_states = (DEALT if options.strategy == "zero1" else LAYOUTS)[layout]
    checkpointer.asynchronous = mode == "async"

    def save() -> None:
        checkpointer.save_checkpoint()
        checkpointer.wait()

    dist.barrier()
    begin = time.perf_counter()
    taken = most_above(checkpointer.recover_if_possible if mode == "load" else save)
    return taken, time.perf_counter() - begin


def measured(options: argparse.Namespace, layout: str, mode: str) -> list[tuple[int, float]]:
    """Save or load once in new processes, in which nothing has been freed yet."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for each in ("sync", "load") if mode == "load" else (mode,):
            with RankPool(timeout=3000) as pool:
                found = pool.run(
                    measure,
                    Path(folder),
                    options,
                    layout,
                    each,
                    world_size=options.ranks,
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=400, help="of weights")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--adam", action="store_true", help="with the states of Adam")
    parser.add_argument("--strategy", choices=("fsdp", "zero1"), default="fsdp")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--folder", type=Path, help="default: the one for temporary files")
    options = parser.parse_args()
    found: dict[Row, list[list[tuple[int, float]]]] = {}
    for _ in range(options.turns):
        for row in itertools.product(LAYOUTS, options.modes):
            found.setdefault(row, []).append(measured(options, *row))
    size = options.megabytes * (3 if options.adam else 1)
    size = 2 * options.megabytes if options.strategy == "zero1" else size
    print(
        f"{size} MB of states on {options.ranks} processes, a shard {size / options.ranks:.0f} MB; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'layout':8} {'mode':6} {'seconds':>8}  MB above the shard, by rank")
    for (layout, mode), turns in found.items():
        seconds = statistics.median(turn[0][1] for turn in turns)
        by_rank = "  ".join(
            f"{statistics.median(turn[rank][0] for turn in turns) / 1e6:6.0f}"
            for rank in range(options.ranks)
        )
        print(f"{layout:8} {mode:6} {seconds:8.2f}  {by_rank}")


if __name__ == "__main__":
    main()
