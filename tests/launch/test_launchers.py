"""What each launcher really sets, and what is made of it."""

from __future__ import annotations

import dataclasses

import pytest

from ddpkit.base import rank_if_known
from ddpkit.errors import LaunchError
from ddpkit.launch.launchers import (
    DERIVED_PORTS,
    FIRST_DERIVED_PORT,
    LAUNCHERS,
    LaunchInfo,
    derived_port,
    find_launch,
)

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def with_changes(environ, changes):
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


def test_no_launcher_is_rank_zero_of_one():
    info = find_launch(
        {"WORLD_SIZE": "4", "PATH": "/bin", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    )
    assert info == LaunchInfo("none", 0, 0, 1, 1, 0, 0)
    assert not info.is_distributed


def test_torchrun_is_read_whole():
    info = find_launch(TORCHRUN)
    assert info == LaunchInfo(
        "torchrun",
        3,
        1,
        4,
        2,
        1,
        2,
        "node1",
        29500,
        "",
        agent_hosts_store=True,
    )
    assert info.is_distributed
    assert info.first_on_node == 2


def test_plain_variables_are_enough():
    info = find_launch({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
    assert info == LaunchInfo("environment", 1, 1, 2, 2, 0, 0)


def test_a_single_process_under_torchrun_is_a_distributed_launch():
    assert find_launch({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}).is_distributed


def test_the_node_is_derived_where_the_launcher_does_not_say():
    environ = with_changes(TORCHRUN, {"GROUP_RANK": None})
    assert find_launch(environ).node_rank == 1
    assert find_launch({**environ, "RANK": "0", "LOCAL_RANK": "0"}).node_rank == 0
    assert find_launch({**environ, "NODE_RANK": "5"}).node_rank == 5  # as Ray says it


def test_elastic_a_world_that_changes_is_read_anew_each_time():
    for world, rank in ((4, 3), (2, 1), (3, 2)):
        environ = {**TORCHRUN, "WORLD_SIZE": str(world), "RANK": str(rank)}
        assert (find_launch(environ).world_size, find_launch(environ).rank) == (world, rank)


def test_the_process_environment_is_read_at_the_time_of_the_call(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert not find_launch().is_distributed
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert find_launch().rank == 3


def test_info_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        find_launch({}).rank = 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": None, "WORLD_SIZE": None}, "RANK is not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "RANK=3 is not below WORLD_SIZE=0"),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a whole number"),
        ({"RANK": "two"}, "RANK='two' is not a whole number"),
        ({"RANK": ""}, "RANK='' is not a whole number"),
        ({"WORLD_SIZE": "2.5"}, "WORLD_SIZE='2.5' is not a whole number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        (
            {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": None},
            ("LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
        ),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 is above WORLD_SIZE=4"),
        (
            {"TORCHELASTIC_RESTART_COUNT": "x"},
            ("TORCHELASTIC_RESTART_COUNT='x' is not a whole number"),
        ),
    ],
)
def test_contradictions_are_errors(changes, reason):
    with pytest.raises(LaunchError) as caught:
        find_launch(with_changes(TORCHRUN, changes))
    message = str(caught.value)
    assert reason in message.splitlines()[0]
    assert "torchrun --standalone --nproc_per_node=N train.py hparams.yaml" in message
    assert "unset RANK LOCAL_RANK WORLD_SIZE" in message


def test_the_error_tabulates_what_was_found_where():
    with pytest.raises(LaunchError) as caught:
        find_launch({"LOCAL_RANK": "0", "SLURM_PROCID": "3"})
    rows = str(caught.value).splitlines()
    assert {"  LOCAL_RANK='0'", "  RANK is not set", "  SLURM_PROCID='3'"} <= set(rows)


# -------------------------------------------------------------------------------------------- Slurm

# Task 3 of `srun -N2 -n4`, as slurmstepd 22.05 sets it up (less what says nothing about ranks).
SRUN = {
    "SLURM_CLUSTER_NAME": "cluster",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2,3",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[05-08]",
    "SLURMD_NODENAME": "gpu08",
}
ONE_NODE = {
    "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2,3", "SLURM_LOCALID": "3", "SLURM_NNODES": "1",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "gpu07",
}  # fmt: skip


def task(rank, **changes):
    """Another task of the same step."""
    node, local = divmod(rank, 2)
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node),
           "SLURM_GTIDS": ("0,1", "2,3")[node], "SLURMD_NODENAME": ("gpu07", "gpu08")[node]}  # fmt: skip  # noqa: E501
    return with_changes({**SRUN, **own}, changes)


def test_several_tasks_of_a_step_are_ranks():
    found = [find_launch(task(rank)) for rank in range(4)]
    assert [info.launcher for info in found] == ["slurm"] * 4
    assert [info.rank for info in found] == [0, 1, 2, 3]
    assert [info.local_rank for info in found] == [0, 1, 0, 1]
    assert [info.node_rank for info in found] == [0, 0, 1, 1]
    assert {(info.world_size, info.local_world_size) for info in found} == {(4, 2)}
    assert {info.address for info in found} == {"gpu07"}, (
        "the first host of the step, not of the job"
    )
    assert len({info.port for info in found}) == 1
    assert FIRST_DERIVED_PORT <= found[0].port < FIRST_DERIVED_PORT + DERIVED_PORTS
    assert not found[0].agent_hosts_store


def test_tasks_that_are_dealt_out_in_turn_know_their_node():
    info = find_launch({**SRUN, "SLURM_GTIDS": "1,3"})  # --distribution=cyclic
    assert (info.rank, info.local_rank, info.first_on_node, info.node_rank) == (3, 1, 1, 1)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("node1", "node1"),
        ("a1.cluster.example.org,10.0.0.7", "a1.cluster.example.org"),
        ("n[098-101]", "n098"),
        ("n[3,1-2],x", "n3"),
        ("rack[1-2]node[08-09]", "rack1node08"),
        ("n[1-2]-ib,n3", "n1-ib"),
    ],
)
def test_the_first_host_of_a_list(text, first):
    assert find_launch(task(1, SLURM_STEP_NODELIST=text)).address == first


