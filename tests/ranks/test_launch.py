"""Ranks that other launchers than torchrun start: the variables that they set, with real processes
behind them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddpkit import parse_arguments
from ddpkit.comm import group_end, shorten_timeout, time_limits
from ddpkit.distributed import control_group, ddp_init_group
from ddpkit.errors import ConfigError, LaunchError
from tests.launching import Run, free_port, python, soon, start_by_hand, wait_until
from tests.needs import needs_torch
from tests.recipes import Regression, make

SCRIPT = """
    import json, logging, os, sys
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import ddpkit as sb
    from ddpkit.distributed import get_local_rank, get_rank, get_world_size, run_on_main, run_once_per_node
    from ddpkit.logger import get_logger

    early = [get_rank(), get_local_rank(), sb.if_main_process()]
    get_logger("early").warning("main is %s", early[0])
    sb.ddp_init_group({"device": "cpu", "distributed_timeout_minutes": 0.5})
    ones = torch.ones(1)
    dist.all_reduce(ones)
    facts = {"early": early, "rank": get_rank(), "local": get_local_rank(), "world": get_world_size(), "sum": int(ones),
             "main": run_on_main(os.getpid), "node": run_once_per_node(os.getpid), "pid": os.getpid()}
    Path(f"facts.{get_rank()}").write_text(json.dumps(facts))
"""  # noqa: E501


def start(folder: Path, environments: list[dict[str, str]]) -> list[Run]:
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    return [
        Run(python("train.py"), folder, one, f"task{task}", warm=True)
        for task, one in enumerate(environments)
    ]


def facts(folder: Path, ranks: int) -> list[dict]:
    found = [json.loads((folder / f"facts.{rank}").read_text()) for rank in range(ranks)]
    assert [(one["rank"], one["world"], one["sum"]) for one in found] == [
        (rank, ranks, ranks) for rank in range(ranks)
    ]
    assert {one["main"] for one in found} == {found[0]["pid"]}
    return found


def srun(job: str, tasks: int, nodes: int = 1, **more: str) -> list[dict[str, str]]:
    """What slurmstepd sets for each task of a step whose tasks are dealt out to the nodes in
    turn.
    """
    there = [[task for task in range(tasks) if task % nodes == node] for node in range(nodes)]
    return [
        {
            "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(task),
            "SLURM_NODEID": str(task % nodes),
            "SLURM_LOCALID": str(task // nodes), "SLURM_GTIDS": ",".join(map(str,
            there[task % nodes])),
            "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_NTASKS": str(tasks),
            "SLURM_STEP_NODELIST": "localhost", **more,
        }
        for task in range(tasks)
    ]  # fmt: skip


def test_bare_srun(tmp_path):
    runs = start(tmp_path, srun(f"{os.getpid()}{time.time_ns()}", 2))
    for run in runs:
        assert run.wait().code == 0, run.err
    found = facts(tmp_path, 2)
    assert [one["early"] for one in found] == [[0, 0, True], [1, 1, False]], (
        "d23: known before the group is there"
    )
    assert runs[0].err == "main is 0\n"
    assert runs[1].err == ""


@pytest.mark.slow
def test_srun_that_deals_tasks_out_in_turn(tmp_path):
    """Two nodes, tasks 0 and 2 on the first: what is done once per node goes to the right ranks."""
    for run in start(tmp_path, srun(f"{os.getpid()}{time.time_ns()}", 4, nodes=2)):
        assert run.wait(90).code == 0, run.err
    found = facts(tmp_path, 4)
    assert [one["node"] for one in found] == [found[rank % 2]["pid"] for rank in range(4)]


@pytest.mark.slow
def test_the_ports_of_the_user_and_two_runs_on_one(tmp_path):
    """Whoever comes second is told so, on each of its ranks."""
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    first = start(folders[0], srun("1", 3, **place)[:2])  # waits for its third task
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port))):
            break
        time.sleep(0.1)
    # its task 1 is in
    dist.TCPStore("127.0.0.1", int(port), wait_for_workers=False).wait(["ddpkit/here/1"])
    second = start(folders[1], srun("2", 3, **place)[:2])
    for run, words in zip(
        second,
        (f"port {port} of MASTER_PORT is taken", ("two processes are rank 1")),
        strict=True,
    ):
        run.wait(50)
        assert run.code == 1
        assert words in run.err, run.err
    for run, words in zip(
        first,
        ("rank 2 (1) of 3 processes did not come", "could not|lost|did not come|not come further"),
        strict=True,
    ):
        run.wait(90)
        assert run.code == 1, "the third has never come"
        assert any(word in run.err for word in words.split("|")), run.err


# ---------------------------------------------------------------------------------------- the group


def late_for_a_barrier():
    dist.all_reduce(torch.ones(1))
    shorten_timeout(1.5)
    began = time.monotonic()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["over"])
        return None
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return time.monotonic() - began, str(error)
    finally:
        store.set("over", "")
    return time.monotonic() - began, ""


@needs_torch("2.13", "gloo keeps its first limit")
def test_a_shortened_timeout_counts(ranks):
    seconds, text = ranks.run(late_for_a_barrier)[0]
    assert "Timed out" in text or "timeout" in text.lower(), text
    assert 1 < seconds < 25, "the group itself waits for thirty"


def limits_of_the_control_group(minutes):
    """Return the limit of the group of the CPU, of one that the library has started or that was
    there.
    """
    if minutes is not None:
        ddp_init_group({"device": "cpu", "distributed_timeout_minutes": minutes})
    shorten_timeout(20)  # of steps, and not of what is done at the end of a stage
    return control_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_the_control_group_waits_as_long_as_the_option_says(ranks):
    assert ranks.run(limits_of_the_control_group, 0.75, init=False) == [45.0, 45.0]


def rank_of_a_scripts_own_group():
    """As after ``mp.spawn``: the script numbers its processes, without LOCAL_RANK."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        del os.environ[name]
    return make(Regression).rank


