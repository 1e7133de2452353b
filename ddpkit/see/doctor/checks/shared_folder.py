"""Whether all hosts see the same output folder: all of them read the checkpoints there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.file_systems import nearest_folder
from ddpkit.see.doctor.finding import OK, PROBLEM, Finding

PREFIX = ".ddpkit-doctor-"


def look(site: Site) -> Iterator[Finding]:
    """Write a file on the main process's host, and look for it on the others.

    Ranks: collective.
    """
    if site.run.output_url or not site.run.has_several_hosts:
        return
    folder = nearest_folder(site.run.output_folder)
    with contextlib.ExitStack() as stack:
        name = _write(folder, stack) if site.ranks.is_main else ""
        written = site.ranks.exchange("file in the output folder", name)[0]
        is_there = bool(written) and _is_there(folder, written)
        site.ranks.exchange("seen", "")  # until all have looked, the file stays
    if written and site.ranks.is_first_on_host:
        yield Finding(
            "shared folder",
            OK if is_there else PROBLEM,
            f"{folder} is the same as on the host of rank 0"
            if is_there
            else f"{folder} is not the same as on the host of rank 0",
            "the same folder on all hosts",
            "rank 0 writes checkpoints, and all ranks read them when a run goes on",
            cost="a run that is started again does not find its checkpoints on this host",
            advice="Give a folder on a file system that all hosts share (NFS, Lustre, GPFS).",
        )


def _write(folder: Path, stack: contextlib.ExitStack) -> str:
    try:
        file = tempfile.NamedTemporaryFile(dir=folder, prefix=PREFIX)  # noqa: SIM115 -- of the stack
    except OSError:
        return ""  # told by the check of the output folder
    stack.enter_context(file)
    return Path(file.name).name


def _is_there(folder: Path, name: str) -> bool:
    return any(entry.name == name for entry in folder.iterdir())  # asks the server anew
