"""All that is to be seen on a GPU, in one command of at most twelve minutes.

    python -m benchmarks.gpu_session --out results    # all rows, those that decide first
    python -m benchmarks.gpu_session --minutes 9      # where a machine is lent for less
    python -m benchmarks.gpu_session --rows choice    # only rows with one of these words
    python -m benchmarks.gpu_session --dry_run        # says what would run, in which order

A row is a process with a limit of its own. One that fails, or hangs and is ended, does not stop
those after it. What a row prints goes to `log.txt` at once, and how it ended to `summary.tsv`: a
session that is cut off loses only what did not run. Nothing is downloaded. The code needs torch and
what `pip install -e .` has installed; the tests need `pytest` and `pytest-timeout`, too.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 12.0
SHORTEST = 10.0  # seconds: a row with less left is not begun
SECONDS_TO_END = 5.0  # for a row that is asked to end
MARK = "DDPKIT_GPU_SESSION"  # in the environment of all processes of a row
HEAD = "row\tended\tseconds\tcode\n"
SAYS = (
    "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available() and "
    "[torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())])"
)


@dataclass(frozen=True)
class Row:
    """One process, and what it is to decide.

    Attributes:
        name: of the row.
        words: of the command after ``python``.
        seconds: after which it is ended.
        question: that it answers.
    """

    name: str
    words: tuple[str, ...]
    seconds: float
    question: str


def measured(*rows: str) -> tuple[str, ...]:
    return ("benchmarks/gpu.py", "--rows", *rows)


def tested(*words: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=90", *words)


#: In the order in which they decide something.
ROWS = (
    Row("machine", ("-c", SAYS), 60, "what it is"),
    Row(
        "choice, small",
        measured("small, read", "small, bf16"),
        60,
        "is a later read slower where the host is, and does a run choose so",
    ),
    Row(
        "choice, transformer",
        measured("transformer, read", "transformer, bf16"),
        80,
        "likewise, where the GPU is the slower one",
    ),
    Row(
        "compiled bits",
        ("-m", "benchmarks.compiled_bits"),
        150,
        "why a compiled transformer ends with other weights",
    ),
    Row(
        "choice, CUDA graphs",
        measured("transformer, reduce-overhead", "as before"),
        80,
        "is a later read quicker where the host has little to do",
    ),
    Row(
        "tests: one process",
        tested("tests/gpu/test_brain.py", "-k", "not benchmark"),
        110,
        "bits, waits of the host, precision, batches moved ahead",
    ),
    Row("tests: NCCL", tested("tests/gpu/test_ddp.py"), 150, "DDP over NCCL, failures, resume"),
    Row(
        "tests: strategies",
        tested("tests/gpu/test_strategies.py"),
        120,
        "the same bits with virtual ranks, zero1, fsdp",
    ),
    Row(
        "tests: others",
        tested(
            "tests/gpu",
            "--ignore=tests/gpu/test_brain.py",
            "--ignore=tests/gpu/test_ddp.py",
            "--ignore=tests/gpu/test_strategies.py",
        ),
        120,
        "saves, estimates, profiles, measured steps",
    ),
    Row(
        "other rows",
        measured(
            "fp32",
            "fp16",
            "not read",
            "timed",
            "large",
            "workers",
            "ahead",
            "small, reduce",
            "checkpoint",
        ),
        150,
        "the rest of the table in docs/reference/benchmarks.md",
    ),
)


@dataclass(frozen=True)
class Ended:
    """How a row has ended.

    Attributes:
        name: of the row.
        how: ``"done"``, ``"failed"``, ``"too long"`` or ``"not begun"``.
        seconds: that it took.
        code: of its process; None: it was ended, or not begun.
    """

    name: str
    how: str
    seconds: float = 0.0
    code: int | None = None


def run_rows(
    rows: Sequence[Row],
    folder: Path,
    seconds: float,
    tell: Callable[[str], object] = print,
) -> list[Ended]:
    """Run rows one after the other.

    Args:
        rows: in their order.
        folder: for ``log.txt`` and ``summary.tsv``; made if it is missing.
        seconds: for all of them.
        tell: is told how each ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    found = []
    with (folder / "log.txt").open("ab") as log, (folder / "summary.tsv").open("a") as summary:
        _written(summary, HEAD)
        for row in rows:
            left = end - time.monotonic()
            if left < min(SHORTEST, row.seconds):
                ended = Ended(row.name, "not begun")
            else:
                _written(log, f"\n==== {row.name}: {row.question} ====\n".encode())
                ended = run_row(row, log, min(row.seconds, left))
            found.append(ended)
            _written(summary, f"{row.name}\t{ended.how}\t{ended.seconds:.1f}\t{ended.code}\n")
            tell(f"{row.name:24}{ended.how:12}{ended.seconds:6.1f} s")
    return found


def _written(file: object, text: object) -> None:
    """Write, and have it on the disk: the machine may be gone a moment later."""
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def run_row(row: Row, log: object, seconds: float) -> Ended:
    """Run a row, and end all of its processes.

    Args:
        row: to be run.
        log: a file for all that it prints.
        seconds: after which it is ended.
    """
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *row.words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    code = None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        _end(process)
    finally:
        end_marked(mark)
        process.wait()
    taken = time.monotonic() - begin
    if code is None:
        return Ended(row.name, "too long", taken)
    return Ended(row.name, "failed" if code else "done", taken, code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a row to end, so that pytest says which test hangs."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()


def end_marked(mark: str) -> None:
    """End the processes of a row that are left, also those with a session of their own: they would
    hold the GPU's memory.
    """
    word = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it has ended, or is another user's


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_session")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--rows", nargs="*", default=[""], help="words of the names of rows")
    parser.add_argument("--dry_run", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if any(word in row.name for word in arguments.rows)]
    if arguments.dry_run:
        for row in rows:
            print(f"{row.name:24}{row.seconds:5.0f} s at most  python {' '.join(row.words)}")
        return
    ended = run_rows(rows, arguments.out, 60 * arguments.minutes)
    print(f"{arguments.out / 'log.txt'} has what the rows printed.")
    raise SystemExit(any(one.how != "done" for one in ended))


if __name__ == "__main__":
    main()
