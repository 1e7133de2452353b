"""`python -m ddpkit doctor` on two hosts with a cable between them."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys

import pytest

STATIC = ("--nproc-per-node=1", "--node-rank={rank}", "--master-addr=host1", "--master-port=29500")
WORDS = ("-m", "ddpkit", "doctor", "--json", "--timeout", "30")


@pytest.fixture
def told(hosts, tmp_path):
    """Run the command on both hosts, and return the exit code and the findings by name and host."""

    def run(**environment):
        with hosts.torchrun(tmp_path, *WORDS, options=STATIC, **environment) as runs:
            codes = {run.wait(120).code for run in runs}
        text = runs[0].out
        assert text.startswith("{"), runs[0].tail(40)
        findings = json.loads(text)["findings"]
        return codes, {(one["name"], one["host"]): one for one in findings}

    return run


def problems(findings):
    return {key for key, one in findings.items() if one["verdict"] == "problem"}


def test_two_hosts_without_faults_have_no_problem(told):
    codes, findings = told()
    assert (codes, problems(findings)) == ({0}, set())
    for host in ("host1", "host2"):
        assert findings["host name", host]["verdict"] == "ok"
        assert findings["next host", host]["verdict"] == "ok"
        assert findings["shared folder", host]["verdict"] == "ok"
    assert findings["clock", "host2"]["verdict"] == "ok"
    assert abs(findings["clock", "host2"]["details"]["ahead"]) < 0.5


def test_a_host_name_that_leads_to_the_loopback_on_one_host_is_found_there(hosts, told, tmp_path):
    other = hosts.machines[1]
    (tmp_path / "hosts").write_text(
        "127.0.1.1 host2\n" + other.run("cat", "/etc/hosts").replace("host2", "x")
    )
    other.run("mount", "--bind", str(tmp_path / "hosts"), "/etc/hosts")
    try:
        _, findings = told()
    finally:
        other.run("umount", "/etc/hosts")
    assert problems(findings) == {
        ("host name", "host2"),
        ("interface of gloo", "host2"),
        ("next host", "host1"),  # which looks for host2 at 127.0.1.1
    }


@contextlib.contextmanager
def closed_ports(machine):
    """Let nothing in but what belongs to a connection, and the rendezvous."""
    machine.run("nft", "add table ip doctor")
    machine.run("nft", "add chain ip doctor in { type filter hook input priority 0; policy drop; }")
    machine.run("nft", "add rule ip doctor in iif lo accept")
    machine.run("nft", "add rule ip doctor in ct state established,related accept")
    machine.run("nft", "add rule ip doctor in tcp dport 29500 accept")
    try:
        yield
    finally:
        machine.run("nft", "delete table ip doctor")


@pytest.mark.exhaustive
def test_a_firewall_that_lets_the_rendezvous_alone_through_is_found(hosts, told):
    with closed_ports(hosts.machines[1]):
        _, findings = told()
    assert problems(findings) == {("next host", "host1")}
    assert "host2 at " in findings["next host", "host1"]["measured"]
    assert "timed out" in findings["next host", "host1"]["measured"]


def test_srun_on_two_nodes_looks_at_both(slurm, tmp_path):
    words = shlex.join([sys.executable, *WORDS, "--device", "cpu"])
    job_script = tmp_path / "job.sh"
    job_script.write_text(
        f"#!/bin/bash\nexport OMP_NUM_THREADS=1\nexec srun --output=table.json {words}\n"
    )
    with slurm.submit(tmp_path, "--nodes=2", "--ntasks-per-node=1", str(job_script)) as job:
        job.wait(180)
        text = (tmp_path / "table.json").read_text()
        assert text.startswith("{"), job.report()
    found = json.loads(text)
    assert found["world_size"] == 2
    assert len(set(found["hosts"])) == 2
    assert not [one for one in found["findings"] if one["name"] in {"launcher", "rendezvous"}]
    assert {one["verdict"] for one in found["findings"] if one["name"] == "next host"} == {"ok"}
