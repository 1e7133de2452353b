"""Keeps GPUs busy while the driver is asked: at rest they lower clocks and PCIe links."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

COPIED_BYTES = 64 * 2**20
MEASURED_SECONDS = 0.15  # of each kind of work
SIDE = 4096  # of the matrices


@dataclass
class Busy:
    """What a GPU did per second: bytes from pinned memory of the host, operations of float16."""

    copied: float = 0.0
    computed: float = 0.0
    error: str | None = None
    is_measured: threading.Event = field(default_factory=threading.Event, repr=False)


@final
class Load:
    """Work on some GPUs, from entering to leaving.

    Args:
        devices: torch's numbers.

    Attributes:
        done: what each has done, by number.

    Example:
        >>> with Load([]) as load:
        ...     load.done
        {}
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.done = {device: Busy() for device in devices}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(device,),
                daemon=True,
            )
            for device in devices
        ]

    def __enter__(self) -> Load:
        """Start; comes back when all are measured, and busy with both kinds of work."""
        for thread in self._threads:
            thread.start()
        for busy in self.done.values():
            busy.is_measured.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, device: int) -> None:
        busy = self.done[device]
        try:
            with torch.cuda.device(device):
                work = _Work(device)
                busy.copied = work.rate(work.copy, COPIED_BYTES)
                busy.computed = work.rate(work.compute, 2 * SIDE**3)
                busy.is_measured.set()
                while not self._over.is_set():
                    work.copy()
                    work.compute()
                    torch.cuda.synchronize()
        except RuntimeError as error:  # no memory left, or the GPU is broken
            busy.error = " ".join(str(error).split())
        finally:
            busy.is_measured.set()


class _Work:
    """A copy to the GPU and a product of matrices."""

    def __init__(self, device: int) -> None:
        place = torch.device("cuda", device)
        self.host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=place)
        self.matrix = torch.ones(SIDE, SIDE, dtype=torch.float16, device=place)
        self.product = torch.empty_like(self.matrix)

    def copy(self) -> None:
        self.copied.copy_(self.host, non_blocking=True)

    def compute(self) -> None:
        torch.mm(self.matrix, self.matrix, out=self.product)

    def rate(self, work: Callable[[], None], amount: int) -> float:
        """Return how much of something is done in a second; the first time does not count."""
        work()
        torch.cuda.synchronize()
        times = 0
        start = now = time.perf_counter()
        while now - start < MEASURED_SECONDS:
            for _ in range(4):
                work()
            torch.cuda.synchronize()
            times += 4
            now = time.perf_counter()
        return times * amount / (now - start)
