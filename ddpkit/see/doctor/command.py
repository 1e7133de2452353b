"""``python -m ddpkit doctor``: looks at the machines of a launch and tells what is wrong for
training.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit import __version__
from ddpkit.device import accelerator_kind
from ddpkit.errors import ConfigError, LaunchError, MissingExtraError
from ddpkit.launch import LaunchInfo, find_launch, refuse_lonely_node
from ddpkit.object_store import is_url
from ddpkit.see.amounts import counted
from ddpkit.see.doctor.check import Check, Site
from ddpkit.see.doctor.examination import Examination, Placed, collect, examine
from ddpkit.see.doctor.finding import PROBLEM, VERDICTS, Finding
from ddpkit.see.doctor.findings_table import table
from ddpkit.see.doctor.machine import Machine
from ddpkit.see.doctor.order import CHECKS
from ddpkit.see.doctor.planned_run import PlannedRun
from ddpkit.see.doctor.ranks import Ranks, open_ranks
from ddpkit.see.doctor.recipe_plan import RecipePlan, parameter_file, plan_of

NEEDED = "psutil"
UNNAMED_LAUNCHERS = ("none", "environment")  # no launcher, and --nproc or variables set by hand


@dataclass(frozen=True)
class Request:
    """What stands on the command line of ``doctor``.

    Attributes:
        device: ``"cpu"`` or a kind of accelerator; None: what is there.
        output_folder: where the run would write, a path or a URL; None: as the recipe says, else
            the present one.
        ckpt_local: the option of that name; None: as the recipe says.
        recipe: script, parameter file if it has one, and overrides.
        workers: loader processes of each rank; None: as the recipe says.
        timeout: seconds to wait for a rank.
        with_pairs: whether to measure pairs of hosts, or of ranks, whatever all together reach.
        as_json: whether to write JSON.
        verbose: whether to say of everything what was expected.

    Ranks: local.
    """

    device: str | None = None
    output_folder: str | None = None
    ckpt_local: str | None = None
    recipe: tuple[str, ...] = ()
    workers: int | None = None
    timeout: float = 120.0
    with_pairs: bool = False
    as_json: bool = False
    verbose: bool = False


def run_doctor(
    request: Request,
    say: Callable[[str], object],
    machine: Machine | None = None,
    checks: Sequence[Check] = CHECKS,
) -> int:
    """Look at the machines of this launch; the main process says what was found.

    Args:
        request: of the command line.
        say: writes a text.
        machine: None: the real one.
        checks: in order.

    Returns:
        1 if there is a problem, 0 else; the same on all ranks.

    Raises:
        ConfigError: the recipe's files cannot be read.
        LaunchError: rank 0 does not answer any more.
        MissingExtraError: the extra ``see`` is not installed.

    Ranks: collective.
    """
    require_extra()
    check_recipe(request.recipe)
    plan = plan_of(request.recipe)
    machine = machine or Machine()
    ranks, launch, before = _meet(request)
    launch = _with_node_size(launch, ranks)
    site = Site(machine, _planned(request, plan, launch), ranks)
    made_before = [Placed(finding, machine.name(), launch.rank) for finding in before]
    examination = collect(site, [*made_before, *examine(site, checks)])
    if ranks.is_main and ranks.is_first_on_host:
        say(
            _as_json(examination, site)
            if request.as_json
            else _as_text(examination, site, verbose=request.verbose)
        )
    ranks.leave()
    return int(any(finding.finding.is_problem for finding in examination.placed))


def require_extra() -> None:
    """Raise where psutil is not installed.

    Raises:
        MissingExtraError: it is not.

    Ranks: local.
    """
    if importlib.util.find_spec(NEEDED) is None:
        raise MissingExtraError(
            f"`python -m ddpkit doctor` needs {NEEDED}, which is not installed. Run `pip install "
            f"{NEEDED}`."
        )


def check_recipe(recipe: Sequence[str]) -> None:
    """Raise where a file of the recipe is not there.

    Args:
        recipe: script, parameter file if it has one, and overrides.

    Raises:
        ConfigError: one of the files is missing.

    Ranks: local.
    """
    for file in (*recipe[:1], *parameter_file(recipe)):
        if not Path(file).is_file():
            raise ConfigError(
                f"--recipe: there is no file {file!r}. Give the script, and its YAML file if it "
                "has one: --recipe train.py hparams.yaml. Its own options stand after --."
            )


def _meet(request: Request) -> tuple[Ranks, LaunchInfo, list[Finding]]:
    """Meet the other ranks. Where that fails this process goes on alone, with the reason as a
    finding.
    """
    try:
        launch = find_launch()
        if not launch.is_distributed:
            refuse_lonely_node()
    except LaunchError as error:
        launch = LaunchInfo()
        return Ranks(launch), launch, [_failed("launcher", error)]
    try:
        return open_ranks(launch, request.timeout), launch, []
    except (RuntimeError, OSError, ValueError) as error:  # LaunchError, and torch's own
        alone = Ranks(launch)
        alone.is_first_on_host = launch.local_rank == 0  # one process of each host tells
        return alone, launch, [_failed("rendezvous", error)]


def _with_node_size(launch: LaunchInfo, ranks: Ranks) -> LaunchInfo:
    """Return the place of this process; how many are on its host the ranks tell each other where no
    launcher says it.
    """
    if launch.launcher != "environment" or ranks.store is None:
        return launch
    first = launch.first_on_node
    size = ranks.exchange("the first rank of each host", first).count(first)
    is_said = "LOCAL_WORLD_SIZE" in os.environ or size <= launch.local_rank
    return launch if is_said else dataclasses.replace(launch, local_world_size=size)


def _failed(name: str, error: Exception) -> Finding:
    return Finding(
        name,
        PROBLEM,
        str(error),
        "all ranks meet at one store",
        "what ddpkit does at the start of each run",
        cost="no run with several processes starts here; below, this process alone",
        advice="See above.",
    )


def _planned(request: Request, plan: RecipePlan, launch: LaunchInfo) -> PlannedRun:
    folder = request.output_folder or plan.output_folder or "."
    return PlannedRun(
        launch=launch,
        device=request.device or accelerator_kind(),
        output_folder=Path() if is_url(folder) else Path(folder),
        output_url=folder if is_url(folder) else "",
        ckpt_local=plan.ckpt_local if request.ckpt_local is None else request.ckpt_local,
        recipe=request.recipe,
        workers=plan.workers if request.workers is None else request.workers,
        timeout=request.timeout,
        with_pairs=request.with_pairs,
        is_cpu_asked=request.device == "cpu",
    )


def _as_text(
    examination: Examination,
    site: Site,
    *,
    verbose: bool,
) -> str:
    hosts = list(dict.fromkeys(examination.hosts))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    processes = counted(examination.world_size, "process")
    by = site.run.launch.launcher
    launcher = "" if by in UNNAMED_LAUNCHERS else f" by {by}"
    title = f"ddpkit {__version__} doctor: {processes} on {where}{launcher}, {site.run.device}"
    text = f"{title}\n\n{table(examination, verbose=verbose)}"
    is_bad = any(finding.finding.is_problem for finding in examination.placed)
    if is_bad and by == "torchrun":
        text += "\n(exit code 1: torchrun adds a report of its own below)"
    return text


def _as_json(examination: Examination, site: Site) -> str:
    verdicts = [finding.finding.verdict for finding in examination.placed]
    return json.dumps(
        {
            "ddpkit": __version__,
            "world_size": examination.world_size,
            "hosts": examination.hosts,
            "device": site.run.device,
            "verdict": max(
                verdicts,
                key=VERDICTS.index,
                default=VERDICTS[0],
            ),
            "findings": [
                {
                    "host": finding.host,
                    "rank": finding.rank,
                    **dataclasses.asdict(finding.finding),
                }
                for finding in examination.placed
            ],
        },
        indent=1,
    )
