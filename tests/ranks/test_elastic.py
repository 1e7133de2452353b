"""torchrun with nodes that come and go: the world shrinks and grows, on one store that is never
emptied.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launching import BIN, Run, free_port, wait_until

SCRIPT = """
    import os, sys, time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from ddpkit.distributed import ddp_init_group, get_rank, get_world_size, run_on_main

    ddp_init_group({"device": "cpu", "distributed_timeout_minutes": 1})
    world = get_world_size()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == world
    assert run_on_main(os.getpid)
    with open("worlds", "a") as file:
        file.write(f"{get_rank()}/{world}/{os.environ['TORCHELASTIC_RESTART_COUNT']}\\n")
    stop = torch.zeros(1)
    while not stop:
        time.sleep(0.1)
        stop.fill_(Path("stop").exists())
        dist.all_reduce(stop)  # fails when the other is gone
    dist.barrier()
"""


TRAINING = """
    import hashlib, os, sys, time
    from pathlib import Path

    import torch
    from torch import nn

    from ddpkit.brain import Brain
    from ddpkit.checkpoints import Checkpointer
    from ddpkit.distributed import get_world_size, if_main_process
    from ddpkit.epoch_loop import EpochCounter

    class Classifier(Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return nn.functional.cross_entropy(predictions, batch[1])

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            with open("steps", "a") as file:
                file.write(f"{get_world_size()}:{self.optimizer_step}\\n")
            time.sleep(0.1 * (get_world_size() - 1))  # long enough for a node to go

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.randn(48, 6)
    data = [(row, row.argmax() % 3) for row in inputs]
    counter = EpochCounter(6)
    options = {"device": "cpu", "noprogressbar": True, "virtual_ranks": 12}
    options |= {"ckpt_interval_steps": 1, "ckpt_async": False}
    saved = Checkpointer(sys.argv[1], {"net": net, "counter": counter})
    brain = Classifier({"net": net}, lambda some: torch.optim.AdamW(some, lr=0.02), None, options, saved)
    brain.fit(counter, data, train_loader_kwargs={"batch_size": 1, "shuffle": True})
    if if_main_process():
        bits = b"".join(one.numpy().tobytes() for one in brain.raw_modules.state_dict().values())
        Path(sys.argv[1], "bits").write_text(hashlib.sha256(bits).hexdigest())
"""  # noqa: E501


def agent(
    folder: Path,
    port: int,
    name: str,
    environment: dict[str, str],
    *arguments: str,
    most: int = 2,
    seconds: int = 10,
) -> Run:
    """Start torchrun for one node; those that come in so many seconds after the first make a world
    with it.

    It is forked from a process that has imported torch: on a loaded machine the import alone takes
    longer than that.
    """
    beats = f"last_call_timeout={seconds},keep_alive_interval=2,keep_alive_max_attempt=4"
    words = [
        f"--nnodes=1:{most}",
        "--nproc_per_node=1",
        "--max-restarts=5",
        "--monitor-interval=0.3",
    ]
    words += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        f"--rdzv-conf={beats}",
        "train.py",
        *arguments,
    ]
    return Run([str(BIN / "torchrun"), *words], folder, environment, name=name, warm=True)


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("localhost", port)) == 0


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("grows", [False, True], ids=["one leaves", "one leaves and one joins"])
def test_nodes_that_come_and_go(tmp_path, grows):
    """torchrun counts no restart when a node leaves or joins: its count cannot tell one attempt
    from another.

    A node that joins finds its way only where torchrun's agents do not share their store: with
    torch 2.13 the first of them does not tell it the address again (``MASTER_ADDR`` is waited for
    in vain), before any rank is started.
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    worlds = tmp_path / "worlds"
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if grows else {}

    def formed(size: int, times: int) -> bool:
        lines = worlds.read_text().split() if worlds.exists() else []
        return sum(line.split("/")[1] == str(size) for line in lines) >= size * times

    port = free_port()
    runs = [agent(tmp_path, port, "first", environment)]
    try:
        assert wait_until(lambda: listens(port), 60), "the first agent keeps the store"
        runs.append(agent(tmp_path, port, "second", environment))
        assert wait_until(lambda: formed(2, 1), 90), runs[0].err + runs[1].err
        for pid in runs[1].alive():
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: formed(1, 1), 90), runs[0].err
        if grows:
            runs.append(agent(tmp_path, port, "third", environment))
            assert wait_until(lambda: formed(2, 2), 90), runs[0].err + runs[2].err
        (tmp_path / "stop").touch()
        for run in (runs[0], *runs[2:]):
            assert run.wait(60).code == 0, run.err
    finally:
        for run in runs:
            for pid in run.alive():
                os.kill(pid, signal.SIGKILL)


@pytest.mark.launch
@pytest.mark.slow
def test_a_run_that_loses_nodes_has_the_same_bits_with_virtual_ranks(tmp_path):
    """Of four nodes one dies, and another, and another; the last one goes on alone, and ends as one
    that was alone.
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    alone = Run([sys.executable, "train.py", "alone"], tmp_path, {})
    assert alone.wait(120).code == 0, alone.err
    steps = tmp_path / "steps"
    port = free_port()
    steps.unlink()

    def trained(size: int) -> list[int]:
        lines = [line.split(":") for line in steps.read_text().split()] if steps.exists() else []
        return [int(step) for world_size, step in lines if int(world_size) == size]

    def start(name: str) -> Run:
        return agent(tmp_path, port, name, {}, "cut", most=4, seconds=20)

    runs = [start("first")]
    try:
        assert wait_until(lambda: listens(port), 60), "the first agent keeps the store"
        runs += [start("second"), start("third"), start("fourth")]
        for size in (4, 3, 2):
            assert wait_until(lambda size=size: len(set(trained(size))) > 3, 120), [
                run.err for run in runs
            ]
            for pid in runs[size - 1].alive():
                os.kill(pid, signal.SIGKILL)
        assert runs[0].wait(180).code == 0, runs[0].err
        assert 0 < trained(2)[0] < trained(1)[0], (
            "each attempt goes on where the one before has saved"
        )
        assert max(trained(4)) < max(trained(3)) < max(trained(2)) < max(trained(1)) == 24
        assert (tmp_path / "cut" / "bits").read_text() == (tmp_path / "alone" / "bits").read_text()
    finally:
        for run in runs:
            for pid in run.alive():
                os.kill(pid, signal.SIGKILL)
