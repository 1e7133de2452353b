"""What the written files have run: their own commands and variables, with those that the engine
sets, as two nodes of this machine.
"""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest
import torch
import yaml

from ddpkit.cli import main
from tests.launching import BIN, Run, free_port, python
from tests.reading_blocks import block_rows

RECIPE = """
    import os, signal, sys
    from pathlib import Path

    import torch
    import ddpkit as sb

    hparams_file, run_opts, overrides = sb.parse_arguments()
    sb.ddp_init_group(run_opts)
    hparams = sb.load_hparams(hparams_file, overrides)
    killed = Path(hparams["output_folder"], "killed")

    class Line(sb.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return torch.nn.functional.mse_loss(predictions, batch[1])

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if self.rank == 1 and self.optimizer_step == 5 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    net = torch.nn.Linear(1, 1).double()
    with torch.no_grad():
        net.weight.fill_(0.5)
        net.bias.fill_(0.0)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).unsqueeze(1)
    line = Line({"net": net}, lambda p: torch.optim.SGD(p, lr=0.1), hparams, run_opts,
                sb.checkpoints.Checkpointer(f"{hparams['output_folder']}/save", {"net": net}))
    counter = sb.epoch_loop.EpochCounter(2)
    line.checkpointer.add_recoverable("counter", counter)
    line.fit(counter, torch.utils.data.TensorDataset(x, 3 * x + 1),
             train_loader_kwargs={"batch_size": 6 // int(os.environ.get("WORLD_SIZE", 1))})
    if sb.if_main_process():
        torch.save(net.state_dict(), f"{hparams['output_folder']}/net.pt")
"""
HPARAMS = "output_folder: results\nckpt_interval_steps: 2\nnoprogressbar: True\ndevice: cpu\n"
TRIES = ("first", "second")
WORDS = ("train.py", "hparams.yaml", "--nodes=2")
KUBERNETES = (*WORDS, "--image=i", "--volume=v", "--gpus-per-node=0", "--nproc-per-node=1")


@pytest.fixture
def written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(RECIPE))
    (tmp_path / "hparams.yaml").write_text(HPARAMS)

    def write(command, *words):
        assert main([command, *words, "--", f"--output_folder={tmp_path / command}"]) == 0
        (tmp_path / command).mkdir()
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return write


def weights(folder):
    return torch.load(folder / "net.pt", weights_only=True)


def variables(container, **more):
    return {each["name"]: each["value"] for each in container["env"]} | more


def nodes_of_train_job(documents):
    """What Kubeflow Trainer v2 has run: ``PET_*`` in the containers of the runtime."""
    trainer = documents[1]["spec"]["trainer"]
    common = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    return [
        (trainer["command"], variables(trainer, **common, PET_NODE_RANK=str(rank)))
        for rank in range(2)
    ]


def nodes_of_pytorch_job(documents):
    """What the training operator v1 has run: workers with an elastic policy, and no master."""
    spec = documents[0]["spec"]
    policy = spec["elasticPolicy"]
    [container] = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    elastic = {
        "PYTHONUNBUFFERED": "0",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }
    return [(container["command"], variables(container, **elastic))] * 2


def nodes_of_skypilot(documents):
    """What SkyPilot has run: a script, with addresses and numbers as it sets them."""
    [task] = documents
    common = task["envs"] | {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
    }
    # one machine has one such port, where each cluster has its own
    script = task["run"].replace("29500", str(free_port()))
    nodes = []
    for rank in range(2):
        environment = common | {"SKYPILOT_NODE_RANK": str(rank)}
        words = subprocess.check_output(
            ["bash", "-c", script.replace("exec torchrun", "printf '%s\\0'")],
            env={**os.environ, **environment},
            text=True,
        )
        nodes.append((["torchrun", *words.split("\0")[:-1]], environment))
    return nodes


def run_nodes(folder, name, nodes):
    """Run the command of each node to its end; return the exit codes."""
    runs = [
        Run([str(BIN / command[0]), *command[1:]], folder, environment, f"{name}{rank}", warm=True)
        for rank, (command, environment) in enumerate(nodes)
    ]
    return [run.wait(120).code for run in runs]


@pytest.mark.launch
def test_two_nodes_train_as_one_process_and_go_on_after_a_kill(written, tmp_path):
    """Each kind of file; a rank of the two of Kubeflow is killed."""
    job = written("kubernetes", *KUBERNETES)
    # its controller makes all nodes anew
    assert 0 not in run_nodes(tmp_path, "first", nodes_of_train_job(job))
    assert run_nodes(tmp_path, "second", nodes_of_train_job(job)) == [0, 0]
    starts = [block_rows((tmp_path / f"{name}0.stderr").read_text())["start"] for name in TRIES]
    assert "from scratch" in starts[0]
    assert "CKPT+" in starts[1]
    found = [weights(tmp_path / "kubernetes")]
    (tmp_path / "kubernetes").rename(tmp_path / "train_job")

    job = written("kubernetes", *KUBERNETES, "--kind=pytorchjob")
    # torchrun starts the ranks of all nodes anew
    assert run_nodes(tmp_path, "elastic", nodes_of_pytorch_job(job)) == [0, 0]
    found.append(weights(tmp_path / "kubernetes"))
    for folder in ("train_job", "kubernetes"):
        assert (tmp_path / folder / "killed").exists()

    task = written("skypilot", *WORDS, "--nproc-per-node=1")
    (tmp_path / "skypilot" / "killed").touch()
    assert run_nodes(tmp_path, "sky", nodes_of_skypilot(task)) == [0, 0]
    found.append(weights(tmp_path / "skypilot"))

    (tmp_path / "alone").mkdir()
    words = ["train.py", "hparams.yaml", f"--output_folder={tmp_path / 'alone'}"]
    assert Run(python(*words), tmp_path, name="alone", warm=True).wait(60).code == 0
    expected = weights(tmp_path / "alone")
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-12)
