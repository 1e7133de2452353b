"""``mpirun`` as the launcher: it gives ranks, and no address."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import time

import pytest

from tests.cells import some_of
from tests.launching import PATIENCE, Run

from .harness import clean_environment, run_on, tail
from .mpi import mpich, openmpi, openmpi_on
from .recipe import HPARAMS, SCRIPT
from .test_slurm import agreed, results

RECIPE = (sys.executable, str(SCRIPT), str(HPARAMS))


def trains(folder, command, processes, hosts, **environment):
    # In the environment of this process may be that of another launcher.
    with run_on([(command, "mpirun")], folder, **clean_environment(), **environment) as [run]:
        assert run.wait(90).code == 0, "\n".join(tail(path) for path in run.paths)
    results(folder, processes, hosts)
    agreed(folder, processes)


def this_host():
    return {socket.gethostname()}


@pytest.mark.exhaustive
def test_openmpi_without_an_address(openmpi_here, tmp_path):
    """On one host nothing need be given, and two runs beside each other do not meet."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        starts = []
        for folder in folders:
            # Two that start at once fail now and then where both make Open MPI's folder.
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpi"))
            command = openmpi(2, *RECIPE, options=("--mca", "orte_tmpdir_base", own))
            starts.append(
                stack.enter_context(run_on([(command, "mpirun")], folder, **clean_environment()))
            )
        for [run], folder in zip(starts, folders, strict=True):
            assert run.wait(90).code == 0, run.tail(40)
            results(folder, 2, this_host())
            agreed(folder, 2)


def test_openmpi_on_two_hosts(openmpi_here, hosts, tmp_path):
    """With ``-x MASTER_ADDR``; no port is given."""
    command = openmpi_on(hosts.machines, tmp_path, 2, "env", "-C", str(tmp_path), *RECIPE)
    trains(tmp_path, hosts.head.enter(*command, folder=tmp_path), 4, {"host1", "host2"})


def test_a_rank_that_fails_ends_an_openmpi_run(openmpi_here, tmp_path):
    """The exit code of the rank is that of mpirun, and nobody stays behind."""
    text = (
        "import os, sys, time; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and sys.exit(7); "
        "time.sleep(60)"
    )
    run = Run(openmpi(2, sys.executable, "-c", text), tmp_path, clean_environment())
    assert run.wait(20).code == 7, run.tail()


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", some_of(["openmpi", "mpich"], ["openmpi"]))
def test_an_exception_under_mpirun(request, launcher, tmp_path):
    request.getfixturevalue(f"{launcher}_here")
    command = {"openmpi": openmpi, "mpich": mpich}[launcher](2, *RECIPE, "--fails_on=1")
    with run_on([(command, "mpirun")], tmp_path, **clean_environment()) as [run]:
        run.wait(60)
        gone = time.time() - float((tmp_path / "results" / "failed").read_text())
    assert run.code != 0
    assert gone < 5 * PATIENCE, gone
    text = "\n".join(tail(path) for path in run.paths)
    assert "ValueError: so it was asked for" in text
    assert "rank 1 (" in text
    assert "in TRAIN of epoch 2 at step" in text


@pytest.mark.exhaustive
def test_mpich(mpich_here, tmp_path):
    trains(tmp_path, mpich(2, *RECIPE), 2, this_host())
