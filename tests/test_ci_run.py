"""`.ci/run`: the suite runs in a clone named ddpkit, as README has it, whatever the checkout's
folder is called.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = """
demo:
\t@echo "demo in $(CURDIR)"
\t@touch demo-is-made

check:
\t@echo "check in $(CURDIR)"
\t@cat note.txt
\t@echo "=== 1 failed, 2 passed in 3.45s ==="
\t@exit 7
"""
# in the place of what installs Debian's packages
PACKAGES = """
import pathlib, sys, time

limit = time.monotonic() + 60
while not pathlib.Path("demo-is-made").exists():
    if time.monotonic() > limit:
        sys.exit("no demo is made meanwhile")
    time.sleep(0.02)
sys.exit("these cannot be installed" if {fails} else 0)
"""


@pytest.fixture
def checkout(tmp_path):
    """Return a function that makes a checkout: `.ci/run` with a suite that takes no time, and
    fails.
    """

    def make(name):
        folder = tmp_path / name
        (folder / ".ci").mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
        shutil.copy(ROOT / ".gitignore", folder / ".gitignore")
        (folder / "Makefile").write_text(MAKEFILE)
        (folder / "note.txt").write_text("as committed\n")
        return folder

    return make


def commit(folder, message):
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@localhost"]
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", message], check=True)


def ci_run(folder, clusters="0"):
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "GIT_"))
    }
    environment["DDPKIT_REQUIRE_CLUSTERS"] = clusters
    environment["PYTHON"] = sys.executable
    command = [str(folder / ".ci" / "run")]
    run = subprocess.run(
        command,
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0, "the status of the suite is kept"
    lines = run.stdout.splitlines()
    assert lines[-1] == "=== 1 failed, 2 passed in 3.45s ===", (
        "the closing line of pytest is the last to read"
    )
    return [line for line in lines if " in " in line and "===" not in line], lines


def test_a_checkout_of_another_name_runs_its_commit_in_a_clone_named_ddpkit(checkout):
    folder = checkout("some-checkout")
    commit(folder, "first")
    clone = folder / ".ci" / "clone" / "ddpkit"
    found, lines = ci_run(folder)
    assert found == [f"== in {clone}", f"demo in {clone}", f"check in {clone}"]
    assert "as committed" in lines
    (clone / ".venv").mkdir()
    (clone / "left.txt").write_text("of an earlier run")
    (folder / "note.txt").write_text("as committed later\n")
    commit(folder, "second")
    (folder / "note.txt").write_text("not committed\n")
    _, lines = ci_run(folder)
    assert "as committed later" in lines
    assert lines[-2] == f"== not tested: what is not committed in {folder}"
    assert (clone / ".venv").is_dir()
    assert not (clone / "left.txt").exists()
    status = ["git", "-C", str(folder), "status", "--porcelain"]
    assert (
        subprocess.run(status, capture_output=True, text=True, check=True).stdout == " M note.txt\n"
    )


def test_a_checkout_without_git_is_copied_whole(checkout):
    folder = checkout("ddpkit-0.1.0")
    clone = folder / ".ci" / "clone" / "ddpkit"
    for text in ("as unpacked", "as unpacked later"):
        (folder / "note.txt").write_text(f"{text}\n")
        found, lines = ci_run(folder)
        assert found == [f"== in {clone}", f"demo in {clone}", f"check in {clone}"]
        assert text in lines
    assert not (clone / ".ci" / "clone").exists()


def test_a_clone_named_ddpkit_is_where_it_runs(checkout):
    folder = checkout("ddpkit")
    found, lines = ci_run(folder)
    assert found == [f"demo in {folder}", f"check in {folder}"]
    assert "as committed" in lines


@pytest.mark.parametrize("fails", [False, True])
def test_packages_of_the_clusters_are_installed_beside_the_demo(checkout, fails):
    folder = checkout("ddpkit")
    package = folder / "tests" / "clusters"
    package.mkdir(parents=True)
    for one in (package.parent, package):
        (one / "__init__.py").touch()
    (package / "__main__.py").write_text(PACKAGES.format(fails=fails))
    _, lines = ci_run(folder, clusters="1")
    told = ["== packages of the clusters"]
    if fails:
        told += [
            "they could not be installed; the tests of the clusters will fail",
            "these cannot be installed",
        ]
    begin = lines.index(told[0])
    assert lines.index(f"demo in {folder}") < begin
    assert lines[begin : lines.index("== make check")] == told


def test_what_installs_the_packages_of_the_clusters_needs_no_package_of_python():
    command = [sys.executable, "-S", "-c", "import tests.clusters.__main__"]
    subprocess.run(command, cwd=ROOT, check=True)
