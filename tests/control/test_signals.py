"""Signals that ask a run to stop or to save."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed.elastic.multiprocessing import api

from ddpkit.control.signals import REPEAT_SECONDS, SignalListener, _Listeners, signal_named
from ddpkit.errors import ConfigError, RunStopped


@contextlib.contextmanager
def stopped(signals):
    """Hear signals, and act on them in the end."""
    handlers = {number: signal.getsignal(number) for number in (*signals.stopping, *signals.saving)}
    try:
        with contextlib.suppress(RunStopped), signals.listening():
            yield
            raise RunStopped(1, "test")
    finally:
        _Listeners.before = {}
        _Listeners.active.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_asks_for_the_end_and_the_handler_is_put_back(name, capfd):
    number = signal_named(name)
    signals = SignalListener()
    before = signal.getsignal(number)
    with stopped(signals):
        signal.raise_signal(number)
        assert signals.stop_signal == number
        assert not signals.save_wanted
    with SignalListener().listening():
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) is before
    told = capfd.readouterr().err
    assert f"{name}: stopping at the end of a step" in told
    assert (f"A second {name} ends the process at once." in told) == (name != "SIGUSR1")


@pytest.mark.parametrize(
    ("environment", "is_told"),
    [
        ({"RANK": "1"}, False),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, False),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, True),
    ],
)
def test_one_process_says_it(monkeypatch, capfd, environment, is_told):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with stopped(SignalListener()):
        signal.raise_signal(signal.SIGTERM)
    assert ("stopping at the end of a step" in capfd.readouterr().err) == is_told


def test_a_signal_asks_for_a_checkpoint():
    signals = SignalListener()
    with signals.listening():
        signal.raise_signal(signal.SIGUSR2)
    assert (signals.save_wanted, signals.stop_signal) == (True, 0)


def test_the_options_choose_the_signals():
    signals = SignalListener(["usr2"], [])
    with stopped(signals):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR2)
    assert signals.stop_signal == signal.SIGUSR2


@pytest.mark.parametrize(
    ("stopping", "saving", "words"),
    [
        (["SIGKILL"], [], "not a signal"),
        (["SIGWHAT"], [], "not a signal"),
        (["TERM"], ["SIGTERM"], "both name SIGTERM"),
    ],
)
def test_what_cannot_work_is_refused(stopping, saving, words):
    with pytest.raises(ConfigError, match=words):
        SignalListener(stopping, saving)


def test_a_script_with_its_own_use_for_a_signal_keeps_it():
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        signals = SignalListener()
        with signals.listening():
            signal.raise_signal(signal.SIGUSR1)
        assert (heard, signals.stop_signal) == ([1], 0)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_rank_that_torch_s_launcher_has_forked_hears_in_the_place_of_its_handler(monkeypatch):
    handler = api._terminate_process_handler
    monkeypatch.setattr("multiprocessing.parent_process", object)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        signals = SignalListener()
        with signals.listening():
            signal.raise_signal(signal.SIGTERM)
            heard = signals.stop_signal
            signals.stop_signal = 0  # as if the run had ended by it
        assert heard == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_of_the_main_thread_nothing_is_heard():
    done = []

    def work():
        with SignalListener().listening():
            done.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.SIG_DFL]


def test_contexts_may_be_nested():
    outer = SignalListener()
    inner = SignalListener()
    with stopped(outer):
        with inner.listening():
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert (inner.stop_signal, outer.stop_signal) == (0, signal.SIGTERM), (
        "the inner one hands it to the outer one"
    )


@pytest.mark.parametrize("error", [None, ValueError])
def test_what_an_inner_context_has_heard_and_not_acted_on_is_not_lost(error, monkeypatch):
    """Such as the evaluation of another Brain inside of fit, which has no beat any more."""
    monkeypatch.setattr("ddpkit.control.signals.REPEAT_SECONDS", 600.0)
    outer = SignalListener()
    inner = SignalListener()
    third = SignalListener(["SIGUSR1"], [])
    with stopped(outer):
        with contextlib.suppress(ValueError), third.listening(), inner.listening():
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGTERM)
            if error is not None:
                raise error
        assert (inner.stop_signal, inner.save_wanted) == (0, False)
        assert (outer.stop_signal, outer.save_wanted) == (signal.SIGTERM, True)
        assert third.stop_signal == 0, "which had no use for that one"
        # the echo of the one that the inner context has heard: does no harm
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_means_what_it_means_to_the_one_who_gets_it():
    outer = SignalListener(["SIGTERM"], ["SIGUSR1"])
    inner = SignalListener(["SIGUSR1"], [])
    with outer.listening(), inner.listening():
        signal.raise_signal(signal.SIGUSR1)
    assert (outer.stop_signal, outer.save_wanted, inner.stop_signal) == (0, True, 0)


def test_of_two_signals_that_save_the_one_is_handed_on_that_came():
    outer = SignalListener(stopping=["SIGUSR1"], saving=["SIGUSR2"])
    inner = SignalListener([], saving=["SIGUSR1", "SIGUSR2"])
    with outer.listening():
        with inner.listening():
            signal.raise_signal(signal.SIGUSR2)
            assert inner.save_wanted
        assert (outer.save_wanted, outer.stop_signal) == (True, 0)


def test_contexts_of_one_brain_have_one_memory():
    signals = SignalListener()
    with stopped(signals):
        with signals.listening():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR2)
        assert (signals.stop_signal, signals.save_wanted) == (signal.SIGTERM, True)


@pytest.mark.costly
def test_a_signal_is_not_lost_at_any_line_of_the_beginning_and_the_end():
    """Each child gets it one line later, until there is none; nobody acts on it, so it has to
    interrupt.
    """
    script = """
