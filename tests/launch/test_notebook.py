"""``notebook_launch`` from a process that has computed before: what it returns, how its ranks end,
and what it refuses. ``tests/starters/test_notebook.py`` calls it in a kernel of Jupyter's.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit
from ddpkit import notebook_launch
from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError, LaunchError, RankFailedError, RunStopped
from ddpkit.launch import find_launch, notebook
from tests.launching import soon, wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system must fork")

OPTIONS = {"device": "cpu", "global_batch_size": 8, "noprogressbar": True}
LONG = 10_000  # epochs: it ends by other means


class Line(Brain):
    """Fits a line; calls a function in each step."""

    in_step = staticmethod(lambda _: None)

    def compute_forward(self, batch, stage):
        self.in_step(self)
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])


def train(epochs=2, in_step=lambda _: None, folder=None, **options):
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    counter = EpochCounter(epochs)
    checkpointer = folder and Checkpointer(folder, {"net": net, "counter": counter})
    brain = Line(
        {"net": net},
        functools.partial(torch.optim.SGD, lr=0.1),
        run_opts={**OPTIONS, **options},
        checkpointer=checkpointer,
    )
    brain.in_step = in_step
    return brain.fit(counter, TensorDataset(inputs, inputs.sum(1, keepdim=True))).train_loss


@pytest.fixture
def on_cpu(monkeypatch):
    """GPUs of the machine are for other tests."""
    monkeypatch.setattr(notebook, "count_gpus", lambda: 0)


# --------------------------------------------------------------------------------- to a good end


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_two_ranks_train_as_the_process_itself_and_rank_0_returns_the_loss():
    worlds = []

    def train_and_look():
        loss = train()
        worlds.append(get_world_size())
        return loss, worlds

    alone, worlds_alone = notebook_launch(train_and_look, 1)
    together, worlds_together = notebook_launch(train_and_look, 2)
    assert together == pytest.approx(alone, rel=1e-5)
    assert worlds_together == [1, 2], "the ranks have what was made before"
    assert worlds_alone == worlds == [1], "and change copies of it"


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_a_rank_sees_what_was_made_before_and_torchruns_variables(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    many = torch.ones(1_000_000)
    torch.set_num_threads(2)  # as a cell that has computed: GNU's OpenMP does not survive a fork
    (many + many).sum()

    def look():
        places = find_launch()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        (many + many).sum()
        return places.launcher, [os.environ[name] for name in names], torch.get_num_threads()

    try:
        seen = notebook_launch(look, "2")
    finally:
        torch.set_num_threads(1)
    assert seen == ("notebook_launch", ["0", "0", "2", "2", "127.0.0.1"], 2)
    assert "RANK" not in os.environ


@pytest.mark.usefixtures("on_cpu")
def test_what_ranks_write_is_shown_before_the_call_is_over(capsys):
    def write():
        os.write(1, f"from C {os.environ['RANK']}\n".encode())
        print("ä" * 40_000, flush=True)
        print(f"trouble {os.environ['RANK']}", file=sys.stderr)

    assert notebook_launch(write, 2) is None
    shown = capsys.readouterr()
    # perhaps in the middle of the other's long line
    assert [shown.out.count(f"from C {rank}\n") for rank in (0, 1)] == [1, 1]
    assert shown.out.count("ä") == 80_000
    assert sorted(shown.err.splitlines()) == ["trouble 0", "trouble 1"]


# ------------------------------------------------------------------------------------ to a bad end


def rank_1_dies(how, brain):
    if (brain.rank, brain.step) == (1, 3):
        how()


def raise_boom():
    raise ValueError("boom")


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_a_rank_that_fails_ends_the_others_and_its_traceback_is_raised():
    began = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        notebook_launch(train, 2, args=(LONG, functools.partial(rank_1_dies, raise_boom)))
    assert soon(began, 10)
    first, _, trace = str(caught.value).partition("\n\n")
    assert first.startswith("rank 1 (")
    assert "in TRAIN of epoch 1 at step 3" in first
    assert first.endswith("ValueError: boom")
    assert trace.startswith("Traceback")
    assert "in raise_boom" in trace
    assert "forked_ranks.py" not in trace


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_a_rank_that_fails_where_no_group_is_ends_one_that_only_sleeps():
    def fail():
        if os.environ["RANK"] == "1":
            raise_boom()
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 .* failed, at .*: ValueError: boom"):
        notebook_launch(fail, 2)
    assert soon(began, 10)


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_a_rank_that_is_killed_is_named():
    kill = functools.partial(rank_1_dies, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RankFailedError, match="rank 1 was killed by SIGKILL"):
        notebook_launch(train, 2, args=(LONG, kill))


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_an_interrupt_stops_the_ranks_with_a_checkpoint_and_the_next_call_goes_on(tmp_path):
    begun = tmp_path / "begun"

    def in_step(brain):
        Path(tmp_path, f"pid{brain.rank}").write_text(str(os.getpid()))
        if brain.optimizer_step > 4:
            begun.touch()

    def interrupt():
        wait_until(begun.exists, 60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        notebook_launch(train, 2, args=(LONG, in_step, tmp_path / "save"))
    thread.join()
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int(Path(tmp_path, f"pid{rank}").read_text()), 0)
    assert list((tmp_path / "save").glob("CKPT+*"))

    def first_step(brain):
        raise ValueError(f"goes on after step {brain.optimizer_step}")

    with pytest.raises(RankFailedError, match=r"goes on after step [1-9]"):
        notebook_launch(train, 2, args=(LONG, first_step, tmp_path / "save"))


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_a_run_that_was_asked_to_stop_says_so():
    def in_step(brain):
        if brain.rank == 1 and brain.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunStopped) as caught:
        notebook_launch(train, 2, args=(LONG, in_step))
    assert (caught.value.code, caught.value.cause) == (143, "SIGTERM")


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_a_value_that_cannot_be_sent_is_named():
    with pytest.raises(RankFailedError, match=r"returned on rank 0 \(lock\)"):
        notebook_launch(threading.Lock, 2)


# -------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("fn", "nproc", "args", "words"),
    [
        (None, 2, (), "fn must be a function, got None. Give the function itself"),
        (train, 0, (), "nproc must be >= 1, got 0"),
        (train, "gpu", (), "no GPU was found or asked for. Give a number, such as nproc=2"),
        (train, 2, 5, r"args=\(value,\)"),
        (raise_boom, 2, (1,), "raise_boom cannot be called with .*get_rank"),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_calls_that_make_no_sense(fn, nproc, args, words):
    with pytest.raises(ConfigError, match=words):
        notebook_launch(fn, nproc, args)


@pytest.mark.costly
def test_ranks_that_could_not_use_the_gpus_are_not_forked(monkeypatch):
    monkeypatch.setattr(notebook, "count_gpus", lambda: 2)
    monkeypatch.setattr(notebook, "is_lost_by_fork", lambda kind: kind == "cuda")
    words = "a GPU was used before.*Restart the kernel.*is_available"
    for nproc in (2, "gpu"):
        with pytest.raises(LaunchError, match=words):
            notebook_launch(raise_boom, nproc)
    hidden = functools.partial(os.environ.get, "CUDA_VISIBLE_DEVICES")
    assert notebook_launch(hidden, 2, device="cpu") == ""
    with pytest.raises(ConfigError, match="there are 2 GPUs.*Give nproc=2 or less, or device=cpu"):
        notebook_launch(raise_boom, 3)


def test_torch_knows_in_the_forked_process_that_the_driver_was_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(notebook, "count_gpus", os.getpid)
    # counted here: a forked process would find none
    assert notebook._look_for_gpus() == (os.getpid(), True)
    # in this process an earlier test may have looked for a driver
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    assert notebook._look_for_gpus()[1] is False


@pytest.mark.usefixtures("on_cpu")
def test_a_rank_starts_no_ranks(monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="environment has started this one already, as rank 1"):
        notebook_launch(raise_boom, 2)


def test_the_name_is_the_packages():
    assert ddpkit.notebook_launch is notebook.notebook_launch
    assert "notebook_launch" in ddpkit.__all__


@pytest.mark.costly
def test_ranks_meet_in_collectives_of_a_group_without_a_brain(monkeypatch):
    monkeypatch.setattr(notebook, "count_gpus", lambda: 0)

    def add():
        ddpkit.ddp_init_group({"device": "cpu"})
        total = torch.tensor(get_rank() + 1.0)
        torch.distributed.all_reduce(total)
        return total.item()

    assert notebook_launch(add, 3) == 6.0
