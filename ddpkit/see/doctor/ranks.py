"""The ranks of the command, which exchange values over the launcher's store: no process group is
needed.

The main process reads what each rank has written and writes the list that all read, so that all
ranks get the same answer. A rank that does not answer in time is None in it, and is not waited for
again.
"""

from __future__ import annotations

import contextlib
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddpkit.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

    from ddpkit.launch import LaunchInfo

LEAVE_SECONDS = 5.0
# times the limit for a rank: the main process answers only after it has waited for the slowest one
MAIN_TIMEOUT_FACTOR = 2.0
NAP_SECONDS = 0.01


class Ranks:
    """The processes that look at their machines together.

    Args:
        launch: the place of this process.
        store: that all of them have joined; None for a process that is alone.
        timeout: seconds to wait for a rank.

    Attributes:
        rank: of this process; 0 is the main one.
        world_size: how many there are.
        store: for checks that talk by themselves, under a prefix of their own.
        silent: ranks that have not answered.

    Ranks: local; the methods say more.

    Example:
        >>> from ddpkit.launch import LaunchInfo
        >>> Ranks(LaunchInfo()).exchange("clock", 3.5)
        [3.5]
    """

    def __init__(
        self,
        launch: LaunchInfo,
        store: Store | None = None,
        timeout: float = 120.0,
    ) -> None:
        is_alone = store is None
        self.rank = 0 if is_alone else launch.rank
        self.world_size = 1 if is_alone else launch.world_size
        self.is_first_on_host = is_alone or launch.local_rank == 0
        self.store = store
        self.timeout = timeout
        self.silent: set[int] = set()
        self._exchanges = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints."""
        return self.rank == 0

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Give a plain value to all ranks, and return those of all, by rank; None for a silent one.

        Args:
            name: what is exchanged, for messages.
            value: of plain types, as JSON has them.

        Raises:
            LaunchError: the main process does not answer, or the store has gone.

        Ranks: collective: every rank calls it, in the same order.
        """
        if self.store is None:
            return [value]
        self._exchanges += 1
        try:
            return self._exchange(self.store, f"exchange/{self._exchanges}", value)
        except LaunchError as error:
            raise LaunchError(f"{error} This was about: {name}.") from error
        except RuntimeError as error:  # torch.distributed.DistError derives from it
            raise LaunchError(
                f"rank {self.rank} has lost the store of the launch, while it was about: {name}. "
                f"Look at the output of rank 0, or of the launcher. ({error})"
            ) from error

    def _exchange(self, store: Store, key: str, value: Any) -> list[Any]:
        store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.is_main:
            values = self._read_all(key)
            store.set(f"{key}/all", json.dumps(values))
            return values
        seconds = MAIN_TIMEOUT_FACTOR * self.timeout
        if not self._await(f"{key}/all", seconds):
            raise LaunchError(f"rank 0 did not answer within {seconds:g} s. Look at its output.")
        found: list[Any] = json.loads(store.get(f"{key}/all"))
        return found

    def leave(self) -> None:
        """End: the process that keeps the store waits a moment for the others."""
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store has gone, and all has been told
            self.store.set(f"left/{self.rank}", "1")
            if self.is_main:
                end = time.monotonic() + LEAVE_SECONDS
                for other in set(range(self.world_size)) - self.silent:
                    self._await(f"left/{other}", end - time.monotonic())

    def _read_all(self, key: str) -> list[Any]:
        end = time.monotonic() + self.timeout
        values: list[Any] = []
        for rank in range(self.world_size):
            is_there = self._await(
                f"{key}/{rank}",
                0.0 if rank in self.silent else end - time.monotonic(),
            )
            if not is_there:
                self.silent.add(rank)
            values.append(json.loads(self._get(f"{key}/{rank}")) if is_there else None)
        return values

    def _get(self, key: str) -> bytes:
        assert self.store is not None  # noqa: S101 -- the callers have asked
        return bytes(self.store.get(key))

    def _await(self, key: str, seconds: float) -> bool:
        """Say whether a key came in time."""
        assert self.store is not None  # noqa: S101 -- the callers have asked
        end = time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > end:
                return False
            time.sleep(NAP_SECONDS)
        return True


def open_ranks(launch: LaunchInfo, timeout: float) -> Ranks:
    """Meet the other ranks.

    Args:
        launch: the place of this process.
        timeout: seconds to wait for each of them.

    Raises:
        LaunchError: they cannot be met; the message says why.

    Ranks: collective.

    Example:
        >>> from ddpkit.launch import LaunchInfo
        >>> open_ranks(LaunchInfo(), 1.0).world_size
        1
    """
    if not launch.is_distributed or launch.world_size == 1:
        return Ranks(launch, timeout=timeout)
    from torch.distributed import PrefixStore

    from ddpkit.comm import open_store

    store, _ = open_store(launch, timedelta(seconds=timeout))
    return Ranks(launch, PrefixStore("doctor", store), timeout)


def answering(values: Sequence[Any]) -> dict[int, Any]:
    """Return the values of an exchange by rank, without those of silent ranks.

    Args:
        values: by rank; None: silent.

    Ranks: local.

    Example:
        >>> answering(["a", None, "b"])
        {0: 'a', 2: 'b'}
    """
    return {rank: value for rank, value in enumerate(values) if value is not None}
