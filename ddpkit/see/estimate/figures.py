"""The peaks of the ranks, from what was rehearsed and what the strategies say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpkit.see.amounts import counted

USABLE = 0.9  # of a device's memory: the rest is CUDA's, NCCL's, and lost between allocations
MOST_SAMPLES = 1 << 30  # nobody has more in a batch
HELD = ("weights", "buffers", "optimizer", "averages")  # all the time
PASSES = "backward"
STEP = "step"


@dataclass(frozen=True)
class Lines:
    """What the passes and the step of the rehearsal allocated, by the samples of the batch.

    Args:
        values: ``fixed`` and ``per_sample`` of ``fresh`` (passes that begin without gradients, with
            the gradients), ``kept`` (passes beside gradients that are there), and ``step``.
        gradients: bytes of all of them, as the rehearsal had them.
    """

    values: Mapping[str, Mapping[str, float]]
    gradients: float

    def at(
        self,
        name: str,
        samples: int,
        share: float = 1.0,
    ) -> float:
        """Return the bytes of so many samples.

        Args:
            name: of the line.
            samples: of a batch.
            share: of what does not depend on them.
        """
        line = self.values[name]
        return line["fixed"] * share + line["per_sample"] * samples


@dataclass(frozen=True)
class RankFigures:
    """What one rank takes, under a strategy on a number of processes.

    Args:
        row: what the strategy said, as the rehearsal wrote it.
        lines: of the rehearsal.
    """

    row: Mapping[str, Any]
    lines: Lines

    @property
    def name(self) -> str:
        """The strategy and the number in words."""
        return f"{self.row['strategy']}, {counted(self.row['processes'], 'process')}"

    @property
    def samples(self) -> int:
        """Samples of the recipe's micro-batch; 0 where that is not known."""
        return self.row["samples"] or 0

    @property
    def activations(self) -> float:
        """What the passes allocate beside gradients, with the recipe's micro-batch."""
        return self.lines.at("kept", self.samples)

    def moments(
        self,
        samples: int,
    ) -> dict[str, float]:
        """Return the peak in the passes, and that in the optimizer step.

        Args:
            samples: of the micro-batch.
        """
        row = self.row
        held = sum(row[part] for part in HELD)
        kept = self.lines.at("kept", samples) + row["exchange"]
        if row["keeps_gradients"]:
            passes = row["gradients"] + max(kept, row["after_backward"])
        else:
            # where a rank has a part of the gradients, the others' parts are not there
            fresh = self.lines.at("fresh", samples) - self.lines.gradients + row["gradients"]
            fresh += row["exchange"]
            passes = max(fresh, kept, row["gradients"] + row["after_backward"])
        step = row["gradients"] + row["in_step"]
        step += self.lines.at("step", samples, row["step_share"])
        return {PASSES: held + passes, STEP: held + step}

    def peak(
        self,
        samples: int | None = None,
    ) -> float:
        """Return the peak.

        Args:
            samples: of the micro-batch; None: as the recipe has it.
        """
        given = self.samples if samples is None else samples
        return max(self.moments(given).values())

    @property
    def moment(self) -> str:
        """When the peak is."""
        moments = self.moments(self.samples)
        return max(moments, key=moments.__getitem__)

    def fits(
        self,
        memory: float,
    ) -> bool:
        """Say whether the peak is in what a device has for it.

        Args:
            memory: of the device.
        """
        return self.peak() <= USABLE * memory

    def largest(
        self,
        memory: float,
    ) -> int | None:
        """Return the most samples of a micro-batch that fit, 0 if none does; None: any number.

        Args:
            memory: of the device.
        """
        room = USABLE * memory
        if self.peak(MOST_SAMPLES) <= room:
            return None
        # by bisection: a peak is the largest of several lines, which bend
        fits = 0
        fails = MOST_SAMPLES
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.peak(middle) <= room:
                fits = middle
            else:
                fails = middle
        return fits


@dataclass(frozen=True)
class MemoryEstimate:
    """All that an estimate has found.

    Args:
        recipe: its command.
        result: what the rehearsal wrote.
        processes: numbers of them; the first one is meant.
        memory: of a device, in bytes; None: not known.
        room: what is known of the room for checkpoints, in words; empty: nothing.

    Ranks: local.
    """

    recipe: str
    result: Mapping[str, Any]
    processes: Sequence[int]
    memory: float | None
    room: str = ""

    @property
    def rows(self) -> list[RankFigures]:
        """What is known, by the number of processes; what trains as one process does comes
        first, and of that what takes most.
        """
        lines = Lines(self.result["lines"], self.result["gradients"])
        # what a strategy cannot do is told below the table
        known = [row for row in self.result["rows"] if "impossible" not in row]
        rows = [RankFigures(row, lines) for row in known]
        rows.sort(
            key=lambda one: (
                one.row["processes"],
                not one.row["is_like_one_process"],
                -one.peak(),
            )
        )
        return rows

    @property
    def chosen(self) -> RankFigures | None:
        """The strategy of the recipe on the number of processes that is meant; None: it does not
        say what it takes there, or cannot run there.
        """
        meant = self.processes[0]
        for row in self.rows:
            if row.row["is_chosen"] and row.row["processes"] == meant:
                return row
        return None

    @property
    def refusal(self) -> tuple[str, str] | None:
        """The strategy of the recipe, and why it cannot run on the number of processes that is
        meant; None: nothing is known that speaks against it.
        """
        meant = self.processes[0]
        for row in self.result["rows"]:
            why = row.get("impossible") or row.get("refused")
            if why and row["is_chosen"] and row["processes"] == meant:
                return row["strategy"], why
        return None

    @property
    def is_line(self) -> bool:
        """Whether it is known how the figures grow with the batch."""
        return bool(self.result["is_line"])

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for programs."""
        rows = []
        for row in self.rows:
            found = {
                **row.row,
                "activations": row.activations,
                "peak": row.peak(),
                "peak_is_in": row.moment,
            }
            if self.memory is not None:
                found["fits"] = row.fits(self.memory)
                if self.is_line:
                    found["largest_micro_batch"] = row.largest(self.memory)
            rows.append(found)
        impossible = [row for row in self.result["rows"] if "impossible" in row]
        refusal = self.refusal
        return {
            "recipe": self.recipe,
            "processes": list(self.processes),
            "memory": self.memory,
            "usable": USABLE,
            "refusal": None if refusal is None else refusal[1],
            **self.result,
            "rows": rows,
            "impossible": impossible,
        }
