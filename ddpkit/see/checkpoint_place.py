"""Where a run keeps its checkpoints on this machine, and how much room is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddpkit.mirror import mirror_place
from ddpkit.object_store import is_url, shown_url
from ddpkit.see.amounts import in_bytes

AT_A_TIME = 2  # a new one is complete before an old one is deleted
OF_FOLDER = (
    "Delete what is not needed (python -m ddpkit ckpt ls shows checkpoints), or give another "
    "--output_folder."
)
OF_MIRROR = (
    "Set TMPDIR to a folder on a disk with more room, or give one with --ckpt_local=/scratch, in "
    "which checkpoints stay from start to start."
)


@dataclass(frozen=True)
class CheckpointPlace:
    """A folder of this machine.

    Attributes:
        folder: need not be there.
        url: of the folder in a store that it mirrors; empty: none.
        stays: whether it is there after the run.

    Example:
        >>> CheckpointPlace(Path("results")).shown
        'results'
    """

    folder: Path
    url: str = ""
    stays: bool = True

    @property
    def shown(self) -> str:
        """The folder in words."""
        return f"{self.folder}, the mirror of {self.url}" if self.url else str(self.folder)

    @property
    def advice(self) -> str:
        """What to do where there is too little room."""
        return OF_MIRROR if self.url else OF_FOLDER


def place_of_checkpoints(output_folder: str, ckpt_local: str = "") -> CheckpointPlace:
    """Return where a run keeps its checkpoints on this machine; nothing is made.

    Args:
        output_folder: of the run, a path or a URL.
        ckpt_local: the option; empty: not given.

    Example:
        >>> place_of_checkpoints("results").folder
        PosixPath('results')
        >>> place_of_checkpoints("s3://bucket/seven", "/scratch").shown
        '/scratch/seven-..., the mirror of s3://bucket/seven'
    """
    if not is_url(output_folder):
        return CheckpointPlace(Path(output_folder))
    folder = mirror_place(output_folder, ckpt_local or None)
    return CheckpointPlace(folder, shown_url(output_folder), bool(ckpt_local))


def room_in_words(place: CheckpointPlace, size: int, free: int) -> str:
    """Say how much is free for checkpoints, and what to do if that is not enough.

    Args:
        place: of the checkpoints.
        size: of one, in bytes.
        free: bytes of its disk.

    Example:
        >>> room_in_words(CheckpointPlace(Path("results")), 2_000_000, 9_000_000)
        'A checkpoint takes about 2.0 MB, and 9.0 MB are free in results.'
    """
    words = f"A checkpoint takes about {in_bytes(size)}, and {in_bytes(free)} are free in "
    words += f"{place.shown}."
    if free >= AT_A_TIME * size:
        return words
    return f"{words} Two are there at a time, the new one and the one before. {place.advice}"
