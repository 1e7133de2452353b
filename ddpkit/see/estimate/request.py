"""What ``python -m ddpkit estimate`` was asked for, looked at before anything runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.errors import ConfigError
from ddpkit.launch import find_launch
from ddpkit.see.scale.request import option_of, require_outputs, require_recipe
from ddpkit.see.scale.slice_process import MeasuredCommand
from ddpkit.strategies import registered

UNDER_A_LAUNCHER = (
    "an estimate is made in one process, and this one was started by {}. Start it alone, and say "
    "how many processes are meant: python -m ddpkit estimate train.py hparams.yaml --nproc 4"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|M|G|T)?(i)?B?", re.IGNORECASE)
_UNITS = ("", "k", "m", "g", "t")  # each a thousand of the one before

#: Options of a run that choose a strategy by themselves, also in one process: the rehearsal turns
#: them off, and the estimate assumes them all the same.
ASSUMED = tuple(
    known.chosen_by
    for known in registered().values()
    if known.chosen_by and "=" not in known.chosen_by
)


def memory_of(text: str) -> float:
    """Read an amount of memory.

    Args:
        text: a number with a unit.

    Returns:
        Bytes.

    Raises:
        ConfigError: it is something else.

    Example:
        >>> memory_of("24GB"), memory_of("1.5 GiB")
        (24000000000.0, 1610612736.0)
        >>> memory_of("lots")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: --memory='lots': give an amount with its unit, such as ...
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(
            f"--memory={text!r}: give an amount with its unit, such as --memory=24GB or "
            "--memory=80GiB."
        )
    number, unit, binary = found.groups()
    step = 1024.0 if binary else 1000.0
    return float(number) * step ** _UNITS.index((unit or "").lower())


def processes_of(text: str) -> list[int]:
    """Read numbers of processes; the first one is the number that is meant, the others are for
    comparison.

    Raises:
        ConfigError: it is something else.

    Example:
        >>> processes_of("4,1,2,4")
        [4, 1, 2]
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(
            f"--nproc={text!r}: give numbers of processes with commas between them, such as "
            "--nproc=4,1,2. The first one is the number that is meant."
        )
    return list(dict.fromkeys(map(int, words)))


@dataclass(frozen=True)
class EstimateRequest:
    """What to estimate, and what to write.

    Args:
        words: script and arguments of the recipe.
        nproc: numbers of processes, as they are typed.
        memory: of a device, as it is typed; None: of the device that there is.
        json: file for the figures, or None.
    """

    words: Sequence[str]
    nproc: str = "1,2,4,8"
    memory: str | None = None
    json: Path | None = None

    @property
    def recipe(self) -> MeasuredCommand:
        """The command that is run."""
        return MeasuredCommand(tuple(self.words))

    @property
    def processes(self) -> list[int]:
        """The numbers of processes; the first one is the number that is meant."""
        return processes_of(self.nproc)

    @property
    def memory_bytes(self) -> float | None:
        """The memory that was given."""
        return None if self.memory is None else memory_of(self.memory)

    @property
    def assumed(self) -> dict[str, str]:
        """Options that the recipe gives, and that the rehearsal runs without."""
        given = {name: option_of(self.words, name) for name in ASSUMED}
        return {name: value for name, value in given.items() if value is not None}

    def check(self) -> None:
        """Refuse what cannot work, before anything runs.

        Raises:
            ConfigError: numbers, amounts, files or processes cannot be used.
            MissingFileError: there is no such script.
        """
        info = find_launch()
        if info.is_distributed:
            raise ConfigError(UNDER_A_LAUNCHER.format(info.launcher))
        require_recipe(self.words)
        require_outputs(None, self.json)
        for _ in (self.processes, self.memory_bytes):
            pass
