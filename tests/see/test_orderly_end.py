"""What the commands start ends with them, however that comes about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddpkit.base import dying_with_parent
from ddpkit.errors import LaunchError
from ddpkit.launch import LaunchInfo
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.checks import recipe_loader
from ddpkit.see.doctor.machine import Machine
from ddpkit.see.doctor.planned_run import PlannedRun
from ddpkit.see.doctor.ranks import Ranks
from ddpkit.see.orderly_end import end_children, ended_in_order
from ddpkit.see.scale import slice_process
from tests.launching import Run, python, wait_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_a_command_tidy_up_and_a_second_one_does_not_disturb_it(number):
    before = signal.getsignal(number)
    tidied = []

    def work():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            tidied.append(True)

    with pytest.raises(SystemExit) as caught, ended_in_order():
        work()
    assert tidied
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with ended_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_children_may_tidy_up_and_are_killed_if_they_do_not():
    kind = subprocess.Popen(["sleep", "60"])
    deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; sleep 60"], stdout=subprocess.PIPE)
    deaf.stdout.readline()  # it has set its trap
    end_children([kind, deaf], 0.1)
    deaf.stdout.close()
    assert (kind.returncode, deaf.returncode) == (-signal.SIGTERM, -signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="the system must offer it")
def test_a_child_ends_with_the_thread_that_has_started_it():
    started = []

    def start():
        end = dying_with_parent(signal.SIGKILL)
        started.append(subprocess.Popen(["sleep", "60"], preexec_fn=end))  # noqa: PLW1509

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert started[0].wait(30) == -signal.SIGKILL


def test_a_recipe_that_never_ends_is_given_up_when_the_main_process_has_gone(monkeypatch, caplog):
    asked = []

    def never_ends(recipe, cell, plan, tell, is_given_up):
        tell("  still running; it said last: 50 % done")
        assert wait_until(is_given_up, 20)
        asked.append(plan.scratch)
        raise recipe_loader.SliceFailedError("it was given up.")

    class Lost(Ranks):
        def exchange(self, name, value):
            raise LaunchError("rank 0 did not answer")

    monkeypatch.setattr(recipe_loader, "run_slice", never_ends)
    run = PlannedRun(launch=LaunchInfo(), recipe=("train.py", "hparams.yaml"), timeout=0.1)
    site = Site(Machine(environ={}), run, Lost(LaunchInfo(), timeout=0.1))
    with (
        caplog.at_level("INFO", logger="ddpkit"),
        pytest.raises(LaunchError, match="rank 0 did not answer"),
    ):
        list(recipe_loader.look(site))
    assert "loader of the recipe: still running; it said last: 50 % done" in caplog.text
    assert len(asked) == 1
    assert not Path(asked[0]).exists()


def test_of_much_that_a_recipe_has_said_the_end_alone_is_read(tmp_path):
    path = tmp_path / "output.rank0.log"
    with path.open("wb") as file:
        file.truncate(2**40)  # a file with a hole: none has the memory for it
        file.seek(0, os.SEEK_END)
        file.write(b"\nfirst\nlast\n")
    assert slice_process._last_lines(path, 2) == "first\nlast"


HANGS = """
    import pathlib, time
    pathlib.Path("told").touch()
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "number", "code"),
    [((), signal.SIGINT, 130), (("--nproc=2",), signal.SIGTERM, 143)],
    ids=["alone", "two ranks"],
)
def test_doctor_leaves_nothing_after_a_signal_while_a_recipe_hangs(tmp_path, words, number, code):
    folder = tmp_path / "recipe"
    temporary = tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    (folder / "train.py").write_text("\n".join(line.strip() for line in HANGS.splitlines()))
    (folder / "hparams.yaml").write_text("lr: 0.1\n")
    command = python("-m", "ddpkit", "doctor", "--device=cpu", *words)
    command += ["--recipe", "train.py", "hparams.yaml"]
    run = Run(command, folder, {"TMPDIR": str(temporary)}, name="../run")
    assert wait_until((folder / "told").exists, 60)
    run.signal(number)
    run.wait(20)
    assert run.code == code
    assert not list(temporary.glob("ddpkit-*"))
