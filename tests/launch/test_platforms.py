"""One process on each node, with the variables of its platform: refused with the command, and not
as lonely runs.
"""

from __future__ import annotations

import re
import sys

import pytest

from ddpkit.comm import init_group
from ddpkit.distributed import environment_without_launch
from ddpkit.errors import LaunchError
from ddpkit.launch import become_torchrun, find_launch, refuse_lonely_node
from ddpkit.launch.platforms import NUMBERS_OF_NODES, PLATFORMS
from tests.pretended_devices import pretend_devices

# What a node of a job with so many nodes and GPUs finds in its environment, as the platforms
# document it.


def kubeflow(nodes, rank, gpus):
    return {
        "PET_NNODES": str(nodes),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29400",
        "PET_NPROC_PER_NODE": str(gpus or "auto"),
    }


def skypilot(nodes, rank, gpus):
    return {
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(f"10.0.0.{number + 1}" for number in range(nodes)),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
    }


def dstack(nodes, rank, gpus):
    return {
        "DSTACK_NODES_NUM": str(nodes),
        "DSTACK_NODE_RANK": str(rank),
        "DSTACK_MASTER_NODE_IP": "10.0.0.1",
        "DSTACK_GPUS_PER_NODE": str(gpus),
        "DSTACK_GPUS_NUM": str(gpus * nodes),
    }


def sagemaker(nodes, rank, gpus):
    hosts = ", ".join(f'"algo-{number + 1}"' for number in range(nodes))
    return {
        "SM_HOSTS": f"[{hosts}]",
        "SM_CURRENT_HOST": f"algo-{rank + 1}",
        "SM_NUM_GPUS": str(gpus),
    }


def aws_batch(nodes, rank, _):
    main = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1"} if rank else {}
    return {
        "AWS_BATCH_JOB_NUM_NODES": str(nodes),
        "AWS_BATCH_JOB_NODE_INDEX": str(rank),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        **main,
    }


def node_level(nodes, rank, _):
    """Vertex AI, Kubeflow's PyTorchJob, PAI, AIHC."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
    }


def pytorch_job(nodes, rank, gpus):
    """Kubeflow's PyTorchJob of the later versions, which has both."""
    return {**node_level(nodes, rank, gpus), **kubeflow(nodes, rank, gpus)}


# By platform: the address of node 0, the port, and whether the platform counts the GPUs of a node.
TABLE = [
    (kubeflow, "train-node-0-0.train", "29400", True),
    (skypilot, "10.0.0.1", "29500", True),
    (dstack, "10.0.0.1", "29500", True),
    (sagemaker, "algo-1", "29500", True),
    (aws_batch, "10.0.0.1", "29500", False),
    (node_level, "job-master-0", "23456", False),
    (pytorch_job, "train-node-0-0.train", "29400", True),
]
OWN_RUN = [row for row in TABLE if "RANK" not in row[0](2, 1, 0)]


