"""Runs the tests that could see a fault, in a copy of the repository, in a process of its own.

The process is forked from one that has imported torch and pytest, and nothing of ddpkit: a trial
starts in milliseconds, and imports the package with the fault in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .fault import Fault
from .planting import plant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("ddpkit", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md")
# What has been imported before pytest starts cannot be rewritten, and need not be.
IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
MARKS = "not slow and not faults and not launch and not gpu"

CAUGHT = "caught"
SURVIVED = "survived"
HUNG = "hung"
BROKEN = "cannot run"
TESTS_FAILED = 1  # what pytest ends with; 0 where all have passed


@dataclass(frozen=True)
class Verdict:
    """What came of a fault.

    Attributes:
        kind: one of the four words above.
        tests: which tests have failed; one where the first ends the trial.
        output: what pytest wrote.
    """

    kind: str
    tests: list[str] = field(default_factory=list)
    output: str = ""


class Failures:
    """Notes the tests that fail, as a plugin of pytest."""

    def __init__(self):
        self.names = []

    def pytest_runtest_logreport(self, report):
        if report.failed and report.nodeid not in self.names:
            self.names.append(report.nodeid)


def copy_of_repository(folder: Path, root: Path = ROOT) -> Path:
    """Copy what tests read."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(
                root / name,
                folder / name,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        elif (root / name).exists():
            shutil.copy2(root / name, folder / name)
    return folder


class Trial:
    """Tests that run in a copy, with a fault or without, in a process of their own."""

    def __init__(
        self,
        copy: Path,
        tests: Sequence[str],
        fault: Fault | None = None,
        *,
        every_test: bool = False,
        limit_seconds: float,
    ):
        self.copy = copy
        self.tests = list(tests)
        self.fault = fault
        self._every_test = every_test
        self.began = time.monotonic()
        self._deadline = self.began + limit_seconds
        self._originals: dict[Path, bytes] = {}
        self._is_over = False
        if fault is not None:
            self._plant(fault)
        self._pid = os.fork()
        if not self._pid:
            self._run_tests()

    def _plant(self, fault: Fault) -> None:
        planted = plant(fault, self.copy / "ddpkit")
        self._originals[planted.path] = planted.path.read_bytes()
        write(planted.path, planted.text.encode())

    def verdict(self) -> Verdict | None:
        """Look once: the verdict, or None while the tests run."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        is_late = time.monotonic() > self._deadline
        if not pid and not is_late:
            return None
        self.end()
        if not pid:
            kind = CAUGHT if self.fault is not None and self.fault.hangs else HUNG
            return Verdict(kind, ["(does not end)"], self._output())
        return self._verdict_of(os.waitstatus_to_exitcode(status))

    def end(self) -> None:
        """End the tests and all that they have started, and take the fault back."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        for path, content in self._originals.items():
            write(path, content)

    def _verdict_of(self, code: int) -> Verdict:
        if code == 0:
            return Verdict(SURVIVED, [], self._output())
        if code != TESTS_FAILED:
            return Verdict(BROKEN, [], f"{self._output()}\npytest has ended with {code}.")
        return Verdict(
            CAUGHT,
            json.loads((self.copy / "failures.json").read_text()),
            self._output(),
        )

    def _output(self) -> str:
        return (self.copy / "output.txt").read_text(encoding="utf-8", errors="replace")

    def _run_tests(self) -> None:
        """Be pytest, in the forked process; never returns."""
        code = -1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._enter_copy()
            import pytest

            failures = Failures()
            words = ["-q", "-m", MARKS, "-W", IMPORTED, "-p", "no:cacheprovider", "-p", "no:xdist"]
            words += [] if self._every_test else ["-x"]
            code = pytest.main([*words, *self.tests], plugins=[failures])
            (self.copy / "failures.json").write_text(json.dumps(failures.names))
        except BaseException:  # noqa: BLE001 - written out, and the process ends
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _enter_copy(self) -> None:
        """Import from the copy, here and in processes that tests start."""
        streams = os.open(self.copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(streams, 1)
        os.dup2(streams, 2)
        os.chdir(self.copy)
        os.environ["PYTHONPATH"] = str(self.copy)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the copy is compiled once for all trials
        sys.dont_write_bytecode = False
        sys.path[:] = [str(self.copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "ddpkit")]:
            del sys.modules[name]
        sys.modules["__main__"] = types.ModuleType("__main__")


def write(path: Path, content: bytes) -> None:
    """Write a file so that no compiled one passes for it, which goes by seconds and size."""
    path.write_bytes(content)
    with contextlib.suppress(FileNotFoundError):
        Path(importlib.util.cache_from_source(str(path))).unlink()
