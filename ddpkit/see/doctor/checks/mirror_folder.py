"""The folder of this machine that mirrors an output folder in an object store: can it be written,
on which file system is it, how full and how fast is that.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpkit.base import FileSystem, require_writable
from ddpkit.errors import ConfigError
from ddpkit.see.checkpoint_place import OF_MIRROR, CheckpointPlace
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.checks.output_folder import kind_of, latency, reason_of, room
from ddpkit.see.doctor.file_systems import OF_CONTAINER, file_system_of, nearest_folder
from ddpkit.see.doctor.finding import OK, PROBLEM, Finding

TWO = (
    "two checkpoints of 300 million parameters with Adam's state, the new one and the one before, "
    "and more where more are kept"
)


def look(site: Site) -> Iterator[Finding]:
    """Look at the folder; write a small file above it and delete it at once."""
    if not site.run.output_url:
        return
    place = site.run.checkpoints
    folder = nearest_folder(place.folder)
    system = file_system_of(site.machine, folder)
    try:
        require_writable("", place.folder)
    except ConfigError as error:
        yield _mirror(place, system, PROBLEM, reason_of(error))
    else:
        ends_anyway = system.kind in OF_CONTAINER and not place.stays
        yield _mirror(place, system, *((OK, "") if ends_anyway else kind_of(system)))
        yield latency(folder, system)
    yield from room(site, folder, TWO, OF_MIRROR)


def _mirror(
    place: CheckpointPlace,
    system: FileSystem,
    verdict: str,
    fault: str,
) -> Finding:
    return Finding(
        "mirror",
        verdict,
        f"{place.folder} on {system.kind}" + (f" {fault}" if fault else ""),
        "a folder of this machine that can be written",
        f"the run works there, and copies to {place.url}: a checkpoint is written there first",
        cost="the run ends before its first step, or when it saves",
        advice=OF_MIRROR,
        details={
            "path": str(place.folder),
            "file_system": system.kind,
            "mount": system.mount,
        },
    )
