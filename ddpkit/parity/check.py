"""``--check_parity W``: starts the recipe once more as W real processes, and compares their gradients with one process.

The process that the user has started is the one. It writes down its weights, and starts its own script again under
torchrun. The ranks run the script up to the same call of ``fit``, take the weights, work on a few optimizer steps,
leave the gradients in a file and end. Then the one process works on the same samples, and compares.

Why processes: ``docs/decisions/0012-parity-by-processes.md``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ddpkit.brain import run_of
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.errors import ConfigError, ParityError
from ddpkit.launch.variables import PARITY
from ddpkit.logger import get_logger
from ddpkit.parity.causes import diagnose
from ddpkit.parity.report import ParityReport
from ddpkit.parity.side import Side, epoch_length, joins, require_samples, share_of
from ddpkit.seed import RngState
from ddpkit.training.stage_batches import counts_of, length_of
from ddpkit.training.strategy import refuse_shared_parameters
from ddpkit.types import Stage

logger = get_logger(__name__)

STEPS = 3  # that are compared: the first ones of an epoch, and its last
SHOWN_LINES = 30  # of what ranks that failed have said
RANDOM_SEED = 1000  # plus the rank

_calls = itertools.count(1)  # of fit in this process, so that the ranks know which one is meant


def check_parity(brain: Any, train_set: Any, loader_kwargs: Mapping[str, Any]) -> None:
    """Compare the gradients of several processes with those of one; in such a process, record them and end.

    Args:
        brain: whose ``fit`` was called.
        train_set: as for ``fit``.
        loader_kwargs: likewise; not changed.

    Raises:
        ParityError: the gradients differ, or the ranks fail where one process does not. The message is the report.
        ConfigError: this training, or this process, cannot be checked.
        SystemExit: in a rank, at its end.

    Ranks: the one process, and each rank that it starts.
    """
    call, target = next(_calls), os.environ.get(PARITY)
    if target is None:
        report = _check(brain, train_set, loader_kwargs, call)
        if not report.holds:
            raise ParityError(str(report))
        logger.announce("%s", report)
    elif call == int(Path(target).name):
        start = torch.load(Path(target, "start.pt"), map_location="cpu", weights_only=True)
        brain.checkpointer, brain.hang_timeout = None, start["seconds"]
        with run_of(brain).guard.guarded("fit"):
            torch.save(record(brain, train_set, loader_kwargs, start), Path(target, f"rank{get_rank()}.pt"))
        raise SystemExit(0)


def require_one_process(world_size: int, *, data_parallel: bool) -> None:
    """Refuse a check where several processes or several GPUs are at work already.

    Raises:
        ConfigError: several processes, ``nn.DataParallel``, or less than two ranks.

    Ranks: local.
    """
    given = f"check_parity={world_size!r}"
    command = f"    python train.py hparams.yaml --check_parity={world_size}"
    if get_world_size() > 1:
        raise ConfigError(
            f"{given} starts the processes itself, and a launcher has started {get_world_size()}. Start one:\n{command}"
        )
    if data_parallel:
        raise ConfigError(
            f"{given} compares processes with one device each, and data_parallel_backend=True uses several GPUs from "
            f"one process. Leave it out:\n{command}"
        )
    if world_size < 2:  # noqa: PLR2004 -- else there is nothing to compare
        raise ConfigError(f"{given}: compare at least 2 processes, for example check_parity=4.")


def record(brain: Any, train_set: Any, loader_kwargs: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """Work on a few optimizer steps as one of several processes.

    Args:
        brain: of this process; it is good for nothing else afterwards.
        train_set: as for ``fit``.
        loader_kwargs: likewise.
        start: what :func:`one_process` gave.

    Returns:
        The samples and the gradients of each step, and what else tells the cause of a difference.

    Ranks: collective.
    """
    factor = run_of(brain).loaders.micro_batches(get_world_size())
    strategy: Any = run_of(brain).strategy
    strategy.find_unused_parameters = strategy.find_unused_parameters or start["leaves_out"]
    loader = _begin(brain, train_set, loader_kwargs, factor)
    brain.raw_modules.load_state_dict(start["modules"])
    brain.progress.optimizer_step = start["optimizer_step"]
    with Side(brain, loader) as side:
        return _record(side, loader, factor)


def _record(side: Side, loader: Any, factor: int) -> dict[str, Any]:
    length = -(-epoch_length(loader) // factor)
    found: dict[str, Any] = {"factor": factor, "length": length, "joins": joins(loader), "steps": []}
    counts = counts_of(loader)
    for number in sorted({*range(min(STEPS - 1, length)), length - 1}):
        share = share_of(loader, number, factor)
        seed = RANDOM_SEED + side.brain.rank
        grads = side.run(share, factor=factor, counts=counts, seed=seed)
        step = {"number": number, "batches": share.batches, "counts": share.counts, "first": share.first}
        step |= {"weighs": counts is not None, "gradients": grads, "sketches": side.sketches}
        step["still"] = side.run(share, factor=factor, counts=counts, seed=seed, still=True) if side.norms else grads
        found["steps"].append(step)
    return found | {"norms": side.norms, "moved": list(side.moved)}


@contextlib.contextmanager
def one_process(brain: Any, train_set: Any, loader_kwargs: Mapping[str, Any]) -> Iterator[tuple[Side, dict[str, Any]]]:
    """Get ready as the one process, and try a step: what is wrong with the recipe alone, it says here.

    Yields:
        The side of the one process, and what the ranks start from.

    Ranks: local; one process.
    """
    refuse_shared_parameters(brain.modules)
    factor = run_of(brain).loaders.micro_batches(1)
    loader = _begin(brain, train_set, loader_kwargs, factor)
    require_samples(loader)
    state = {name: value.detach().cpu().clone() for name, value in brain.raw_modules.state_dict().items()}
    with Side(brain, loader) as side:
        began = time.monotonic()
        grads = side.run(share_of(loader, 0, factor), factor=factor, counts=counts_of(loader))
        seconds = 30.0 + 60.0 * (time.monotonic() - began)
        leaves_out = any(one is None for step in grads for one in step.values())
        start = {"modules": state, "optimizer_step": side.done, "seconds": seconds, "leaves_out": leaves_out}
        yield side, start


def _begin(brain: Any, train_set: Any, loader_kwargs: Mapping[str, Any], factor: int) -> Any:
    """Do what ``fit`` does before it trains."""
    brain.grad_accumulation_factor = factor
    loader = brain._loader(train_set, Stage.TRAIN, loader_kwargs)
    brain._take_length(length_of(loader), factor)
    brain.on_fit_start()
    return loader


def _check(brain: Any, train_set: Any, loader_kwargs: Mapping[str, Any], call: int) -> ParityReport:
    world_size = brain.check_parity
    require_one_process(world_size, data_parallel=brain.data_parallel_backend)
    _require_script()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_unchanged(brain))
        stack.enter_context(run_of(brain).stages.session(getattr(brain.hparams, "output_folder", "results")))
        side, start = stack.enter_context(one_process(brain, train_set, loader_kwargs))
        target = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddpkit-parity-")), str(call))
        target.mkdir()
        torch.save(start, target / "start.pt")
        _run_ranks(world_size, target)
        paths = [target / f"rank{rank}.pt" for rank in range(world_size)]
        if not all(path.exists() for path in paths):
            raise ParityError(
                f"parity does not hold: call {call} of fit, which one process has reached, was not reached by "
                f"{world_size}: the script takes another way under a launcher."
            )
        return diagnose(side, [torch.load(path, map_location="cpu", weights_only=True) for path in paths])


def _require_script() -> None:
    if not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(
            "check_parity starts the running script again as several processes, and there is none: this is a notebook, "
            "an interactive Python, or code from a pipe. Put the code into a file, and start that with --check_parity."
        )


def _run_ranks(world_size: int, target: Path) -> None:
    """Run the script as several processes, to the end of the call of ``fit`` that is checked."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}", "--no-python"]
    command = [sys.executable, *launcher, sys.executable, *sys.orig_argv[1:]]
    logger.info("check_parity: starting %d processes of this script.", world_size)
    with (target / "output.txt").open("w+b") as output:
        environment = {**os.environ, PARITY: str(target)}
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        )
        if ended.returncode:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            raise ParityError(
                f"parity does not hold: {world_size} processes fail where one has made a step. Their last words:\n"
                + "\n".join(lines[-SHOWN_LINES:])
            )


@contextlib.contextmanager
def _unchanged(brain: Any) -> Iterator[None]:
    """Put everything back that a check may move."""
    names = ("scaler", "training_ctx", "grad_accumulation_factor")
    values = {name: getattr(brain, name) for name in names}
    random_states, progress = RngState.capture(), brain.progress.optimizer_step
    modes = [(module, module.training) for module in brain.modules.modules()]
    flags = [(one, one.requires_grad, one.grad) for one in brain.modules.parameters()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires_grad, grad in flags:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
        for name, value in values.items():
            setattr(brain, name, value)
        brain.progress.restart()
        brain.progress.optimizer_step = progress
        random_states.restore()
