"""What a release is made of: its workflow, its version in all places, its tools."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from datetime import date, datetime, timezone
from pathlib import Path

import pytest
import yaml

import ddpkit

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKED = re.compile(r"\]\((?!https?:|#)(?P<path>[^)#\s]+)(?:#(?P<place>[^)\s]+))?\)")
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$")


def load(path):
    """Load a script that is no module of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def release(tmp_path):
    """The tool, on a copy of what it changes."""
    for name in ("ddpkit/__init__.py", "pyproject.toml", "README.md", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for path in {found["path"] for found in LINKED.finditer(README)}:
        is_folder = (ROOT / path).is_dir()
        (tmp_path / path if is_folder else (tmp_path / path).parent).mkdir(
            parents=True, exist_ok=True
        )
        if not is_folder:
            (tmp_path / path).touch()
    (tmp_path / "docs" / "changelog.md").write_text(
        "# Changelog\n\n## Unreleased\n\n### Added\n\n- New.\n\n## 0.0.9 (2025-01-02)\n\n- Old.\n"
    )
    tool = load(ROOT / ".ci" / "release.py")
    return lambda *words: tool.main(list(words), tmp_path)


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def steps_of(jobs):
    return [step for job in jobs.values() for step in job["steps"]]


def test_a_release_has_its_version_and_date_in_all_places(release, tmp_path, capsys):
    assert release("begin", "0.2.0") == 0
    changelog = (tmp_path / "docs" / "changelog.md").read_text()
    [day] = re.findall(r"^## 0\.2\.0 \((\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    assert abs((date.fromisoformat(day) - datetime.now(timezone.utc).date()).days) <= 1
    assert changelog.index("## Unreleased") < changelog.index("## 0.2.0") < changelog.index("New.")
    assert '__version__ = "0.2.0"' in (tmp_path / "ddpkit" / "__init__.py").read_text()
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text())["version"] == "0.2.0"
    assert release("check", "v0.2.0") == 0
    assert release("notes", "v0.2.0") == 0
    assert capsys.readouterr().out == "### Added\n\n- New.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("begin", "1.0"), "'1.0' is no version"),
        (("begin", "0.0.9"), "has a section of 0.0.9 already"),
        (("begin", "0.0.8"), "0.0.8 is older than what is released: 0.0.9"),
        (("check", "v9.9.9"), f"ddpkit.__version__ is '{ddpkit.__version__}'"),
        (("check", f"v{ddpkit.__version__}"), "the changelog says nothing of"),
    ],
)
def test_a_release_that_is_not_ready_is_refused(release, capsys, words, message):
    assert release(*words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "old", "new", "number"),
    [
        ("CITATION.cff", "version: ", "release: ", 0),
        ("CITATION.cff", "license: ", "version: 1\nlicense: ", 2),
        ("ddpkit/__init__.py", "__version__ = ", "VERSION = ", 0),
    ],
)
def test_a_version_that_would_stay_behind_is_told_before_a_file_changes(
    release, tmp_path, capsys, name, old, new, number
):
    path = tmp_path / name
    path.write_text(path.read_text().replace(f"\n{old}", f"\n{new}"))
    before = {path: path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert release("begin", "0.2.0") == 1
    assert f"{path.name} has {number} lines such as " in capsys.readouterr().err
    assert {path: path.read_text() for path in before} == before


def test_a_wrong_command_shows_the_help(release, capsys):
    assert release("begin") == 2
    assert ".ci/release.py begin 0.2.0" in capsys.readouterr().err


def test_the_page_of_an_index_leads_to_the_repository(release, tmp_path):
    assert release("addresses", "https://host/me/ddpkit", "v0.2.0") == 0
    text = (tmp_path / "pyproject.toml").read_text()
    assert '[project.urls]\nRepository = "https://host/me/ddpkit"\n' in text
    readme = (tmp_path / "README.md").read_text()
    assert "(https://host/me/ddpkit/blob/v0.2.0/docs/how-to/check-parity.md)" in readme
    assert "(https://host/me/ddpkit/raw/v0.2.0/docs/pictures/report.png)" in readme
    assert "(https://host/me/ddpkit/tree/v0.2.0/examples/digits)" in readme
    assert "/blob/v0.2.0/docs/reference/run_opts.md#all-options)" in readme
    assert re.findall(r"\]\((?!https://|#)", readme) == []
    assert release("addresses", "https://host/me/ddpkit", "v0.2.0") == 1


def test_what_looks_like_a_link_in_a_block_of_code_stays(release, tmp_path):
    code = "```python\nhandlers[name](event)\n```\n"
    (tmp_path / "README.md").write_text(f"[a](LICENSE)\n\n{code}\n[b](docs/changelog.md)\n")
    assert release("addresses", "https://host/me/ddpkit", "v0.2.0") == 0
    readme = (tmp_path / "README.md").read_text()
    assert code in readme
    assert readme.count("https://host/me/ddpkit/blob/v0.2.0/") == 2


def test_a_link_to_nothing_is_told_before_a_file_changes(release, tmp_path, capsys):
    before = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "README.md").write_text("[here](docs/nowhere.md)\n")
    assert release("addresses", "https://host/me/ddpkit", "v0.2.0") == 1
    assert "leads to docs/nowhere.md, which is not in" in capsys.readouterr().err
    assert (tmp_path / "pyproject.toml").read_text() == before


