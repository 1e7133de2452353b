"""How a run was started, read from its own record: what is needed to start it once more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.launch import count_processes
from ddpkit.reporting import file_identity
from ddpkit.see.scale.slice_process import MeasuredCommand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpkit.see.diff.hashed_run import Call, HashedRun
    from ddpkit.see.report.records import Record

#: Programs that have started a run in a process of theirs. Their command starts no run.
STARTERS = ("ipykernel_launcher", "default_worker.py", "submitit.core._submit")
WITH_VALUE = ("-X", "-W")  # options of Python
NO_COMMAND = (
    "{}: its record does not say how it was started: an earlier ddpkit has written it, or it was "
    "made without create_experiment_directory. {}"
)
NO_SCRIPT = (
    "{}: it was started by `python {}`, a notebook or a program that starts ranks by itself, which "
    "a command does not start again. {}"
)
NOT_HERE = "{}: {} is not on this machine. The run was started on {}, in {}, by `python {}`. {}"
BY_HAND = (
    "Start the recipe by hand in a copy of the run's folder, with --hash_every=1 and from the "
    "checkpoint that `diff` names, and compare the two copies."
)
CHANGED = "{} is not as it was when the run was started"
STARTED_ANEW = (
    "steps up to {} were made by an earlier start with another command, other options or another "
    "number of processes, and are made again as the later ones were"
)


@dataclass(frozen=True)
class RecordedStart:
    """How a run was started.

    Attributes:
        command: to run, with its working directory and variables.
        processes: how many.
        options: run options that the run had, and a slice would not.
        notes: what is other now, in words.

    Ranks: local.
    """

    command: MeasuredCommand
    processes: int
    options: dict[str, Any]
    notes: list[str]


def recorded_start(
    run: HashedRun,
    after: int,
    last: int,
) -> RecordedStart:
    """Return how a run was started for some of its steps.

    Args:
        run: that has a record.
        after: the optimizer step before those that are made again.
        last: of them, which the start has made.

    Raises:
        ConfigError: it cannot be started again here: its record does not say how, or what it needs
            is not on this machine.

    Ranks: local.
    """
    *earlier, call = run.calls_of_steps(after, last)
    start = call.start
    words = list(start.get("command") or [])
    directory = start.get("directory")
    if not words or not directory:
        raise ConfigError(NO_COMMAND.format(run.label, BY_HAND))
    _require_script(run, start, words, directory)
    ranks = call.fit.get("ranks") or [{}]
    processes = _processes(call)
    # refuses more processes than GPUs, which would end in an error of NCCL's
    count_processes(processes, ranks[0].get("device"))
    notes = _changed_files(start)
    if any(_facts(other) != _facts(call) for other in earlier):
        notes.append(STARTED_ANEW.format(call.before))
    return RecordedStart(
        MeasuredCommand(tuple(_without_nproc(words)), directory, _variables(run, last)),
        processes,
        _options(call),
        notes,
    )


def _processes(call: Call) -> int:
    # `start` may stand before a process group
    return int(call.fit.get("world_size") or call.start["world_size"])


def _facts(call: Call) -> tuple[Any, ...]:
    """Return what a start has that its steps may depend on."""
    return (
        call.start.get("command"),
        call.fit.get("options"),
        call.fit.get("world_size"),
    )


def _require_script(
    run: HashedRun,
    start: Record,
    words: Sequence[str],
    directory: str,
) -> None:
    """Refuse a command that starts no script, or whose script is not here."""
    shown = " ".join(words)
    script, is_module = _script_of(words)
    if script is None or Path(script).name in STARTERS:
        raise ConfigError(NO_SCRIPT.format(run.label, shown, BY_HAND))
    needed = [Path(directory)]
    if not is_module:
        needed.append(Path(directory, script))
    environment = start.get("environment") or {}
    for path in needed:
        if not path.exists():
            host = environment.get("host")
            raise ConfigError(
                NOT_HERE.format(run.label, path, host, directory, shown, BY_HAND),
            )


def _script_of(words: Sequence[str]) -> tuple[str | None, bool]:
    """Return what a command of Python runs, and whether that is a module; None for code."""
    rest = iter(words)
    for word in rest:
        if word == "-m":
            return next(rest, None), True
        if word == "-c":
            return None, False
        if word in WITH_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            return word, False
    return None, False


def _without_nproc(words: Sequence[str]) -> list[str]:
    """Return a command without ``--nproc``: the ranks are started here one by one."""
    found = []
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word == "--nproc":
            is_value = True
        elif not word.startswith("--nproc="):
            found.append(word)
    return found


def _variables(run: HashedRun, step: int) -> dict[str, str]:
    """Return variables on which bits depend: as many threads as the run had at a step."""
    # a sum is added up in another order by another number of threads
    record = run.steps[run.recorded_at(step)]
    threads = record.get("labels", {}).get("threads")
    return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}


def _options(call: Call) -> dict[str, Any]:
    """Return the options that a slice has at other values, and on which the steps depend."""
    # the limit is part of the length that a schedule is made for
    given = call.fit.get("options") or call.start.get("options") or {}
    return {
        "optimizer_step_limit": given.get("optimizer_step_limit"),
        "debug": given.get("debug", False),
    }


def _changed_files(start: Record) -> list[str]:
    """Name the files of the recipe that have changed since."""
    found = []
    for name in ("script", "yaml"):
        file = start.get(name) or {}
        path = file.get("path")
        if path is not None and file_identity(path)["sha256"] != file.get("sha256"):
            found.append(CHANGED.format(path))
    return found