@pytest.mark.parametrize("text", [",a", "n[1-2", "n1]", "n[]", "n[a-b]", "n[1-2[3]]"])
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(LaunchError, match="Set MASTER_ADDR to the host of task 0") as caught:
        find_launch(task(1, SLURM_STEP_NODELIST=text))
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["x", "2(x2)", "-1", "0,,1", None])
def test_what_is_no_list_of_ranks_is_refused(text):
    with pytest.raises(LaunchError, match="is not a list of the ranks on this node"):
        find_launch(task(1, SLURM_GTIDS=text))


def test_on_one_node_the_loopback_is_enough():
    info = find_launch({**SRUN, **ONE_NODE})
    assert (info.address, info.local_world_size, info.node_rank, info.local_rank) == (
        "127.0.0.1",
        4,
        0,
        3,
    )


def test_each_step_and_each_requeue_has_a_port_of_its_own():
    changes = ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "78"}, {"SLURM_RESTART_COUNT": "1"})
    assert len({find_launch({**SRUN, **change}).port for change in changes}) == len(changes)


def test_what_the_user_says_of_address_and_port_wins():
    info = find_launch({**SRUN, "MASTER_ADDR": "ib-gpu07", "MASTER_PORT": "12345"})
    assert (info.address, info.port, info.run_id) == ("ib-gpu07", 12345, "")
    info = find_launch({**SRUN, **ONE_NODE, "MASTER_ADDR": "ib-gpu07"})
    assert info.address == "ib-gpu07"
    assert info.run_id
    assert find_launch({**SRUN, "MASTER_PORT": "12345"}).address == "gpu07"
    for port in ("0", "x", "70000", "-1"):
        with pytest.raises(
            LaunchError,
            match=f"MASTER_PORT must be a port from 1 to 65535, got '{port}'",
        ):
            find_launch({**SRUN, "MASTER_PORT": port})


@pytest.mark.parametrize("environ", [SRUN, TORCHRUN], ids=["slurm", "torchrun"])
@pytest.mark.parametrize(
    ("given", "address"),
    [("[2001:db8::1]", "2001:db8::1"), ("2001:db8::1", "2001:db8::1"), (" node1\n", "node1")],
)
def test_an_address_is_taken_without_what_stands_around_it(environ, given, address):
    """Brackets are for an address of IPv6 with a port; a job script may leave a blank."""
    assert find_launch({**environ, "MASTER_ADDR": given}).address == address


