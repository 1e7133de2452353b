from __future__ import annotations

import shutil
import subprocess

import pytest

from ddpkit.errors import LaunchError
from ddpkit.launch.host_lists import expand_counts, expand_host_list

LISTS = {
    "node1": ["node1"],
    "a,b": ["a", "b"],
    "gpu[01-03,07],cpu-a[1-2]": ["gpu01", "gpu02", "gpu03", "gpu07", "cpu-a1", "cpu-a2"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[09-11]": ["n09", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[5]": ["n5"],
    "n[3,1,2]": ["n3", "n1", "n2"],
    "rack[1-2]node[08-09]": ["rack1node08", "rack1node09", "rack2node08", "rack2node09"],
    "a1.cluster.example.org,10.0.0.7": ["a1.cluster.example.org", "10.0.0.7"],
    "x-y_z[0-1],single": ["x-y_z0", "x-y_z1", "single"],
}


@pytest.mark.parametrize(("text", "names"), LISTS.items(), ids=LISTS.keys())
def test_lists(text, names):
    assert expand_host_list(text) == names


@pytest.mark.parametrize("text", LISTS, ids=LISTS.keys())
def test_slurms_own_program_says_the_same(text, tmp_path):
    """Where Slurm is installed it is the judge of the table above; it needs a configuration, and no daemon."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        pytest.skip("no scontrol here")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=ALL\n")
    command = [scontrol, "show", "hostnames", text]
    told = subprocess.run(
        command, env={"SLURM_CONF": str(conf)}, capture_output=True, text=True, check=True, timeout=20
    )
    assert told.stdout.split() == LISTS[text]


def test_letters_after_a_bracket():
    """Newer than some of Slurm's own programs, which refuse them."""
    assert expand_host_list("n[1-2]-ib,n3") == ["n1-ib", "n2-ib", "n3"]


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a,,b", "n[1-2", "n1]", "n[]", "n[a-b]", "n[2-1]", "n[1-]", "n[1-2[3]]",
             "n[0-9999999]", "n[0-2000][0-2000]"]
)  # fmt: skip
def test_what_is_no_list_is_refused(text):
    with pytest.raises(LaunchError, match="Set MASTER_ADDR to the host of task 0") as caught:
        expand_host_list(text)
    assert repr(text) in str(caught.value)


def test_counts():
    assert expand_counts("4") == [4]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("0,4,2") == [0, 4, 2]
    for text in ("", "x", "2(3)", "2(x)", "-1", "1(x99999999)"):
        with pytest.raises(LaunchError):
            expand_counts(text)
