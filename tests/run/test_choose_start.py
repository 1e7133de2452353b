"""What a run starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.base import dump_plain_yaml, load_plain_yaml
from ddpkit.checkpointing import Checkpoint
from ddpkit.checkpoints import Checkpointer
from ddpkit.errors import CheckpointError
from ddpkit.run.brain_file import BRAIN_FILE, DEBUG, EVALUATED
from ddpkit.run.choose_start import _states_of, choose_start
from ddpkit.run.optimizer_settings import optimizer_settings
from ddpkit.run.unsaved_objects import modules_not_saved


class Brain:
    """Saves what a test says."""

    def __init__(self, state):
        self.state = state


def save(folder, state, **meta):
    checkpointer = Checkpointer(folder)
    hook = lambda obj, path: Path(path).write_text(dump_plain_yaml(obj.state))
    checkpointer.add_recoverable(
        "brain",
        Brain(state),
        custom_save_hook=hook,
        custom_load_hook=lambda *where: None,
    )
    return checkpointer.save_checkpoint(meta=meta)


@pytest.fixture
def restarted(monkeypatch):
    values = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


FOUR = {"world_size": 4, "grad_accumulation_factor": 1, "per_step": 64, "per_process": 16}
TWO = {"world_size": 2, "grad_accumulation_factor": 1, "per_step": 32, "per_process": 16}


@pytest.mark.parametrize("resume", ["never", "path"])
def test_a_restarted_launch_goes_on_with_its_own_newest_and_at_its_pace(
    tmp_path,
    restarted,
    resume,
):
    """One decision for the weights and for the samples per step, whatever the option says."""
    other = save(tmp_path, {"launch": "other", "asked": TWO})
    own = save(tmp_path, {"launch": "mine", "asked": FOUR})
    save(tmp_path, {"launch": "third", "asked": TWO})
    start = choose_start(Checkpointer(tmp_path), "never" if resume == "never" else str(other.path))
    assert start.resume.path == own.path
    assert start.step_plan.per_step == 64


def test_what_is_asked_for_is_the_start_and_its_pace(tmp_path, caplog):
    """What the run does not go on from is moved out of the way: all, or what is newer."""
    old = save(tmp_path, {})
    path = save(tmp_path, {"asked": FOUR}).path
    newer = save(tmp_path, {"asked": TWO})
    checkpointer = Checkpointer(tmp_path)
    named = choose_start(checkpointer, str(path))
    assert (named.resume.path, named.step_plan.per_step) == (path, 64)
    assert {one.path for one in checkpointer.list_checkpoints()} == {old.path, path}
    [moved] = tmp_path.glob("earlier-*/CKPT+*")
    assert moved.name == newer.path.name
    assert (
        f"Checkpoints that this run does not continue were moved to {moved.parent}." in caplog.text
    )
    elsewhere = Checkpointer(tmp_path / "elsewhere")
    assert choose_start(elsewhere, str(moved)).step_plan.per_step == 32
    never = choose_start(checkpointer, "never")
    assert (never.resume, never.step_plan, checkpointer.list_checkpoints()) == ("never", None, [])
    assert choose_start(checkpointer, "auto").resume == "auto", "what was moved is not found"


@pytest.mark.parametrize(
    ("folder", "path"),
    [("save", "link/{}"), ("link", "save/{}"), ("save", "link/../save/{}")],
)
def test_the_start_stays_by_whatever_path_it_is_named(tmp_path, folder, path):
    """Scratch disks are links: what the run goes on from must not be moved, nor what came before
    it.
    """
    (tmp_path / "link").symlink_to(tmp_path / "save")
    old, named, newer = (save(tmp_path / "save", {}).path.name for _ in range(3))
    start = choose_start(Checkpointer(tmp_path / folder), str(tmp_path / path.format(named)))
    assert start.resume.path.samefile(tmp_path / "save" / named)
    assert {one.name for one in tmp_path.glob("save/CKPT*")} == {old, named}
    assert [one.name for one in tmp_path.glob("save/earlier-*/CKPT+*")] == [newer]


def test_what_is_asked_for_must_be_whole(tmp_path):
    (save(tmp_path, {}).path / "brain.ckpt").write_text("damaged")
    with pytest.raises(CheckpointError, match="is damaged"):
        choose_start(Checkpointer(tmp_path), str(next(tmp_path.glob("CKPT*"))))
    with pytest.raises(CheckpointError, match="it has no CKPT.yaml"):
        choose_start(Checkpointer(tmp_path), str(tmp_path / "CKPT+none"))
    assert len(list(tmp_path.glob("CKPT*"))) == 1, "nothing is moved"


def test_the_newest_that_is_whole_decides(tmp_path):
    whole = save(tmp_path, {"asked": FOUR})
    damaged = save(tmp_path, {"asked": TWO})
    text = damaged.path / "CKPT.yaml"
    start = choose_start(Checkpointer(tmp_path), "auto")
    assert start.resume.path == damaged.path
    # as long, and another one
    text.write_bytes(text.read_bytes().replace(b"unixtime: 1", b"unixtime: 2"))
    start = choose_start(Checkpointer(tmp_path), "auto")
    assert (start.resume.path, start.step_plan.per_step) == (whole.path, 64)
    assert choose_start(Checkpointer(tmp_path / "new"), "auto").step_plan is None


def test_a_later_call_goes_on_with_the_newest(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    assert [
        choose_start(checkpointer, resume, is_first=False).resume for resume in ("auto", "never")
    ] == [
        "auto",
        "never",
    ]
    own = save(tmp_path, {})
    assert choose_start(checkpointer, "never", is_first=False).resume == str(own.path)


# ---------------------------------------------------------------------- saved by who only evaluated


def test_a_training_does_not_go_on_from_what_an_evaluation_has_saved(tmp_path, caplog):
    caplog.set_level("INFO")
    own = save(tmp_path, {"asked": FOUR})
    state = {"asked": FOUR, EVALUATED: True}
    evaluated = [save(tmp_path, state), save(tmp_path, state)]
    start = choose_start(Checkpointer(tmp_path), "auto")
    assert (start.resume.path, start.step_plan.per_step) == (own.path, 64)
    assert f"{evaluated[-1].path} was saved by a process that only evaluated" in caplog.text
    assert choose_start(Checkpointer(tmp_path), "auto", is_first=False).resume == str(own.path)
    assert choose_start(Checkpointer(tmp_path), "never", is_first=False).resume == str(own.path)
    named = choose_start(Checkpointer(tmp_path), str(evaluated[0].path))
    assert named.resume.path == evaluated[0].path, "what is asked for"


def test_nor_from_what_a_debug_run_has_saved(tmp_path, caplog):
    rehearsed = save(tmp_path, {"asked": FOUR, DEBUG: True})
    assert choose_start(Checkpointer(tmp_path), "auto", is_debug=True).resume == rehearsed
    start = choose_start(Checkpointer(tmp_path), "auto")
    assert (start.resume, start.num_found) == ("auto", 0)
    assert "1 checkpoint(s)" in caplog.text
    assert "were saved with --debug" in caplog.text


def test_nor_where_the_newest_of_the_training_is_damaged(tmp_path):
    own = save(tmp_path, {"asked": FOUR})
    save(tmp_path, {"asked": FOUR, EVALUATED: True})
    damaged = save(tmp_path, {"asked": FOUR})
    (damaged.path / "brain.ckpt").write_text("")
    checkpointer = Checkpointer(tmp_path)
    checkpointer.resume = choose_start(checkpointer, "auto").resume
    assert checkpointer.recover_if_possible() == own


def test_an_evaluation_s_is_taken_where_the_run_has_no_other(tmp_path, caplog):
    evaluated = save(tmp_path, {"asked": FOUR, EVALUATED: True})
    caplog.set_level("INFO")
    start = choose_start(Checkpointer(tmp_path), "auto")
    assert start.resume == evaluated
    assert choose_start(Checkpointer(tmp_path), "never", is_first=False).resume == str(
        evaluated.path
    )
    assert "only evaluated" not in caplog.text


def test_a_restarted_launch_does_not_go_on_from_what_it_has_evaluated(tmp_path, restarted):
    own = save(tmp_path, {"launch": "mine", "asked": FOUR})
    save(tmp_path, {"launch": "mine", "asked": FOUR, EVALUATED: True})
    assert choose_start(Checkpointer(tmp_path), "never").resume == own


# ----------------------------------------------------------------------------- what should be known


def test_modules_in_no_recoverable():
    class Holder:
        def __init__(self, parts):
            self.parts = parts

    one = nn.Linear(1, 1)
    two = nn.Linear(1, 1)
    three = nn.Linear(1, 1)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    modules = nn.ModuleDict({"one": one, "two": two, "three": three, "frozen": frozen})
    optimizer = torch.optim.SGD(modules.parameters(), lr=1.0)
    assert modules_not_saved(modules, {"all": nn.ModuleList([one, two, three])}) == []
    lost = ["two", "three"]
    assert modules_not_saved(modules, {"model": one, "optimizer": optimizer}) == lost
    assert modules_not_saved(modules, {"model": one, "holder": Holder({"two": two})}) == lost[1:]
    assert modules_not_saved(modules, {"model": one, "holder": Holder([two])}) == lost[1:]
    three.bias = one.bias
    assert modules_not_saved({"three": three}, {"model": one}) == ["three"]


def test_settings_of_every_group_are_plain_values():
    def adam(*rates):
        return torch.optim.Adam(
            [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
        )

    now = optimizer_settings({"a": adam(0.1, torch.tensor(0.5)), "b": adam(0.25)})
    assert {name: [group["lr"] for group in groups] for name, groups in now.items()} == {
        "a": [0.1, 0.5],
        "b": [0.25],
    }
    assert (now["b"][0]["class"], now["b"][0]["betas"], "params" in now["b"][0]) == (
        "Adam",
        [0.9, 0.999],
        False,
    )
    assert load_plain_yaml(dump_plain_yaml(now)) == now
    assert optimizer_settings({"own": object()}) == {"own": []}


def test_a_file_is_read_once_unless_another_checkpoint_has_taken_its_name(tmp_path):
    known = {}
    first = Checkpoint(tmp_path, {"unixtime": 1.0}, {})
    then = Checkpoint(tmp_path, {"unixtime": 2.0}, {})
    (tmp_path / BRAIN_FILE).write_text("step: 1")
    assert _states_of([first], known) == {tmp_path: {"step": 1}}
    (tmp_path / BRAIN_FILE).write_text("step: 2")
    assert _states_of([first], known) == {tmp_path: {"step": 1}}
    assert _states_of([then], known) == {tmp_path: {"step": 2}}
