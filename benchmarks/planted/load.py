"""Other processes that keep the machine busy, in bursts, as other people's jobs do."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

BURST_SECONDS = (0.02, 1.5)
REST_SECONDS = (0.01, 0.5)


def _work(seed: int) -> None:
    random.seed(seed)
    while True:
        end = time.perf_counter() + random.uniform(*BURST_SECONDS)
        while time.perf_counter() < end:
            sum(range(2000))
        time.sleep(random.uniform(*REST_SECONDS))


@contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    """Keep some processes working, in a context."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(seed,), daemon=True) for seed in range(processes)
    ]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
