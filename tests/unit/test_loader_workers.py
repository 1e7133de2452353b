"""Workers that are not forked from their rank: deaf as those that are, and known to it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from multiprocessing import forkserver, util

import pytest
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker as torchs

from ddpkit.loader_workers import deaf_signals, kill_workers, starting_workers, where_workers_are


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


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_are_deaf_answer_and_end(context):
    loader = DataLoader(Looking(), batch_size=None, num_workers=1, multiprocessing_context=context)
    with starting_workers():
        batches = iter(loader)
    [process] = batches._workers
    assert next(batches) == [process.pid, -signal.SIGTERM, -signal.SIGTERM], "what a worker starts is not deaf"
    end = time.monotonic() + 20
    while not any("in __getitem__" in line for line in where_workers_are()) and time.monotonic() < end:
        time.sleep(0.1)
    [said] = [line for line in where_workers_are() if f"pid {process.pid}" in line]
    assert "test_loader_workers.py:" in said
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


def functions():
    return util.spawnv_passfds, forkserver.connect_to_new_process, torchs._worker_loop


def start_some(before):
    """Start something in the context, in another thread, and in a context in the context; then fail."""
    with starting_workers():
        util.spawnv_passfds("program", [], [])
        other = threading.Thread(target=util.spawnv_passfds, args=("program", [], []))
        other.start()
        other.join()
        with starting_workers():
            util.spawnv_passfds("program", [], [])
        assert forkserver.connect_to_new_process is not before[1]
        raise ZeroDivisionError


def test_what_starts_workers_is_put_back_and_does_for_other_threads_what_it_did():
    before, masks = functions(), []

    def spawn(*_arguments):
        masks.append(deaf_signals() <= signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return 1

    util.spawnv_passfds = spawn
    try:
        with pytest.raises(ZeroDivisionError):
            start_some(before)
    finally:
        assert functions() == (spawn, *before[1:])
        util.spawnv_passfds = before[0]
    assert masks == [True, False, True]
    assert not deaf_signals() & signal.pthread_sigmask(signal.SIG_BLOCK, [])
