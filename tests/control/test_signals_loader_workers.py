"""Workers of every start method: deaf, known to their rank, and no example to a script's own
processes.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import time

import pytest
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ddpkit.control import SignalListener
from ddpkit.control.loader_workers import ignored_signals, kill_workers, show_workers, start_loading
from tests.launching import Run, python


def end_what_was_started():
    """Start a program and a process, end both with SIGTERM, and return their exit codes."""
    program = subprocess.Popen(["sleep", "600"])
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"here")
        time.sleep(600)
    os.read(reader, 4)
    os.close(reader)
    os.close(writer)
    program.terminate()
    os.kill(pid, signal.SIGTERM)
    return program.wait(60), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Looking(Dataset):
    """Its first item is what its worker does to signals and to a program; it is stuck at its last
    one.
    """

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 1:
            time.sleep(600)
        for number in ignored_signals():
            os.kill(os.getpid(), number)
        return os.getpid(), *end_what_was_started()


# For a process that imports nothing, as the module of a function would have it do.
SAY_AND_SLEEP = "import time; connection.send('here'); time.sleep(600)"


def write_stderr_into(path, worker):
    """A forkserver that an earlier test has started has the stderr of that test, and its workers
    have it too.
    """
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "context",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"],
)
def test_workers_are_deaf_answer_and_end(context, capfd, tmp_path):
    stderr = tmp_path / "stderr"
    loader = DataLoader(
        Looking(),
        batch_size=None,
        num_workers=1,
        multiprocessing_context=context,
        worker_init_fn=functools.partial(write_stderr_into, stderr),
    )
    batches = start_loading(loader)
    [process] = batches._workers
    assert next(batches) == [process.pid, -signal.SIGTERM, -signal.SIGTERM], (
        "what a worker starts is not deaf"
    )
    os.kill(process.pid, signal.SIGTERM)  # as a launcher sends to all
    end = time.monotonic() + 60
    while "in __getitem__" not in stderr.read_text() and time.monotonic() < end:
        show_workers()
    assert f"A worker of the loader (pid {process.pid}) is here:" in capfd.readouterr().err
    assert 'test_signals_loader_workers.py", line' in stderr.read_text()
    kill_workers()
    process.join(60)
    assert process.exitcode in {-signal.SIGKILL, 255}
    ours, theirs = multiprocessing.get_context(context).Pipe()
    helper = multiprocessing.get_context(context).Process(
        target=exec,
        args=(SAY_AND_SLEEP, {"connection": theirs}),
    )
    helper.start()
    try:
        assert ours.recv() == "here"
        helper.terminate()
        helper.join(60)
        assert helper.exitcode == -signal.SIGTERM, "a script's own process hears signals"
    finally:
        helper.kill()
        helper.join()


class Starting(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return end_what_was_started()


def test_what_a_dataset_starts_without_workers_can_be_ended():
    with SignalListener().listening():
        items = list(start_loading(DataLoader(Starting(), batch_size=None)))
    assert [tuple(item) for item in items] == [(-signal.SIGTERM, -signal.SIGTERM)] * 2


class Broken(DataLoader):
    """Cannot start its workers."""

    def __iter__(self):
        raise OSError("no more processes")


def test_the_mask_of_signals_and_the_worker_init_fn_are_those_of_before_also_if_no_worker_can_be_started():  # noqa: E501
    loader = Broken(range(3), num_workers=1, worker_init_fn=print)
    with pytest.raises(OSError, match="no more processes"):
        start_loading(loader)
    assert loader.worker_init_fn is print
    assert not ignored_signals() & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_signals_are_blocked_in_the_thread_that_starts_workers():
    masks = []

    def begin():
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return iter(["a batch"])

    assert next(start_loading([], begin)) == "a batch"
    assert ignored_signals() <= masks[0]


def test_the_users_worker_init_fn_is_called():
    loader = DataLoader(Numbered(), batch_size=None, num_workers=2, worker_init_fn=number_dataset)
    assert sorted(int(item) for item in start_loading(loader)) == [100, 101]


class Numbered(Dataset):
    number = 0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.number


def number_dataset(worker):
    get_worker_info().dataset.number = 100 + worker


def test_a_worker_that_is_terminated_ends_although_it_is_deaf():
    """torch terminates workers that do not end by themselves, and then waits for them."""
    others = set(multiprocessing.active_children())
    loading = start_loading(DataLoader(range(4), num_workers=1))
    [worker] = set(multiprocessing.active_children()) - others
    next(loading)
    worker.terminate()
    with contextlib.suppress(RuntimeError):  # torch may tell of it in between
        worker.join(60)
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    del loading


LEAVES_A_LOADER = """
from ddpkit.dataloader import Sharding, shard
batches = iter(shard(range(100), Sharding(), batch_size=2, num_workers=1))
print(next(batches).tolist())
"""


def test_a_script_that_leaves_a_loader_in_the_middle_ends(tmp_path):
    """Python's own end waits for the worker, after a SIGTERM that the worker does not hear."""
    ended = Run(python("-c", LEAVES_A_LOADER), tmp_path, warm=True).wait()
    assert (ended.code, ended.err) == (0, "")
    assert len(ended.out.split()) == 2


FORKS = """
import os
import sys
from ddpkit.dataloader import Sharding, shard
batches = iter(shard(range(100), Sharding(), batch_size=2, num_workers=1))
next(batches)
pid = os.fork()
if pid == 0:
    sys.exit()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(len(list(batches)))
"""


def test_a_forked_process_that_ends_leaves_the_workers_of_its_parent_alone(tmp_path):
    ended = Run(python("-c", FORKS), tmp_path, warm=True).wait()
    assert (ended.code, ended.out) == (0, "49\n"), ended.err
