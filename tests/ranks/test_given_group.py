"""A process group that the script has made itself: its ranks watch each other like any others."""

from __future__ import annotations

import signal
import textwrap
import time

import pytest

from tests.launching import Run, free_port, python, soon, wait_until

SCRIPT = """
    import os, signal, sys, threading, time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import ddpkit as sb
    from ddpkit.base import FailureReport, Reason
    from ddpkit.compat import default_store

    ADDRESS, RANK, WHAT = sys.argv[1:4]


    class Line(sb.Brain):
        def compute_forward(self, batch, stage):
            time.sleep(0.02)
            if self.step == 5 and self.rank == 1:
                misbehave()
            return self.modules.net(batch)

        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch).square().mean()


    def misbehave():
        Path("fault").touch()
        if WHAT == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if WHAT == "stop":
            time.sleep(3600)


    dist.init_process_group("gloo", init_method=ADDRESS, rank=int(RANK), world_size=2)
    if WHAT == "end early" and dist.get_rank() == 1:
        Path("fault").touch()
        os._exit(3)
    sb.distributed.run_on_main(lambda: Line({"net": torch.nn.Linear(1, 1)}, run_opts={"device": "cpu"}))
    if dist.get_rank() == 1:  # what an earlier attempt may have left in the store of a launcher
        report = FailureReport(default_store(), 1, 2)
        report.tell(Reason.of(1, ValueError("earlier"), is_final=True))
        report.depart()
    brain = Line(
        {"net": torch.nn.Linear(1, 1)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        run_opts={"device": "cpu", "noprogressbar": True, "hang_warning": 1.0},
    )
    print("local rank", sb.distributed.get_local_rank(), flush=True)
    brain.fit(range(1, 3), torch.arange(20.0).view(-1, 1), train_loader_kwargs={"batch_size": 1})
    print("trained", flush=True)
    dist.destroy_process_group()
    if RANK == "1":
        time.sleep(2.5)
    watching = {"ddpkit-heartbeat", "ddpkit-watch"}
    print("left", [one.name for one in threading.enumerate() if one.name in watching], flush=True)
"""  # noqa: E501


def start(folder, address, what):
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return [
        Run(python(str(script), address, str(rank), what), folder, name=f"rank{rank}", warm=True)
        for rank in range(2)
    ]


def address_of(kind, folder):
    return f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{folder}/meet"


EITHER = pytest.mark.parametrize("kind", ["tcp", pytest.param("file", marks=pytest.mark.slow)])


@EITHER
def test_a_killed_rank_is_named_by_the_others(tmp_path, kind):
    main, other = start(tmp_path, address_of(kind, tmp_path), "be killed")
    assert wait_until((tmp_path / "fault").exists, 60), main.err
    began = time.monotonic()
    main.wait(30)
    assert soon(began, 6)
    assert (main.code, other.wait(5).code) == (1, -signal.SIGKILL), main.err
    assert f"pid {other.process.pid}) disappeared in TRAIN of epoch 1 at step 5" in main.tail(1)
    assert (main.out, other.out) == ("local rank 0\n", "local rank 1\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_that_come_to_their_end_are_told_of_no_failure(tmp_path, kind):
    for run in start(tmp_path, address_of(kind, tmp_path), "train"):
        run.wait(60)
        assert (run.code, run.out.splitlines()[1]) == (0, "trained"), run.err
        assert "TCPStore" not in run.err
        if run.name == "rank1":
            assert run.out.splitlines()[-1] == "left []", "the watch ends with the group"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_it_is_said_which_rank_keeps_the_others_waiting(tmp_path, kind):
    main, other = start(tmp_path, address_of(kind, tmp_path), "stop")
    assert wait_until(lambda: "in misbehave" in main.err, 60), main.err
    assert "waiting for other ranks" in main.err
    other.signal(signal.SIGKILL)
    assert main.wait(30).code == 1
    other.wait(5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_rank_that_ends_before_it_makes_a_brain_is_named(tmp_path, kind):
    main, other = start(tmp_path, address_of(kind, tmp_path), "end early")
    other.wait(60)
    began = time.monotonic()
    assert main.wait(60).code == 1, main.err
    assert soon(began, 6)
    assert "rank 1 has ended" in main.tail(1)


NOTHING_HOLDS = """
    import sys, threading, time

    import torch.distributed as dist

    import ddpkit as sb


    def watching():
        return sorted(one.name for one in threading.enumerate() if one.name in WATCH)


    WATCH = {"ddpkit-heartbeat", "ddpkit-watch"}
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
    sb.ddp_init_group({})
    print(watching(), flush=True)
    dist.destroy_process_group()
    end = time.monotonic() + 30
    while watching() and time.monotonic() < end:
        time.sleep(0.05)
    print(watching(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_the_watch_ends_with_a_group_that_nothing_holds(tmp_path, kind):
    """Of a destroyed group a module may hold on to, and nothing else does."""
    (tmp_path / "train.py").write_text(textwrap.dedent(NOTHING_HOLDS))
    command = python("train.py", address_of(kind, tmp_path))
    run = Run(command, tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    assert run.out.splitlines() == ["['ddpkit-heartbeat', 'ddpkit-watch']", "[]"]


SPAWNED = """
    import os, sys

    import torch.distributed as dist
    import torch.multiprocessing as mp

    import ddpkit as sb


    def train(rank):
        address = f"tcp://127.0.0.1:{sys.argv[1]}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        sb.ddp_init_group({})
        sys.stdout.write(f"rank {rank} is watched\\n")
        sys.stdout.flush()
        dist.destroy_process_group()


    if __name__ == "__main__":
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
        mp.spawn(train, nprocs=2)
"""


@pytest.mark.slow
def test_variables_that_are_true_of_one_rank_alone_keep_none_waiting(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SPAWNED))
    run = Run(python("train.py", str(free_port())), tmp_path)
    run.wait(60)
    assert run.code == 0, run.err
    assert sorted(run.out.splitlines()) == ["rank 0 is watched", "rank 1 is watched"]
