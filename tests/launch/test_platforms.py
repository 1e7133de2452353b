"""One process on each node, with the variables of its platform: refused with the command, and not
as lonely runs.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import types

import pytest

from ddpkit.comm import init_group
from ddpkit.distributed import environment_without_launch
from ddpkit.errors import LaunchError
from ddpkit.launch import become_torchrun, find_launch, nproc, refuse_lonely_node
from ddpkit.launch.platforms import PLATFORMS, TELL_NODES
from ddpkit.run_opts import parse_arguments
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


def runpod(nodes, rank, gpus):
    return {
        "PRIMARY_ADDR": "10.0.0.1",
        "PRIMARY_PORT": "29400",
        "NODE_ADDR": f"10.0.0.{rank + 1}",
        "NODE_RANK": str(rank),
        "NUM_NODES": str(nodes),
        "NUM_TRAINERS": str(gpus),
        "HOST_NODE_ADDR": "10.0.0.1:29400",
        "WORLD_SIZE": str(nodes * gpus),
    }


def beaker(nodes, rank, gpus):
    return {
        "BEAKER_REPLICA_COUNT": str(nodes),
        "BEAKER_REPLICA_RANK": str(rank),
        "BEAKER_LEADER_REPLICA_HOSTNAME": "gpu-1.example",
        "BEAKER_ASSIGNED_GPU_COUNT": str(gpus),
    }


def lepton(nodes, rank, gpus):
    return {
        "LEPTON_JOB_NAME": "job",
        "LEPTON_JOB_TOTAL_WORKERS": str(nodes),
        "LEPTON_JOB_WORKER_INDEX": str(rank),
        "LEPTON_SUBDOMAIN": "job-job-svc",
        "LEPTON_RESOURCE_ACCELERATOR_NUM": str(gpus),
    }


def volcengine(nodes, rank, gpus):
    return {
        "MLP_WORKER_NUM": str(nodes),
        "MLP_ROLE_INDEX": str(rank),
        "MLP_WORKER_0_HOST": "worker-0",
        "MLP_WORKER_0_PORT": "2222",
        "MLP_WORKER_GPU": str(gpus),
    }


def modelarts(nodes, rank, gpus):
    return {
        "MA_NUM_HOSTS": str(nodes),
        "VC_TASK_INDEX": str(rank),
        "VC_WORKER_HOSTS": ",".join(f"worker-{number}" for number in range(nodes)),
        "MA_NUM_GPUS": str(gpus),
    }


def node_level(nodes, rank, _):
    """Vertex AI, Kubeflow's PyTorchJob of old, AIHC, Volcano."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
    }


def pai(nodes, rank, gpus):
    return {**node_level(nodes, rank, gpus), "NPROC_PER_NODE": str(gpus)}


def pytorch_job(nodes, rank, gpus):
    """Kubeflow's PyTorchJob, which has both. There WORLD_SIZE is the number of processes."""
    return {
        **node_level(nodes * (gpus or 1), rank, gpus),
        **kubeflow(nodes, rank, gpus),
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
    }


