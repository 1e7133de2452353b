"""Starts the processes of one slice, waits for its result, and makes sure that none of them is
left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpkit.base import dying_with_parent
from ddpkit.errors import LaunchError
from ddpkit.launch import SLICE, SlicePlan, cores, open_store, rank_variables, without_launch
from ddpkit.run import SliceResult
from ddpkit.see.scale.cells import Cell

POLL_SECONDS = 0.05
STORE_SECONDS = 300.0
GRACE_SECONDS = 10.0  # in which the other ranks may tell of the failure of one, and end
CONTINUED = 8 * " "  # before a line that goes on with the one above
SHOWN_LINES = 30  # of what a process that failed has said
SHOWN_BYTES = 200_000  # in which these lines are
USAGE_ERROR = ": error: "  # before the sentence that ends a script with a mistake in its usage
QUIET_SECONDS = 30.0  # after so long the user is shown what the recipe says
NO_FIT = "the script ended without a call of Brain.fit, which is what is measured."
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")
_RANK_PREFIX = re.compile(r"^\[rank:? ?\d+\]:? ")


class SliceFailedError(LaunchError):
    """The processes of a slice have ended without a result. The message has what they said."""


@dataclass(frozen=True)
class MeasuredCommand:
    """The command that is measured.

    Args:
        words: script and arguments, as they stand after ``python``.
        directory: in which it is run; None: the present one.
        variables: of the environment, besides those of this process.

    Example:
        >>> MeasuredCommand(("train.py", "hparams.yaml")).shown
        'train.py hparams.yaml'
    """

    words: tuple[str, ...]
    directory: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The words in one line."""
        return " ".join(self.words)

    @property
    def command(self) -> list[str]:
        """The command line of one process."""
        return [sys.executable, *self.words]


def run_slice(
    recipe: MeasuredCommand,
    cell: Cell,
    plan: SlicePlan,
    tell: Callable[[str], object],
    is_given_up: Callable[[], bool] = lambda: False,
) -> SliceResult:
    """Run the processes of a slice to its end.

    Args:
        recipe: as in :func:`run_plan`, and the others.
        cell: how, and in how many processes.
        plan: for them.
        tell: is told what the recipe says, if it takes long.
        is_given_up: whether nobody waits for the result any more; asked again and again.

    Returns:
        What the slice has measured.

    Raises:
        SliceFailedError: a process has failed, or none has come to ``fit``.
    """
    values = run_plan(recipe, cell, plan, tell, is_given_up)
    return SliceResult.from_dict({**values, "size": cell.size}, plan.result)


