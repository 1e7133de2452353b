"""What is installed and distributed, built as pip builds it, without the network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HIDDEN = shutil.ignore_patterns("__pycache__")


@pytest.fixture
def clone(tmp_path):
    """Return a clone named ddpkit, with all that a build reads."""
    folder = tmp_path / "ddpkit"
    shutil.copytree(ROOT / "ddpkit", folder / "ddpkit", ignore=HIDDEN)
    shutil.copytree(ROOT / "tests" / "unit", folder / "tests" / "unit", ignore=HIDDEN)
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
        "tests/__init__.py",
        "tests/test_house.py",
    ):
        shutil.copy(ROOT / name, folder / name)
    return folder


def build(clone, kind):
    """Build a distribution as pip does; return its file."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('../built')"
    (clone.parent / "built").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=clone, check=True, capture_output=True)
    return next((clone.parent / "built").iterdir())


def where_it_is(paths, folder):
    """Return the file of the package that Python imports in a folder, with folders of packages
    alone.
    """
    lines = [
        "import site",
        *(f"site.addsitedir({str(path)!r})" for path in paths),
        "import ddpkit",
        "print(ddpkit.__file__, ddpkit.__version__, ddpkit.Stage)",
    ]
    command = [sys.executable, "-S", "-c", "\n".join(lines)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.check_output(command, cwd=folder, env=environment, text=True).split()[0]


@pytest.mark.slow
def test_in_the_folder_above_a_clone_an_editable_install_is_imported(clone, tmp_path):
    """There the clone itself looks like a package without __init__.py."""
    site = tmp_path / "site-packages"
    with zipfile.ZipFile(build(clone, "editable")) as wheel:
        wheel.extractall(site)
    assert where_it_is([site], clone.parent) == str(clone / "ddpkit" / "__init__.py")
    assert where_it_is([site], clone) == str(clone / "ddpkit" / "__init__.py")


@pytest.mark.slow
def test_a_source_distribution_has_no_part_of_the_tests(clone):
    with tarfile.open(build(clone, "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in names if name.startswith("tests")] == []
    package = {
        str(path.relative_to(clone)) for path in (clone / "ddpkit").rglob("*") if path.is_file()
    }
    assert package <= names


@pytest.mark.slow
def test_pip_installs_a_clone_so_that_it_is_imported_from_everywhere(clone, tmp_path):
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    tools = tmp_path / "tools"
    tools.mkdir()
    import setuptools

    (tools / "setuptools").symlink_to(Path(setuptools.__file__).parent)
    python = str(environment / "bin" / "python")
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    variables = {**os.environ, "PYTHONPATH": str(tools)}
    subprocess.run([*pip, "-e", str(clone)], check=True, env=variables, cwd=clone)
    code = "import ddpkit; print(ddpkit.__file__)"
    variables.pop("PYTHONPATH")
    for folder in (clone.parent, clone, clone / "tests", tmp_path / "built"):
        folder.mkdir(exist_ok=True)
        shown = subprocess.check_output([python, "-c", code], cwd=folder, env=variables, text=True)
        assert shown.strip() == str(clone / "ddpkit" / "__init__.py")


INSTALLED_BY = re.compile(r"pip install (?P<words>[^`#\n]+)")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
SAYING = (
    "README.md",
    "ddpkit/**/*.py",
    "docs/**/*.md",
    "examples/**/*.py",
    "examples/**/*.md",
    "examples/**/*.ipynb",
    "tests/**/*.py",
)


def test_what_is_said_of_pip_works_in_every_shell_and_without_an_index_that_has_ddpkit():
    """It is on none, so that `ddpkit[...]` is found nowhere; and zsh takes brackets without quotes
    for file names.
    """
    wrong = [
        f"{path.relative_to(ROOT)}: pip install {words}"
        for pattern in SAYING
        for path in ROOT.glob(pattern)
        if path.name != Path(__file__).name and path.name != "changelog.md"
        for words in INSTALLED_BY.findall(path.read_text(encoding="utf-8"))
        if "ddpkit[" in words or "[" in QUOTED.sub("", words)
    ]
    assert wrong == []
