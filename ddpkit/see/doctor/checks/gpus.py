"""All that is looked at on GPUs: first at rest, then at work, on all ranks at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from ddpkit.errors import ConfigError, LaunchError, MissingExtraError
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.checks import (
    gpu_health,
    gpu_links,
    gpu_modes,
    gpu_ranks,
    gpu_software,
    gpu_use,
)
from ddpkit.see.doctor.checks.gpu_ranks import Seat
from ddpkit.see.doctor.finding import LOOK, OK, Finding, not_looked_at
from ddpkit.see.doctor.gpus.by_torch import ByTorch
from ddpkit.see.doctor.gpus.driver import Driver, Gpu
from ddpkit.see.doctor.gpus.load import Busy
from ddpkit.see.doctor.gpus.visible import VARIABLE, visible_gpus
from ddpkit.see.doctor.ranks import answering

NAME = "GPUs"


@dataclass
class _Look:
    """What a rank knows so far."""

    site: Site
    findings: list[Finding] = field(default_factory=list)
    driver: Driver | None = None
    busy_driver: Driver | None = None
    seen: ByTorch = field(default_factory=ByTorch)
    indices: list[int] = field(default_factory=list)  # the driver's numbers of what torch sees
    seat: Seat | None = None
    done: dict[int, Busy] = field(default_factory=dict)  # by torch's number

    def add(self, *found: Finding | None) -> None:
        """Keep findings."""
        self.findings += [finding for finding in found if finding is not None]

    @property
    def is_left_out(self) -> bool:
        """Whether there are GPUs, and the run is to be on the CPU."""
        return self.site.run.device == "cpu" and bool(self.seen.gpus)


def look(site: Site) -> Iterator[Finding]:
    """Look at the GPUs of this machine, and which rank gets which.

    Each part that may fail is on its own, so that all ranks meet at the same places.

    Ranks: collective.
    """
    ranks = site.ranks
    host = site.machine.name()
    here = _Look(site)
    _attempt(here, "driver of the GPUs", _at_rest)
    processes = ranks.exchange("processes", {"host": host, "pid": os.getpid()})
    _attempt(here, "GPUs of torch", _by_torch)
    plain = ranks.exchange("seats", None if here.seat is None else asdict(here.seat))
    seats = [Seat(**value) for value in answering(plain).values()]
    ours = [value["pid"] for value in answering(processes).values() if value["host"] == host]
    speeds = _at_work(here)
    if ranks.is_first_on_host:
        _attempt(here, "GPUs of this host", lambda look: _of_host(look, seats, ours))
    if ranks.is_main:
        _attempt(here, "GPUs of all ranks", lambda look: _of_run(look, seats, speeds))
    yield from here.findings


def _attempt(here: _Look, name: str, work: Callable[[_Look], None]) -> None:
    try:
        work(here)
    except MissingExtraError as error:
        if here.site.ranks.is_first_on_host:
            here.add(_without_package(error))
    except Exception as error:  # noqa: BLE001 -- becomes a finding; the others wait further on
        here.add(not_looked_at(name, error))


def _without_package(error: MissingExtraError) -> Finding:
    return Finding(
        NAME,
        LOOK,
        "not looked at: nvidia-ml-py is not installed",
        "the package nvidia-ml-py",
        "the extra `see` of ddpkit",
        cost="faults of GPUs are not seen",
        advice=str(error),
    )


def _at_rest(here: _Look) -> None:
    here.driver = here.site.machine.gpus.driver()


def _at_work_driver(here: _Look) -> None:
    here.busy_driver = here.site.machine.gpus.driver()


def _by_torch(here: _Look) -> None:
    site = here.site
    here.seen = site.machine.gpus.by_torch()
    if here.seen.gpus or site.run.device != "cpu":
        here.seat = _seat(site, here.seen)
    if here.driver is not None:
        here.indices = _indices(
            here.seen,
            here.driver,
            site.machine.environ.get(VARIABLE),
        )


def _seat(site: Site, seen: ByTorch) -> Seat:
    """Find the GPU that ddpkit would give this rank."""
    rank = site.ranks.rank
    host = site.machine.name()
    try:
        device = site.machine.gpus.device_of(site.run.device, site.run.launch)
    except (ConfigError, LaunchError) as error:
        return Seat(
            rank,
            host,
            site.run.device,
            problem=str(error),
        )
    if not device.startswith("cuda"):
        return Seat(rank, host, device)
    gpu = seen.gpus[_number(device)]
    part = site.machine.environ.get(VARIABLE, "")  # of a GPU that is divided
    uuid = f"{gpu.uuid} {part}" if gpu.uuid and part.startswith("MIG-") else gpu.uuid or ""
    return Seat(
        rank,
        host,
        device,
        "",
        uuid,
        gpu.name,
        gpu.memory_total,
    )


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _indices(seen: ByTorch, driver: Driver, visible: str | None) -> list[int]:
    """Find the driver's numbers of the GPUs that torch sees: by UUID, else by the variable."""
    by_uuid = {gpu.uuid: gpu.index for gpu in driver.gpus}
    known = [by_uuid[gpu.uuid] for gpu in seen.gpus if gpu.uuid in by_uuid]
    if known and len(known) == len(seen.gpus):
        return known
    return visible_gpus(visible, driver.gpus).gpus


