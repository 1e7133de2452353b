"""What others take of the cores at this moment: programs of other people, or of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator

from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, Finding
from ddpkit.see.doctor.ranks import answering

LITTLE = 0.25  # of all cores
LITTLE_STOLEN = 0.05


def look(site: Site) -> Iterator[Finding]:
    """Measure for half a second.

    Ranks: collective.
    """
    own = answering(
        site.ranks.exchange(
            "processes",
            [site.machine.name(), site.machine.pid()],
        )
    )
    ranks_here = {pid for host, pid in own.values() if host == site.machine.name()}
    if not site.ranks.is_first_on_host:
        return
    load = site.machine.load(ranks_here)
    names = ", ".join(f"{name} (pid {pid}) {cores:.1f} cores" for name, pid, cores in load.busiest)
    yield Finding(
        "busy cores",
        LOOK if load.busy_cores > LITTLE * load.cores else OK,
        f"{load.busy_cores:.1f} of {load.cores} by others" + (f": {names}" if names else ""),
        f"at most {LITTLE * load.cores:.1f}",
        f"measured for {load.seconds:g} s, without the ranks of this command",
        cost="steps are slower from time to time; with several ranks all wait for the slowest",
        advice="End them (top shows them), or wait; an earlier run may have left processes behind.",
        details={"busy": load.busy_cores, "cores": load.cores},
    )
    if load.stolen > LITTLE_STOLEN:
        yield Finding(
            "stolen time",
            LOOK,
            f"{load.stolen:.0%} of the time this machine's cores were another machine's",
            f"at most {LITTLE_STOLEN:.0%}",
            "steal of /proc/stat: virtual machines share the cores below",
            cost="all threads stand still meanwhile",
            advice="Take a machine with cores of its own.",
        )
