"""The runs: twenty with a planted fault each, twenty without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Of a step, that a delay of "half a step" and "a third of a step" takes.
HALF = 0.5
THIRD = 0.3


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: for the table.
        processes: how many ranks.
        phase: in which a delay is planted; "" for none. Also "loader" (of all ranks), "lengths",
            "bytes" and "memory".
        rank: which has it; None: all.
        delay: seconds.
        steps: delay in steps of this very run, which are measured before; instead of seconds.
        kind: of the verdict that is expected; "" for none at all.
        width: of the layers.
        layers: how many.
        batch: samples in a batch.
        length: frames of a sample.
        spread: of the lengths, as a share of them.
        batch_norm: with synchronised statistics.
        stream: the data is a stream, in shards of uneven length.
        epoch: steps of an epoch; 0: it never ends.
        num_workers: of the loader.
        options: of the run.
    """

    name: str
    processes: int = 2
    phase: str = ""
    rank: int | None = None
    delay: float = 0.0
    steps: float = 0.0
    kind: str = ""
    width: int = 192
    layers: int = 4
    batch: int = 8
    length: int = 48
    spread: float = 0.0
    batch_norm: bool = False
    stream: bool = False
    epoch: int = 0
    num_workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict_phase(self) -> str | None:
        """The phase of the verdict that is expected."""
        if self.kind == "late_rank":
            return self.phase
        return "data" if self.kind == "slow_data" else None


def _late(phase: str, rank: int, processes: int, **more: Any) -> Case:
    if "steps" not in more:
        more = {"delay": 0.05, **more}
    many = f"{more['delay'] * 1e3:.0f} ms" if "delay" in more else f"{more['steps']:.0%} of a step"
    name = f"{many} in {phase} of rank {rank} of {processes}"
    if more.get("batch_norm"):
        name += ", BatchNorm"
    return Case(name, processes, phase, rank, kind="late_rank", **more)


FAULTS = (
    _late("data", 0, 2),
    _late("forward", 1, 2),
    _late("backward", 0, 2),
    _late("optimizer", 1, 2),
    _late("data", 2, 3),
    _late("forward", 0, 3),
    _late("backward", 1, 3),
    _late("optimizer", 2, 3),
    _late("data", 3, 4, delay=0.1),
    _late("forward", 2, 4, delay=0.1),
    _late("backward", 1, 4, delay=0.2),
    _late("optimizer", 0, 4, delay=0.1),
    _late("move", 1, 2, batch_norm=True),
    _late("forward", 0, 2, steps=THIRD),
    _late("backward", 1, 2, steps=THIRD),
    _late("data", 1, 3, steps=HALF),
    Case(
        "lengths from 1 to 9, of 2",
        phase="lengths",
        kind="uneven_batches",
        width=384,
        length=80,
        spread=0.8,
    ),
    Case("50 ms in the loader of all 2 ranks", phase="loader", delay=0.05, kind="slow_data"),
    Case(
        "38 MB of gradients of a tiny batch, of 4",
        4,
        phase="bytes",
        kind="communication",
        width=1536,
        batch=1,
        length=1,
    ),
    Case("1 MB more memory a step in rank 1 of 2", phase="memory", rank=1, kind="memory_grows"),
)

CLEAN = (
    Case("1 process", 1),
    Case("2 processes", 2),
    Case("3 processes", 3),
    Case("4 processes", 4),
    Case("1 process, small", 1, width=48, layers=2, length=16),
    Case("2 processes, small", 2, width=48, layers=2, length=16),
    Case("4 processes, small", 4, width=48, layers=2, length=16),
    Case("2 processes, wide", 2, width=512, length=64),
    Case("3 processes, wide", 3, width=512, length=64),
    Case("2 processes, accumulation", 2, options={"grad_accumulation_factor": 4}),
    Case("4 processes, accumulation", 4, options={"grad_accumulation_factor": 2}),
    Case("1 process, accumulation", 1, options={"grad_accumulation_factor": 4}),
    Case("2 processes, BatchNorm", 2, batch_norm=True),
    Case("3 processes, BatchNorm", 3, batch_norm=True),
    Case("4 processes, BatchNorm", 4, batch_norm=True),
    Case("2 processes, uneven streams", 2, stream=True, epoch=400),
    Case("3 processes, uneven streams", 3, stream=True, epoch=400),
    Case("2 processes, loader workers", 2, num_workers=1),
    Case("2 processes, lengths that differ a little", 2, spread=0.06),
    Case("2 processes, short epochs", 2, epoch=60),
)

#: For the short form: faults that take little time, and a run that was hard to get right.
SHORT_FAULTS = tuple(
    case for case in FAULTS if case.name.startswith(("200 ms", "50 ms in the loader"))
)
SHORT_CLEAN = tuple(case for case in CLEAN if case.name == "2 processes, BatchNorm")
