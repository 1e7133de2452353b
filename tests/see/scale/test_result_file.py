"""Result files: what ``--json`` writes, ``--join`` reads; and what is drawn of it."""

from __future__ import annotations

import json

import pytest

from ddpkit.cli import main
from ddpkit.errors import ConfigError
from ddpkit.see.scale.plot import draw
from ddpkit.see.scale.result_file import Measurement, read_measurement, write_measurement
from ddpkit.see.scale.summary import rows_of
from tests.see.scale.results import measured, result


def written(path, *slices, **more):
    write_measurement(path, measured(*slices, **more), [row.as_dict() for row in rows_of(slices)])
    return str(path)


def test_a_file_holds_all_slices_and_the_table(tmp_path):
    slices = result(1), result(2, ranks=[{"exchange": 14.0}] * 2)
    path = tmp_path / "scale.json"
    written(path, *slices, failed={"fsdp, 2 processes": "no memory"})
    assert read_measurement(path) == Measurement(
        "train.py hparams.yaml",
        False,
        list(slices),
        {"fsdp, 2 processes": "no memory"},
    )
    row = json.loads(path.read_text())["table"][1]
    assert (row["size"], row["speed_up"], row["word"]) == (2, pytest.approx(0.978, abs=1e-3), "bad")


def test_files_of_several_launches_make_one_table(tmp_path, capsys):
    files = [
        written(tmp_path / f"{size}.json", result(size, nodes=max(size // 4, 1)))
        for size in (1, 4, 8)
    ]
    assert main(["scale", "--join", *files, "--json", str(tmp_path / "all.json")]) == 0
    text = capsys.readouterr().out
    assert "Weak scaling: a step has 48 samples for each process" in text
    assert "ddp, 8 processes          28,657               8.00x    100 % good" in text
    assert len(read_measurement(tmp_path / "all.json").slices) == 3


def test_strong_scaling_is_seen_from_the_steps(tmp_path, capsys):
    files = [
        written(tmp_path / f"{size}.json", result(size, per_process=48 / size)) for size in (1, 2)
    ]
    assert main(["scale", "--join", *files]) == 0
    assert "Strong scaling: a step has 48 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            measured(result(2), recipe="other.py"),
            "the files are of different recipes, 'train.py hparams.yaml' and",
        ),
        (
            measured(result(2, per_process=200.0)),
            "a step has 48 on 1, 400 on 2 processes. It must be the same on all",
        ),
    ],
)
def test_files_that_do_not_go_together_are_refused(tmp_path, capsys, other, words):
    files = [written(tmp_path / "1.json", result(1)), str(tmp_path / "2.json")]
    write_measurement(tmp_path / "2.json", other, [])
    assert main(["scale", "--join", *files]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        (
            '{"format": "ddpkit scale 1", "recipe": "", "scaling": "weak", "slices": [{}], '
            '"failed": '
            "{}}"
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, capsys, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert main(["scale", "--join", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["scale", "--join", str(tmp_path / "a.json")]) == 1
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "begins"),
    [(".svg", b"<?xml"), pytest.param(".png", b"\x89PNG", marks=pytest.mark.slow)],
)
def test_a_plot_is_a_file_of_its_kind_and_the_same_for_the_same_results(tmp_path, suffix, begins):
    slices = result(1), result(2), result(4), result(4, way="fsdp", ranks=[{"data": 20.0}] * 4)
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in files:
        draw(measured(*slices), rows_of(slices), path)
    assert files[0].read_bytes().startswith(begins)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in files}


@pytest.mark.parametrize(
    "change",
    [{"slices": []}, {"slices": None}, {"slices": [5]}, {"failed": 5}, {"recipe": None}],
    ids=str,
)
def test_a_file_that_was_changed_by_hand_is_no_result_file(tmp_path, capsys, change):
    path = tmp_path / "scale.json"
    written(path, result(1))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert main(["scale", "--join", str(path)]) == 1
    assert "Give files that" in capsys.readouterr().err


def test_what_was_measured_is_said_also_where_it_cannot_be_written(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise ConfigError("the disk is full")

    monkeypatch.setattr("ddpkit.see.scale.command.write_measurement", full)
    file = written(tmp_path / "1.json", result(1))
    assert main(["scale", "--join", file, "--json", str(tmp_path / "all.json")]) == 1
    captured = capsys.readouterr()
    assert "samples/s" in captured.out
    assert "the disk is full" in captured.err
