"""``--check_parity W``: starts the recipe once more as W real processes, and compares their
gradients with one process.

The process that the user has started is the one. It writes down its weights, and starts its own
script again under torchrun. The ranks run the script up to its first call of ``fit``, take the
weights, work on a few optimizer steps, leave the gradients in a file and end. Then the one process
works on the same samples, compares, and ends as well.

Why processes: ``docs/decisions/0012-parity-by-processes.md``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ddpkit.checkpoints import safe_load
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.errors import ConfigError, ParityError
from ddpkit.launch import PARITY
from ddpkit.logger import get_logger
from ddpkit.parity.causes import Diagnosis
from ddpkit.parity.side import Side
from ddpkit.strategies import refuse_shared_parameters

if TYPE_CHECKING:
    from ddpkit.parity.recipe import CheckedBrain
    from ddpkit.run import Run

logger = get_logger(__name__)

STEPS = 3  # that are compared: the first ones of an epoch, and its last
SHOWN_LINES = 30  # of what ranks that failed have said
RANDOM_SEED = 1000  # plus the rank


def check_parity(
    brain: CheckedBrain,
    parts: Run,
    train_set: Any,
    loader_kwargs: Mapping[str, Any],
) -> NoReturn:
    """Compare the gradients of several processes with those of one, or record them in such a
    process; then end it.

    Args:
        brain: whose ``fit`` was called.
        parts: that the Brain holds, a :class:`~ddpkit.run.run.Run`.
        train_set: as for ``fit``.
        loader_kwargs: likewise; not changed.

    Raises:
        ParityError: the gradients differ, or the ranks fail where one process does not. The message
            is the report.
        ConfigError: this training, or this process, cannot be checked.
        SystemExit: with code 0, at the end.

    Ranks: the one process, and each rank that it starts.
    """
    if PARITY in os.environ:
        folder = Path(os.environ[PARITY])
        start = safe_load(folder / "start.pt")
        brain.checkpointer = None
        brain.hang_timeout = start["seconds"]
        with parts.stop.guarded("fit"):
            side = Side(brain, parts, train_set, loader_kwargs, start)
            torch.save(record(side), folder / f"rank{get_rank()}.pt")
    else:
        world_size = brain.run_opts["check_parity"]
        require_one_process(world_size)
        refuse_shared_parameters(brain.modules)
        with parts.stages.session():
            side = Side(brain, parts, train_set, loader_kwargs)
            report = Diagnosis(side, _run_ranks(world_size, try_step(side))).report()
        if not report.holds:
            raise ParityError(str(report))
        logger.announce("%s", report)
    raise SystemExit(0)


def require_one_process(world_size: int) -> None:
    """Refuse a check that cannot start processes, or where several processes are at work already.

    Raises:
        ConfigError: several processes, or no script.

    Ranks: local.
    """
    given = f"check_parity={world_size!r}"
    if get_world_size() > 1:
        raise ConfigError(
            f"{given} starts the processes itself, and a launcher has started {get_world_size()}. "
            "Start one:\n"
            f"    python train.py hparams.yaml --{given}"
        )
    if not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(
            f"{given} starts the running script again as several processes, and this is a "
            "notebook, an interactive Python, or code from a pipe. Put the code into a file, and "
            "start that with --check_parity."
        )


def try_step(side: Side) -> dict[str, Any]:
    """Try a step as the one process: what is wrong with the recipe alone, it says here.

    Returns:
        What the ranks start from: the weights, the optimizer step, and the seconds that they may
        take for a step.

    Ranks: local; one process.
    """
    state = {
        name: value.detach().cpu().clone()
        for name, value in side.brain.raw_modules.state_dict().items()
    }
    began = time.monotonic()
    side.run(side.step(0), side.factor)
    return {
        "modules": state,
        "optimizer_step": side.done,
        "seconds": 30.0 + 60.0 * (time.monotonic() - began),
    }


def record(side: Side) -> dict[str, Any]:
    """Work on a few optimizer steps as one of several processes.

    Returns:
        The samples and the gradients of each step, and what else tells the cause of a difference.

    Ranks: collective.
    """
    side.parts.preflight.compare_data(train=side.loader)
    length = -(-side.num_batches // side.factor)
    steps = []
    for number in sorted({*range(min(STEPS - 1, length)), length - 1}):
        step = side.step(number)
        gradients = side.run(
            step,
            side.factor,
            seed=RANDOM_SEED + side.brain.rank,
        )
        steps.append({**vars(step), "gradients": gradients})
    return {
        "factor": side.factor,
        "steps": steps,
        "norms": side.own_norms(),
        "moved": list(side.moved),
    }


def _run_ranks(
    world_size: int,
    start: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Run the script as several processes, to the end of its first call of ``fit``; return what
    they have recorded.
    """
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={world_size}",
        "--no-python",
    ]
    command = [
        sys.executable,
        *launcher,
        sys.executable,
        *sys.orig_argv[1:],
    ]
    logger.info("check_parity: starting %d processes of this script.", world_size)
    with tempfile.TemporaryDirectory(prefix="ddpkit-parity-") as name:
        folder = Path(name)
        output = Path(name, "output.txt")
        torch.save(start, folder / "start.pt")
        with output.open("wb") as file:
            environment = {**os.environ, PARITY: name}
            ended = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                check=False,
            )
        paths = [folder / f"rank{rank}.pt" for rank in range(world_size)]
        if ended.returncode or not all(path.exists() for path in paths):
            failure = "fail" if ended.returncode else "end without this call of fit"
            lines = output.read_text(errors="replace").splitlines()
            raise ParityError(
                (
                    f"parity does not hold: {world_size} processes {failure} where one process has "
                    "made a step. They said last:\n"
                )
                + "\n".join(lines[-SHOWN_LINES:])
            )
        return [safe_load(path) for path in paths]
