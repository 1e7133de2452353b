"""The frame of doctor: findings of all ranks in one table, whatever a check or a rank does."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ddpkit.cli import main
from ddpkit.errors import LaunchError, MissingExtraError
from ddpkit.launch import LaunchInfo, find_launch
from ddpkit.see import Request, run_doctor
from ddpkit.see.doctor.check import EACH_RANK, TOGETHER, Check
from ddpkit.see.doctor.command import require_extra
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.machine import Machine
from ddpkit.see.doctor.ranks import Ranks, open_ranks
from tests.house import run_tool

FINE = Finding("cores", OK, "8", "at least 2", "the number of processes")
SMALL = Finding(
    name="shared memory",
    verdict=PROBLEM,
    measured="64.0 MB",
    expected="at least 1 GB",
    source="the loaders",
    cost="a bus error",
    advice="docker run --shm-size=1g",
)


def told(checks, **request):
    said = []
    code = run_doctor(Request(device="cpu", **request), said.append, checks=checks)
    return code, "\n".join(said)


def yields(*findings):
    return lambda site: iter(findings)


def test_the_worst_finding_stands_last_with_what_to_do_and_makes_the_exit_code():
    code, text = told([Check("b", yields(SMALL)), Check("a", yields(FINE))])
    assert code == 1
    assert text.index("ok       cores") < text.index("PROBLEM  shared memory")
    assert text.splitlines()[-8:] == [
        "PROBLEM  shared memory",
        "         found     64.0 MB",
        "         expected  at least 1 GB",
        "         because   the loaders",
        "         cost      a bus error",
        "         do        docker run --shm-size=1g",
        "",
        "1 problem, 0 to look at, 1 ok: shared memory",
    ]


def test_a_check_that_fails_itself_is_a_finding_and_ends_nothing():
    def denied(site):
        yield FINE
        site.machine.read("proc/no/such/file")

    code, text = told([Check("swap", denied), Check("other", yields(FINE))])
    assert code == 0
    assert "look     swap" in text
    assert "FileNotFoundError" in text
    assert "0 problems, 1 to look at, 1 ok" in text


def test_json_has_everything_and_a_verdict():
    small = dataclasses.replace(SMALL, details={"bytes": 67108864})
    code, text = told([Check("a", yields(small))], as_json=True)
    found = json.loads(text)
    assert (code, found["verdict"], found["world_size"]) == (1, "problem", 1)
    assert found["findings"][0]["details"] == {"bytes": 67108864}
    assert found["findings"][0]["host"] == Machine().name()


def test_no_line_is_wider_than_80_columns_and_of_what_is_well_only_the_value_is_told():
    long = dataclasses.replace(SMALL, advice="raise it " * 40, source="the loaders of each " * 9)
    text = told([Check("a", yields(long)), Check("b", yields(FINE))])[1]
    assert max(map(len, text.splitlines())) <= 80
    assert "the number of processes" not in text
    assert "the number of processes" in told([Check("b", yields(FINE))], verbose=True)[1]


def look_differently(site):
    yield dataclasses.replace(FINE, measured="8" if site.ranks.rank else "2")
    yield dataclasses.replace(SMALL, name="same")


def look_together(site):
    ranks = site.ranks.exchange("ranks", site.ranks.rank)
    yield Finding("ranks", LOOK, str(ranks), "all", "the launcher")


def on_a_rank():
    return told([Check("a", look_differently, EACH_RANK), Check("b", look_together, TOGETHER)])


@pytest.mark.slow
def test_what_the_ranks_say_alike_is_told_once_by_the_main_process_alone(ranks):
    (code, text), (other_code, nothing) = ranks.run(on_a_rank, init=False)
    assert (code, other_code, nothing) == (1, 1, "")
    unwrapped = " ".join(text.split())
    assert "ok cores 2 (rank 0); 8 (rank 1)" in unwrapped
    assert "PROBLEM same found 64.0 MB expected" in unwrapped
    assert "look ranks found [0, 1] expected" in unwrapped


def leave_early():
    launch = find_launch()
    if launch.rank == 1:
        open_ranks(launch, 30.0)
        return None
    return told([Check("a", yields(FINE), EACH_RANK)], timeout=0.5)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_a_problem_and_not_waited_for_for_ever(ranks):
    (code, text), _ = ranks.run(leave_early, init=False)
    assert code == 1
    assert "PROBLEM answer of the rank found none (rank 1 on ?)" in " ".join(text.split())
    assert "ok       cores" in text


def leave_as_main():
    launch = find_launch()
    if launch.rank == 0:
        open_ranks(launch, 30.0)
        return None
    words = "rank 0 did not answer within 0.6 s.*about: the first rank of each host"
    with pytest.raises(LaunchError, match=words):
        told([Check("a", yields(FINE), EACH_RANK)], timeout=0.3)
    return "told"


@pytest.mark.slow
def test_a_main_process_that_does_not_answer_is_an_error_in_a_sentence(ranks):
    assert ranks.run(leave_as_main, init=False) == [None, "told"]


class GoneStore:
    """A store whose process has ended."""

    def set(self, key, value):
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_has_gone_is_an_error_in_a_sentence():
    here = Ranks(LaunchInfo("torchrun", rank=1, world_size=2), GoneStore(), timeout=0.1)
    with pytest.raises(LaunchError, match="rank 1 has lost the store.*about: versions"):
        here.exchange("versions", {})


def test_without_the_extra_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install psutil"):
        require_extra()


def test_ranks_that_cannot_meet_are_a_problem_and_the_machine_is_looked_at_all_the_same(
    monkeypatch,
):
    monkeypatch.setenv("RANK", "0")
    code, text = told([Check("a", yields(FINE))])
    assert code == 1
    assert "PROBLEM  launcher" in text
    assert "LOCAL_RANK is not set" in text
    assert "ok       cores" in text


def test_one_process_on_each_of_several_nodes_is_a_problem(monkeypatch):
    monkeypatch.setenv("DSTACK_NODES_NUM", "2")
    monkeypatch.setenv("DSTACK_NODE_RANK", "1")
    code, text = told([Check("a", yields(FINE))])
    assert code == 1
    assert "PROBLEM  launcher" in text
    assert "this is node 1 of 2 nodes (dstack)" in " ".join(text.split())
    assert "ok       cores" in text


@pytest.mark.parametrize(
    "words",
    [["--workers", "-1"], ["--no-such-option"], ["--recipe"]],
)
def test_wrong_words_are_refused(words):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *words])


@pytest.mark.parametrize("words", [["no.py", "no.yaml"], ["no.py"], ["no.py", "--", "--seed=1"]])
def test_a_recipe_that_is_not_there_is_an_error(words, capsys):
    """It needs no YAML: what is missed is the script."""
    assert main(["doctor", "--recipe", *words]) == 1
    assert "there is no file 'no.py'" in capsys.readouterr().err


def test_options_of_a_recipe_in_the_wrong_place_are_told_with_the_right_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--recipe", "train.py", "hparams.yaml", "--batch_size", "8"])
    assert capsys.readouterr().err.endswith(
        "it stands after --: python -m ddpkit doctor --recipe train.py hparams.yaml -- "
        "--batch_size 8\n"
    )


@pytest.mark.exhaustive
@pytest.mark.launch
def test_nproc_starts_the_ranks_and_prints_one_table():
    done = run_tool("-m", "ddpkit", "doctor", "--nproc=2", "--json")
    found = json.loads(done.stdout)
    assert found["world_size"] == 2
    assert done.returncode == (found["verdict"] == "problem")