def test_an_address_of_blanks_is_none():
    assert find_launch({**TORCHRUN, "MASTER_ADDR": " "}).address == ""
    assert find_launch({**SRUN, "MASTER_ADDR": " "}).address == "gpu07"


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None, "SLURM_PROCID": "0"},  # a batch script, or a salloc shell
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash in a larger allocation
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": None},  # salloc's interactive step
        # the batch script, where it has a number
        {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": None},
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": None},
    ],
)
def test_one_process_inside_slurm_is_one_process(changes):
    assert not find_launch(with_changes(SRUN, changes)).is_distributed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not below the number of tasks=4"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 is not below the number of tasks on this node=2"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        ({"SLURM_GTIDS": "0,1"}, "SLURM_PROCID=3, but SLURM_GTIDS has 1 for SLURM_LOCALID=1"),
        (
            {"SLURM_GTIDS": "0,3,4,5,6"},
            ("the number of tasks on this node=5 is above the number of tasks=4"),
        ),
        ({"SLURM_STEP_NODELIST": "gpu[7"}, "cannot read the Slurm host list"),
    ],
)
def test_a_step_that_contradicts_itself(changes, reason):
    with pytest.raises(LaunchError) as caught:
        find_launch(with_changes(SRUN, changes))
    assert reason in str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("variables", "own"),
    [
        ({}, False),
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu:4,gres:gpu:1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu:4"}, False),
        ({"SLURM_GPU_BIND": "verbose,single:1"}, True),
        ({"SLURM_GPU_BIND": "map_gpu:0,1"}, True),
        ({"SLURM_GPU_BIND": "closest"}, False),
        ({"SLURM_GPU_BIND": "none"}, False),
    ],
)
def test_slurm_may_give_each_task_gpus_of_its_own(variables, own):
    assert find_launch({**SRUN, **variables}).own_devices is own


def test_torchrun_inside_slurm_wins():
    assert find_launch({**SRUN, **TORCHRUN}) == find_launch(TORCHRUN)


RANKS = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {**task(1), **RANKS},
            ("RANK=3 of WORLD_SIZE=4, but slurm started this process as number 1 of 4"),
        ),
        (
            {**SRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            "but slurm started this process as number 3 of 4",
        ),
        ({**SRUN, "LOCAL_RANK": "1"}, "RANK is not set"),
    ],
)
def test_ranks_that_contradict_the_step_are_refused_with_a_table(environ, words):
    with pytest.raises(LaunchError) as caught:
        find_launch(environ)
    message = str(caught.value)
    assert words in message.splitlines()[0]
    assert {f"  SLURM_PROCID='{environ['SLURM_PROCID']}'", "  SLURM_STEP_NUM_TASKS='4'"} <= set(
        message.splitlines()
    )


@pytest.mark.parametrize(
    "variables",
    [
        RANKS,  # a script of the user's own that renames the variables
        # one that starts 4 per task
        {"RANK": "13", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"},
        {**RANKS, "RANK": "0", "RAY_JOB_ID": "01000000"},  # Ray numbers its workers as it likes
    ],
)
def test_ranks_that_fit_into_the_step(variables):
    assert find_launch({**SRUN, **variables}).rank == int(variables["RANK"])


# ---------------------------------------------------------------------------------------------- MPI

# Rank 1 of `mpirun -np 2`, Open MPI 4.1.4.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1527119872.0;tcp://192.0.2.2:58353",
    "OMPI_MCA_ess_base_jobid": "1527119873",
    "PMIX_NAMESPACE": "1527119873",
    "PMIX_RANK": "1",
}
# The same of MPICH 4.0.2.
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "8",
}
# jsrun sets Open MPI's variables too.
JSRUN = {
    **OPEN_MPI, "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1", "LSB_JOBID": "4711",
}  # fmt: skip
MPI = {"openmpi": OPEN_MPI, "pmi": MPICH, "jsm": JSRUN}


@pytest.mark.parametrize("launcher", MPI)
def test_processes_of_an_mpi_launcher_are_ranks(launcher):
    info = find_launch(MPI[launcher])
    assert (info.launcher, info.rank, info.local_rank, info.world_size, info.local_world_size,
        info.node_rank) == (
        launcher, 1, 1, 2, 2, 0,
    )  # fmt: skip
    assert info.address == "127.0.0.1"
    assert find_launch({**MPI[launcher], "MASTER_ADDR": "a", "MASTER_PORT": "5"}).port == 5