# By platform: the address of node 0, the port, and whether the platform counts the GPUs of a node.
TABLE = [
    (kubeflow, "train-node-0-0.train", "29400", True),
    (skypilot, "10.0.0.1", "29500", True),
    (dstack, "10.0.0.1", "29500", True),
    (sagemaker, "algo-1", "29500", True),
    (aws_batch, "10.0.0.1", "29500", False),
    (runpod, "10.0.0.1", "29400", True),
    (beaker, "gpu-1.example", "29500", True),
    (lepton, "job-0.job-job-svc", "29500", True),
    (volcengine, "worker-0", "2222", True),
    (modelarts, "worker-0", "29500", True),
    (node_level, "job-master-0", "23456", False),
    (pai, "job-master-0", "23456", True),
    (pytorch_job, "job-master-0", "23456", True),
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
    words = ["recipe.py", "hparams.yaml", "--nproc", "gpu", "--lr=0.1"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", words[0], raising=False)
    for name in (*node_level(1, 0, 0), "LOCAL_RANK", *TELL_NODES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to have so many GPUs."""

    def have(gpus):
        pretend_devices(monkeypatch, "cuda" if gpus else "cpu", cuda=gpus)
        monkeypatch.setattr(nproc, "accelerator_kind", lambda: "cuda" if gpus else "cpu")
        monkeypatch.setattr(nproc, "count_devices", lambda _: gpus)

    return have


@pytest.fixture
def started(monkeypatch):
    """Return a function that becomes torchrun in an environment, and returns torchrun's options."""

    def start(environ, asked="2", device="cpu"):
        monkeypatch.setattr(os, "environ", dict(environ))
        monkeypatch.setattr(os, "execv", lambda _, words: commands.append(words))
        commands = []
        become_torchrun(asked, device)
        [words] = commands
        assert words[-6:] == [sys.executable, *sys.orig_argv[1:]]
        return words[3 : words.index("--no_python")]

    return start


def look(environ):
    if not find_launch(environ).is_distributed:
        refuse_lonely_node(environ)


def refused(environ):
    with pytest.raises(LaunchError) as caught:
        look(environ)
    return str(caught.value)


@of_table(TABLE)
def test_one_of_several_nodes_is_refused_with_its_torchrun_line(
    machine,
    platform,
    address,
    port,
    counts,
):
    for gpus in (0, 8):
        machine(gpus)
        check_refusal(platform, address, port, counts, gpus)


def check_refusal(platform, address, port, counts, gpus):
    message = refused(platform(2, 1, gpus))
    processes = (
        (gpus or ("auto" if "PET_NPROC_PER_NODE" in platform(2, 1, 0) else 1))
        if counts
        else gpus or 1
    )
    line = (
        f"torchrun --nnodes=2 --nproc_per_node={processes} --node_rank=1 --master_addr={address} "
        f"--master_port={port} recipe.py hparams.yaml --lr=0.1"
    )
    assert f"\n  {line}\n" in message
    assert "node 1 of 2" in message
    assert "--standalone" not in message
    assert f"if you add --nproc={processes} to it" in message
    assert re.search(r"[Tt]o train alone on each node, as in a sweep, unset \w+", message)


@of_table(TABLE)
def test_one_node_goes_on_as_ever(machine, started, platform, address, port, counts):
    for gpus in (0, 8):
        machine(gpus)
        environ = platform(1, 0, gpus)
        refuse_lonely_node(environ)
        assert not find_launch(environ).is_distributed
        assert started(environ)[0] == "--standalone"


@of_table(TABLE)
def test_nproc_starts_the_ranks_of_this_node(
    machine,
    started,
    platform,
    address,
    port,
    counts,
):
    """The same command on each node, and on one."""
    for rank, gpus in itertools.product((0, 1), (0, 8)):
        machine(gpus)
        # the main node of AWS Batch is told no address of its own
        at = "127.0.0.1" if platform is aws_batch and rank == 0 else address
        options = started(platform(2, rank, gpus), "auto" if gpus else "2", None)
        assert options == [
            "--nnodes=2",
            f"--nproc_per_node={gpus or 2}",
            f"--node_rank={rank}",
            f"--master_addr={at}",
            f"--master_port={port}",
        ]


def test_nproc_says_where_it_waits_for_whom(started, caplog):
    """The other nodes may not be about to come, as in a shell on a node of a job."""
    started(skypilot(2, 1, 8))
    started({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job:1"})
    wait = "2 processes start here, and wait for the other nodes at"
    assert caplog.messages == [
        f"Node 1 of 2 (SkyPilot): {wait} 10.0.0.1:29500.",
        f"One of 1:4 (Kubeflow): {wait} job:1.",
    ]


@of_table(OWN_RUN)
def test_what_the_message_says_is_enough_to_run_alone(platform, address, port, counts):
    environ = platform(2, 1, 0)
    name = re.search(r"unset (\w+),", refused(environ))[1]
    assert name in TELL_NODES
    del environ[name]
    look(environ)


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
def test_the_group_and_the_command_line_refuse_alike(
    monkeypatch,
    tmp_path,
    platform,
    address,
    port,
    counts,
):
    for name, value in platform(2, 0, 0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    file = tmp_path / "h.yaml"
    file.write_text("lr: 0.1\n")
    for start in (
        lambda: init_group({"device": "cpu"}),
        lambda: parse_arguments([str(file), "--device=cpu"]),
    ):
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


def test_nproc_of_an_elastic_job_meets_where_it_says(machine, started):
    machine(0)
    environ = {
        "PET_NNODES": "1:4",
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_BACKEND": "etcd-v2",
        "PET_RDZV_CONF": "timeout=60",
    }
    assert started(environ) == [
        "--nnodes=1:4",
        "--nproc_per_node=2",
        "--rdzv_backend=etcd-v2",
        "--rdzv_endpoint=job-worker-0:23456",
    ]


@pytest.mark.parametrize(
    ("changes", "met_at"),
    [
        ({"PET_RDZV_BACKEND": "static", "PET_RDZV_ENDPOINT": "job-0:23456"}, "job-0:23456"),
        ({"PET_RDZV_BACKEND": "static", "PET_RDZV_ENDPOINT": "job-0"}, "job-0:29500"),
        ({"PET_RDZV_BACKEND": "static", "PET_RDZV_ENDPOINT": "[::1]"}, "[::1]:29500"),
        ({"PET_RDZV_BACKEND": "static", "PET_RDZV_ENDPOINT": "[::1]:5"}, "[::1]:5"),
        (
            {"PET_RDZV_BACKEND": "static", "PET_RDZV_ENDPOINT": "job-0:5", "MASTER_ADDR": "ib-0"},
            "ib-0:5",
        ),
        ({"PET_RDZV_BACKEND": "static", "PET_MASTER_ADDR": "job-0"}, "job-0:29500"),
        ({"PET_RDZV_BACKEND": "c10d", "PET_MASTER_ADDR": "job-0"}, "job-0:29500"),
    ],
)
def test_torchruns_own_variables_do_not_have_the_nodes_meet_elsewhere(started, changes, met_at):
    """torchrun reads them where its options say nothing: c10d without an endpoint is a meeting of
    each node with itself.
    """
    environ = {"PET_NNODES": "4", "PET_NODE_RANK": "3", **changes}
    assert started(environ)[2:] == [
        "--node_rank=3",
        "--rdzv_backend=static",
        f"--rdzv_endpoint={met_at}",
    ]


def test_other_platforms_override_the_rendezvous_of_an_image_too(started):
    asked = {"PET_RDZV_BACKEND": "c10d"}
    for platform, address in ((skypilot, "10.0.0.1:29500"), (node_level, "job-master-0:23456")):
        options = started({**platform(2, 1, 8), **asked})
        assert options[3:] == ["--rdzv_backend=static", f"--rdzv_endpoint={address}"]
    [backend, endpoint] = started({**slurm(2, 1, 1), **asked})[3:]
    assert backend == "--rdzv_backend=static"
    assert re.fullmatch(r"--rdzv_endpoint=gpu07:[23]\d{4}", endpoint)


@pytest.mark.parametrize("given", ["", "x", "0", "-1", "xpu"])
def test_a_number_of_processes_that_is_none_is_not_advised(machine, given):
    machine(4)
    message = refused({**kubeflow(2, 1, 8), "PET_NPROC_PER_NODE": given})
    assert "--nproc_per_node=4 " in message
    assert "add --nproc=4 to it" in message


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (None, "keep_alive_interval=86400"),
        (" ", "keep_alive_interval=86400"),
        ("timeout=60,join_timeout=3", "keep_alive_interval=86400,timeout=60,join_timeout=3"),
    ],
)
def test_what_the_user_has_set_for_the_rendezvous_wins(started, given, settings):
    environ = {} if given is None else {"PET_RDZV_CONF": given}
    assert f"--rdzv_conf={settings}" in started(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"SKYPILOT_NUM_NODES": "", "SKYPILOT_NODE_IPS": ""},
        {"SM_HOSTS": ""},
        {"PET_NNODES": ""},
        {"PET_NNODES": "1:1"},
        {"DSTACK_NODES_NUM": "1"},
        {"PET_NODE_RANK": "1"},
        {"NUM_NODES": "2", "NODE_RANK": "1"},
        {"BEAKER_REPLICA_COUNT": "2", "BEAKER_REPLICA_RANK": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "4", "PET_NNODES": "1", "PET_NODE_RANK": "0"},
    ],
)
def test_what_says_nothing_of_several_nodes(started, environ):
    look(environ)
    assert started(environ)[0] == "--standalone"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SM_HOSTS": "algo-1, algo-2"}, "SM_HOSTS='algo-1, algo-2' is not a list of hosts in JSO"),
        ({"SM_HOSTS": '"algo-1"'}, "is not a list of hosts in JSON"),
        ({"SM_HOSTS": "[]"}, "is not a list of hosts in JSON"),
        (
            {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"},
            r"SM_CURRENT_HOST='c' is none of SM_HOSTS='\[\"a\", \"b\"\]'",
        ),
        ({"PET_NNODES": "two"}, "PET_NNODES='two' is not a number of nodes, from 1 on"),
        ({"PET_NNODES": "4:1"}, "PET_NNODES='4:1' is not a number of nodes"),
        ({"PET_NNODES": "1:x"}, "PET_NNODES='1:x' is not a number of nodes"),
        ({"SKYPILOT_NUM_NODES": "0"}, "SKYPILOT_NUM_NODES='0' is not a number of nodes"),
        ({"MLP_WORKER_NUM": "-2"}, "MLP_WORKER_NUM='-2' is not a number of nodes"),
        (
            {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "2"},
            "DSTACK_NODE_RANK='2' is not a number from 0 to 1, as DSTACK_NODES_NUM='2'",
        ),
        (
            {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "-1"},
            "DSTACK_NODE_RANK='-1' is not a number from 0 to 1",
        ),
        (
            {"DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "first"},
            "DSTACK_NODE_RANK='first' is not a number from 0 to 0",
        ),
        (
            {**kubeflow(2, 1, 8), "PET_MASTER_PORT": "99999"},
            "the port of node 0, '99999', is not from 1 to 65535",
        ),
        ({**skypilot(2, 1, 8), "MASTER_PORT": "x"}, "the port of node 0, 'x', is not from 1"),
        (
            {**dstack(2, 1, 8), "DSTACK_MASTER_NODE_IP": "10.0.0.1 10.0.0.2"},
            "the address of node 0, '10.0.0.1 10.0.0.2', is not one word",
        ),
        ({**dstack(2, 1, 8), "MASTER_ADDR": "a\nb"}, r"the address of node 0, 'a\\nb', is not one"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' is not a number from 0 to 1, as WORLD_SIZE="),
        (
            {**skypilot(2, 1, 8), **dstack(3, 0, 8)},
            r"SkyPilot says that this is node 1 of 2 nodes .* and dstack that it is node 0 of 3 ",
        ),
    ],
)
def test_values_that_cannot_be_are_named(started, environ, said):
    for start in (look, started):
        with pytest.raises(LaunchError, match=said) as caught:
            start(environ)
        assert re.search("unset [A-Z]|Unset the variable", str(caught.value))


def test_two_platforms_that_say_the_same_are_one(started):
    """As of a platform that is started inside another one."""
    environ = {**skypilot(2, 1, 8), **aws_batch(2, 1, 8), "DSTACK_NODES_NUM": "1"}
    assert "(SkyPilot)" in refused(environ)
    assert started(environ)[:3] == ["--nnodes=2", "--nproc_per_node=2", "--node_rank=1"]


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        (
            {"DSTACK_NODES_NUM": "2"},
            r"DSTACK_NODE_RANK \(the number of this node\), DSTACK_MASTER_NODE",
        ),
        ({**skypilot(2, 1, 8), "SKYPILOT_NODE_IPS": ""}, "SKYPILOT_NODE_IPS"),
        ({**kubeflow(2, 1, 8), "PET_MASTER_ADDR": " "}, "PET_MASTER_ADDR"),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_BACKEND": "static"},
            "PET_MASTER_ADDR",
        ),
        ({**sagemaker(2, 1, 8), "SM_CURRENT_HOST": ""}, "SM_CURRENT_HOST"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"LEPTON_JOB_TOTAL_WORKERS": "2", "LEPTON_JOB_WORKER_INDEX": "0"}, "LEPTON_JOB_NAME"),
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "1"}, "PET_MASTER_ADDR"),
    ],
)
def test_nproc_says_what_is_missing(machine, started, environ, missing):
    machine(0)
    with pytest.raises(LaunchError, match=rf"(?s)one of .* Not set: {missing}.*torchrun --nnodes="):
        started(environ)


