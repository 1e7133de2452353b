"""TensorBoard's event files: what they have got since a checkpoint."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

EVENT_FILES = "events.out.tfevents.*"
TEXT = "/text_summary"  # which TensorBoard adds to the tag of a text
LENGTH = struct.Struct("<Q")
CHECKSUM_BYTES = 4  # after the length of a record, and after its data


def event_file_sizes(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Return the sizes of the event files of a folder by their names.

    Args:
        folder: it need not exist.

    Ranks: main only.
    """
    return {path.name: path.stat().st_size for path in Path(folder).glob(EVENT_FILES)}


def events_after(folder: str | os.PathLike[str], sizes: Mapping[str, int]) -> Iterator[Any]:
    """Yield the events that event files have got since they had these sizes.

    Args:
        folder: of the files.
        sizes: as :func:`event_file_sizes` has returned them.

    Ranks: main only.
    """
    for path in sorted(Path(folder).glob(EVENT_FILES)):
        yield from _events(path, sizes.get(path.name, 0))


def _events(path: Path, start: int) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(start)
        while len(head := file.read(LENGTH.size + CHECKSUM_BYTES)) == LENGTH.size + CHECKSUM_BYTES:
            (length,) = LENGTH.unpack(head[: LENGTH.size])
            if length + CHECKSUM_BYTES > size - file.tell():  # cut off by a kill
                return
            try:
                event = Event.FromString(file.read(length + CHECKSUM_BYTES)[:length])
            except DecodeError:  # what a crash of the machine has left
                return
            yield event


class StandingValues:
    """Numbers and texts that event files have of one step, for a run that makes it again.

    Args:
        events: any.
        step: of which to look at.

    Ranks: main only.

    Example:
        >>> StandingValues(iter([]), 4).take("loss/valid", 0.5, 4)
        False
    """

    def __init__(self, events: Iterator[Any], step: int) -> None:
        self._step = step
        self._values: dict[str, list[Any]] = {}
        for event in events:
            if event.step == step and event.HasField("summary"):
                for value in event.summary.value:
                    tag = value.tag.removesuffix(TEXT)
                    self._values.setdefault(tag, []).append(_plain(value))

    def take(
        self,
        tag: str,
        value: float | str,
        step: int,
    ) -> bool:
        """Say whether a value stands there already; once for each that does."""
        if step != self._step:
            return False
        standing = self._values.get(tag, [])
        same = next((found for found in standing if _is_same(found, value)), None)
        if same is None:
            return False
        standing.remove(same)
        return True


def _plain(value: Any) -> float | str:
    texts = value.tensor.string_val
    return texts[0].decode(errors="replace") if texts else float(value.simple_value)


def _is_same(found: float | str, value: float | str) -> bool:
    if isinstance(found, str) or isinstance(value, str):
        return found == value
    with np.errstate(over="ignore"):  # event files have 32 bits
        written = float(np.float32(value))
    return found == written or (math.isnan(found) and math.isnan(written))