@pytest.mark.parametrize("launcher", ["openmpi", "jsm"])
def test_the_port_of_mpi_comes_from_what_all_ranks_share(launcher):
    environ = MPI[launcher]
    mine = [name for name in environ if name.endswith("RANK")]
    first = find_launch({**environ, **dict.fromkeys(mine, "0")})
    assert first.port == find_launch(environ).port > 0
    other = {**environ, "PMIX_NAMESPACE": "99", "OMPI_MCA_orte_hnp_uri": "9.0;tcp://192.0.2.2:1"}
    assert find_launch(other).port != first.port


def test_mpich_shares_nothing_that_a_port_could_be_made_from():
    assert (find_launch(MPICH).port, find_launch(MPICH).run_id) == (0, "")


@pytest.mark.parametrize("launcher", MPI)
def test_over_several_nodes_no_address_is_invented(launcher):
    environ = {name: {"1": "3", "2": "4"}.get(value, value) if name.endswith(("_RANK",
        "_SIZE")) else value
               for name, value in MPI[launcher].items()}  # fmt: skip
    local = {name: value for name, value in MPI[launcher].items() if "LOCAL" in name}
    info = find_launch({**environ, **local})
    assert (info.rank, info.local_rank, info.world_size, info.local_world_size, info.node_rank) == (
        3,
        1,
        4,
        2,
        1,
    )
    assert info.address == ""
    assert find_launch({**environ, **local, "MASTER_ADDR": "node1"}).address == "node1"


def test_mpi_ranks_that_are_dealt_out_in_turn_are_refused():
    """Rank 1 of 4 is alone on the second of two nodes, as with --map-by node: nobody says who is
    first on a node.
    """
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(LaunchError, match="mpirun --map-by slot"):
        find_launch(environ)


def test_more_processes_on_a_node_than_in_the_run_are_told_as_mpi_gave_them():
    with pytest.raises(
        LaunchError,
        match="OMPI_COMM_WORLD_LOCAL_SIZE=5 is above OMPI_COMM_WORLD_SIZE=2",
    ):
        find_launch({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "5"})


def test_mpirun_starts_its_helpers_by_srun_and_wins():
    helper = {
        **SRUN,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": "1",
    }
    assert find_launch({**helper, **OPEN_MPI}).launcher == "openmpi"
    assert find_launch({**helper, **MPICH}).launcher == "pmi"


def test_the_pmi_of_srun_is_slurms():
    assert find_launch({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "slurm"
    with pytest.raises(LaunchError, match="MPI_LOCALRANKID is not set"):
        find_launch({"PMI_RANK": "3", "PMI_SIZE": "4"})


@pytest.mark.parametrize("launcher", MPI)
def test_a_single_process_of_mpi_is_one_process(launcher):
    changes = {
        name: "1" for name in MPI[launcher] if name.endswith("SIZE") or name == "MPI_LOCALNRANKS"
    }
    assert not find_launch({**MPI[launcher], **changes}).is_distributed


def test_ranks_that_contradict_mpi_are_refused():
    with pytest.raises(
        LaunchError,
        match="but openmpi started this process as number 1 of 2",
    ) as caught:
        find_launch({**OPEN_MPI, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    assert "OMPI_COMM_WORLD_RANK" in str(caught.value)
    assert (
        find_launch({**OPEN_MPI, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).launcher
        == "environment"
    )


def test_jsrun_shows_each_process_its_own_gpus():
    assert find_launch(JSRUN).own_devices
    assert not find_launch(OPEN_MPI).own_devices


# ------------------------------------------------------------------------------------------- others


def test_ports_differ_and_stay():
    ports = [derived_port(f"slurm 77.{step}") for step in range(8)]
    assert len(set(ports)) == 8
    assert derived_port("slurm 77.0") == 24302, (
        "another version of ddpkit on another node must find the same"
    )


def test_the_rank_is_known_before_the_group_is_there():
    known = [TORCHRUN, SRUN, *MPI.values()]
    assert all(any(read(environ) for environ in known) for read in LAUNCHERS), (
        "a launcher without an environment here"
    )
    for environ in known:
        assert rank_if_known(environ) == find_launch(environ).rank
    assert rank_if_known({**SRUN, "SLURM_LOCALID": "9"}) == 3, (
        "also where the rest contradicts itself"
    )
    assert rank_if_known({**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}) is None
