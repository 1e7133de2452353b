"""``--check_parity W``: starts the recipe once more as W real processes, and compares their gradients with one process.

The process that the user has started is the one. It writes down its weights, and starts its own script again under
torchrun. The ranks run the script up to its first call of ``fit``, take the weights, work on a few optimizer steps,
leave the gradients in a file and end. Then the one process works on the same samples, compares, and ends as well.

Why processes: ``docs/decisions/0012-parity-by-processes.md``.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from ddpkit.distributed import get_rank, get_world_size
from ddpkit.errors import ConfigError, ParityError
from ddpkit.launch import PARITY
from ddpkit.logger import get_logger
from ddpkit.parity.causes import diagnose
from ddpkit.parity.report import ParityReport
from ddpkit.parity.side import Side
from ddpkit.strategies import refuse_shared_parameters

logger = get_logger(__name__)

STEPS = 3  # that are compared: the first ones of an epoch, and its last
SHOWN_LINES = 30  # of what ranks that failed have said
RANDOM_SEED = 1000  # plus the rank


def check_parity(brain: Any, parts: Any, train_set: Any, loader_kwargs: Mapping[str, Any]) -> NoReturn:
    """Compare the gradients of several processes with those of one, or record them in such a process; then end it.

    Args:
        brain: whose ``fit`` was called.
        parts: that the Brain holds, a :class:`~ddpkit.run.parts.Run`.
        train_set: as for ``fit``.
        loader_kwargs: likewise; not changed.

    Raises:
        ParityError: the gradients differ, or the ranks fail where one process does not. The message is the report.
        ConfigError: this training, or this process, cannot be checked.
        SystemExit: with code 0, at the end.

    Ranks: the one process, and each rank that it starts.
    """
    if PARITY not in os.environ:
        require_one_process(brain.check_parity)
        report = _compare(brain, parts, train_set, loader_kwargs)
        if not report.holds:
            raise ParityError(str(report))
        logger.announce("%s", report)
    else:
        folder = Path(os.environ[PARITY])
        start = torch.load(folder / "start.pt", map_location="cpu", weights_only=True)
        brain.checkpointer, brain.hang_timeout = None, start["seconds"]
        with parts.stop.guarded("fit"):
            torch.save(record(brain, parts, train_set, loader_kwargs, start), folder / f"rank{get_rank()}.pt")
    raise SystemExit(0)


def require_one_process(world_size: int) -> None:
    """Refuse a check that cannot start processes, or where several processes are at work already.

    Raises:
        ConfigError: several processes, less than two ranks, or no script.

    Ranks: local.
    """
    given = f"check_parity={world_size!r}"
    if get_world_size() > 1:
        raise ConfigError(
            f"{given} starts the processes itself, and a launcher has started {get_world_size()}. Start one:\n"
            f"    python train.py hparams.yaml --{given}"
        )
    if world_size < 2:  # noqa: PLR2004 -- else there is nothing to compare
        raise ConfigError(f"{given}: compare at least 2 processes, for example check_parity=4.")
    if not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(
            f"{given} starts the running script again as several processes, and this is a notebook, an interactive "
            "Python, or code from a pipe. Put the code into a file, and start that with --check_parity."
        )


def record(
    brain: Any, parts: Any, train_set: Any, loader_kwargs: Mapping[str, Any], start: Mapping[str, Any]
) -> dict[str, Any]:
    """Work on a few optimizer steps as one of several processes.

    Args:
        brain: of this process; it is good for nothing else afterwards.
        parts: that it holds.
        train_set: as for ``fit``.
        loader_kwargs: likewise.
        start: what :func:`one_process` gave.

    Returns:
        The samples and the gradients of each step, and what else tells the cause of a difference.

    Ranks: collective.
    """
    side, steps = Side(brain, parts, train_set, loader_kwargs, start), []
    parts.preflight.compare_data(train=side.loader)
    length, seed = -(-side.num_batches // side.factor), RANDOM_SEED + brain.rank
    for number in sorted({*range(min(STEPS - 1, length)), length - 1}):
        step = side.step(number)
        grads = side.run(step, side.factor, side.counts, seed=seed)
        steps.append({**dataclasses.asdict(step), "gradients": grads, "weighs": side.counts is not None})
    return {"factor": side.factor, "length": length, "steps": steps, "norms": side.norms, "moved": list(side.moved)}


def one_process(
    brain: Any, parts: Any, train_set: Any, loader_kwargs: Mapping[str, Any]
) -> tuple[Side, dict[str, Any]]:
    """Get ready as the one process, and try a step: what is wrong with the recipe alone, it says here.

    Returns:
        The side of the one process, and what the ranks start from.

    Ranks: local; one process.
    """
    refuse_shared_parameters(brain.modules)
    side = Side(brain, parts, train_set, loader_kwargs)
    state = {name: value.detach().cpu().clone() for name, value in brain.raw_modules.state_dict().items()}
    began = time.monotonic()
    side.run(side.step(0), side.factor, side.counts)
    seconds = 30.0 + 60.0 * (time.monotonic() - began)
    return side, {"modules": state, "optimizer_step": side.done, "seconds": seconds}


def _compare(brain: Any, parts: Any, train_set: Any, loader_kwargs: Mapping[str, Any]) -> ParityReport:
    with (
        parts.stages.session(getattr(brain.hparams, "output_folder", "results")),
        tempfile.TemporaryDirectory(prefix="ddpkit-parity-") as folder,
    ):
        side, start = one_process(brain, parts, train_set, loader_kwargs)
        torch.save(start, Path(folder, "start.pt"))
        _run_ranks(brain.check_parity, Path(folder))
        paths = [Path(folder, f"rank{rank}.pt") for rank in range(brain.check_parity)]
        if not all(path.exists() for path in paths):
            raise ParityError(
                f"parity does not hold: {len(paths)} processes end without the call of fit that one process has "
                "reached: the script does something else under a launcher."
            )
        return diagnose(side, [torch.load(path, map_location="cpu", weights_only=True) for path in paths])


def _run_ranks(world_size: int, folder: Path) -> None:
    """Run the script as several processes, to the end of its first call of ``fit``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}", "--no-python"]
    command = [sys.executable, *launcher, sys.executable, *sys.orig_argv[1:]]
    logger.info("check_parity: starting %d processes of this script.", world_size)
    output = folder / "output.txt"
    with output.open("wb") as file:
        environment = {**os.environ, PARITY: str(folder)}
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
        )
    if ended.returncode:
        lines = output.read_text(errors="replace").splitlines()
        raise ParityError(
            f"parity does not hold: {world_size} processes fail where one process has made a step. They said last:\n"
            + "\n".join(lines[-SHOWN_LINES:])
        )
