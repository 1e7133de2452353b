"""Saves in the background: the thread itself, and the checkpointer that uses it."""

from __future__ import annotations

import errno
import gc
import logging
import os
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpkit.checkpointing import async_save, folder, storage
from ddpkit.checkpointing.async_save import BackgroundSave
from ddpkit.checkpointing.storage import FileOperations, FolderLock, verify
from ddpkit.checkpoints import Checkpointer, safe_load
from ddpkit.errors import CheckpointError, FolderInUseError
from tests.launching import Run, python
from tests.warm_starts import WHOLE_EXIT


class Gate(FileOperations):
    """Holds the writing thread at its first large file until it is opened; fails then, if told
    so.
    """

    def __init__(self):
        self.open = threading.Event()
        self.waiting = threading.Event()
        self.error = None

    def write(self, path, writer):
        if path.name == "model.ckpt":
            self.waiting.set()
            assert self.open.wait(60)
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
        super().write(path, writer)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(storage, "FILES", gate)
    yield gate
    gate.open.set()


def stamp(model, value):
    """Give all values of a model one number, so that a mixture of two states can be seen
    anywhere.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def stamps_in(path):
    return {number for tensor in safe_load(path).values() for number in tensor.unique().tolist()}


def saver_threads():
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("ddpkit saves")
    ]


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))
    stamp(model, 0)
    return model


@pytest.fixture
def checkpointer(tmp_path, model):
    checkpointer = Checkpointer(tmp_path / "save", {"model": model})
    checkpointer.asynchronous = True
    return checkpointer


def names(checkpointer):
    return sorted(
        path.name for path in checkpointer.checkpoints_dir.iterdir() if not path.is_symlink()
    )


# --------------------------------------------------------------------------------------- the thread


def test_the_thread_lives_while_there_is_work_and_its_error_comes_out_once():
    background = BackgroundSave()
    go = threading.Event()
    background.start(Path("folder/CKPT+a"), lambda: (go.wait(60), 1 / 0))
    assert saver_threads() == ["ddpkit saves CKPT+a"]
    go.set()
    with pytest.raises(CheckpointError, match=r"CKPT\+a in the background: ZeroDivisionError"):
        background.wait()
    assert saver_threads() == []
    background.wait()


# ------------------------------------------------------------------------------------------- saving


def test_a_default_device_of_the_recipe_is_not_that_of_the_copies(checkpointer, model):
    stamp(model, 1)
    torch.set_default_device("meta")
    try:
        saved = checkpointer.save_checkpoint()
    finally:
        torch.set_default_device(None)
    checkpointer.wait()
    assert stamps_in(saved.paramfiles["model"]) == {1}


def test_where_the_system_grants_no_thread_the_save_fails_and_the_next_one_does_not(
    checkpointer,
    monkeypatch,
):
    with monkeypatch.context() as patched:
        start = threading.Thread.start

        def refuse(thread):
            if thread.name.startswith("ddpkit saves"):
                raise RuntimeError("can't start new thread")
            start(thread)

        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            checkpointer.save_checkpoint(name="lost")
    assert not (checkpointer.checkpoints_dir / ".lock").exists()
    checkpointer.save_checkpoint(name="next")
    checkpointer.wait()
    assert names(checkpointer) == ["CKPT+next"]


def test_the_working_directory_may_change_while_a_relative_folder_is_written(
    tmp_path,
    monkeypatch,
    model,
    gate,
):
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("save", {"model": model})
    checkpointer.asynchronous = True
    saved = checkpointer.save_checkpoint()
    assert gate.waiting.wait(60)
    monkeypatch.chdir("/")
    gate.open.set()
    checkpointer.wait()
    assert saved.path.parent == tmp_path / "save"
    assert [found.path for found in checkpointer.list_checkpoints()] == [saved.path]


def test_a_save_returns_before_anything_large_is_written(checkpointer, gate):
    saved = checkpointer.save_checkpoint(meta={"loss": 0.5})
    assert gate.waiting.wait(60)
    assert not saved.path.exists()
    assert saved.meta["loss"] == 0.5
    assert saved.paramfiles == {"model": saved.path / "model.ckpt"}
    assert saver_threads() == [f"ddpkit saves {saved.path.name}"]
    gate.open.set()
    checkpointer.wait()
    assert saver_threads() == []
    assert verify(saved.path) == []
    found = checkpointer.find_checkpoint()
    assert (found, found.meta, found.paramfiles) == (saved, saved.meta, saved.paramfiles)


def test_what_is_on_the_disk_is_the_state_at_the_call_though_training_goes_on(
    checkpointer,
    gate,
    model,
):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    checkpointer.add_recoverable("optimizer", optimizer)
    paths = []
    for number in (3, 4, 5):
        stamp(model, number)
        gate.open.clear()
        gate.waiting.clear()
        paths.append(checkpointer.save_checkpoint().path)
        assert gate.waiting.wait(60)
        for _ in range(5):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
        gate.open.set()
        for _ in range(5):
            optimizer.step()
    checkpointer.wait()
    assert [stamps_in(path / "model.ckpt") for path in paths] == [{3.0}, {4.0}, {5.0}]
    assert safe_load(paths[0] / "optimizer.ckpt")["state"] == {}


def test_the_memory_of_a_save_is_not_used_again_before_that_is_written(checkpointer, gate, model):
    stamp(model, 1)
    first = checkpointer.save_checkpoint().path
    stamp(model, 2)
    threading.Timer(0.3, gate.open.set).start()
    second = checkpointer.save_checkpoint().path  # waits
    assert first.exists()
    checkpointer.wait()
    assert (stamps_in(first / "model.ckpt"), stamps_in(second / "model.ckpt")) == ({1.0}, {2.0})


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.find_checkpoint(),
        lambda c: c.find_checkpoints()[0],
        lambda c: c.list_checkpoints()[0],
        lambda c: c.recover_if_possible(),
        lambda c: (c.delete_checkpoints(), c.list_checkpoints()[0])[1],
    ],
)
def test_every_later_call_waits_for_the_save(checkpointer, gate, call):
    saved = checkpointer.save_checkpoint()
    threading.Timer(0.2, gate.open.set).start()
    assert call(checkpointer) == saved


def test_loading_waits_for_the_save_too(checkpointer, gate, model):
    stamp(model, 7)
    saved = checkpointer.save_checkpoint()
    stamp(model, 8)
    threading.Timer(0.2, gate.open.set).start()
    checkpointer.load_checkpoint(saved)
    assert model[0].weight.unique().tolist() == [7.0]


def test_names_of_the_same_second_count_the_one_that_is_still_written(
    checkpointer,
    monkeypatch,
    gate,
):
    monkeypatch.setattr(folder.time, "strftime", lambda *form: "2026-01-02+03-04-05")
    gate.open.set()
    saved = [checkpointer.save_checkpoint().path.name for _ in range(3)]
    checkpointer.wait()
    assert (
        saved
        == names(checkpointer)
        == [f"CKPT+2026-01-02+03-04-05+0{number}" for number in range(3)]
    )


def test_two_checkpointers_of_one_folder_do_not_disturb_each_other(checkpointer, gate, model):
    saved = checkpointer.save_checkpoint(name="first")
    other = Checkpointer(checkpointer.checkpoints_dir, {"model": model})
    threading.Timer(0.2, gate.open.set).start()
    other.save_checkpoint(name="second")  # removes leftovers, but not those of a save that goes on
    checkpointer.wait()
    assert names(checkpointer) == ["CKPT+first", "CKPT+second"]
    assert verify(saved.path) == []


def test_the_retention_is_applied_after_the_new_one_is_there(checkpointer, gate):
    gate.open.set()
    checkpointer.save_and_keep_only(name="old", meta={"unixtime": 1})
    checkpointer.wait()
    gate.open.clear()
    checkpointer.save_and_keep_only(name="new", meta={"unixtime": 2})
    assert gate.waiting.wait(60)
    assert "CKPT+old" in names(checkpointer)
    gate.open.set()
    checkpointer.wait()
    assert names(checkpointer) == ["CKPT+new"]


def test_other_savers_write_before_the_call_returns(checkpointer, gate):
    where = []

    def saver(obj, path):
        where.append(threading.current_thread())
        path.write_text(str(obj["n"]))

    counter = {"n": 1}
    checkpointer.add_recoverable("counter", counter, lambda *_: None, saver)
    saved = checkpointer.save_checkpoint()
    counter["n"] = 2
    assert sorted(saved.paramfiles) == ["counter", "model"]
    gate.open.set()
    checkpointer.wait()
    assert (saved.path / "counter.ckpt").read_text() == "1"
    assert where == [threading.main_thread()]
    assert verify(saved.path) == []


def test_the_files_are_those_of_a_synchronous_save(tmp_path, model):
    for asynchronous in (False, True):
        checkpointer = Checkpointer(
            tmp_path / str(asynchronous),
            {"model": model, "sgd": torch.optim.SGD([nn.Parameter(torch.ones(3))])},
        )
        checkpointer.asynchronous = asynchronous
        checkpointer.save_checkpoint(meta={"unixtime": 5.0}, name="a")
        checkpointer.wait()
    one = tmp_path / "False" / "CKPT+a"
    two = tmp_path / "True" / "CKPT+a"
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {
        p.name: p.read_bytes() for p in two.iterdir()
    }


def test_memory_is_given_back_when_it_is_switched_off(checkpointer):
    checkpointer.save_checkpoint()
    checkpointer.wait()
    assert checkpointer._memory._kept
    checkpointer.asynchronous = False
    checkpointer.wait()
    assert not checkpointer._memory._kept


def test_where_memory_is_short_the_save_waits_and_says_so_once(
    checkpointer,
    monkeypatch,
    caplog,
    model,
):
    monkeypatch.setattr(async_save, "available_bytes", lambda: 1000)
    ran = []
    checkpointer.add_recoverable(
        "other",
        {},
        lambda *_: None,
        lambda obj, path: ran.append(path.write_text("x")),
    )
    stamp(model, 6)
    for _ in range(2):
        saved = checkpointer.save_checkpoint()
        assert saved.path.is_dir()
        assert saver_threads() == []
        assert verify(saved.path) == []
    assert stamps_in(saved.path / "model.ckpt") == {6.0}
    assert len(ran) == 2
    assert (
        caplog.text.count("written while training waits, because the state cannot be copied first")
        == 1
    )


# ------------------------------------------------------------------------------------------- errors


def fail_in_the_background(checkpointer, gate):
    gate.open.set()
    checkpointer.save_checkpoint(name="good")
    checkpointer.wait()
    gate.error = errno.ENOSPC
    return checkpointer.save_checkpoint(name="bad")


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.wait(),
        lambda c: c.save_checkpoint(name="next"),
        lambda c: c.find_checkpoint(),
        lambda c: c.list_checkpoints(),
        lambda c: c.delete_checkpoints(),
        lambda c: c.recover_if_possible(),
    ],
)
def test_the_next_call_raises_what_went_wrong_once(checkpointer, gate, call):
    bad = fail_in_the_background(checkpointer, gate)
    with pytest.raises(
        CheckpointError,
        match=r"cannot save .*CKPT\+bad: .*no space left .* "
        r"bytes needed",
    ) as raised:
        call(checkpointer)
    assert raised.value.__cause__.errno == errno.ENOSPC
    gate.error = None
    assert [ckpt.path.name for ckpt in checkpointer.list_checkpoints()] == ["CKPT+good"]
    assert names(checkpointer) == ["CKPT+good"]
    assert not bad.path.exists()


def test_the_bytes_needed_are_those_of_the_state(checkpointer, gate, model):
    needed = sum(4 * parameter.numel() for parameter in model.parameters())
    for asynchronous in (True, False):
        checkpointer.asynchronous = asynchronous
        gate.error = errno.ENOSPC
        gate.open.set()
        with pytest.raises(
            CheckpointError,
            match=f"about {needed} bytes needed, [0-9]+ bytes free",
        ):
            checkpointer.save_checkpoint() and checkpointer.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_warn_training_goes_on(checkpointer, gate, caplog, asynchronous):
    checkpointer.on_error = "warn"
    checkpointer.asynchronous = asynchronous
    fail_in_the_background(checkpointer, gate)
    checkpointer.wait()
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert "CKPT+bad: No space left on device: no space left" in warned[0]
    assert warned[0].endswith("Existing checkpoints are unchanged. Training goes on.")
    gate.error = None
    assert checkpointer.save_checkpoint(name="after").path.name == "CKPT+after"
    checkpointer.wait()
    assert names(checkpointer) == ["CKPT+after", "CKPT+good"]


def test_with_warn_a_save_that_cannot_even_begin_returns_none(checkpointer, caplog):
    checkpointer.on_error = "warn"
    checkpointer.checkpoints_dir.rmdir()
    assert checkpointer.save_checkpoint() is None
    assert "No such file or directory" in caplog.text
    assert "Training goes on." in caplog.text


def test_with_warn_a_retention_that_fails_does_not_take_the_checkpoint_back(
    checkpointer,
    monkeypatch,
    caplog,
):
    checkpointer.on_error = "warn"
    checkpointer.asynchronous = False
    checkpointer.save_checkpoint(name="old", meta={"unixtime": 1})

    class Stuck(FileOperations):
        def rename(self, source, target):
            if target.name.startswith(".trash"):
                raise OSError(errno.EACCES, "Permission denied")
            super().rename(source, target)

    monkeypatch.setattr(storage, "FILES", Stuck())
    checkpointer.save_and_keep_only(name="new")
    assert names(checkpointer) == ["CKPT+new", "CKPT+old"]
    assert "cannot remove" in caplog.text


def test_a_state_that_cannot_be_had_fails_at_the_call_and_leaves_nothing(checkpointer):
    class Broken:
        def state_dict(self):
            raise KeyError("gone")

        def load_state_dict(self, state):
            pass

    checkpointer.add_recoverable("broken", Broken())
    with pytest.raises(CheckpointError, match="saving the recoverable 'broken': KeyError: 'gone'"):
        checkpointer.save_checkpoint()
    assert names(checkpointer) == []
    assert saver_threads() == []


def test_a_state_that_could_not_be_loaded_again_is_refused_in_the_background(checkpointer):
    class Odd:
        def state_dict(self):
            return {"path": Path("a")}

        def load_state_dict(self, state):
            pass

    checkpointer.add_recoverable("odd", Odd())
    checkpointer.save_checkpoint()
    with pytest.raises(
        CheckpointError,
        match="recoverable 'odd': CheckpointError: its state holds pathlib",
    ):
        checkpointer.wait()
    assert names(checkpointer) == []


def test_an_error_of_the_callers_own_functions_comes_out_as_ours(checkpointer):
    checkpointer.save_and_keep_only(ckpt_predicate=lambda checkpoint: 1 / 0)
    with pytest.raises(CheckpointError, match="in the background: ZeroDivisionError"):
        checkpointer.wait()


def test_a_run_that_has_lost_the_folder_changes_nothing_in_it(checkpointer, monkeypatch):
    checkpointer.save_checkpoint()
    checkpointer.wait()
    before = names(checkpointer)

    def lost(lock):
        if threading.current_thread() is not threading.main_thread():
            raise FolderInUseError("another run has taken the folder.")

    monkeypatch.setattr(FolderLock, "require", lost)
    checkpointer.on_error = "warn"  # which is for disks, not for this
    checkpointer.save_checkpoint()
    with pytest.raises(CheckpointError, match="another run has taken the folder"):
        checkpointer.wait()
    assert names(checkpointer) == before


# -------------------------------------------------------------------------------- ends of all kinds


def test_a_checkpointer_that_is_collected_finishes_its_save_first(tmp_path, model, gate):
    checkpointer = Checkpointer(tmp_path, {"model": model})
    checkpointer.asynchronous = True
    saved = checkpointer.save_checkpoint()
    assert gate.waiting.wait(60)
    threading.Timer(0.2, gate.open.set).start()
    gone = weakref.ref(checkpointer)
    del checkpointer
    gc.collect()
    assert gone() is None
    assert verify(saved.path) == []
    assert saver_threads() == []


def test_another_checkpointer_can_wait_for_a_folder(checkpointer, gate):
    saved = checkpointer.save_checkpoint()
    threading.Timer(0.2, gate.open.set).start()
    BackgroundSave().wait(checkpointer.checkpoints_dir)
    assert verify(saved.path) == []


def test_a_lost_error_is_logged_when_the_checkpointer_is_collected(tmp_path, model, gate, caplog):
    checkpointer = Checkpointer(tmp_path, {"model": model})
    checkpointer.asynchronous = True
    fail_in_the_background(checkpointer, gate)
    with caplog.at_level(logging.ERROR):
        del checkpointer
        gc.collect()
    assert "A checkpoint is lost: cannot save" in caplog.text
    assert saver_threads() == []


SCRIPT = """
    import os, sys, threading, torch
    from ddpkit.checkpoints import Checkpointer
    from ddpkit.checkpointing import storage

    class Slow(storage.FileOperations):
        def write(self, path, writer):
            import time
            if path.name == "model.ckpt":
                time.sleep(SECONDS[0])
            super().write(path, writer)

    SECONDS = [0.0]
    storage.FILES = Slow()
    model = torch.nn.Linear(1500, 1500)
    checkpointer = Checkpointer(sys.argv[1], {"model": model})
    checkpointer.asynchronous = True
    checkpointer.save_checkpoint(name="one")
    checkpointer.wait()
    SECONDS[0] = float(sys.argv[2])
    checkpointer.save_checkpoint(name="two")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "kept"),
    [
        ("", 0, ["CKPT+one", "CKPT+two"]),
        ("sys.exit(3)", 3, ["CKPT+one", "CKPT+two"]),
        ("raise ValueError('stop')", 1, ["CKPT+one", "CKPT+two"]),
        ("os.kill(os.getpid(), 9)", -9, ["CKPT+one"]),
    ],
)
def test_a_process_that_ends_finishes_its_save_and_one_that_is_killed_loses_that_alone(
    tmp_path,
    end,
    code,
    kept,
):
    """The first is started as a user does; the others end as it does, too."""
    script = textwrap.dedent(SCRIPT) + end + "\n"
    seconds = "600" if "kill" in end else "0.5"
    command = python("-c", script, str(tmp_path / "save"), seconds)
    ended = Run(command, tmp_path, {WHOLE_EXIT: "1"}, warm=bool(end)).wait(100)
    assert ended.code == code, ended.err
    assert sorted(p.name for p in (tmp_path / "save").glob("CKPT*")) == kept
    assert all(verify(path) == [] for path in (tmp_path / "save").glob("CKPT*"))


@pytest.mark.costly
def test_forked_loader_workers_are_not_disturbed_and_disturb_nothing(checkpointer, gate, model):
    stamp(model, 9)
    saved = checkpointer.save_checkpoint()
    assert gate.waiting.wait(60)
    loader = DataLoader(range(64), batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert sum(int(batch.sum()) for batch in loader) == sum(range(64))
    gate.open.set()
    assert sum(int(batch.sum()) for batch in loader) == sum(range(64))
    checkpointer.wait()
    assert stamps_in(saved.path / "model.ckpt") == {9.0}
    assert verify(saved.path) == []


@pytest.mark.parametrize(
    "use",
    [lambda c: None, lambda c: c.wait(), lambda c: c.list_checkpoints()],
)
def test_a_forked_process_has_nothing_to_wait_for(checkpointer, gate, use):
    saved = checkpointer.save_checkpoint()
    assert gate.waiting.wait(60)
    pid = os.fork()
    if pid == 0:
        try:
            use(checkpointer)
            del checkpointer
            gc.collect()
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert ended == (pid, 0)
    gate.open.set()
    checkpointer.wait()
    assert verify(saved.path) == []
