"""Host names, interfaces and ports: what gloo and NCCL would take, and whether that leads
anywhere.
"""

from __future__ import annotations

import socket

import pytest

from ddpkit.see.doctor.checks import host_name, master_port, network_interfaces, reachability
from ddpkit.see.doctor.interfaces import Interface, interfaces_of_machine, taken_by_nccl
from ddpkit.see.doctor.machine import Machine
from tests.see.doctor.sites import HERE, TWO_HOSTS, found, site_of

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("10.0.0.5",), megabits=10_000)
ETH1 = Interface("eth1", ("192.168.7.5",), is_up=False)
DOCKER = Interface("docker0", ("172.17.0.1",))
BARE = Interface("ib0", ())
ALL = [LO, DOCKER, ETH0, ETH1, BARE]


def machine(addresses=("10.0.0.5",), interfaces=ALL, **environ):
    def resolve(name):
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return list(addresses)

    return Machine(
        environ=environ,
        name=lambda: "gpu07",
        resolve=resolve,
        interfaces=lambda: list(interfaces),
    )


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (("127.0.1.1",), "gpu07 is 127.0.1.1, the loopback"),
        (("::1",), "the loopback"),
        ((), "gpu07 is nothing: the name has no address"),
        (("10.9.9.9",), "which no interface of this host has"),
    ],
)
def test_a_host_name_that_others_cannot_reach_is_a_problem_with_several_hosts(addresses, words):
    here = machine(addresses)
    finding = found(host_name, site_of(here, launch=TWO_HOSTS))["host name"]
    assert finding.verdict == "problem"
    assert words in finding.measured
    assert found(host_name, site_of(here, launch=HERE))["host name"].verdict == "look"
    named = machine(addresses, GLOO_SOCKET_IFNAME="eth0")
    assert found(host_name, site_of(named, launch=TWO_HOSTS))["host name"].verdict == "ok"


def test_a_host_name_with_an_address_of_this_host_is_well():
    findings = found(host_name, site_of(machine(), launch=TWO_HOSTS))
    assert findings["host name"].measured == "gpu07 is 10.0.0.5"
    taken = found(network_interfaces, site_of(machine(), launch=TWO_HOSTS))["interface of gloo"]
    assert (taken.verdict, taken.measured) == ("ok", "eth0 (10.0.0.5)")


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("eth7", "there is no interface 'eth7'"),
        ("eth", "there is no interface 'eth'"),
        ("eth1", "eth1 is down"),
        ("ib0", "ib0 has no address"),
        ("eth0,eth7", "there is no interface 'eth7'"),
    ],
)
def test_an_interface_for_gloo_that_is_not_there_or_down_is_a_problem(named, words):
    site = site_of(machine(GLOO_SOCKET_IFNAME=named))
    finding = found(network_interfaces, site)["interface of gloo"]
    assert finding.verdict == "problem"
    assert words in finding.measured
    assert "up here: lo, docker0, eth0." in finding.advice


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (None, ["eth0"]),
        ("eth", ["eth0"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^docker,lo", ["eth0"]),
        ("^=eth0", ["lo", "docker0"]),
        ("eth1", []),
        ("lo", ["lo"]),
    ],
)
def test_nccl_takes_interfaces_by_its_own_rules(names, taken):
    assert [one.name for one in taken_by_nccl(ALL, names)] == taken


def test_an_interface_for_nccl_that_is_not_there_is_a_problem():
    site = site_of(machine(NCCL_SOCKET_IFNAME="eno1"))
    finding = found(network_interfaces, site)["interface of NCCL"]
    assert finding.verdict == "problem"
    assert finding.measured == "NCCL_SOCKET_IFNAME=eno1: none is up by this name"
    assert "interface of NCCL" not in found(network_interfaces, site_of(machine()))
    on_gpus = site_of(machine(), device="cuda", launch=TWO_HOSTS)
    assert found(network_interfaces, on_gpus)["interface of NCCL"].measured == "eth0 (10.0.0.5)"


@pytest.mark.parametrize(
    ("interfaces", "named", "verdict"),
    [
        ([LO, DOCKER], "docker0", "look"),
        ([LO, ETH0], "lo", "problem"),
        ([LO, Interface("eth0", ("10.0.0.5",), megabits=100)], "eth0", "look"),
        ([LO, ETH0], "eth0", "ok"),
    ],
)
def test_an_interface_that_does_not_lead_to_other_hosts_is_told(interfaces, named, verdict):
    here = machine(interfaces=interfaces, GLOO_SOCKET_IFNAME=named, NCCL_SOCKET_IFNAME=named)
    findings = found(network_interfaces, site_of(here, launch=TWO_HOSTS, device="cuda"))
    assert {one.verdict for one in findings.values()} == {verdict}
    alone = found(network_interfaces, site_of(here, device="cuda"))
    assert {one.verdict for one in alone.values()} == {"ok"}


def test_the_interfaces_of_this_machine_are_seen():
    loopback = next(one for one in interfaces_of_machine() if "127.0.0.1" in one.addresses)
    assert loopback.is_up


def test_a_port_that_another_program_has_is_a_problem_and_says_whose():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        site = site_of(Machine(environ={"MASTER_PORT": str(port)}))
        finding = found(master_port, site)["rendezvous port"]
        assert finding.verdict == "problem"
        assert f"port {port} (MASTER_PORT) is taken" in finding.measured
        assert "(pid " in finding.measured
    assert found(master_port, site)["rendezvous port"].verdict == "ok"


@pytest.mark.parametrize("port", ["0", "http", "70000"])
def test_what_is_no_port_is_a_problem(port):
    finding = found(master_port, site_of(Machine(environ={"MASTER_PORT": port})))["rendezvous port"]
    assert (finding.verdict, finding.measured) == (
        "problem",
        f"port {port} (MASTER_PORT) is no port",
    )


def test_the_port_of_a_launch_is_not_looked_at_again():
    assert found(master_port, site_of(launch=TWO_HOSTS)) == {}


class Others:
    """Ranks of two hosts; the other one says where it listens."""

    def __init__(self, other):
        self.rank = 0
        self.is_first_on_host = True
        self.other = other

    def exchange(self, name, value):
        return [value, self.other]


def test_a_host_that_cannot_be_reached_is_a_problem_and_one_that_answers_is_not(monkeypatch):
    site = site_of(machine(("127.0.0.1",)), launch=TWO_HOSTS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        other = {"host": "gpu08", "address": "127.0.0.1", "port": port}
        object.__setattr__(site, "ranks", Others(other))
        assert found(reachability, site)["next host"].verdict == "ok"
    finding = found(reachability, site)["next host"]
    assert finding.verdict == "problem"
    assert "gpu08 at 127.0.0.1 cannot be reached" in finding.measured
