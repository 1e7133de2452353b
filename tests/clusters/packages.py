"""What the clusters are made of: Debian packages, installed if this process may."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CannotSetUpError", "need"]

INSTALL_SECONDS = 100
ATTEMPTS = 4
PAUSE_SECONDS = 3.0  # after the first attempt, twice that after the second, and so on
LOCK_SECONDS = 60
APT_GET = ("apt-get", "-q", "-o", "Acquire::Retries=2", "-o", "Acquire::http::Timeout=20")
POLICY = Path("/usr/sbin/policy-rc.d")
NO_SERVICES = "#!/bin/sh\nexit 101\n"  # the tests start their own daemons, with their own settings


class CannotSetUpError(Exception):
    """This machine has not got what a cluster needs; the message says what is missing."""


def need(packages: Mapping[str, str], seconds: float = INSTALL_SECONDS) -> None:
    """See to it that programs are there, as root by installing their packages.

    Args:
        packages: name of a program: the Debian package that brings it.
        seconds: for the installation.

    Raises:
        CannotSetUpError: a program is missing and cannot be installed.
    """
    missing = sorted({package for program, package in packages.items() if not _there(program)})
    if not missing:
        return
    if os.geteuid() != 0 or not _there("apt-get"):
        raise CannotSetUpError(
            f"not installed: {', '.join(missing)}, and only root with apt-get could do that"
        )
    with _no_services_started():
        said = _install(missing, seconds)
    still = sorted(program for program in packages if not _there(program))
    if still:
        raise CannotSetUpError(
            f"apt-get install {' '.join(missing)} did not bring {', '.join(still)}: {said[-1000:]}"
        )


def _there(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def _install(packages: list[str], seconds: float) -> str:
    """Try until it works or the time is over: mirrors fail for a moment, and somebody else may be
    installing.
    """
    end = time.monotonic() + seconds
    said = ""
    for attempt in range(ATTEMPTS):
        lock = [
            "-o",
            f"DPkg::Lock::Timeout={max(1, round(min(LOCK_SECONDS, end - time.monotonic())))}",
        ]
        if attempt:
            time.sleep(min(PAUSE_SECONDS * attempt, max(0.0, end - time.monotonic())))
            if "dpkg --configure -a" in said:  # somebody has been interrupted
                said += _run("dpkg", "--configure", "-a", end=end)[1]
            # no lists of packages yet, or old ones; or it failed
            said += _run(*APT_GET, "update", end=end)[1]
        status, more = _run(
            *APT_GET,
            *lock,
            "install",
            "--yes",
            "--no-install-recommends",
            *packages,
            end=end,
        )
        said += more
        if status == 0 or time.monotonic() > end:
            break
    return said


def _run(*command: str, end: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, end - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return 1, f"{command}: {error}\n"
    return done.returncode, done.stdout


@contextmanager
def _no_services_started() -> Iterator[None]:
    """Keep packages from starting their daemons; Debian asks this script, which a container often
    has already.
    """
    if POLICY.exists():
        yield
        return
    POLICY.write_text(NO_SERVICES)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
