"""What the clusters are made of: Debian packages, installed if this process may."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CannotSetUpError", "need"]

INSTALL_SECONDS = 100
POLICY = Path("/usr/sbin/policy-rc.d")
NO_SERVICES = "#!/bin/sh\nexit 101\n"  # the tests start their own daemons, with their own settings


class CannotSetUpError(Exception):
    """This machine has not got what a cluster needs; the message says what is missing."""


def need(packages: Mapping[str, str]) -> None:
    """See to it that programs are there, as root by installing their packages.

    Args:
        packages: name of a program: the Debian package that brings it.

    Raises:
        CannotSetUpError: a program is missing and cannot be installed.
    """
    missing = sorted({package for program, package in packages.items() if not _there(program)})
    if not missing:
        return
    if os.geteuid() != 0 or not _there("apt-get"):
        raise CannotSetUpError(f"not installed: {', '.join(missing)}, and only root with apt-get could do that")
    with _no_services_started():
        said = _install(missing)
    still = sorted(program for program in packages if not _there(program))
    if still:
        raise CannotSetUpError(f"apt-get install {' '.join(missing)} did not bring {', '.join(still)}: {said[-1000:]}")


def _there(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def _install(packages: list[str]) -> str:
    install = ["install", "--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=60", *packages]
    status, said = _apt_get(*install)
    if status != 0:  # perhaps there are no lists of packages yet, or they are old
        _, more = _apt_get("update")
        said += more + _apt_get(*install)[1]
    return said


def _apt_get(*words: str) -> tuple[int, str]:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", "-q", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return 1, f"apt-get {words[0]}: {error}\n"
    return done.returncode, done.stdout


@contextmanager
def _no_services_started() -> Iterator[None]:
    """Keep packages from starting their daemons; Debian asks this script, which a container often has already."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text(NO_SERVICES)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
