"""Where one rank is, as it tells the others about once a second."""

from __future__ import annotations

import json
from dataclasses import dataclass


def name_of_rank(
    rank: int,
    host: str,
    pid: int,
) -> str:
    """Return what messages call a rank.

    Args:
        rank: its number.
        host: name of its machine; empty: unknown, and so is its process.
        pid: its process.

    Ranks: local.

    Example:
        >>> name_of_rank(2, "node7", 4711), name_of_rank(2, "", 0)
        ('rank 2 (node7, pid 4711)', 'rank 2')
    """
    return f"rank {rank} ({host}, pid {pid})" if host else f"rank {rank}"


@dataclass(eq=False)
class RankStatus:
    """Where one rank is.

    Attributes:
        rank: its number.
        host: name of its machine.
        pid: its process.
        stage: such as ``"TRAIN"``; empty outside of any.
        epoch: from 1.
        step: batches of the stage so far.
        seconds: since it has begun a batch.
        where: file, line and function, once the batch takes long; else empty.
        waits: whether that is a place where ranks wait for each other.
        started: when its process was started, in clock ticks since boot; 0: unknown.
        session: which call of ``fit`` or ``evaluate`` it is in, from 1; 0: outside.
        inside: whether it is in one now.
        beats: how many heartbeats it has sent.
        doing: what that call does before its first stage, such as
            ``"fit, before the first stage"``; empty otherwise.
        machine: where its process number counts: one machine, or one container on it.

    Example:
        >>> RankStatus.read(RankStatus(rank=1, host="a", pid=7).to_json()).pid
        7
    """

    rank: int = 0
    host: str = ""
    pid: int = 0
    stage: str = ""
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    where: str = ""
    waits: bool = False
    started: int = 0
    session: int = 0
    inside: bool = False
    beats: int = 0
    doing: str = ""
    machine: str = ""

    def to_json(self) -> str:
        """Return a text that :meth:`read` understands."""
        return json.dumps(vars(self))

    @classmethod
    def read(cls, text: str | bytes) -> RankStatus:
        """Read what :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def name(self) -> str:
        """Return ``"rank 2 (host, pid 4711)"``."""
        return name_of_rank(self.rank, self.host, self.pid)

    def place(self) -> str:
        """Return ``"in TRAIN of epoch 3 at step 1204"``, what comes before the first stage, or
        nothing outside.
        """
        if self.doing:
            return f"in {self.doing}"
        if not self.stage:
            return ""
        epoch = f" of epoch {self.epoch}" if self.epoch else ""
        # Around an evaluation no step is the current one.
        return f"in {self.stage}{epoch}" + (
            f" at step {self.step}" if self.step or self.stage == "TRAIN" else ""
        )
