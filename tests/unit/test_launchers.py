from __future__ import annotations

import dataclasses

import pytest

from ddpkit.errors import LaunchError
from ddpkit.launchers import LaunchInfo, find_launch

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_no_launcher_is_rank_zero_of_one():
    info = find_launch({"WORLD_SIZE": "4", "PATH": "/bin"})
    assert info == LaunchInfo("none", 0, 0, 1, 1, 0, 0)
    assert not info.is_distributed


def test_torchrun_is_read_whole():
    info = find_launch(TORCHRUN)
    assert info == LaunchInfo("torchrun", 3, 1, 4, 2, 1, 2)
    assert info.is_distributed


def test_plain_variables_are_enough():
    info = find_launch({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
    assert info == LaunchInfo("environment", 1, 1, 2, 2, 0, 0)


def test_a_single_process_under_torchrun_is_a_distributed_launch():
    assert find_launch({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}).is_distributed


def test_the_node_is_derived_where_the_launcher_does_not_say():
    environ = {k: v for k, v in TORCHRUN.items() if k != "GROUP_RANK"}
    assert find_launch(environ).node_rank == 1
    assert find_launch({**environ, "RANK": "0", "LOCAL_RANK": "0"}).node_rank == 0


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
        ({"RANK": None}, "LOCAL_RANK and WORLD_SIZE are set, but RANK is not"),
        ({"RANK": None, "WORLD_SIZE": None}, "LOCAL_RANK is set, but RANK is not"),
        ({"LOCAL_RANK": None}, "RANK and WORLD_SIZE are set, but LOCAL_RANK is not"),
        ({"WORLD_SIZE": None}, "RANK and LOCAL_RANK are set, but WORLD_SIZE is not"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "RANK=3 is not below WORLD_SIZE=0"),
        ({"RANK": "-1"}, "RANK=-1 is negative"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 is negative"),
        ({"RANK": "two"}, "RANK='two' is not a whole number"),
        ({"RANK": ""}, "RANK='' is not a whole number"),
        ({"WORLD_SIZE": "2.5"}, "WORLD_SIZE='2.5' is not a whole number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": None}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 is above WORLD_SIZE=4"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x' is not a whole number"),
    ],
)
def test_contradictions_are_errors(changes, reason):
    environ = {k: v for k, v in {**TORCHRUN, **changes}.items() if v is not None}
    with pytest.raises(LaunchError) as caught:
        find_launch(environ)
    message = str(caught.value)
    assert reason in message.splitlines()[0]
    assert "torchrun --standalone --nproc_per_node=N train.py hparams.yaml" in message
    assert "unset RANK LOCAL_RANK WORLD_SIZE" in message


def test_the_error_tabulates_what_was_found_where():
    with pytest.raises(LaunchError) as caught:
        find_launch({"LOCAL_RANK": "0", "SLURM_PROCID": "3"})
    rows = [line.split() for line in str(caught.value).splitlines()]
    assert ["LOCAL_RANK", "'0'", "torch"] in rows
    assert ["RANK", "not", "set", "torch"] in rows
    assert ["SLURM_PROCID", "'3'", "Slurm"] in rows


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NNODES": "1",
}


def test_d6_srun_without_ranks_is_an_error_that_shows_the_command():
    with pytest.raises(LaunchError) as caught:
        find_launch(SLURM)
    message = str(caught.value)
    assert message.startswith("Slurm started 4 tasks (this is task 2), but RANK is not set")
    assert "torchrun --standalone --nproc_per_node=4 train.py hparams.yaml" in message
    assert "srun --ntasks=1 python train.py hparams.yaml" in message


def test_d6_srun_over_several_nodes_shows_a_rendezvous():
    with pytest.raises(LaunchError) as caught:
        find_launch({**SLURM, "SLURM_STEP_NUM_NODES": "2"})
    message = str(caught.value)
    assert "srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=2" in message
    assert "--rdzv_endpoint=" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None, "SLURM_PROCID": "0"},  # a batch script, or a salloc shell
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash in a larger allocation
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": None},  # salloc's interactive step
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": None},
    ],
)
def test_d6_one_process_inside_slurm_is_no_error(changes):
    environ = {k: v for k, v in {**SLURM, **changes}.items() if v is not None}
    assert not find_launch(environ).is_distributed


def test_torchrun_inside_slurm_wins():
    assert find_launch({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_d6_mpirun_without_ranks_is_an_error_that_shows_the_command():
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(LaunchError, match="Open MPI started 2 processes") as caught:
        find_launch(environ)
    assert "torchrun --standalone --nproc_per_node=2 train.py hparams.yaml" in str(caught.value)
    assert not find_launch({**environ, "OMPI_COMM_WORLD_SIZE": "1"}).is_distributed
    assert find_launch({**environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).rank == 1