import os, signal, sys
from ddpkit.control import SignalListener

def outcome(line):
    seen = 0
    def trace(frame, event, _):
        nonlocal seen
        if not frame.f_code.co_filename.endswith("control/signals.py"):
            return None
        seen += event == "line"
        if event == "line" and seen == line:
            signal.raise_signal(signal.SIGINT)
        return trace
    try:
        sys.settrace(trace)
        with SignalListener().listening():
            pass
    except KeyboardInterrupt:
        return "heard"
    finally:
        sys.settrace(None)
    return "lost" if seen >= line else "over"

for line in range(1, 1000):
    child = os.fork()
    if child == 0:
        os._exit(["heard", "lost", "over"].index(outcome(line)))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        print(line > 40, code)
        break
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.stdout == "True 2\n", run.stderr


@pytest.mark.parametrize(
    ("name", "code"),
    [("SIGTERM", -signal.SIGTERM), ("SIGUSR1", -signal.SIGUSR1), ("SIGINT", 1)],
)
def test_a_signal_that_nobody_has_acted_on_is_not_swallowed(name, code):
    script = f"""
import signal, sys
from ddpkit.control.signals import SignalListener
try:
    with SignalListener().listening():
        signal.raise_signal(signal.{name})
        print("the last step", flush=True)
except KeyboardInterrupt:
    sys.exit(1)
print("not here", flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (run.returncode, run.stdout) == (code, "the last step\n"), run.stderr


def test_after_a_stop_the_signals_of_a_launcher_do_no_harm(tmp_path):
    script = """
import signal, sys
from ddpkit.errors import RunStopped
from ddpkit.control.signals import SignalListener
try:
    with SignalListener().listening():
        signal.raise_signal(signal.SIGTERM)
        raise RunStopped(143, "SIGTERM")
