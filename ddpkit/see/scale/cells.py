"""Which sizes are measured: a cell is a way to run and a number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpkit.errors import ConfigError
from ddpkit.see.amounts import counted

#: Way -> the run options that choose it. ``""`` is the recipe's own way, whatever its options say.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "single": {"strategy": "single", "data_parallel_backend": False},
    "dp": {"strategy": "auto", "data_parallel_backend": True},
    "ddp": {"strategy": "ddp", "data_parallel_backend": False},
    "fsdp": {"strategy": "fsdp", "data_parallel_backend": False},
    "zero1": {"strategy": "zero1", "data_parallel_backend": False},
}
NAMED_WAYS = tuple(way for way in WAYS if way)


@dataclass(frozen=True)
class Cell:
    """A way to run and a number of processes (with ``dp``: of GPUs of one process).

    Example:
        >>> Cell("ddp", 2).name, Cell("", 1).name, Cell("dp", 4).name
        ('ddp, 2 processes', '1 process', 'dp, 1 process, 4 GPUs')
    """

    way: str
    size: int
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def processes(self) -> int:
        """How many processes are started."""
        return 1 if self.way == "dp" else self.size

    @property
    def name(self) -> str:
        """The cell in words."""
        words = [self.way] if self.way else []
        words.append(counted(self.processes, "process"))
        if self.way == "dp":
            words.append(f"{self.size} GPUs")
        return ", ".join(words)

    @property
    def run_options(self) -> dict[str, Any]:
        """The run options that make a recipe run like this."""
        return {**WAYS[self.way], **self.options}


def sizes_of(text: str) -> list[int]:
    """Read the value of ``--nproc``.

    Args:
        text: numbers with commas between them.

    Returns:
        These, smallest first, each once.

    Raises:
        ConfigError: it is something else.

    Example:
        >>> sizes_of("4,1,2")
        [1, 2, 4]
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(
            f"--nproc={text!r}: give numbers of processes with commas between them, such as "
            "--nproc=1,2,4."
        )
    return sorted(set(map(int, words)))


def ways_of(text: str | None) -> list[str]:
    """Read the value of ``--ways``; None is the recipe's own way.

    Raises:
        ConfigError: a name is none of the ways.

    Example:
        >>> ways_of("ddp,fsdp"), ways_of(None)
        (['ddp', 'fsdp'], [''])
    """
    if text is None:
        return [""]
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in NAMED_WAYS]
    if unknown:
        known = ", ".join(NAMED_WAYS)
        raise ConfigError(
            f"--ways={text!r}: {unknown[0]!r} is no way to run. Give some of {known}."
        )
    return list(dict.fromkeys(words))


def cells_of(sizes: Sequence[int], ways: Sequence[str]) -> list[Cell]:
    """Return what is to be measured, the base first.

    One process alone is the same whatever the way, and is measured once, without a launcher.

    Args:
        sizes: numbers of processes, smallest first.
        ways: names.

    Raises:
        ConfigError: nothing is left to measure.

    Example:
        >>> [cell.name for cell in cells_of([1, 2], ["ddp", "fsdp"])]
        ['single, 1 process', 'ddp, 2 processes', 'fsdp, 2 processes']
    """
    several = [way for way in ways if way != "single"]
    if not several and sizes[-1] > 1:
        raise ConfigError(
            f"--ways=single is one process, and --nproc={','.join(map(str, sizes))} asks for more. "
            "Add another way, such as --ways=single,ddp, or give --nproc=1."
        )
    cells: list[Cell] = []
    for size in sizes:
        if size == 1:
            cells.append(Cell("" if ways == [""] else "single", 1))
        else:
            cells += [Cell(way, size) for way in several]
    return cells
