"""``--nproc``: the script becomes torchrun, with its own command line for every rank."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.launching import Run, free_port, python, soon, torchrun, wait_until

TRAIN = """
    import os, sys, time
    from pathlib import Path

    import torch

    import ddpkit as sb
    from ddpkit.distributed import ddp_barrier, ddp_all_reduce, get_rank, get_world_size, run_on_main

    file, run_opts, overrides = sb.parse_arguments()
    sb.ddp_init_group(run_opts)
    rank = get_rank()
    ones = torch.ones(1)
    if get_world_size() > 1:
        ddp_all_reduce(ones)
    threads = os.environ["OMP_NUM_THREADS"]
    Path(f"facts.{rank}").write_text(f"{os.getpid()} {os.getppid()} {int(ones)} {threads} {' '.join(sys.argv[1:])}")
    Path(f"ready.{rank}").touch()

"""  # noqa: E501
WORDS = ("h.yaml", "--device=cpu")


def write(folder: Path, body: str = "", name: str = "train.py", head: str = TRAIN) -> str:
    (folder / "h.yaml").write_text("lr: 0.1\n")
    (folder / name).write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return name


def facts(folder: Path, processes: int) -> list[list[str]]:
    return [(folder / f"facts.{rank}").read_text().split() for rank in range(processes)]


def ready(folder: Path, processes: int) -> bool:
    return wait_until(
        lambda: all((folder / f"ready.{rank}").exists() for rank in range(processes)),
        60,
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_nproc(tmp_path, processes):
    """More than there are cores, too."""
    command = python(write(tmp_path), *WORDS, f"--nproc={processes}", "--lr=0.5")
    run = Run(command, tmp_path, warm=True).wait()
    check(run, processes)
    many = "3 processes share" if processes > len(os.sched_getaffinity(0)) else ""
    assert all(many and line.startswith(many) for line in run.lines), run.err


def check(run: Run, processes: int) -> list[list[str]]:
    assert run.code == 0, run.err
    assert run.out == ""
    found = facts(run.folder, processes)
    for _, _, total, _, *words in found:
        assert total == str(processes)
        assert words == [*WORDS, f"--nproc={processes}", "--lr=0.5"], (
            "the command line is handed on as it was"
        )
    return found


@pytest.mark.exhaustive
def test_nproc_started_cold_where_the_name_of_the_host_has_no_address(tmp_path):
    """As in a container; the ranks met under that name, and waited for a minute each time. It ends
    as Python ends.
    """
    apart = ["unshare", "--map-root-user", "--uts"]
    if subprocess.run([*apart, "hostname", "none-x1"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not give a host another name (unshare --uts)")
    strict = ("-W", "error::ResourceWarning")
    words = shlex.join(python(*strict, write(tmp_path), *WORDS, "--nproc=2", "--lr=0.5"))
    run = Run([*apart, "sh", "-c", f"hostname none-x1; exec {words}"], tmp_path).wait()
    for pid, parent, *_ in check(run, 2):
        assert parent == str(run.process.pid) != pid
    assert not run.lines, run.err


MODEL = """
    class Model(sb.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.square().mean()

    torch.manual_seed(rank)
    brain = Model({"net": torch.nn.Linear(3, 1)}, lambda p: torch.optim.SGD(p, 0.1), run_opts=run_opts)
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(7))
    brain.fit(range(2), torch.utils.data.DataLoader(data, batch_size=2))
    if rank == 0:
        Path("weights").write_text(str([one.tolist() for one in brain.raw_modules.parameters()]))