def test_rank_and_world_size_of_a_group_that_is_there_number_no_nodes(ranks):
    assert ranks.run(rank_of_a_scripts_own_group) == [0, 1]


def group_on_a_node_of_a_platform(file):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    parse_arguments([file, "--device=cpu"])


def test_ranks_that_have_a_group_are_no_lonely_nodes(ranks, tmp_path):
    file = tmp_path / "h.yaml"
    file.write_text("lr: 0.1\n")
    ranks.run(group_on_a_node_of_a_platform, str(file))


def limit_by_default():
    ddp_init_group({"device": "cpu", "hang_timeout": 1800.0})
    return control_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_collectives_wait_longer_than_the_watchdog_does(ranks):
    """So that it is the watchdog that says why; NCCL ends a process without a word of where the
    others are.
    """
    assert ranks.run(limit_by_default, init=False) == [1830.0, 1830.0]


def connect_late():
    """Say, on rank 0, whether rank 1 had connected when the group was ready; rank 1 waits for just
    that.
    """
    make = dist.new_group

    def make_late(**options):
        group = make(**options)
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            with contextlib.suppress(RuntimeError):  # it must not come
                store.wait(["rank 0 is ready"], timedelta(seconds=1))
            store.set("rank 1 has connected", "")
        return group

    dist.new_group = make_late
    try:
        ddp_init_group({"device": "cpu"})
    finally:
        dist.new_group = make
    store = dist.distributed_c10d._get_default_store()
    connected = store.check(["rank 1 has connected"])
    if dist.get_rank() == 0:
        store.set("rank 0 is ready", "")
    return connected


def test_a_group_is_ready_when_all_ranks_have_connected(ranks):
    """A script that ended before would close connections that other ranks are still making."""
    assert ranks.run(connect_late, init=False) == [True, True]


def share_a_gpu():
    words = (
        "ncclInvalidUsage. Last error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA "
        "device 35000"
    )

    def refuse(*_arguments, **_options):
        raise RuntimeError(words)

    dist.init_process_group, before = refuse, dist.init_process_group
    try:
        ddp_init_group({"device": "cpu"})
    except LaunchError as error:
        return str(error)
    finally:
        dist.init_process_group = before


def test_ranks_that_share_a_gpu_are_told_what_to_do(ranks):
    for text in ranks.run(share_a_gpu, init=False):
        assert "Duplicate GPU detected" in text
        assert "With NCCL each process needs a GPU of its own" in text