def run_plan(
    recipe: MeasuredCommand,
    cell: Cell,
    plan: SlicePlan,
    tell: Callable[[str], object],
    is_given_up: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run processes with a plan to their end.

    Args:
        recipe: what is run.
        cell: how, and in how many processes.
        plan: for them.
        tell: is told what the recipe says, if it takes long.
        is_given_up: whether nobody waits for the result any more; asked again and again.

    Returns:
        What they have written.

    Raises:
        SliceFailedError: a process has failed, or none has come to ``fit``.

    State: no process of the slice is left, also after an exception.
    """
    Path(plan.result).unlink(missing_ok=True)
    log = Path(plan.scratch, "output.log")
    with _processes(recipe, cell, plan, log) as processes:
        codes = _wait(processes, log, tell, is_given_up)
    if any(codes):
        raise SliceFailedError(_failure(cell, codes, log))
    if not Path(plan.result).exists():
        raise SliceFailedError(f"{cell.name}: {NO_FIT} {_said(_last_lines(_log_of(log, 0)))}")
    values: dict[str, Any] = json.loads(Path(plan.result).read_text(encoding="utf-8"))
    return values


@contextlib.contextmanager
def _processes(
    recipe: MeasuredCommand,
    cell: Cell,
    plan: SlicePlan,
    log: Path,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes; end all that is left of them."""
    started: list[subprocess.Popen[bytes]] = []
    store = None
    try:
        if cell.processes > 1:
            store = open_store(STORE_SECONDS)
        for rank in range(cell.processes):
            environment = environment_of(
                cell,
                plan,
                rank,
                0 if store is None else store.port,
            )
            with _log_of(log, rank).open("wb") as file:
                started.append(
                    subprocess.Popen(
                        recipe.command,
                        env={**environment, **recipe.variables},
                        cwd=recipe.directory,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                        preexec_fn=dying_with_parent(signal.SIGKILL),  # noqa: PLW1509 -- takes no lock
                    )
                )
        yield started
    finally:
        _kill(started)
        del store


def environment_of(
    cell: Cell,
    plan: SlicePlan,
    rank: int,
    port: int,
) -> dict[str, str]:
    """Return the environment of a process of a slice: what ``--nproc`` of a recipe gives it, and
    the plan.

    Args:
        cell: of the slice.
        plan: of the slice.
        rank: of the process.
        port: at which the ranks meet.
    """
    number = cell.processes
    environment = {
        **without_launch(os.environ),
        SLICE: plan.text(),
        "TMPDIR": plan.scratch,
        "PYTHONUNBUFFERED": "1",
    }
    if cell.way == "dp":
        visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        chosen = visible if len(visible) >= cell.size else list(map(str, range(cell.size)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen[: cell.size])
    if number == 1:
        return environment
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // number)))
    return environment | rank_variables(rank, number, port)


# ----------------------------------------------------------------------------------- while they run


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    log: Path,
    tell: Callable[[str], object],
    is_given_up: Callable[[], bool],
) -> list[int]:
    """Wait until all have ended, or until one has failed and the others have had time to follow."""
    give_up = None
    tell_at = time.monotonic() + QUIET_SECONDS
    while True:
        codes = [process.poll() for process in processes]
        now = time.monotonic()
        if None not in codes:
            return [code or 0 for code in codes]
        if give_up is None and any(codes):
            give_up = now + GRACE_SECONDS
        if give_up is not None and now > give_up:
            return [0 if code is None else code for code in codes]
        if is_given_up():
            raise SliceFailedError("it was given up.")
        if now > tell_at:
            tell_at = now + QUIET_SECONDS
            said = last_sentence(_last_lines(_log_of(log, 0))) or "nothing"
            tell(f"  still running; it said last: {said}")
        time.sleep(POLL_SECONDS)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes with all that they have started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


# ------------------------------------------------------------------------------ when one has failed


def _log_of(log: Path, rank: int) -> Path:
    return log.with_suffix(f".rank{rank}.log")


def _failure(cell: Cell, codes: Sequence[int], log: Path) -> str:
    """Say which rank has failed, and what it said last; a mistake in the usage is one sentence."""
    said = {rank: _last_lines(_log_of(log, rank)) for rank, code in enumerate(codes) if code}
    for text in said.values():
        lines = text.splitlines()
        at = next((number for number, line in enumerate(lines) if USAGE_ERROR in line), None)
        if at is not None:
            return f"{cell.name}: " + "\n".join(
                [lines[at].partition(USAGE_ERROR)[2], *lines[at + 1 :]]
            )
    rank = max(said, key=lambda number: len(said[number]))
    who = "the recipe" if len(codes) == 1 else f"rank {rank} of the recipe"
    return f"{cell.name}: {who} {_ended(codes[rank])}. {_said(said[rank])}"


def _said(text: str) -> str:
    return f"It said last:\n{text}" if text else "It said nothing."


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _last_lines(path: Path, number: int = SHOWN_LINES) -> str:
    """Return the last lines of an output, without those that torch repeats with a rank before
    them.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - SHOWN_BYTES))  # a recipe may have said very much
        text = file.read(SHOWN_BYTES).decode("utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    told = set(lines)
    own = [line for line in lines if not _is_repeated(line, told)]
    return "\n".join(own[-number:])


def last_sentence(said: str) -> str:
    r"""Return the last line of an output, with the lines before it that it continues.

    Args:
        said: lines; a line that goes on below is followed by lines that are indented far.

    Example:
        >>> last_sentence(
        ...     "  epochs     10\n  start      from scratch: nothing is in\n             /tmp/run"
        ... )
        'start from scratch: nothing is in /tmp/run'
    """
    lines = said.splitlines()
    first = len(lines) - 1
    while first > 0 and lines[first].startswith(CONTINUED):
        first -= 1
    return " ".join(" ".join(lines[max(first, 0) :]).split())


def _is_repeated(line: str, told: set[str]) -> bool:
    plain = _RANK_PREFIX.sub("", line)
    return plain != line and plain in told


def short_reason(failure: str) -> str:
    r"""Return the line of a failure that says most: its last exception, or else its last line.

    Example:
        >>> short_reason("rank 0 failed. It said last:\nValueError: too many\n  ^^^^")
        'ValueError: too many'
    """
    lines = failure.splitlines()
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])
