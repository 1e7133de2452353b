"""Checks that a file of ``torch.save`` holds all of each storage that it names.

Before 2.10 torch takes the number of elements from the file's pickle, and does not compare it with
the bytes that are there: the tensor goes on into whatever memory comes next. The pickle is read
here with nothing behind its names, so that no code is looked up or run.

Source: https://github.com/pytorch/pytorch/pull/165553 , by which torch compares them itself.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import zipfile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path
    from typing import IO

COMPARES_ITSELF = (2, 10)  # the first version of torch that does
PICKLE = "data.pkl"

_BYTES_OF_ELEMENT = {
    "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8,
    "DoubleStorage": 8,
    "LongStorage": 8,
    "FloatStorage": 4,
    "IntStorage": 4,
    "QInt32Storage": 4,
    "BFloat16Storage": 2,
    "HalfStorage": 2,
    "ShortStorage": 2,
}  # of all others one at least


def torch_compares_itself() -> bool:
    """Say whether this torch refuses a storage that is larger than its record."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return found is None or (int(found[1]), int(found[2])) >= COMPARES_ITSELF


def check_record_sizes(path: Path) -> None:
    """Raise if a storage of a file has more bytes than the file holds of it.

    Args:
        path: of a file of ``torch.save``. One that cannot be read is left to torch, which says why.

    Raises:
        ValueError: it names such a storage.

    Ranks: local.
    """
    records: dict[str, int] = {}
    storages: list[tuple[str, int]] = []
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name = entry.filename.partition("/")[2]
            records[name] = min(entry.file_size, records.get(name, entry.file_size))
        [place] = {name for name in archive.namelist() if name.partition("/")[2] == PICKLE}
        with archive.open(place) as file:
            _Reader(file, storages).load()
    for key, needed in storages:
        there = records.get(f"data/{key}")
        if there is not None and needed > there:
            raise ValueError(f"storage {key} has {needed} bytes, and its record size is {there}")


class _Placeholder:
    """Stands for whatever a pickle names, and takes all that a pickle can do with it."""

    def __init__(self, *_args: object, **_named: object) -> None:
        """Take anything."""

    def _take(self, *_args: object) -> None:
        """Take anything."""

    __setitem__ = __setstate__ = append = extend = add = update = _take


class _Reader(pickle.Unpickler):
    """Finds the storages of a pickle: the key of each, and its bytes."""

    def __init__(self, file: IO[bytes], storages: list[tuple[str, int]]) -> None:
        super().__init__(file, encoding="utf-8")
        self._storages = storages

    def find_class(self, _module: str, name: str) -> type[_Placeholder]:
        return type(name, (_Placeholder,), {})

    def persistent_load(self, saved_id: Any) -> _Placeholder:
        _, kind, key, _, numel = saved_id
        self._storages.append((str(key), _BYTES_OF_ELEMENT.get(kind.__name__, 1) * int(numel)))
        return _Placeholder()
