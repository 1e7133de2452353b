"""What it costs to know which samples come next: ddpkit's plan against
``torch.utils.data.DistributedSampler``.

    python benchmarks/sampling_plan.py            # up to 1e9 samples; torch only up to 1e7: gigabytes above

Per row: milliseconds to the first index, nanoseconds per own index with construction included, and
peak memory in MB (allocated by Python and numpy, from tracemalloc in a run of its own).
"""  # noqa: E501

from __future__ import annotations

import argparse
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import DistributedSampler

from ddpkit.data.planned_batches import PlannedBatchSampler

BATCH = 32
ENOUGH = 2_000_000
TORCH_UP_TO = 10_000_000


def plan(samples: int, ranks: int) -> Iterator[int]:
    sampler = PlannedBatchSampler(samples, BATCH, 0, ranks, shuffle=True, seed=1)
    return itertools.chain.from_iterable(sampler)


def torch_sampler(samples: int, ranks: int) -> Iterator[int]:
    sampler = DistributedSampler(range(samples), ranks, 0, shuffle=True)
    sampler.set_epoch(1)
    return iter(sampler)


def measure(
    make: Callable[[int, int], Iterator[int]],
    samples: int,
    ranks: int,
) -> tuple[float, float, float]:
    """Return milliseconds to the first index, nanoseconds per index, and megabytes."""
    start = time.perf_counter()
    next(make(samples, ranks))
    first = (time.perf_counter() - start) * 1e3
    own = min(samples // ranks, ENOUGH)
    start = time.perf_counter()
    taken = sum(1 for _ in itertools.islice(make(samples, ranks), own))
    each = (time.perf_counter() - start) / taken * 1e9
    tracemalloc.start()
    sum(1 for _ in itertools.islice(make(samples, ranks), min(own, 100_000)))
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return first, each, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--largest", type=float, default=1e9)
    largest = parser.parse_args().largest
    torch.set_num_threads(1)
    print(f"{'samples':>8} {'ranks':>5}   {'ddpkit: ms, ns, MB':>24}   {'torch: ms, ns, MB':>26}")
    for samples in (10**6, 10**7, 10**8, 10**9):
        for ranks in (1, 2, 8):
            if samples > largest:
                continue
            ours = measure(plan, samples, ranks)
            row = f"{samples:8.0e} {ranks:5}   {ours[0]:8.2f} {ours[1]:7.0f} {ours[2]:7.2f}"
            if samples <= TORCH_UP_TO:
                theirs = measure(torch_sampler, samples, ranks)
                row += f"   {theirs[0]:9.1f} {theirs[1]:7.0f} {theirs[2]:8.1f}"
            print(row)


if __name__ == "__main__":
    main()