def of_table(rows):
    return pytest.mark.parametrize(
        ("platform", "address", "port", "counts"),
        rows,
        ids=[row[0].__name__ for row in rows],
    )


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipe.py", "hparams.yaml", "--nproc", "gpu", "--lr=0.1"])
    for name in (*node_level(1, 0, 0), "LOCAL_RANK", *NUMBERS_OF_NODES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to have so many GPUs."""

    def have(gpus):
        pretend_devices(monkeypatch, "cuda" if gpus else "cpu", cuda=gpus)

    return have


def look(environ):
    if not find_launch(environ).is_distributed:
        refuse_lonely_node(environ)


def refused(environ):
    with pytest.raises(LaunchError) as caught:
        look(environ)
    return str(caught.value)


@pytest.mark.parametrize("gpus", [0, 8])
@of_table(TABLE)
def test_one_of_several_nodes_is_refused_with_its_torchrun_line(
    machine,
    platform,
    address,
    port,
    counts,
    gpus,
):
    machine(gpus)
    message = refused(platform(2, 1, gpus))
    processes = (
        (gpus or ("auto" if "PET" in str(platform(2, 1, 0)) else 1)) if counts else gpus or 1
    )
    line = (
        f"torchrun --nnodes=2 --nproc_per_node={processes} --node_rank=1 --master_addr={address} "
        f"--master_port={port} recipe.py hparams.yaml --lr=0.1"
    )
    assert f"\n  {line}\n" in message
    assert "node 1 of 2" in message
    assert "--standalone" not in message
    assert re.search(r"To train alone on each node, as in a sweep, unset \w+", message)


@of_table(OWN_RUN)
def test_one_node_goes_on_as_ever(machine, platform, address, port, counts):
    for gpus in (0, 8):
        machine(gpus)
        environ = platform(1, 0, gpus)
        refuse_lonely_node(environ)
        assert not find_launch(environ).is_distributed


@of_table(OWN_RUN)
def test_what_the_message_says_is_enough_to_run_alone(platform, address, port, counts):
    environ = platform(2, 1, 0)
    name = re.search(r"unset (\w+),", refused(environ))[1]
    assert name in NUMBERS_OF_NODES
    del environ[name]
    refuse_lonely_node(environ)


@of_table(TABLE)
def test_ranks_of_a_real_launch_are_not_refused(platform, address, port, counts):
    ranks = {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "TORCHELASTIC_RUN_ID": "x",
    }
    info = find_launch({**platform(2, 1, 8), **ranks})
    assert (info.launcher, info.rank, info.node_rank) == ("torchrun", 9, 1)


@of_table(OWN_RUN)
def test_a_program_that_a_rank_starts_alone_is_no_lonely_node(platform, address, port, counts):
    refuse_lonely_node(environment_without_launch(platform(2, 1, 8)))


@of_table(OWN_RUN)
def test_the_group_and_nproc_refuse_alike(monkeypatch, platform, address, port, counts):
    for name, value in platform(2, 0, 0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for start in (lambda: init_group({"device": "cpu"}), lambda: become_torchrun("2", "cpu")):
        with pytest.raises(LaunchError, match=r"node 0 of 2 nodes .*every node would train alone"):
            start()


def test_an_elastic_job_meets_where_it_says(machine):
    machine(0)
    environ = {
        "PET_NNODES": "1:4",
        "PET_RDZV_ENDPOINT": "job-master-0:23456",
        "PET_NPROC_PER_NODE": "2",
    }
    message = refused(environ)
    assert (
        "torchrun --nnodes=1:4 --nproc_per_node=2 --rdzv_backend=c10d "
        "--rdzv_endpoint=job-master-0:23456 "
    ) in message
    assert "this is one of 1:4 nodes" in message


@pytest.mark.parametrize(
    "environ",
    [
        {"SM_HOSTS": "algo-1, algo-2"},
        {"SM_HOSTS": '"algo-1"'},
        {"SM_HOSTS": "[]"},
        {"SKYPILOT_NUM_NODES": "", "SKYPILOT_NODE_IPS": ""},
        {"PET_NNODES": "two"},
        {"DSTACK_NODES_NUM": "1"},
        {"PET_NODE_RANK": "1"},
    ],
)
def test_what_cannot_be_read_says_nothing_of_several_nodes(environ):
    refuse_lonely_node(environ)


def test_what_a_platform_does_not_say_is_left_to_fill_in(machine):
    machine(4)
    message = refused({"DSTACK_NODES_NUM": "3"})
    assert (
        "--node_rank=<number of this node> --master_addr=<address of node 0> "
        in message.replace("'", "")
    )
    assert "--nproc_per_node=4" in message
    assert "this is one of 3 nodes" in message


def test_ranks_that_lack_their_local_rank_are_no_nodes():
    """As where a process of torchrun has lost it."""
    with pytest.raises(
        LaunchError,
        match="LOCAL_RANK is not set: the launcher's environment contradicts itself",
    ):
        find_launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(LaunchError, match="LOCAL_RANK is not set"):
        find_launch({"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("argv", "said"),
    [([""], "train.py hparams.yaml"), (["a b.py", "--nproc=2"], "'a b.py'")],
)
def test_the_command_has_the_script_that_runs(machine, monkeypatch, argv, said):
    machine(0)
    monkeypatch.setattr(sys, "argv", argv)
    assert re.search(rf"--master_port=29500 {re.escape(said)}\n", refused(skypilot(2, 0, 0)))


def test_each_platform_is_in_the_table():
    assert len(PLATFORMS) == len(NUMBERS_OF_NODES) == len(OWN_RUN)
