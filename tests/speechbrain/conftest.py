"""The real SpeechBrain, installed beside the environment of the tests and not into it.

It comes without its dependencies: those that are needed besides ddpkit's own are listed here, and
``torchaudio``, which has no build for some of the machines that run these tests, is replaced by an
empty module where it is missing (most of SpeechBrain imports it and uses nothing of it). Where the
packages cannot be had the tests skip, and the end of the run says so; with
DDPKIT_REQUIRE_SPEECHBRAIN=1 they fail.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore = ["recipes"]

PACKAGES = (
    *(
        "speechbrain==1.1.2",
        "huggingface_hub==2.4.0",
        "soundfile==0.14.0",
        "cffi==2.1.1",
        "pycparser==3.12",
    ),
    "sentencepiece==0.2.3",
)
REQUIRE = "DDPKIT_REQUIRE_SPEECHBRAIN"
NOT_THERE = "SpeechBrain cannot be installed here"
TORCHAUDIO = (
    '"""Stands in for torchaudio, so that modules that import it and do not use it can be '
    'imported."""\n'
)
IMPORT = (
    "import speechbrain, speechbrain.dataio.dataset, speechbrain.lobes.features, "
    "speechbrain.utils.metric_stats"
)
TEXT = {"capture_output": True, "text": True}
PIP = (
    sys.executable,
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--no-deps",
)


def _install(folder):
    """Fill a folder; it gets its name when it is complete."""
    part = folder.with_suffix(".part")
    done = subprocess.run(
        [*PIP, "--upgrade", "--target", str(part), *PACKAGES],
        check=False,
        **TEXT,
    )
    if done.returncode:
        reason = f"{NOT_THERE}: {' '.join(done.stderr.split())[-500:]}"
        if os.environ.get(REQUIRE, "") not in {"", "0"}:
            pytest.fail(
                f"{reason}\n({REQUIRE} is set, so this is a failure and no skip.)",
                pytrace=False,
            )
        pytest.skip(reason)
    part.rename(folder)


@pytest.fixture(scope="session")
def speechbrain(tmp_path_factory):
    """Return what PYTHONPATH is for a process that finds ddpkit and the real SpeechBrain."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ddpkit-tests")
    cache.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(repr((PACKAGES, sys.version_info[:2], sys.platform)).encode()).hexdigest()[
        :12
    ]
    folder = cache / f"speechbrain-{key}"
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = not folder.exists()
        if is_new:
            _install(folder)
    paths = [str(Path(__file__).parents[2]), str(folder)]
    if find_spec("torchaudio") is None:
        paths.append(str(tmp_path_factory.mktemp("stand-in")))
        Path(paths[-1], "torchaudio.py").write_text(f'{TORCHAUDIO}__version__ = "2.11.0"\n')
    path = os.pathsep.join(paths)
    if is_new:  # later each test would say so
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-c", IMPORT]
        imported = subprocess.run(command, env=environment, check=False, **TEXT)
        assert imported.returncode == 0, (
            f"SpeechBrain is installed, and cannot be imported:\n{imported.stderr}"
        )
    return path


def pytest_terminal_summary(terminalreporter):
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if NOT_THERE in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.section("NOT TESTED with the real SpeechBrain", red=True, bold=True)
        terminalreporter.line(
            f"{len(skipped)} tests; {skipped[0].longrepr[2]}\n{REQUIRE}=1 makes this a failure."
        )
