"""`python -m ddpkit` without a command."""

from __future__ import annotations

import pytest

import ddpkit
from tests.house import run_tool


@pytest.mark.costly
def test_the_package_says_its_version_and_its_help():
    def run(*arguments):
        return run_tool("-m", "ddpkit", *arguments)

    assert run("--version").stdout == f"ddpkit {ddpkit.__version__}\n"
    assert "torchrun --standalone" in run("--help").stdout
    assert run().stdout == run("--help").stdout
    wrong = run("--no-such-option")
    assert wrong.returncode == 2
    assert "unrecognized arguments: --no-such-option" in wrong.stderr
