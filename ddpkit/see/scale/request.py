"""What ``python -m ddpkit scale`` was asked for, and whether that can be done here: looked at
before anything runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.base import require_writable_file
from ddpkit.device import accelerator_kind, count_devices
from ddpkit.errors import ConfigError, MissingExtraError, MissingFileError
from ddpkit.launch import count_processes
from ddpkit.options import RUN_OPTIONS
from ddpkit.recipe_yaml import pairs, read_document
from ddpkit.see.scale.cells import Cell, cells_of, sizes_of, ways_of
from ddpkit.see.scale.slice_process import MeasuredCommand

PLOT_SUFFIXES = (".svg", ".png", ".pdf")
_YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class ScaleRequest:
    """What to measure, and what to write.

    Args:
        words: script and arguments of the recipe.
        nproc: numbers of processes, as they are typed.
        ways: ways to run, as they are typed; None: the recipe's own.
        scaling: ``"strong"``, ``"weak"``, or None: as the recipe has it.
        rounds: slices of each size.
        seconds: of steps in each slice.
        plot: file for the plot, or None.
        json: file for the results, or None.
    """

    words: Sequence[str]
    nproc: str = "1,2"
    ways: str | None = None
    scaling: str | None = None
    rounds: int = 3
    seconds: float = 2.0
    plot: Path | None = None
    json: Path | None = None

    @property
    def recipe(self) -> MeasuredCommand:
        """The command that is measured."""
        return MeasuredCommand(tuple(self.words))

    def cells(self) -> list[Cell]:
        """Return what is measured, the base first.

        Raises:
            ConfigError: this machine, or an option, does not allow it.
        """
        cells = cells_of(sizes_of(self.nproc), ways_of(self.ways))
        device = device_of(self.words)
        largest = max((cell.size for cell in cells if cell.way != "dp"), default=1)
        if largest > 1:
            count_processes(largest, device)
        for cell in cells:
            if cell.way == "dp":
                _require_gpus(cell.size, device)
        return cells

    def check_files(self) -> None:
        """Refuse files that cannot be read or written, before anything is measured.

        Raises:
            ConfigError: a file cannot be used.
            MissingExtraError: a plot is asked for, and there is no matplotlib.
        """
        require_recipe(self.words)
        require_outputs(self.plot, self.json)


def require_recipe(words: Sequence[str]) -> None:
    """Refuse a command that names no script.

    Raises:
        ConfigError: there is none.
    """
    if not words:
        raise ConfigError(
            "no recipe was given. Give the script with its arguments, as after `python`: "
            "python -m ddpkit scale train.py hparams.yaml --nproc 1,2"
        )
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise MissingFileError(
            f"there is no script {words[0]!r}. Give the path of the recipe, such as train.py."
        )


def require_outputs(plot: Path | None, json: Path | None) -> None:
    """Refuse outputs that cannot be written.

    Raises:
        ConfigError: the kind or the place of a file cannot be used.
        MissingExtraError: there is no matplotlib for the plot.
    """
    for name, path in (("plot", plot), ("json", json)):
        if path is not None:
            require_writable_file(f"--{name}={str(path)!r}", path)
    if plot is None:
        return
    if plot.suffix not in PLOT_SUFFIXES:
        raise ConfigError(
            f"--plot={str(plot)!r}: a plot is a file that ends in {', '.join(PLOT_SUFFIXES)}."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(
            f"--plot={str(plot)!r} needs matplotlib, which is not installed. "
            "Run `pip install matplotlib`, or leave --plot out."
        )


def device_of(words: Sequence[str]) -> str | None:
    """Return the device that a recipe's command line or YAML asks for, if it is said in plain
    words.

    Args:
        words: script and arguments.

    Example:
        >>> device_of(["train.py", "--device=cpu"]), device_of(["train.py"])
        ('cpu', None)
    """
    return option_of(words, "device")


def option_of(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option that a recipe's command line or YAML gives, if it is said in
    plain words.

    Args:
        words: script and arguments.
        name: of the option.

    Example:
        >>> option_of(["train.py", "--virtual_ranks", "8"], "virtual_ranks")
        '8'
        >>> option_of(["train.py", "--data_parallel_backend", "h.yaml"], "data_parallel_backend")
        'True'
    """
    for place, word in enumerate(words):
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
        if word == f"--{name}" and RUN_OPTIONS[name].type is bool:
            return "True"
        if word == f"--{name}" and place + 1 < len(words):
            return words[place + 1]
    for word in words:
        if word.endswith(_YAML_SUFFIXES) and Path(word).is_file():
            found = {key.value: value.value for key, value in pairs(read_document(word).root)}
            value = found.get(name)
            return value if isinstance(value, str) else None
    return None


def _require_gpus(size: int, device: str | None) -> None:
    kind = accelerator_kind()
    gpus = 0 if kind == "cpu" or device == "cpu" else count_devices(kind)
    if gpus < size:
        raise ConfigError(
            f"--ways=dp with --nproc={size} is one process with {size} GPUs, and {gpus} can be "
            "used here. Leave dp out, or give smaller numbers."
        )
