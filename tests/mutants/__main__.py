"""Plants each fault of the list, runs the tests that could see it, and compares with the record.

``make mutants`` runs all; ``make mutants MUTANTS_ARGS="--only optim"`` those of a room, or of which
the name contains the words.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from .fault import Fault
from .planting import DoesNotApply, find
from .record import complaint, read_record, write_record
from .rooms import all_faults
from .trial import BROKEN, CAUGHT, ROOT, SURVIVED, Trial, Verdict, copy_of_repository

POLL_SECONDS = 0.02
PRELOADED = ("pytest", "hypothesis", "hyperpyyaml", "tqdm", "torch", "torch.utils.data")
SECONDS_OF_A_TEST = 10.0  # on average, on a machine that is busy
LINES_OF_A_REASON = 20


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="ROOM|WORDS",
        help="those of a room, or with a name",
    )
    parser.add_argument("--new", action="store_true", help="those that are not in the record")
    parser.add_argument("--list", action="store_true", help="print the faults, and plant none")
    parser.add_argument("--record", action="store_true", help="write the verdicts to the record")
    parser.add_argument(
        "--all",
        action="store_true",
        help="find all tests that fail, not the first",
    )
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument(
        "--limit",
        type=float,
        default=200,
        help="seconds that the tests of a fault may take",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="print what pytest wrote of faults that are not caught",
    )
    return parser.parse_args(words)


def chosen(faults: Sequence[Fault], only: Sequence[str] | None) -> list[Fault]:
    """Choose by room or by a part of the name.

    Raises:
        SystemExit: if a word chooses nothing.
    """
    for word in only or ():
        if not any(word == fault.room or word in fault.name for fault in faults):
            rooms = ", ".join(dict.fromkeys(fault.room for fault in faults))
            sys.exit(f"--only={word!r} is no room, and in no fault's name. The rooms: {rooms}.")
    return [
        fault
        for fault in faults
        if not only or any(word == fault.room or word in fault.name for word in only)
    ]


def run_trials(
    faults: Sequence[Fault],
    folder: Path,
    arguments: argparse.Namespace,
) -> Iterator[tuple[Trial, Verdict]]:
    """Try the faults, some at a time, and yield each with its verdict when it has one."""
    waiting = list(reversed(faults))
    copies = []
    for number in range(min(arguments.jobs, len(faults))):
        (folder / str(number)).mkdir()
        copies.append(copy_of_repository(folder / str(number)))
    running: list[Trial] = []
    try:
        while waiting or running:
            while waiting and copies:
                fault = waiting.pop()
                copy = copies.pop()
                wanted = {"every_test": arguments.all, "limit_seconds": arguments.limit}
                running.append(Trial(copy, shlex.split(fault.tests), fault, **wanted))
            time.sleep(POLL_SECONDS)
            for trial in list(running):
                if verdict := trial.verdict():
                    running.remove(trial)
                    copies.append(trial.copy)
                    yield trial, verdict
    finally:
        for trial in running:
            trial.end()


def without_faults(
    verdicts: dict[str, Verdict],
    folder: Path,
    limit_seconds: float,
) -> dict[str, Verdict]:
    """Run the tests that have failed without any fault: one that fails then, too, catches
    nothing.
    """
    caught = [verdict for verdict in verdicts.values() if verdict.kind == CAUGHT]
    tests = sorted({test for verdict in caught for test in verdict.tests if "::" in test})
    if not tests:
        return verdicts
    print(f"{len(tests)} tests have failed. They run once more, without a fault.", flush=True)
    (folder / "clean").mkdir()
    copy = copy_of_repository(folder / "clean")
    limit = limit_seconds + len(tests) * SECONDS_OF_A_TEST
    trial = Trial(copy, tests, every_test=True, limit_seconds=limit)
    try:
        while (clean := trial.verdict()) is None:
            time.sleep(POLL_SECONDS)
    finally:
        trial.end()
    if clean.kind not in {SURVIVED, CAUGHT}:
        sys.exit(f"{clean.output}\nThe tests cannot run without a fault.")
    failing = set(clean.tests)
    for test in failing:
        print(f"fails without a fault, too: {test}")
    return {
        name: Verdict(BROKEN, verdict.tests, clean.output)
        if verdict.tests and set(verdict.tests) <= failing
        else verdict
        for name, verdict in verdicts.items()
    }


def tell(trial: Trial, verdict: Verdict, *, show: bool) -> None:
    seconds = time.monotonic() - trial.began
    fault = trial.fault
    print(f"{verdict.kind:<10} {seconds:6.1f} s  {fault.room}: {fault.name}", flush=True)
    for test in verdict.tests:
        print(f"{'':21}by {test}", flush=True)
    if verdict.kind != CAUGHT:
        print(f"{'':21}tests: {fault.tests}", flush=True)
        if show:
            print(verdict.output, flush=True)
        elif verdict.kind == BROKEN:
            print(last_lines(verdict.output), flush=True)


def last_lines(output: str) -> str:
    lines = output.strip().splitlines()[-LINES_OF_A_REASON:]
    return "".join(f"{'':21}| {line}\n" for line in lines)


def check_all_apply(faults: Sequence[Fault]) -> None:
    """End with the list of faults whose text is gone."""
    errors = []
    for fault in faults:
        try:
            find(fault, ROOT / "ddpkit")
        except DoesNotApply as error:
            errors.append(str(error))
    if errors:
        sys.exit("\n".join([*errors, f"{len(errors)} faults cannot be planted."]))


def preload() -> None:
    """Import what each trial would import, but nothing of ddpkit."""
    for name in PRELOADED:
        importlib.import_module(name)
    torch = sys.modules["torch"]
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first imports much


@contextlib.contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Take the trials and their copies away at SIGTERM, too, as at Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    everything = all_faults()
    recorded = read_record()
    faults = chosen(everything, arguments.only)
    faults = [one for one in faults if not (arguments.new and one.name in recorded)]
    if arguments.list:
        print("".join(f"{fault.room}: {fault.name}\n" for fault in faults), end="")
        return 0
    check_all_apply(faults)
    preload()
    verdicts = {}
    with ending_at_sigterm(), tempfile.TemporaryDirectory(prefix="ddpkit-mutants-") as folder:
        for trial, verdict in run_trials(faults, Path(folder), arguments):
            tell(trial, verdict, show=arguments.show)
            verdicts[trial.fault.name] = verdict
            if arguments.record:
                write_record(everything, {**recorded, **verdicts})
        verdicts = without_faults(verdicts, Path(folder), arguments.limit)
    if arguments.record:
        write_record(everything, {**recorded, **verdicts})
    counts = Counter(verdict.kind for verdict in verdicts.values())
    print(", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    return 0 if arguments.record else _compare(faults, verdicts, recorded)


def _compare(
    faults: Sequence[Fault],
    verdicts: dict[str, Verdict],
    recorded: dict[str, Verdict],
) -> int:
    complaints = [
        complaint(fault, verdicts[fault.name], recorded.get(fault.name)) for fault in faults
    ]
    print("".join(f"{words}\n" for words in complaints if words), end="")
    for fault in faults:
        before = recorded.get(fault.name)
        if before and before.kind == SURVIVED and verdicts[fault.name].kind == CAUGHT:
            print(f"{fault.name!r} survived when it was recorded, and is caught now: record it.")
    return int(any(complaints))


if __name__ == "__main__":
    sys.exit(main())
