"""The file of ``--json``: all slices that were measured. Files of several launches can be
joined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpkit.errors import ConfigError, MissingFileError
from ddpkit.run import SliceResult
from ddpkit.see.json_file import write_json

FORMAT = "ddpkit scale 1"


@dataclass(frozen=True)
class Measurement:
    """Slices of one recipe, in the order in which they were measured.

    Attributes:
        recipe: script and arguments.
        is_strong: whether the batch of a step stays the same on any number of processes.
        slices: what was measured.
        failed: cells without a result, by name: why.
    """

    recipe: str
    is_strong: bool
    slices: Sequence[SliceResult]
    failed: Mapping[str, str]


def write_measurement(
    path: Path,
    measurement: Measurement,
    table: Sequence[Mapping[str, Any]],
) -> None:
    """Write a file of results.

    Args:
        path: of the file.
        measurement: all slices.
        table: rows for other programs: what was made of the slices.

    Raises:
        ConfigError: it cannot be written.
    """
    values = {
        "format": FORMAT,
        "recipe": measurement.recipe,
        "scaling": "strong" if measurement.is_strong else "weak",
        "table": list(table),
        "failed": dict(measurement.failed),
        "slices": [slice_.as_dict() for slice_ in measurement.slices],
    }
    write_json(path, values)


def read_measurement(path: Path) -> Measurement:
    """Read a file of results.

    Raises:
        MissingFileError: there is none.
        ConfigError: it is something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(f"--join: there is no file {str(path)!r}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _unknown(path) from error
    if not _is_measurement(values):
        raise _unknown(path)
    slices = [SliceResult.from_dict(found, repr(str(path))) for found in values["slices"]]
    is_strong = values["scaling"] == "strong"
    return Measurement(values["recipe"], is_strong, slices, values["failed"])


def _is_measurement(values: Any) -> bool:
    """Return whether values have the shape of a file of results, with one slice at least."""
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        return False
    kinds = {"recipe": str, "scaling": str, "slices": list, "failed": dict}
    return all(isinstance(values.get(name), kind) for name, kind in kinds.items()) and bool(
        values["slices"]
    )


def joined(measurements: Sequence[Measurement]) -> Measurement:
    """Join the slices of several files.

    Args:
        measurements: at least one; of the same recipe.

    Raises:
        ConfigError: strong and weak scaling are mixed, or another recipe was measured.

    Ranks: local.
    """
    first = measurements[0]
    for other in measurements[1:]:
        if other.recipe != first.recipe:
            raise ConfigError(
                f"--join: the files are of different recipes, {first.recipe!r} and "
                f"{other.recipe!r}. Join files of one recipe with the same options."
            )
    slices = [slice_ for measurement in measurements for slice_ in measurement.slices]
    failed = {name: why for measurement in measurements for name, why in measurement.failed.items()}
    return Measurement(first.recipe, _is_strong(slices), slices, failed)


def _is_strong(slices: Sequence[SliceResult]) -> bool:
    """Return whether the steps of all slices have the same number of samples.

    Raises:
        ConfigError: neither a step nor the part of a process has the same number everywhere.
    """
    if same_number([slice_.samples_of_step for slice_ in slices]):
        return (
            len({slice_.size for slice_ in slices}) > 1 or slices[0].global_batch_size is not None
        )
    if same_number([slice_.samples_of_step / slice_.size for slice_ in slices]):
        return False
    steps = ", ".join(f"{slice_.samples_of_step:g} on {slice_.size}" for slice_ in slices)
    raise ConfigError(
        f"--join: a step has {steps} processes. It must be the same on all (strong scaling), "
        "or the same for each process (weak scaling). Measure all with --strong, or all with "
        "--weak."
    )


def same_number(numbers: Sequence[float]) -> bool:
    """Return whether numbers of samples are the same but for short last batches.

    Example:
        >>> same_number([48.0, 47.5]), same_number([48.0, 96.0])
        (True, False)
    """
    return max(numbers) <= 1.2 * min(numbers)


def _unknown(path: Path) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is no result file. Give files that `python -m ddpkit scale --json` has "
        "written."
    )
