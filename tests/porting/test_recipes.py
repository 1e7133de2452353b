"""`python -m ddpkit port` on folders of recipes: what is shown, what is written, what is left."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from ddpkit.cli import main
from ddpkit.errors import ConfigError
from ddpkit.porting import ddpkit_name, port_recipe, write_recipe
from tests.launching import Run, python
from tests.porting.resolving import exists, names_of

RECIPES = Path(__file__).parent / "recipes"
CLEAN = (
    "nothing to change: no Python or YAML file here names anything of SpeechBrain that ddpkit has\n"
)
OLD = "import speechbrain as sb\nsb.Stage.TRAIN\n"
NEW = "import ddpkit\nddpkit.Stage.TRAIN\n"


@pytest.fixture
def recipe(tmp_path):
    shutil.copytree(RECIPES, tmp_path / "recipes")
    return tmp_path / "recipes"


def picture(folder):
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


# ------------------------------------------------------------------------------------------- names


def test_afterwards_every_name_resolves(recipe):
    assert main(["port", str(recipe), "--write"]) == 0
    files = [
        path
        for path in recipe.rglob("*")
        if path.suffix in {".py", ".yaml"} and ".before" not in str(path)
    ]
    names = [name for path in files for name in names_of(path)]
    ours = {name for name in names if name.split(".")[0] == "ddpkit"}
    theirs = {name for name in names if name.split(".")[0] == "speechbrain"}
    assert {name for name in ours if not exists(name)} == set()
    assert {name for name in theirs if ddpkit_name(name)} == set()
    assert len(files) == 5
    assert {"ddpkit.Brain", "ddpkit.device.infer_device", "ddpkit.checkpoints.Checkpointer"} <= ours
    assert {
        "speechbrain.dataio.dataset.DynamicItemDataset.from_csv",
        "speechbrain.nnet.losses.nll_loss",
    } <= theirs


@pytest.mark.slow
def test_a_recipe_that_needs_the_core_alone_runs_without_speechbrain(recipe, tmp_path):
    assert main(["port", str(recipe / "own"), "--write"]) == 0
    assert "import speechbrain" not in (recipe / "own/train.py").read_text()
    command = python(
        "train.py",
        "hparams/train.yaml",
        "--device=cpu",
        f"--output_folder={tmp_path / 'out'}",
    )
    run = Run(command, recipe / "own", warm=True).wait()
    assert run.code == 0, run.err
    assert re.search(r"^test loss 0\.\d+ by ddpkit\.brain$", run.out, re.MULTILINE)
    assert (tmp_path / "out/train_log.txt").read_text().count("epoch:") == 2


# -------------------------------------------------------------------------------------- the command


def test_nothing_is_written_until_it_is_asked_for(recipe, capsys):
    before = picture(recipe)
    assert main(["port", str(recipe)]) == 0
    shown = capsys.readouterr().out
    assert picture(recipe) == before
    assert "--- a/mixed/train.py\n+++ b/mixed/train.py\n" in shown
    assert "file(s) would change; nothing was written (--write does)" in shown


def test_the_diff_is_what_is_written(recipe, tmp_path, capsys):
    (recipe / "odd.py").write_bytes(
        b"import speechbrain as sb\r\nsb.Stage\r\n'no end of line'; sb.core.Stage"
    )
    assert main(["port", str(recipe)]) == 0
    patch = tmp_path / "patch"
    patched = tmp_path / "patched"
    patch.write_bytes(capsys.readouterr().out.encode())
    shutil.copytree(recipe, patched)
    subprocess.run(["git", "apply", "--whitespace=nowarn", str(patch)], cwd=patched, check=True)
    assert main(["port", str(recipe), "--write"]) == 0
    for path in patched.rglob("*.*"):
        assert (
            path.is_dir() or path.read_bytes() == (recipe / path.relative_to(patched)).read_bytes()
        )


def test_twice_changes_nothing_and_the_copies_lead_back(recipe, capsys):
    before = {path: raw for path, (raw, _) in picture(recipe).items()}
    assert main(["port", str(recipe), "--write"]) == 0
    shown = capsys.readouterr().out
    backup = recipe / ".before-ddpkit"
    assert f"as they were: {str(backup)!r}\nTo go back: cp -a {backup}/. {recipe}\n" in shown
    after = picture(recipe)
    assert main(["port", str(recipe), "--write"]) == 0
    assert capsys.readouterr().out.endswith(CLEAN)
    assert picture(recipe) == after
    shutil.copytree(backup, recipe, dirs_exist_ok=True)
    assert {path: path.read_bytes() for path in before} == before


def test_an_earlier_copy_is_never_replaced(tmp_path, capsys):
    (tmp_path / "train.py").write_text("import speechbrain as sb\nsb.Brain\n")
    assert main(["port", str(tmp_path), "--write"]) == 0
    (tmp_path / "train.py").write_text(OLD)
    assert main(["port", str(tmp_path), "--write"]) == 1
    assert "File exists: '" in capsys.readouterr().err
    assert (tmp_path / ".before-ddpkit/train.py").read_text().endswith("sb.Brain\n")
    assert (tmp_path / "train.py").read_text() == OLD


def test_what_behaves_differently_is_told_with_line_and_link(recipe, capsys):
    main(["port", str(recipe)])
    told = capsys.readouterr().out.partition("What behaves differently in this recipe:")[2]
    lines = (recipe / "gan/train.py").read_text().splitlines()
    shown = {
        "def fit_batch": "overrides fit_batch",
        "_should_save": "is not called any more",
        "DistributedSamplerWrapper": "repeats samples to be even",
    }
    for code, text in shown.items():
        number = next(number for number, line in enumerate(lines, 1) if code in line)
        assert f"\ngan/train.py:{number}: {text}" in told
    assert re.search(
        r"mixed/train.py:\d+: takes lengths.*\n    "
        r"docs/porting.md#gradients-and-steps\n",
        told,
    )
    assert "mixed/hparams/tagger.yaml:8: says no `shuffle`" in told
    assert "\nown/train.py" not in told


def test_lines_are_those_of_the_file_as_it_is(recipe, capsys):
    path = recipe / "mixed/train.py"
    for arguments in ([], ["--write"], []):
        main(["port", str(recipe), *arguments])
        [number] = re.findall(r"mixed/train.py:(\d+): takes lengths", capsys.readouterr().out)
        assert "nll_loss(" in path.read_text().splitlines()[int(number) - 1]


def test_what_is_left_is_told(tmp_path, capsys):
    (tmp_path / "train.py").write_text("from speechbrain.core import *\n")
    main(["port", str(tmp_path)])
    told = capsys.readouterr().out.partition("Left as it is:")[2]
    assert "train.py:1: `from speechbrain.core import *` is left" in told


@pytest.mark.parametrize(
    ("name", "raw", "problem"),
    [
        ("bad.py", b"import speechbrain as sb\ndef f(:\n", r"line 2"),
        ("bad.py", b"import speechbrain # \xff\n", r"can't decode byte"),
        ("bad.py", b"import speechbrain\0\n", r"null byte"),
        ("bad.yaml", b"a: !new:speechbrain.Brain\n  - 'b\n", r"line \d"),
        ("bad.yaml", b"a: speechbrain \xff\n", r"can't decode byte"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_left(tmp_path, capsys, name, raw, problem):
    (tmp_path / name).write_bytes(raw)
    (tmp_path / "good.py").write_text(OLD)
    assert main(["port", str(tmp_path), "--write"]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(
        rf"python -m ddpkit port: error: {name}: left as it is: .*{problem}.*\n",
        error,
    )
    assert (tmp_path / name).read_bytes() == raw
    assert (tmp_path / "good.py").read_text() == NEW


def test_an_empty_folder_and_wrong_arguments(tmp_path, capsys):
    assert main(["port", str(tmp_path)]) == 0
    assert capsys.readouterr().out == CLEAN
    assert main(["port", str(tmp_path / "nowhere")]) == 1
    assert "does not exist: give the folder of a recipe" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text(OLD)
    with pytest.raises(ConfigError, match="neither Python nor YAML"):
        port_recipe(tmp_path / "notes.txt")


# ------------------------------------------------------------------------------------------- files


def write(recipe):
    return write_recipe(port_recipe(recipe))


def test_the_mode_stays(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OLD)
    path.chmod(0o755)
    write(path)
    assert path.read_text() == NEW
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_one_file_is_ported_alone(tmp_path):
    (tmp_path / "train.py").write_text(OLD)
    (tmp_path / "other.py").write_text(OLD)
    assert write(tmp_path / "train.py") == tmp_path / ".before-ddpkit"
    assert ((tmp_path / "train.py").read_text(), (tmp_path / "other.py").read_text()) == (NEW, OLD)


@pytest.mark.parametrize(
    "place",
    [".git", "__pycache__", "venv", "results/1", "save/CKPT+1", ".hidden.py", "notes.txt"],
)
def test_what_is_no_part_of_the_recipe_is_passed_over(tmp_path, place):
    path = (
        tmp_path / place / "train.py"
        if not Path(place).suffix or place == ".git"
        else tmp_path / place
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OLD)
    (tmp_path / "venv").mkdir(exist_ok=True)
    (tmp_path / "venv/pyvenv.cfg").touch()
    (tmp_path / "results/1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "results/1/env.log").touch()
    assert port_recipe(tmp_path).changed == []


def test_links_are_passed_over(tmp_path):
    (tmp_path / "shared.py").write_text(OLD)
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "train.py").write_text(OLD)
    (recipe / "same.py").symlink_to("train.py")
    (recipe / "shared.py").symlink_to("../shared.py")
    (recipe / "broken.py").symlink_to("nowhere.py")
    (recipe / "loop").symlink_to(".")
    found = port_recipe(recipe)
    write_recipe(found)
    assert [one.name for one in found.files] == ["train.py"]
    assert (recipe / "same.py").read_text() == NEW
    assert (tmp_path / "shared.py").read_text() == OLD
    write(recipe / "shared.py")  # asked for by its name
    assert (tmp_path / "shared.py").read_text() == NEW
    assert (recipe / "shared.py").is_symlink()