def test_the_users_address_and_port_win(started):
    environ = {**skypilot(2, 1, 8), "MASTER_ADDR": "ib-1", "MASTER_PORT": "1234"}
    assert started(environ)[3:] == ["--master_addr=ib-1", "--master_port=1234"]


def test_the_main_node_of_aws_batch_need_not_be_the_first(started):
    last = {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "2"}
    last["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "10.0.0.3"
    of = [started({**aws_batch(3, index, 0), **last})[2] for index in range(3)]
    assert of == ["--node_rank=2", "--node_rank=1", "--node_rank=0"]


def slurm(tasks, tasks_here, rank):
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % tasks_here),
        "SLURM_GTIDS": ",".join(str(rank - rank % tasks_here + at) for at in range(tasks_here)),
        "SLURM_NODEID": str(rank // tasks_here), "SLURM_STEP_NODELIST": "gpu[07-08]",
    }  # fmt: skip


def test_nproc_starts_in_the_one_task_that_srun_has_on_each_node(started):
    options = started(slurm(2, 1, 1))
    assert options[:4] == [
        "--nnodes=2",
        "--nproc_per_node=2",
        "--node_rank=1",
        "--master_addr=gpu07",
    ]
    assert re.fullmatch(r"--master_port=[23]\d{4}", options[4])
    with pytest.raises(LaunchError, match="slurm has started this one already, as rank 1 of 4"):
        started(slurm(4, 2, 1))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_job_script_may_export_rank_and_world_size_of_its_tasks(started, rank):
    """Slurm says the rest, such as which of them are on this node."""
    environ = {**slurm(4, 2, rank), "RANK": str(rank), "WORLD_SIZE": "4"}
    info = find_launch(environ)
    assert (info.launcher, info.rank, info.local_rank) == ("slurm", rank, rank % 2)
    with pytest.raises(LaunchError, match=f"slurm has started this one already, as rank {rank}"):
        started(environ)
    with pytest.raises(LaunchError, match="node 0 of 4"):
        find_launch({**slurm(4, 2, 1), "RANK": "0", "WORLD_SIZE": "4"})