def leave_groups_of_nccl():
    """Say which groups are destroyed after a failure if the default one were of NCCL."""
    control = control_group()
    destroyed = []
    fake = SimpleNamespace(
        get_backend=lambda group=None: "gloo" if group is control else "nccl",
        destroy_process_group=lambda group=None: destroyed.append(
            "all" if group is None else dist.get_backend(group)
        ),
        distributed_c10d=dist.distributed_c10d,
    )
    group_end.dist, before = fake, group_end.dist
    try:
        group_end._destroy_groups(failed=True)
        group_end._destroy_groups(failed=False)
    finally:
        group_end.dist = before
    dist.barrier()  # else the first rank may be gone before the other has connected
    return destroyed


def test_after_a_failure_the_groups_that_are_not_of_nccl_are_destroyed(ranks):
    assert ranks.run(leave_groups_of_nccl) == [["gloo", "all"]] * 2


def guest_limits():
    # which is not the one who decides
    ddp_init_group({"device": "cpu", "distributed_timeout_minutes": 7})
    found = limits_of_the_control_group(None)
    dist.barrier()  # else the first rank may be gone before the other has connected
    return found


def test_the_control_group_waits_as_long_as_a_group_of_somebody_else(ranks):
    assert ranks.run(guest_limits) == [30.0, 30.0]


def senseless_timeouts():
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="would end every collective at once"):
            shorten_timeout(seconds)
    return True


def test_timeouts_that_make_no_sense(ranks):
    assert ranks.run(senseless_timeouts, world_size=1) == [True]


def test_a_backend_without_timeouts_is_left_alone(monkeypatch):
    asked = []

    class NoTimeouts:
        def set_timeout(self, limit):
            asked.append(limit)
            raise RuntimeError("Backend mpi does not support setting a timeout")

    monkeypatch.setattr(time_limits, "is_distributed_initialized", lambda: True)
    monkeypatch.setattr(
        time_limits,
        "dist",
        SimpleNamespace(group=SimpleNamespace(WORLD=NoTimeouts())),
    )
    shorten_timeout(5)
    assert asked == [timedelta(seconds=5)]
    # an older torch
    monkeypatch.setattr(
        time_limits,
        "dist",
        SimpleNamespace(group=SimpleNamespace(WORLD=object())),
    )
    shorten_timeout(5)


LOST_WHILE_JOINING = """
    import os, sys, time
    import torch.distributed as dist
    import ddpkit

    really_join = dist.init_process_group

    def join(*_, **__):
        print("here", flush=True)
        if sys.argv[1] == "raise":
            raise ValueError("boom before the group")
        time.sleep(3)  # until the others know each other
        os.kill(os.getpid(), 9)

    def join_and_be_killed(*given, **more):
        really_join(*given, **more)
        print("here", flush=True)
        os.kill(os.getpid(), 9)

    if os.environ["RANK"] == "1" and sys.argv[1] != "kill the first":
        dist.init_process_group = join
    if os.environ["RANK"] == "0" and sys.argv[1] == "kill the first":
        dist.init_process_group = join_and_be_killed
    ddpkit.ddp_init_group({"device": "cpu"})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("kill", "disappeared: it was killed, or has crashed"),
        ("kill the first", "disappeared: it was lost with the store on"),
        pytest.param(
            "raise",
            "failed first, at train.py:11 in join: ValueError: boom",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_is_lost_while_the_group_is_made_ends_the_others(tmp_path, how, reason):
    """No launcher ends them, and torch would wait for it for half an hour."""
    (tmp_path / "train.py").write_text(textwrap.dedent(LOST_WHILE_JOINING))
    first, lost = start_by_hand(python("train.py", how), tmp_path, 2, warm=True)
    if how == "kill the first":
        first, lost = lost, first
    assert wait_until(lambda: lost.out, 60)
    began = time.monotonic()
    first.wait(60)
    assert soon(began, 10)
    assert lost.wait().code != 0
    assert first.code == 1
    assert reason in first.tail(1), first.err
    assert reason in first.err.rstrip().rpartition("\n")[2], "below what torch writes of its store"


def sockets_after_a_brain():
    make(Regression, device="cpu")
    gc.collect()
    links = [one.readlink() for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return sum(str(one).startswith("socket:") for one in links)


@pytest.mark.slow
def test_a_process_group_that_another_replaces_leaves_no_connection(ranks):
    counts = [ranks.run(sockets_after_a_brain, world_size=2)[1] for _ in range(8)]
    assert max(counts[4:]) < counts[0] + 4
