"""torchrun and its like, as a user starts them: clean from start to end, and all gone at the
end.
"""

from __future__ import annotations

import json
import re
import signal
import textwrap
import time
from pathlib import Path

import pytest

import ddpkit
from tests.launching import Run, free_port, python, soon, start_by_hand, torchrun, wait_until

RECIPE = """
    import json, os, sys
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import ddpkit as sb
    from ddpkit.distributed import get_rank, get_world_size, run_on_main


    class Line(sb.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch[1]).square().mean()


    def train(**options):
        torch.manual_seed(0)
        data = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(12)]
        brain = Line(
            {"net": torch.nn.Linear(1, 1)},
            lambda parameters: torch.optim.SGD(parameters, lr=0.001),
            run_opts={"device": "cpu", "noprogressbar": True, "max_grad_norm": 0, **options},
        )
        brain.fit(range(1, 3), data, data, train_loader_kwargs={"batch_size": 12 // get_world_size()})
        brain.evaluate(data)
        report(brain)


    def report(brain):
        facts = {
            "rank": get_rank(), "world_size": get_world_size(), "value": run_on_main(os.getpid),
            "in_ddp": isinstance(brain.modules.net, torch.nn.parallel.DistributedDataParallel),
            "weight": brain.raw_modules.net.weight.item(),
        }
        Path(f"report.{get_rank()}.json").write_text(json.dumps(facts))

"""  # noqa: E501


def write(folder: Path, body: str = "train()") -> str:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(RECIPE) + textwrap.dedent(body))
    return str(script)


def reports(folder: Path, processes: int) -> list[dict]:
    found = [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(processes)]
    assert [report["rank"] for report in found] == list(range(processes))
    assert len({report["value"] for report in found}) == 1
    assert len({report["weight"] for report in found}) == 1
    assert {report["world_size"] for report in found} == {processes}
    assert all(report["in_ddp"] for report in found)
    return found


def assert_clean(run: Run, processes: int = 2, *, is_main: bool = True) -> None:
    assert run.code == 0, run.err
    rows = [
        line[2:12].strip() if line.startswith("  ") else line.split(" with ")[0]
        for line in run.err.splitlines()
    ]
    batch = ["batch", "per step"] if processes > 1 else ["batch"]
    evaluation = ["evaluation"] if processes > 1 else []
    rows = [row for row in rows if row]  # a row may have several lines
    means = ["epochs", "valid set", "optimizer", "clipping", "precision", *evaluation, "start"]
    training = ["Training", "launcher", "devices", "versions", "strategy", *batch, *means]
    expected = [*training, "Evaluation", "test set", "weights"] if is_main else []
    assert rows == expected, (
        "a clean run says nothing on stderr but these, once, from the main process"
    )
    assert run.out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "warm"),
    [(1, [True]), (2, [True, False]), (3, [True])],
)
def test_a_clean_start_and_exit(tmp_path, processes, warm):
    """A Brain made without ddp_init_group; no abort, no warning, nothing left, and the same weights
    each time, also in processes that start cold.
    """
    script = write(tmp_path)
    weights = set()
    for is_warm in warm:
        assert_clean(Run(torchrun(processes, script), tmp_path, warm=is_warm).wait(), processes)
        weights |= {report["weight"] for report in reports(tmp_path, processes)}
        for rank in range(processes):
            (tmp_path / f"report.{rank}.json").unlink()
    assert len(weights) == 1


def test_plain_environment_variables_without_a_launcher(tmp_path):
    script = write(tmp_path, "dist.is_initialized() and sys.exit('already'); train()")
    for rank, run in enumerate(start_by_hand(python(script), tmp_path, 2, warm=True)):
        assert_clean(run.wait(), is_main=rank == 0)
    reports(tmp_path, 2)


@pytest.mark.slow
def test_a_group_of_the_users_own_is_used_and_not_destroyed(tmp_path):
    body = """
        dist.init_process_group("gloo")
        mine = dist.group.WORLD
        train()
        assert dist.group.WORLD is mine
        import atexit
        atexit.register(lambda: (Path(f"still.{get_rank()}").write_text(str(dist.is_initialized()))))
        from ddpkit.comm import group_end, mailbox
        group_end._leave(mailbox.get_runtime, destroy=False)
        assert dist.is_initialized()
        dist.barrier()
        dist.destroy_process_group()
    """  # noqa: E501
    assert_clean(Run(torchrun(2, write(tmp_path, body)), tmp_path, warm=True).wait())
    reports(tmp_path, 2)


def test_a_group_made_without_a_launcher_is_used(tmp_path):
    """Spawned processes with a file for a meeting point have no RANK in their environment: the
    group is the truth.
    """
    body = f"""
        dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=int(sys.argv[1]), world_size=2)
        train()
        dist.destroy_process_group()
    """  # noqa: E501
    script = write(tmp_path, body)
    runs = [
        Run(python(script, str(rank)), tmp_path, name=f"rank{rank}", warm=True) for rank in range(2)
    ]
    for rank, run in enumerate(runs):
        assert_clean(run.wait(), is_main=rank == 0)
    reports(tmp_path, 2)