finally:
    signal.raise_signal(signal.SIGTERM)
    print("still here", flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (run.returncode, run.stdout) == (143, "still here\n"), run.stderr


LOOP = """
import signal, sys, time
from ddpkit.control import signals
signals.REPEAT_SECONDS = float(sys.argv[1])
heard = signals.SignalListener()
with heard.listening():
    print("ready", flush=True)
    while not (heard.stop_signal and signals._Listeners.asked_at):
        time.sleep(0.01)
    print("heard", flush=True)
    while True:
        time.sleep(0.01)
"""


@contextlib.contextmanager
def one_that_has_heard(number, repeat_seconds):
    """Yield a process that has heard a first signal."""
    command = [sys.executable, "-c", LOOP, str(repeat_seconds)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stdout.readline() == "ready\n"
        run.send_signal(number)
        assert run.stdout.readline() == "heard\n"
        yield run
    finally:
        run.kill()
        run.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_the_process_at_once(number):
    with one_that_has_heard(number, repeat_seconds=0.1) as run:
        time.sleep(0.5)
        run.send_signal(number)
        assert run.wait(50) == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_echo_of_a_signal_does_not_end_the_process(number):
    """That a launcher passes on what a scheduler has sent to everybody."""
    with one_that_has_heard(number, repeat_seconds=600) as run:
        for _ in range(3):
            run.send_signal(number)
            time.sleep(0.2)
        assert run.poll() is None


DEAF = """
import ctypes, os, signal, threading, time
from ddpkit.control import signals
signals.REPEAT_SECONDS = 0.1
system, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)

def send(number):
    for pause in (2, 60):  # the second one ends the process
        os.kill(os.getpid(), number)
        time.sleep(pause)
    system.pthread_mutex_unlock(mutex)

with signals.SignalListener().listening():
    system.pthread_mutex_lock(mutex)
    threading.Thread(target=send, args=(signal.%s,)).start()
    system.pthread_mutex_lock(mutex)  # where no signal calls the main thread back
    raise ValueError("the connection to another rank was lost")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a lock of Linux's C library")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
)
def test_the_second_signal_is_not_lost_that_came_while_the_main_thread_was_busy_in_c(number):
    """Python tells a main thread of two signals as of one."""
    script = DEAF % number.name
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 128 + number, run.stderr
    assert "ValueError" not in run.stderr


def test_a_stop_is_no_exception_that_a_recipe_would_catch():
    stopped = RunStopped(143, "SIGTERM")
    assert isinstance(stopped, SystemExit)
    assert not isinstance(stopped, Exception)
    assert (stopped.code, stopped.cause) == (143, "SIGTERM")


def test_only_the_signals_that_end_a_process_end_it_at_the_second():
    signals = SignalListener()
    with stopped(signals):
        for pause in (REPEAT_SECONDS + 0.1, 0.1):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(pause)


def come_and_stay(pipe):
    pipe.send("here")
    time.sleep(600)


def test_a_helper_that_a_script_forks_can_be_ended():
    mine, its = multiprocessing.Pipe()
    with mine, its, SignalListener().listening():
        helper = multiprocessing.get_context("fork").Process(target=come_and_stay, args=(its,))
        helper.start()
        assert mine.poll(60)
        helper.terminate()
        helper.join(60)
        code = helper.exitcode
        helper.kill()
        helper.join()
    assert code == -signal.SIGTERM


FORKS = """
import os, sys
from ddpkit.control.signals import SignalListener
with SignalListener().listening():
    pid = os.fork()
    if not pid:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_helper_that_a_script_forks_ends_with_its_own_code():
    # 3.12 warns of threads
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "7\n", "")


def test_a_signal_that_the_script_handles_itself_ends_nothing_however_often_it_comes():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with SignalListener().listening():
            for pause in (REPEAT_SECONDS + 0.1, REPEAT_SECONDS + 0.1, 0.1):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(pause)
    finally:
        signal.signal(signal.SIGTERM, before)


TWO_CALLS = """
import contextlib, os, signal, time
from ddpkit.control import signals
from ddpkit.errors import RunStopped
signals.REPEAT_SECONDS = 0.1
for call in range(2):
    listener = signals.SignalListener()
    with contextlib.suppress(RunStopped), listener.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)
        print(listener.stop_signal, flush=True)
        raise RunStopped(143, "SIGTERM")
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_a_script_that_catches_a_stop_is_asked_anew_and_its_end_can_be_hastened():
    run = subprocess.run(
        [sys.executable, "-c", TWO_CALLS],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (run.returncode, run.stdout.split()) == (143, ["15", "15", "-15"]), run.stderr


NESTED = """
import os, signal, time
from ddpkit.control import signals
signals.REPEAT_SECONDS = 0.1
with signals.SignalListener().listening():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2)
    with signals.SignalListener().listening():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""


def test_a_call_inside_of_another_one_is_not_asked_anew():
    run = subprocess.run(
        [sys.executable, "-c", NESTED],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 143, run.stderr


@pytest.mark.parametrize(
    "names",
    [
        ["SIGTERM", "SIGTERM"],
        pytest.param(["SIGUSR1", "SIGTERM", "SIGTERM"], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_what_ends_a_process_is_the_second_of_its_kind(names):
    """Slurm sends SIGUSR1 as a warning, and SIGTERM at the end."""
    script = f"""
import os, signal, time
from ddpkit.control import signals
signals.REPEAT_SECONDS = 0.1
with signals.SignalListener().listening():
    for name in {names}:
        print(name, flush=True)
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(2)
    time.sleep(60)
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (run.returncode, run.stdout.split()) == (143, names), run.stderr


NOTEBOOK = """
import os, signal, sys
sys.ps1 = "> "
from ddpkit.control.signals import SignalListener
try:
    with SignalListener().listening():
        os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("the next cell", flush=True)
"""


def test_a_notebook_is_interrupted_as_ever():
    run = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "the next cell\n"), run.stderr