"""  # noqa: E501


def test_nproc_trains_as_torchrun_does(tmp_path):
    weights = []
    for folder, words in (
        ("nproc", python("train.py", *WORDS, "--nproc=2")),
        ("torchrun", torchrun(2, "train.py", *WORDS)),
    ):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, MODEL)
        run = Run(words, tmp_path / folder, warm=True).wait()
        assert run.code == 0, run.err
        weights.append((tmp_path / folder / "weights").read_text())
    assert weights[0] == weights[1]


NODES = """
    class Model(sb.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.square().mean()

        def on_fit_batch_end(self, *_):
            if self.optimizer_step == 12:
                if not rank:
                    torch.save([one.detach() for one in self.raw_modules.parameters()], "weights")
                Path(f"trained.{rank}").touch()
                time.sleep(3600)

    torch.manual_seed(7)
    brain = Model({"net": torch.nn.Linear(3, 1)}, lambda p: torch.optim.SGD(p, 0.1), run_opts=run_opts)
    data = torch.randn(24, 3)
    brain.fit(range(2), torch.utils.data.DataLoader(data, batch_size=4))
"""  # noqa: E501


def trained_alone() -> list[torch.Tensor]:
    """Return what plain torch makes of it, in one process."""
    torch.manual_seed(7)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    data = torch.randn(24, 3)
    for batch in [*data.split(4)] * 2:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return [one.detach() for one in net.parameters()]


def node_variables(node: int, port: str) -> dict[str, str]:
    """Return what Kubeflow, SkyPilot and Vertex AI tell a node, all at once: torchrun reads the
    first itself, and gives the last other values.
    """
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NODE_RANK": str(node),
        "RANK": str(node),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


@pytest.mark.slow
def test_one_command_on_two_nodes_trains_as_one_process_does_and_ends_with_a_killed_rank(tmp_path):
    words = (write(tmp_path, NODES), *WORDS, "--global_batch_size=4", "--nproc=2")
    port = str(free_port())
    runs = [
        Run(python(*words), tmp_path, node_variables(node, port), f"node{node}", warm=True)
        for node in range(2)
    ]
    assert wait_until(lambda: len(list(tmp_path.glob("trained.*"))) == 4, 60), runs[0].err
    assert [total for _, _, total, *_ in facts(tmp_path, 4)] == ["4"] * 4
    torch.testing.assert_close(torch.load(tmp_path / "weights"), trained_alone())
    killed = int(facts(tmp_path, 4)[1][0])
    began = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    assert all(run.wait(20).code for run in runs)
    assert soon(began, 8)
    assert [f"Node {number} of 2" in run.err for number, run in enumerate(runs)] == [True, True]
    assert re.search(rf"rank 1 \(.*pid {killed}\)", runs[1].err), runs[1].err


@pytest.mark.slow
def test_one_process_on_each_node_is_refused_before_anything_is_done(tmp_path):
    environ = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    run = Run(python(write(tmp_path), *WORDS), tmp_path, environ, warm=True).wait()
    assert run.code == 2
    assert "train.py: error: this is node 1 of 2 nodes (SkyPilot)" in run.err
    assert not list(tmp_path.glob("facts.*"))


@pytest.mark.slow
def test_nproc_by_module_and_from_the_yaml_device(tmp_path):
    write(tmp_path)
    (tmp_path / "h.yaml").write_text("device: cpu\n")
    command = python("-m", "train", "h.yaml", "--nproc", "2")
    run = Run(command, tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    assert len(facts(tmp_path, 2)) == 2


@pytest.mark.slow
def test_the_threads_of_each(tmp_path):
    without = """
    import os

    if "RANK" not in os.environ:  # the process that starts the ranks
        del os.environ["OMP_NUM_THREADS"]
    """
    script = write(tmp_path, TRAIN, head=without)
    run = Run(python(script, *WORDS, "--nproc=2"), tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    wanted = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [threads for _, _, _, threads, *_ in facts(tmp_path, 2)] == [wanted] * 2


@pytest.mark.slow
def test_an_exception_on_one_rank(tmp_path):
    body = """
        if rank == 1:
            raise ValueError("boom")
        time.sleep(60)
    """
    run = Run(python(write(tmp_path, body), *WORDS, "--nproc=2"), tmp_path, warm=True).wait(40)
    assert run.code == 1
    assert re.search(
        r"rank 1 \(.*, pid \d+\) failed first, at train.py:\d+ in <module>: "
        r"ValueError: boom",
        run.tail(3),
    ), run.err
    assert "Root Cause" in run.err, "torchrun's summary"


@pytest.mark.faults
def test_the_parent_is_killed(tmp_path):
    run = Run(python(write(tmp_path, "time.sleep(60)"), *WORDS, "--nproc=1"), tmp_path)
    assert ready(tmp_path, 1), run.err
    began = time.monotonic()
    run.signal(signal.SIGKILL)
    run.wait(20)
    assert soon(began, 5)


@pytest.mark.faults
def test_ctrl_c_at_the_terminal(tmp_path):
    """The terminal signals its process group, and the ranks are not in it."""
    head = """
    import os

    if "RANK" not in os.environ:  # the process that starts the ranks
        os.setsid()
    """
    script = write(tmp_path, TRAIN + "    time.sleep(60)", head=head)
    run = Run(python(script, *WORDS, "--nproc=2"), tmp_path, warm=True)
    assert ready(tmp_path, 2), run.err
    began = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait(20)
    assert soon(began, 8)
    assert run.code == 1, run.err
    assert "SignalException" in run.tail(1), "torchrun's own last line"


@pytest.mark.faults
def test_a_save_that_takes_a_while_is_ended_when_another_rank_fails(tmp_path):
    body = """
        from ddpkit.control import SignalListener
        from ddpkit.control import EXIT_DELAY
        if rank == 0:
            with SignalListener().listening(), EXIT_DELAY.held():
                Path("saving").touch()
                time.sleep(6)
                Path("saved").touch()
            time.sleep(60)
        while not Path("saving").exists():
            time.sleep(0.05)
        os._exit(3)
    """
    run = Run(python(write(tmp_path, body), *WORDS, "--nproc=2"), tmp_path, warm=True)
    assert wait_until((tmp_path / "saving").exists, 60)
    began = time.monotonic()
    assert run.wait(30).code == 1, run.err
    assert (tmp_path / "saved").exists()
    assert soon(began, 16), "and no longer"


@pytest.mark.slow
def test_nproc_under_a_launcher_is_refused(tmp_path):
    script = write(tmp_path)
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_GTIDS": "0,1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
    }  # fmt: skip
    run = Run(python(script, *WORDS, "--nproc=2"), tmp_path, step, warm=True).wait()
    assert run.code == 2
    assert (
        "--nproc starts the processes itself, but slurm has started this one already, as rank 1 "
        "of 2"
    ) in run.err
    assert "SLURM_PROCID" in run.err
    step |= {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": "0",
    }
    run = Run(python(script, *WORDS, "--nproc=2"), tmp_path, step, warm=True).wait()
    assert run.code == 0, "one task of srun may start as many as it likes"
    assert len(facts(tmp_path, 2)) == 2


@pytest.mark.slow
def test_nproc_needs_a_script(tmp_path):
    script = write(tmp_path)
    code = (tmp_path / script).read_text()
    body = code.replace("parse_arguments()", "parse_arguments(['h.yaml', '--nproc=2'])")
    (tmp_path / "other.py").write_text(body)
    run = Run(python("other.py", *WORDS), tmp_path, warm=True).wait()
    assert "Leave --nproc out, and start the script with torchrun" in run.tail(1), run.err
    run = Run(python("-c", code, *WORDS, "--nproc=1"), tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    assert len(facts(tmp_path, 1)) == 1