@pytest.mark.slow
def test_torch_distributed_launch(tmp_path):
    """The old launcher, with the --local_rank that it used to pass."""
    yaml = tmp_path / "h.yaml"
    yaml.write_text("lr: 0.1\n")
    body = "file, run_opts, overrides = sb.parse_arguments(); train(**run_opts)"
    launcher = (
        "-m",
        "torch.distributed.launch",
        "--nproc_per_node=2",
        f"--master_port={free_port()}",
    )
    run = Run(
        python(*launcher, write(tmp_path, body), "h.yaml", "--device=cpu"),
        tmp_path,
        warm=True,
    ).wait()
    assert run.code == 0, run.err
    reports(tmp_path, 2)
    assert "train.py" not in run.err, "only the launcher itself may complain"
    # the path of the launcher may have the name of a clone in it
    package = f"{Path(ddpkit.__file__).parent}/"
    assert package not in run.err, "no warning of a file of this package"


def test_data_parallel_backend_under_torchrun_shows_both_commands(tmp_path):
    (tmp_path / "h.yaml").write_text("lr: 0.1\n")
    body = "sb.parse_arguments(); train()"
    run = Run(
        torchrun(2, write(tmp_path, body), "h.yaml", "--data_parallel_backend"),
        tmp_path,
        warm=True,
    ).wait()
    assert run.code == 1
    assert "python train.py hparams.yaml --data_parallel_backend" in run.tail()
    assert "torchrun --standalone --nproc_per_node=N train.py hparams.yaml" in run.tail()
    assert "train.py: error: data_parallel_backend=True" in run.tail()


@pytest.mark.parametrize("restarts", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_restarts_meet_again_on_gloo(tmp_path, restarts):
    """A rank is killed in its first attempts: each restart must not read the addresses of the dead
    attempt.
    """
    body = """
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        victim = restart % 2
        if restart < int(sys.argv[1]):
            sb.distributed.ddp_init_group({"device": "cpu"})
            dist.barrier()
            with open("attempts", "a") as file:
                file.write(f"{restart}\\n")
            dist.barrier()  # both have written
            if int(os.environ["RANK"]) == victim:
                os.kill(os.getpid(), 9)
            dist.barrier()
        train()
    """
    command = torchrun(2, f"--max-restarts={restarts}", write(tmp_path, body), str(restarts))
    run = Run(command, tmp_path, warm=True).wait(100)
    assert run.code == 0, run.err
    assert sorted((tmp_path / "attempts").read_text().split()) == [
        str(n) for n in range(restarts) for _ in range(2)
    ]
    reports(tmp_path, 2)


def test_ctrl_c(tmp_path):
    """SIGINT to torchrun: gone soon, nothing left, and one line that says where the ranks have
    stopped.
    """
    body = """
        class Endless(Line):
            def on_fit_batch_end(self, *args):
                Path(f"running.{self.rank}").touch()

        data = [(torch.ones(1), torch.ones(1))] * 4
        options = {"device": "cpu", "noprogressbar": True}
        brain = Endless({"net": torch.nn.Linear(1, 1)}, lambda p: torch.optim.SGD(p, lr=0.0), run_opts=options)
        brain.fit(range(1, 10**9), data)
    """  # noqa: E501
    run = Run(torchrun(2, write(tmp_path, body)), tmp_path, warm=True)
    assert wait_until(
        lambda: all((tmp_path / f"running.{rank}").exists() for rank in range(2)),
        30,
    ), run.err
    stopped = time.monotonic()
    run.signal(signal.SIGINT)
    run.wait(30)
    assert soon(stopped, 8)
    assert run.code != 0
    assert "SIGINT: stopping at the end of a step." in run.err
    told = (
        r"^Stopped by SIGINT in TRAIN of epoch \d+ at step [1-4], after \d+ optimizer steps. "
        r"There is no checkpoint.$"
    )
    assert len(re.findall(told, run.err, re.MULTILINE)) == 1, run.err
    assert "[rank" not in run.err


LEAVING = """
    import time

    import torch.distributed as dist

    class Slow(Line):
        def on_stage_end(self, stage, loss, epoch=None):
            if stage is sb.Stage.TEST and self.rank == 0:
                time.sleep(4)
                print("results are written")

    sb.ddp_init_group({"device": "cpu"})
    data = [(torch.ones(1), torch.ones(1))] * 4
    Slow({"net": torch.nn.Linear(1, 1)}, run_opts={"device": "cpu", "noprogressbar": True}).evaluate(data)
    dist.destroy_process_group()
"""  # noqa: E501


@pytest.mark.slow
def test_a_rank_that_has_destroyed_the_group_and_ended_is_not_missed(tmp_path):
    """The main process is still in ``evaluate`` then, with work of its own."""
    run = Run(torchrun(2, write(tmp_path, LEAVING)), tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    assert "results are written" in run.out
