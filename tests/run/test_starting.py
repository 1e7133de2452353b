"""What a run starts from, and which checkpoints are its own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.base import dump_plain_yaml
from ddpkit.checkpointing import Checkpoint
from ddpkit.checkpoints import Checkpointer
from ddpkit.run.resuming import EVALUATED, Lineage
from ddpkit.run.starting import choose_start, lineage_of, modules_not_saved, start_again
from ddpkit.run.state import learning_rates


class Brain:
    """Saves what a test says."""

    def __init__(self, state):
        self.state = state


def save(folder, state, **meta):
    checkpointer = Checkpointer(folder)
    hook = lambda obj, path: Path(path).write_text(dump_plain_yaml(obj.state))
    checkpointer.add_recoverable("brain", Brain(state), custom_save_hook=hook, custom_load_hook=lambda *where: None)
    return checkpointer.save_checkpoint(meta=meta)


@pytest.fixture
def restarted(monkeypatch):
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


FOUR = {"world_size": 4, "grad_accumulation_factor": 1, "per_step": 64, "per_process": 16}
TWO = {"world_size": 2, "grad_accumulation_factor": 1, "per_step": 32, "per_process": 16}


@pytest.mark.parametrize("resume", ["never", "path"])
def test_a_restarted_launch_goes_on_with_its_own_newest_and_at_its_pace(tmp_path, restarted, resume):
    """One decision for the weights and for the samples per step, whatever the option says."""
    other = save(tmp_path, {"launch": "other", "asked": TWO})
    own = save(tmp_path, {"launch": "mine", "asked": FOUR, **Lineage.new().state_dict()})
    save(tmp_path, {"launch": "third", "asked": TWO})
    start = choose_start(Checkpointer(tmp_path), "never" if resume == "never" else str(other.path), 1)
    assert start.resume == str(own.path)
    assert start.step_plan.per_step == 64


def test_what_is_asked_for_is_the_start_and_its_pace(tmp_path, caplog):
    path = save(tmp_path, {"asked": FOUR}).path
    save(tmp_path, {"asked": TWO})
    checkpointer = Checkpointer(tmp_path)
    named = choose_start(checkpointer, str(path), 1)
    assert (named.resume, named.step_plan.per_step) == (str(path), 64)
    assert "2 checkpoint(s) of another run" in caplog.text
    never = choose_start(checkpointer, "never", 1)
    assert (never.resume, never.step_plan) == ("never", None)


def test_the_newest_that_is_whole_decides(tmp_path):
    whole = save(tmp_path, {"asked": FOUR})
    damaged = save(tmp_path, {"asked": TWO})
    text = damaged.path / "CKPT.yaml"
    start = choose_start(Checkpointer(tmp_path), "auto", 1)
    assert start.resume == str(damaged.path)
    text.write_bytes(text.read_bytes().replace(b"unixtime: 1", b"unixtime: 2"))  # as long, and another one
    start = choose_start(Checkpointer(tmp_path), "auto", 1)
    assert (start.resume, start.step_plan.per_step) == (str(whole.path), 64)
    assert choose_start(Checkpointer(tmp_path / "new"), "auto", 1).step_plan is None


def test_on_as_many_processes_the_checkpointer_looks_for_itself(tmp_path):
    save(tmp_path, {"asked": FOUR})
    assert choose_start(Checkpointer(tmp_path), "auto", 4).resume == "auto"


def test_a_later_call_goes_on_with_the_run_s_own(tmp_path):
    save(tmp_path, {})
    run, checkpointer = Lineage.new(), Checkpointer(tmp_path)
    assert start_again(checkpointer, "auto", run).resume == "auto"
    assert start_again(checkpointer, "never", run).resume == "never"
    own = save(tmp_path, run.state_dict())
    assert start_again(checkpointer, "never", run).resume == str(own.path)


# ------------------------------------------------------------------------------- saved by who only evaluated


def test_a_training_does_not_go_on_from_what_an_evaluation_has_saved(tmp_path, caplog):
    caplog.set_level("INFO")
    run = Lineage.new()
    own = save(tmp_path, {**run.state_dict(), "asked": FOUR})
    state = {**run.state_dict(), "asked": FOUR, EVALUATED: True}
    evaluated = [save(tmp_path, state), save(tmp_path, state)]
    start = choose_start(Checkpointer(tmp_path), "auto", 4)
    assert (start.resume, start.lineage, start.step_plan.per_step) == (str(own.path), run, 64)
    assert f"{evaluated[-1].path} was saved by a process that only evaluated" in caplog.text
    assert all(map(run.includes, evaluated))
    assert start_again(Checkpointer(tmp_path), "auto", run).resume == str(own.path)
    assert start_again(Checkpointer(tmp_path), "never", run).resume == str(own.path)
    named = choose_start(Checkpointer(tmp_path), str(evaluated[0].path), 4)
    assert named.resume == str(evaluated[0].path), "what is asked for"


def test_nor_where_the_newest_of_the_training_is_damaged(tmp_path):
    run = Lineage.new()
    own = save(tmp_path, {**run.state_dict(), "asked": FOUR})
    save(tmp_path, {**run.state_dict(), "asked": FOUR, EVALUATED: True})
    damaged = save(tmp_path, {**run.state_dict(), "asked": FOUR})
    (damaged.path / "brain.ckpt").write_text("")
    checkpointer = Checkpointer(tmp_path)
    checkpointer.resume = choose_start(checkpointer, "auto", 4).resume
    assert checkpointer.recover_if_possible() == own


def test_an_evaluation_s_is_taken_where_the_run_has_no_other(tmp_path, caplog):
    run = Lineage.new()
    evaluated = save(tmp_path, {**run.state_dict(), "asked": FOUR, EVALUATED: True})
    caplog.set_level("INFO")
    start = choose_start(Checkpointer(tmp_path), "auto", 4)
    assert (start.resume, start.lineage) == ("auto", run)
    assert start_again(Checkpointer(tmp_path), "never", run).resume == str(evaluated.path)
    assert "only evaluated" not in caplog.text


def test_a_restarted_launch_does_not_go_on_from_what_it_has_evaluated(tmp_path, restarted):
    own = save(tmp_path, {"launch": "mine", "asked": FOUR})
    save(tmp_path, {"launch": "mine", "asked": FOUR, EVALUATED: True})
    assert choose_start(Checkpointer(tmp_path), "never", 4).resume == str(own.path)


# ------------------------------------------------------------------------------------------ whose checkpoints


@pytest.mark.parametrize("content", [b"PK\x03\x04\xff\xfe", b"a: [", b"- 1"])
def test_a_brain_that_saves_itself_otherwise_goes_on_with_all_that_was_there(tmp_path, content):
    """Nothing can be known of its run: it is taken for a run that does not say."""
    for _ in range(2):
        checkpointer = Checkpointer(tmp_path)
        write = lambda obj, path: Path(path).write_bytes(content)
        checkpointer.add_recoverable("brain", Brain({}), custom_save_hook=write, custom_load_hook=lambda *where: None)
        checkpointer.save_checkpoint()
    start = choose_start(Checkpointer(tmp_path), "auto", 1)
    found = Checkpointer(tmp_path).list_checkpoints()
    assert (start.resume, len(found)) == ("auto", 2)
    assert all(map(start.lineage.includes, found))
    assert start.others == ()


def record(folder, time, state):
    path = folder / f"CKPT+{time}"
    path.mkdir()
    (path / "brain.ckpt").write_text(dump_plain_yaml(state))
    return Checkpoint(path, {"unixtime": time}, {})


def test_a_run_has_its_own_and_those_it_went_on_from(tmp_path):
    first = Lineage("first", 0.0)
    old = [record(tmp_path, time, first.state_dict()) for time in (1, 2, 3)]
    unknown = record(tmp_path, 1.5, {})
    branch = Lineage.new(first.state_dict(), 2.0)
    assert list(map(branch.includes, old)) == [True, True, False]
    assert not branch.includes(unknown)
    assert branch.includes(record(tmp_path, branch.since + 1, {})), "made since, whoever made it"
    assert branch.includes(record(tmp_path, 9, branch.state_dict()))
    again = Lineage.read(branch.state_dict())
    assert again == branch
    assert Lineage.new({}, 2.0).includes(unknown)
    assert not any(map(Lineage.new().includes, [*old, unknown]))
    assert Lineage.new().before == {}
    third = Lineage.new(branch.state_dict(), math.inf)
    assert list(map(third.includes, old)) == [True, True, False]


def test_the_run_that_saved_last(tmp_path):
    first, second = Lineage("first", 0.0), Lineage("second", 4.0)
    checkpoints = [record(tmp_path, 1, first.state_dict()), record(tmp_path, 5, second.state_dict())]
    checkpoints.append(record(tmp_path, 6, {}))
    found = lineage_of(checkpoints)
    assert list(map(found.includes, checkpoints)) == [False, True, True]
    assert lineage_of(checkpoints[2:]) is None


@pytest.mark.parametrize("state", [{}, {"run": 3}, {"run": "a"}, {"run": "a", "run_since": "b"}])
def test_what_says_nothing_of_its_run(state):
    assert Lineage.read(state) is None


# ------------------------------------------------------------------------------------------ what should be known


def test_modules_in_no_recoverable():
    class Holder:
        def __init__(self, parts):
            self.parts = parts

    one, two, three = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    modules = nn.ModuleDict({"one": one, "two": two, "three": three, "frozen": frozen})
    optimizer = torch.optim.SGD(modules.parameters(), lr=1.0)
    assert modules_not_saved(modules, {"all": nn.ModuleList([one, two, three])}) == []
    lost = ["two (2 of 2 parameters)", "three (2 of 2 parameters)"]
    assert modules_not_saved(modules, {"model": one, "optimizer": optimizer}) == lost
    assert modules_not_saved(modules, {"model": one, "holder": Holder({"two": two})}) == lost[1:]
    assert modules_not_saved(modules, {"model": one, "holder": Holder([two])}) == lost[1:]
    three.bias = one.bias
    assert modules_not_saved({"three": three}, {"model": one}) == ["three (1 of 2 parameters)"]


def test_learning_rates_of_every_group():
    def sgd(*rates):
        return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])

    now = learning_rates({"a": sgd(0.1, 0.2), "b": sgd(0.5)})
    assert now == {"a": [0.1, 0.2], "b": [0.5]}
    assert learning_rates(None) == {}
