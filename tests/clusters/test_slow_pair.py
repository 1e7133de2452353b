"""``python -m ddpkit doctor`` on three hosts, whose cables are whole, or one of which is slow."""

from __future__ import annotations

import json

import pytest

from .three_hosts import three_hosts


@pytest.fixture(scope="module")
def network(clusters, tmp_path_factory):
    made, stack = clusters
    folder = tmp_path_factory.mktemp("three_hosts")
    return made.get("a network of three hosts", lambda: stack.enter_context(three_hosts(folder)))


def findings(network, folder, *words):
    """Return what was found, by name, and the exit codes of the hosts."""
    with network.python(folder, "-m", "ddpkit", "doctor", "--device=cpu", "--json", *words) as runs:
        ended = [run.wait(120) for run in runs]
    found = json.loads(ended[0].out)
    assert found["world_size"] == 3
    return {one["name"]: one for one in found["findings"]}, [one.code for one in ended]


@pytest.mark.exhaustive
def test_a_slow_cable_between_two_of_three_hosts_is_found_and_they_are_named(network, tmp_path):
    with network.slow("beta", "gamma", megabits=50):
        found, codes = findings(network, tmp_path)
    assert found["all-reduce"]["verdict"] in {"look", "problem"}
    assert found["pairs of hosts"]["verdict"] == "problem"
    assert found["pairs of hosts"]["measured"].startswith("beta and gamma: ")
    assert codes == [1, 1, 1]
    speeds = found["pairs of hosts"]["details"]["bytes_per_second"]
    assert 3e6 < speeds["1-2"] < 9e6, "50 Mbit/s are 6.25 MB/s"
    assert min(speeds["0-1"], speeds["0-2"]) > 4 * speeds["1-2"]


def test_whole_cables_are_well(network, tmp_path):
    found, _ = findings(network, tmp_path, "--pairs")
    # The three hosts share the cores of this machine with whatever else runs on it.
    assert "problem" not in {found["all-reduce"]["verdict"], found["latency"]["verdict"]}
    assert found["pairs of hosts"]["verdict"] == "ok"
    speeds = found["pairs of hosts"]["details"]["bytes_per_second"]
    assert min(speeds.values()) > 9e6, "faster than the slow cable of the other test"
