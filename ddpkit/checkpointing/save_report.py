"""What a save or a deletion has done, for records of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Retained:
    """What a deletion has left in a folder.

    Attributes:
        kept: names of the checkpoints that are there, the newest last.
        deleted: names of those that it has deleted.
        best: the best that is there, by the key of the meta that has decided.

    Ranks: main only.

    Example:
        >>> Retained(("CKPT+a",), ("CKPT+b",), {"loss": "CKPT+a"}).deleted
        ('CKPT+b',)
    """

    kept: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    best: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveReport:
    """What one save has done.

    Attributes:
        path: the directory of the checkpoint.
        size: of its files, in bytes.
        seconds: for which training stood still.
        asynchronous: whether the files were written while training went on.
        end_of_epoch: whether an epoch had ended.
        meta: what ``CKPT.yaml`` holds.
        retained: what is left in the folder; None where the save has deleted nothing and was not
            asked to.

    Ranks: main only.
    """

    path: Path
    size: int
    seconds: float
    asynchronous: bool
    end_of_epoch: bool
    meta: Mapping[str, Any]
    retained: Retained | None = None


class SaveListener(Protocol):
    """Is told what becomes of saves, on the main process.

    Ranks: main only; what ``begin`` returns may be called in a thread.
    """

    def begin(self) -> Callable[[SaveReport], object]:
        """Note that a save begins; return what is called when its checkpoint is complete."""

    def deleted(self, retained: Retained) -> None:
        """Note that checkpoints were deleted apart from a save."""

    def failed(self, error: BaseException) -> None:
        """Note that a save or a deletion has failed and training goes on (``on_error="warn"``)."""


def size_of_files(folder: Path) -> int:
    """Return how much the files in a folder take, in bytes; files deleted meanwhile count
    nothing.

    Args:
        folder: whose files, and those of its subfolders.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "a").write_text("12345")
        5
        >>> size_of_files(folder)
        5
    """
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