def _at_work(here: _Look) -> dict[str, float]:
    """Have the GPUs of the run work at once; ask the driver meanwhile; return how fast they are."""
    ranks = here.site.ranks
    with here.site.machine.gpus.load(_own_devices(here)) as load:
        here.done = load.done
        ranks.exchange("at work", True)
        if ranks.is_first_on_host and load.done:
            _attempt(here, "driver of the GPUs, at work", _at_work_driver)
        speeds = ranks.exchange("speeds", _speeds(here))
    return {
        name: value
        for speeds_of_rank in answering(speeds).values()
        for name, value in speeds_of_rank.items()
    }


def _own_devices(here: _Look) -> list[int]:
    """Number the GPUs that this process has at work: its own; all, if it is alone."""
    if here.is_left_out or here.seat is None or here.seat.problem:
        return []
    if here.site.ranks.world_size == 1:
        return [gpu.index for gpu in here.seen.gpus]
    return [_number(here.seat.device)] if here.seat.device.startswith("cuda") else []


def _speeds(here: _Look) -> dict[str, float]:
    is_alone = here.site.ranks.world_size == 1
    name = f"rank {here.site.ranks.rank}"
    return {
        (f"GPU {device}" if is_alone else name): busy.computed
        for device, busy in here.done.items()
        if busy.computed
    }


def _of_run(here: _Look, seats: Sequence[Seat], speeds: dict[str, float]) -> None:
    """Look at the GPUs of all ranks."""
    if here.is_left_out or not seats:
        return
    if here.site.ranks.world_size > 1:
        here.add(gpu_ranks.seats(seats), gpu_ranks.alike(seats, is_run=True))
    else:
        each = [
            Seat(
                0,
                seats[0].host,
                f"cuda:{gpu.index}",
                "",
                "",
                gpu.name,
                gpu.memory_total,
            )
            for gpu in here.seen.gpus
        ]
        here.add(gpu_ranks.seats(seats), gpu_ranks.alike(each, is_run=False))
    here.add(gpu_ranks.even_speed(speeds))


def _of_host(here: _Look, seats: Sequence[Seat], ours: Sequence[int]) -> None:
    """Look at the driver and the GPUs of this host that the run would take."""
    driver = here.driver
    seen = here.seen
    run = here.site.run
    if driver is None:  # said already
        return
    if driver.version is None:
        here.add(gpu_software.no_driver(driver, seen))
        return
    if here.is_left_out:
        here.add(_not_wanted(driver))
        return
    visible, hidden = gpu_software.hidden(here.site.machine.environ, driver)
    is_wanted = not run.is_cpu_asked
    here.add(hidden, gpu_software.seen_by_torch(seen, visible, is_wanted=is_wanted))
    here.add(*gpu_software.versions(driver, seen), gpu_health.lost(driver.gpus))
    chosen = _chosen(here, seats, visible.gpus)
    _states(here, [driver.gpus[index] for index in chosen], ours)
    here.add(*gpu_links.peers(driver, seen, here.indices))


def _not_wanted(driver: Driver) -> Finding:
    return Finding(
        NAME,
        OK,
        f"{len(driver.gpus)}, not looked at",
        "not used",
        "--device=cpu",
    )


def _chosen(
    here: _Look,
    seats: Sequence[Seat],
    visible: Sequence[int],
) -> list[int]:
    """Return the driver's numbers of the GPUs of this host that ranks have."""
    assert here.driver is not None  # noqa: S101 -- the caller has looked
    if here.site.ranks.world_size == 1:
        return here.indices or list(visible)
    host = here.site.machine.name()
    own = [seat for seat in seats if seat.host == host and seat.device.startswith("cuda")]
    found = []
    for seat in own:
        uuid = seat.uuid.partition(" ")[0]
        by_uuid = [gpu.index for gpu in here.driver.gpus if uuid and gpu.uuid == uuid]
        by_number = here.indices[_number(seat.device) :][:1]
        found += by_uuid or by_number
    return sorted(set(found)) or list(visible)


def _states(here: _Look, gpus: Sequence[Gpu], ours: Sequence[int]) -> None:
    """Look at GPUs, at work if they were: the same ones, of the later answers."""
    if not gpus:
        return
    later = {gpu.index: gpu for gpu in (here.busy_driver or Driver()).gpus}
    is_loaded = bool(here.done) and all(gpu.index in later for gpu in gpus)
    busy = [later[gpu.index] for gpu in gpus] if is_loaded else list(gpus)
    here.add(
        gpu_use.others(gpus, ours),
        gpu_links.pcie(busy, is_loaded=is_loaded),
        gpu_links.replays(busy),
        gpu_links.nvlinks(busy),
        _copies(here, later),
        gpu_health.memory_errors(busy),
        gpu_health.slowdown(busy, is_loaded=is_loaded),
        gpu_health.temperature(busy),
        gpu_health.power_limit(busy),
        gpu_modes.persistence(busy),
        gpu_modes.compute_mode(busy),
        gpu_modes.mig(busy, here.site.ranks.world_size),
    )


def _copies(here: _Look, later: dict[int, Gpu]) -> Finding | None:
    """Look at the copies to the GPUs that this process had at work."""
    known = [
        (later[here.indices[device]], busy)
        for device, busy in here.done.items()
        if device < len(here.indices) and here.indices[device] in later
    ]
    failed = [busy.error for _, busy in known if busy.error]
    if failed:
        raise RuntimeError(failed[0])
    return gpu_links.copies([gpu for gpu, _ in known], [busy for _, busy in known])
