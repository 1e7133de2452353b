"""A cable that is slow, long or bad, in user space: two TUN devices, and a process that carries
packets between them.

The kernels that the tests run on often lack netem, which would delay packets. Run it as ``python
tun_link.py SLEEPER_A ADDRESS_A SLEEPER_B ADDRESS_B DELAY_MS LOSS_PERCENT
RATE_MBIT``; it prints ``up``, carries packets until it is killed, and the devices go with it.
Standard library only: it starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
CLONE_NEWNET = 0x40000000
MTU = 1500
LONGEST_QUEUE_SECONDS = 1.0  # of a limited rate; what comes on top is lost, as in a switch
NAME = "tun0"


def enter_network(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {path}")
    os.close(handle)


def open_tun(sleeper: str, address: str, peer: str) -> int:
    """Make a device in the network of a process; it stays there when this process leaves that
    network.
    """
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter_network(f"/proc/{sleeper}/ns/net")
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", NAME.encode(), IFF_TUN | IFF_NO_PI))
    for words in (
        ["ip", "address", "add", f"{address}/32", "peer", peer, "dev", NAME],
        ["ip", "link", "set", NAME, "mtu", str(MTU), "up"],
    ):
        subprocess.run(words, check=True)
    enter_network(f"/proc/self/fd/{home}")
    os.close(home)
    return handle


@dataclass
class Direction:
    """Packets on their way from one end to the other."""

    source: int
    target: int
    delay: float
    loss: float
    bytes_per_second: float
    free_at: float = 0.0
    waiting: list[tuple[float, int, bytes]] = field(default_factory=list)
    count: int = 0

    def take(self) -> None:
        """Read what has been sent, and decide when it arrives, if ever."""
        while True:
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            now = time.monotonic()
            start = max(now, self.free_at)
            if random.random() < self.loss or start - now > LONGEST_QUEUE_SECONDS:
                continue
            self.free_at = start + (
                len(packet) / self.bytes_per_second if self.bytes_per_second else 0.0
            )
            self.count += 1
            heapq.heappush(self.waiting, (self.free_at + self.delay, self.count, packet))

    def deliver(self) -> None:
        """Hand over what has arrived by now."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            os.write(self.target, heapq.heappop(self.waiting)[2])


def main() -> None:
    sleeper_a, address_a, sleeper_b, address_b, *numbers = sys.argv[1:]
    delay = float(numbers[0]) / 1e3
    loss = float(numbers[1]) / 100
    rate = float(numbers[2]) * 1e6 / 8
    one = open_tun(sleeper_a, address_a, address_b)
    other = open_tun(sleeper_b, address_b, address_a)
    ways = {
        one: Direction(one, other, delay, loss, rate),
        other: Direction(other, one, delay, loss, rate),
    }
    selector = selectors.DefaultSelector()
    for end in ways:
        selector.register(end, selectors.EVENT_READ)
    print("up", flush=True)
    while True:
        arrivals = [way.waiting[0][0] for way in ways.values() if way.waiting]
        timeout = max(0.0, min(arrivals) - time.monotonic()) if arrivals else None
        for key, _ in selector.select(timeout):
            ways[key.fd].take()
        for way in ways.values():
            way.deliver()


if __name__ == "__main__":
    main()
