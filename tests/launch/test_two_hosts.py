"""torchrun on two hosts, and a cable between them that fails, comes back, is slow, is long."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time

import pytest

from tests.launching import wait_until

from .harness import MARKER, find, rank_of, tail
from .recipe import HPARAMS, SCRIPT, read_steps
from .test_slurm import agreed, both_at, held, results

pytestmark = pytest.mark.timeout(240)

HOSTS = {"host1", "host2"}
STATIC = ("--nproc-per-node=1", "--node-rank={rank}", "--master-addr=host1", "--master-port=29500")
C10D = ("--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=test", "--rdzv-endpoint=host1:29500")


@contextlib.contextmanager
def training(hosts, folder, options, *words):
    """Run the recipe on both hosts; what it said is in the failure."""
    with hosts.torchrun(folder, str(SCRIPT), str(HPARAMS), *words, options=options) as runs:
        try:
            yield runs
        except AssertionError as error:
            said = "\n".join(tail(path) for run in runs for path in run.paths)
            raise AssertionError(f"{error}\n{said}") from error


def to_the_end(runs, folder, seconds=90):
    for run in runs:
        assert run.wait(seconds).code == 0, run.tail(40)
    results(folder, 2, HOSTS)
    agreed(folder, 2)


@pytest.mark.parametrize("options", [STATIC, C10D], ids=["static", "c10d"])
def test_two_hosts_train(hosts, tmp_path, options):
    gate = held(tmp_path)
    with training(hosts, tmp_path, options) as runs:
        assert wait_until(lambda: both_at(tmp_path), 60), "the first step of both ranks"
        found = {}
        for run in runs:
            found |= {rank: one.pid for rank, one in rank_of(find(MARKER, run.marker), SCRIPT.name).items()}
        assert found == {one.rank: one.pid for one in read_steps(tmp_path / "results")}, "the harness finds them"
        gate.unlink()
        to_the_end(runs, tmp_path)


def test_a_cable_that_is_out_for_ten_seconds_does_not_end_the_run(hosts, tmp_path):
    with training(hosts, tmp_path, STATIC, "--step_seconds=0.1") as runs:
        assert wait_until(lambda: both_at(tmp_path, 3), 60), "the third step of both ranks"
        hosts.cut()
        cut_at = time.time()
        time.sleep(10)
        assert all(run.process.poll() is None for run in runs)
        silent = [one for one in read_steps(tmp_path / "results") if one.time > cut_at + 1]
        assert not silent, "the cable was cut: nobody can take a step"
        hosts.mend()
        to_the_end(runs, tmp_path)


def test_a_slow_and_lossy_cable_does_not_end_the_run(hosts, tmp_path):
    with hosts.slow(megabits=2), hosts.lossy(percent=1), training(hosts, tmp_path, STATIC) as runs:
        to_the_end(runs, tmp_path)


def test_hosts_that_are_far_apart(hosts, tmp_path):
    """20 ms one way and 1 % loss: a step takes at least one way there and back."""
    with hosts.far_apart(delay_ms=20, loss_percent=1), training(hosts, tmp_path, STATIC, "--step_seconds=0") as runs:
        to_the_end(runs, tmp_path)
    times = [one.time for one in read_steps(tmp_path / "results") if one.rank == 0]
    assert times[-1] - times[0] > 0.04 * (len(times) / 2)


def round_trip(one, other):
    """Return how many seconds it takes to be told by the other host that nobody listens; a second is too long."""
    text = f"""
        import contextlib, socket, time
        start = time.monotonic()
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(({other.address!r}, 9), timeout=1)
        print(time.monotonic() - start)
    """
    return float(one.run(sys.executable, "-S", "-c", textwrap.dedent(text)))


def test_the_cable_is_what_it_is_said_to_be(hosts):
    """The tools themselves: what is cut, delayed or lossy really is."""
    one, other = hosts.machines
    assert round_trip(one, other) < 0.05
    hosts.cut()
    with pytest.raises(AssertionError, match="timed out|unreachable"):
        round_trip(other, one)
    hosts.mend()
    with hosts.lossy(percent=99), pytest.raises(AssertionError, match="timed out"):
        round_trip(one, other)
    with hosts.far_apart(delay_ms=50):
        assert 0.1 < round_trip(one, other) < 0.5
        assert 0.1 < round_trip(other, one) < 0.5
    assert round_trip(one, other) < 0.05
    assert [one.run("hostname"), other.run("hostname")] == ["host1\n", "host2\n"]
