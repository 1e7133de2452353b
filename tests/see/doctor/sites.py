"""Machines with files of their own, and what a check finds on them."""

from __future__ import annotations

import dataclasses

from ddpkit.launch import LaunchInfo
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.machine import Machine
from ddpkit.see.doctor.planned_run import PlannedRun
from ddpkit.see.doctor.ranks import Ranks

HERE = LaunchInfo()
FOUR = LaunchInfo("torchrun", world_size=4, local_world_size=4)
TWO_HOSTS = LaunchInfo("torchrun", world_size=2, local_world_size=1, address="node0", port=29500)


def machine_with(root, files, **replaced):
    """A machine whose files are these alone."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root=root, **{"environ": {}, **replaced})


def site_of(machine=None, launch=HERE, **run):
    """A site on which this process is alone, whatever the launch says."""
    return Site(machine or Machine(environ={}), PlannedRun(launch=launch, **run), Ranks(HERE))


def found(check, site):
    """The findings of a check by their names."""
    findings = list(check.look(site))
    assert all(one.measured and one.expected and one.source for one in findings)
    assert all(one.cost and one.advice for one in findings if one.verdict != "ok")
    assert all(dataclasses.is_dataclass(one) for one in findings)
    return {one.name: one for one in findings}