def test_skypilot_on_slurm_is_a_job_of_skypilot(started):
    assert started({**slurm(2, 1, 1), **skypilot(2, 1, 8)})[3:] == [
        "--master_addr=10.0.0.1",
        "--master_port=29500",
    ]


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
    for environ in (
        {"RANK": "1"},
        {"RANK": "", "WORLD_SIZE": ""},
        {"RANK": "0", "WORLD_SIZE": "x"},
    ):
        with pytest.raises(LaunchError, match="contradicts itself"):
            find_launch(environ)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a b.py", "--nproc=2"], "'a b.py'"),
        (["-u", "-W", "error", "-m", "recipes.train", "h.yaml"], "-m recipes.train h.yaml"),
        (["-m", "ddpkit", "doctor", "--nproc", "2", "--json"], "-m ddpkit doctor --json"),
        (["-Xfrozen_modules=off", "train.py", "--nproc"], "train.py"),
        (["-"], "train.py hparams.yaml"),
        (["-c", "import x"], "train.py hparams.yaml"),
        ([], "train.py hparams.yaml"),
    ],
)
def test_the_command_has_the_script_that_runs(machine, monkeypatch, words, said):
    machine(0)
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    assert re.search(rf"--master_port=29500 {re.escape(said)}\n", refused(skypilot(2, 0, 0)))


def test_a_notebook_is_no_script_that_torchrun_could_start(machine, monkeypatch):
    machine(0)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ipykernel_launcher", "-f", "k.json"])
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    assert "--master_port=29500 train.py hparams.yaml\n" in refused(kubeflow(2, 0, 0)).replace(
        "29400", "29500"
    )


def test_each_platform_is_in_the_table():
    assert len(PLATFORMS) == len(TELL_NODES) == len(OWN_RUN)