def heading_names(path):
    """The names of a page's headings, as they stand in addresses."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_links_of_the_readme_lead_somewhere():
    places = [(ROOT / found["path"], found["place"]) for found in LINKED.finditer(README)]
    assert len(places) > 1
    assert [path for path, _ in places if not path.exists()] == []
    named = [(path, place) for path, place in places if place]
    assert [(path, place) for path, place in named if place not in heading_names(path)] == []


def test_sections_of_the_changelog_have_dates_and_the_newest_first():
    text = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    dates = [re.fullmatch(r"\d+\.\d+\.\d+ \((\d{4}-\d\d-\d\d)\)", one)[1] for one in headings[1:]]
    assert dates == sorted(dates, reverse=True)


def test_the_citation_has_the_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == ddpkit.__version__


def test_the_command_is_there():
    module, name = re.search(r'^ddpkit = "([\w.]+):(\w+)"$', PROJECT, re.MULTILINE).groups()
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_what_is_pinned_and_may_do_little(path):
    text = path.read_text(encoding="utf-8")
    lines = [line.partition("uses: ")[2] for line in text.splitlines() if "uses: " in line]
    assert [line for line in lines if not PINNED.fullmatch(line)] == []
    content = yaml.safe_load(text)
    assert content["permissions"] == {"contents": "read"}
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= (360 if path.stem == "weekly" else 90)
    for step in steps_of(content["jobs"]):
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
        if "run" in step:
            # what an event brings is no code
            assert "${{" not in step["run"]
            subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)


def test_the_workflow_builds_once_tries_and_then_publishes_a_tag():
    content = workflow("release.yml")
    assert content[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` so
    jobs = content["jobs"]
    assert [jobs[name].get("needs") for name in ("try", "publish", "announce")] == [
        "build",
        "try",
        "publish",
    ]
    builds = [step for step in steps_of(jobs) if "python -m build" in step.get("run", "")]
    assert len(builds) == 1
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    [publish] = [step for step in jobs["publish"]["steps"] if "publish" in step["uses"]]
    # a trusted publisher: no password, and the index of the action
    assert publish["with"] == {"attestations": True}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_each_python_and_the_oldest_torch_are_tried():
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    oldest = re.search(r'"torch>=([\d.]+)"', PROJECT)[1]
    matrix = workflow("release.yml")["jobs"]["try"]["strategy"]["matrix"]
    assert matrix["python"] == pythons
    assert {extra["torch"] for extra in matrix["include"]} == {f"torch=={oldest}.0"}
    assert matrix["include"][0]["python"] == pythons[0]
    jobs = workflow("ci.yml")["jobs"]
    assert jobs["check"]["strategy"]["matrix"]["python"] == pythons
    assert (ROOT / ".ci" / "floor.txt").read_text() == f"torch=={oldest}.0\n"
    [floor] = [step["run"] for step in jobs["floor"]["steps"] if "run" in step]
    assert "CONSTRAINTS=.ci/floor.txt" in floor
    for name in re.findall(r"--deselect=([^\s\"]+)", floor):
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


def test_the_newest_torch_is_tried_each_week_on_the_newest_python():
    content = workflow("weekly.yml")
    assert len(content[True]["schedule"]) == 1  # YAML reads `on` so
    job = content["jobs"]["newest"]
    [run] = [step["run"] for step in job["steps"] if "run" in step]
    assert run == "make test PYTHON=python CONSTRAINTS=.ci/newest.txt"
    assert "continue-on-error" not in job
    [version] = [
        step["with"]["python-version"]
        for step in job["steps"]
        if "setup-python" in step.get("uses", "")
    ]
    assert version == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)[-1]
    lines = (ROOT / ".ci" / "newest.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == []  # nothing is held back


def test_the_clusters_run_as_root():
    [run] = [step["run"] for step in workflow("ci.yml")["jobs"]["all"]["steps"] if "run" in step]
    assert run.startswith("sudo env ")
    assert "DDPKIT_REQUIRE_CLUSTERS=1" in run


def test_the_recipe_of_the_readme_is_found(tmp_path):
    command = [sys.executable, ROOT / ".ci" / "readme_recipe.py", ROOT / "README.md", tmp_path]
    subprocess.run(command, check=True)
    assert "class Line(ddpkit.Brain)" in (tmp_path / "train.py").read_text()
    assert "net: !new:torch.nn.Linear" in (tmp_path / "hparams.yaml").read_text()


@pytest.mark.parametrize("name", ["ISSUE_TEMPLATE/bug.yml", "ISSUE_TEMPLATE/wish.yml"])
def test_issue_forms_ask_for_what_is_needed(name):
    form = yaml.safe_load((ROOT / ".github" / name).read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    names = [question["id"] for question in form["body"] if "id" in question]
    assert len(names) == len(set(names)) > 0
