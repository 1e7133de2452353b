"""Workers of every start method: deaf, known to their rank, and no example to a script's own processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time

import pytest
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ddpkit.control.loader_workers import deaf_signals, kill_workers, show_workers, start_loading


class Looking(Dataset):
    """Its first item is what its worker does to signals and to a program; it is stuck at its last one."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 1:
            time.sleep(600)
        for number in deaf_signals():
            os.kill(os.getpid(), number)
        program = subprocess.Popen(["sleep", "600"])
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        time.sleep(0.2)
        program.terminate()
        os.kill(pid, signal.SIGTERM)
        return os.getpid(), program.wait(10), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_are_deaf_answer_and_end(context, capfd):
    loader = DataLoader(Looking(), batch_size=None, num_workers=1, multiprocessing_context=context)
    batches = start_loading(loader)
    [process] = batches._workers
    assert next(batches) == [process.pid, -signal.SIGTERM, -signal.SIGTERM], "what a worker starts is not deaf"
    end = time.monotonic() + 20
    said = ""
    while "in __getitem__" not in said and time.monotonic() < end:
        show_workers()
        said = capfd.readouterr().err
    stack = said.partition(f"A worker of the loader (pid {process.pid}) is here:")[2]
    assert 'test_loader_workers.py", line' in stack
    kill_workers()
    process.join(10)
    assert process.exitcode in {-signal.SIGKILL, 255}
    helper = multiprocessing.get_context(context).Process(target=time.sleep, args=(600,))
    helper.start()
    try:
        time.sleep(0.5)
        helper.terminate()
        helper.join(10)
        assert helper.exitcode == -signal.SIGTERM, "a script's own process hears signals"
    finally:
        helper.kill()
        helper.join()


class Broken(DataLoader):
    """Cannot start its workers."""

    def __iter__(self):
        raise OSError("no more processes")


def test_the_mask_of_signals_and_the_worker_init_fn_are_those_of_before_also_if_no_worker_can_be_started():
    loader = Broken(range(3), num_workers=1, worker_init_fn=print)
    with pytest.raises(OSError, match="no more processes"):
        start_loading(loader)
    assert loader.worker_init_fn is print
    assert not deaf_signals() & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_signals_are_blocked_in_the_thread_that_starts_workers():
    masks = []

    def begin():
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return iter(["a batch"])

    assert next(start_loading([], begin)) == "a batch"
    assert deaf_signals() <= masks[0]


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
