from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddpkit import device
from ddpkit.device import default_backend, infer_device, resolve_device, widest_float
from ddpkit.errors import ConfigError, LaunchError
from ddpkit.launch import LaunchInfo, find_launch
from ddpkit.run_opts import RunOptions
from tests.pretended_devices import pretend_devices

ALONE = LaunchInfo()


def ranks(local_rank, world_size=2):
    return LaunchInfo("torchrun", local_rank, local_rank, world_size, world_size)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to have so many devices of each kind."""

    def have(**counts):
        kind = next((kind for kind, count in counts.items() if count), "cpu")
        pretend_devices(monkeypatch, kind, **counts)

    return have


def test_infer_without_gpu_is_cpu(machine):
    machine(cuda=0)
    assert infer_device() == "cpu"
    assert infer_device(3) == "cpu"


def test_infer_takes_the_own_gpu(machine, monkeypatch):
    machine(cuda=4)
    assert infer_device() == "cuda:0"
    assert infer_device(3) == "cuda:3"
    for name, value in (("RANK", "6"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert infer_device() == "cuda:2"
    monkeypatch.delenv("RANK")
    with pytest.raises(LaunchError):
        infer_device()


def test_infer_other_accelerators(machine):
    machine(mps=1)
    assert infer_device() == "mps"
    machine(xpu=2)
    assert infer_device(1) == "xpu:1"


def test_infer_on_this_machine_is_a_device_that_works():
    assert torch.zeros(1, device=infer_device(0)).item() == 0.0


def test_not_enough_gpus_says_what_was_found_and_what_to_run(machine, monkeypatch):
    machine(cuda=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    for call in (lambda: infer_device(2), lambda: resolve_device("cuda", ranks(2, 3))):
        with pytest.raises(ConfigError) as caught:
            call()
        message = str(caught.value)
        assert message.startswith("Not enough GPUs")
        assert "LOCAL_RANK=2" in message
        assert "found 2 GPUs (cuda:0, cuda:1; CUDA_VISIBLE_DEVICES='4,5')" in message
        assert "--nproc_per_node=2" in message
        assert "--device=cpu --distributed_backend=gloo" in message


@pytest.mark.parametrize("given", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_cpu_in_any_form(given):
    assert resolve_device(given, ALONE) == "cpu"
    assert resolve_device(given, ranks(1)) == "cpu"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "cuda:0"),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        (torch.device("cuda"), "cuda:0"),
        (torch.device("cuda", 1), "cuda:1"),
    ],
)
def test_cuda_in_one_process(machine, given, expected):
    machine(cuda=2)
    assert resolve_device(given, ALONE) == expected


@pytest.mark.parametrize("given", [None, "cuda", "cuda:0", "cuda:1", torch.device("cuda")])
def test_a_launcher_binds_the_device_to_the_local_rank(machine, given):
    machine(cuda=2)
    assert [resolve_device(given, ranks(r)) for r in (0, 1)] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(("given", "speaker"), [("cuda:0", 1), ("cuda:1", 0), ("cuda:2", 0)])
def test_a_contradicting_number_is_warned_of_once_per_node(machine, caplog, given, speaker):
    machine(cuda=4)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for rank in range(4):
                resolve_device(given, ranks(rank, 4))
    (record,) = caplog.records
    assert f"device={given!r} under a launcher" in record.getMessage()
    assert f"cuda:{speaker} here" in record.getMessage()


def test_what_was_bound_is_bound_again_in_silence(machine, caplog):
    machine(cuda=2)
    for rank in (0, 1):
        first = resolve_device("cuda", ranks(rank))
        with caplog.at_level(logging.WARNING):
            assert resolve_device(first, ranks(rank)) == first
    assert not caplog.records


@pytest.mark.parametrize("info", [ALONE, ranks(0)])
def test_a_number_beyond_the_gpus(machine, info):
    machine(cuda=2)
    with pytest.raises(ConfigError) as caught:
        resolve_device("cuda:9", info)
    assert "device='cuda:9', but found 2 GPUs (cuda:0, cuda:1)" in str(caught.value)
    assert "--device=cuda:1" in str(caught.value)


def test_cuda_without_a_gpu_names_the_torch_that_sees_none(machine):
    machine()
    with pytest.raises(
        ConfigError,
        match=r"device='cuda', but found 0 GPUs \(by torch "
        r".*--device=cpu",
    ):
        resolve_device("cuda", ALONE)
    with pytest.raises(ConfigError) as caught:
        resolve_device("cuda:1", ranks(1))
    assert "--device=cpu --distributed_backend=gloo" in str(caught.value)
    assert torch.__version__ in str(caught.value)


def test_hidden_gpus_are_named(machine, monkeypatch):
    machine(cuda=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=''"):
        resolve_device("cuda", ALONE)


def test_mps_and_xpu(machine):
    machine(mps=1, xpu=2)
    assert resolve_device("mps", ALONE) == "mps"
    assert resolve_device("xpu:1", ALONE) == "xpu:1"
    assert resolve_device("xpu", ranks(1)) == "xpu:1"
    with pytest.raises(ConfigError, match="Not enough GPUs"):
        resolve_device("mps", ranks(1))


@pytest.mark.parametrize("given", ["gpu", "cuda:x", "", "0", 1.5])
def test_unknown_devices(given):
    with pytest.raises(ConfigError) as caught:
        resolve_device(given, ALONE)
    assert repr(given) in str(caught.value)
    assert "--device=cpu" in str(caught.value)


def test_meta_holds_no_data():
    with pytest.raises(ConfigError, match="holds no data"):
        resolve_device("meta", ALONE)


def test_default_backend():
    assert [default_backend(d) for d in ("cuda", "cuda:3", "cpu", "mps", "xpu:0")] == [
        "nccl",
        "nccl",
        "gloo",
        "gloo",
        "gloo",
    ]


def test_the_real_counts_are_plain_numbers():
    for kind in ("cpu", "cuda", "mps", "xpu", "nothing"):
        assert device.count_devices(kind) >= 0
    assert device.count_devices("nothing") == 0
    assert find_launch({}).local_rank == 0


def test_a_launcher_that_shows_each_process_its_own_gpu(machine):
    """srun --gpus-per-task=1: the third process of the node sees one GPU, by the number 0."""
    own = LaunchInfo("slurm", 2, 2, 4, 4, own_devices=True)
    machine(cuda=1)
    assert resolve_device(None, own) == resolve_device("cuda", own) == "cuda:0"
    assert resolve_device("cpu", own) == "cpu"
    machine(cuda=4)  # not bound after all: each sees all of them
    assert resolve_device("cuda", own) == "cuda:2"


@pytest.mark.parametrize("launcher", ["environment", "slurm", "openmpi", "torchrun"])
def test_who_sees_one_gpu_and_is_one_of_several_takes_that(machine, monkeypatch, launcher):
    """submitit exports LOCAL_RANK=3, and shows each process one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    info = LaunchInfo(launcher, 3, 3, 4, 4)
    machine(cuda=1)
    assert resolve_device(None, info) == resolve_device("cuda", info) == "cuda:0"
    machine(cuda=4)
    assert resolve_device("cuda", info) == "cuda:3"
    machine(cuda=2)
    with pytest.raises(ConfigError, match="Not enough GPUs: this is LOCAL_RANK=3"):
        resolve_device("cuda", info)
    machine(mps=1)
    with pytest.raises(ConfigError, match="Not enough GPUs"):
        resolve_device("mps", info)


def test_processes_of_torchrun_that_nothing_is_hidden_from_see_the_same_gpu(machine):
    machine(cuda=1)
    with pytest.raises(ConfigError, match="Not enough GPUs: this is LOCAL_RANK=1"):
        resolve_device("cuda", ranks(1))
    assert resolve_device("cuda", ranks(0)) == "cuda:0"


@pytest.mark.parametrize(
    ("visible", "number"),
    [("0", "GPU-1"), ("MIG-aa", "GPU-1 MIG-aa"), ("MIG-bb", "GPU-1 MIG-bb")],
)
def test_parts_of_a_divided_gpu_are_devices_of_their_own(monkeypatch, visible, number):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(uuid="GPU-1"),
    )
    assert device.physical_device("cuda:0") == number


@pytest.fixture
def group(monkeypatch):
    # torch puts its own in the place, to stay
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_in_a_group_without_a_launcher_the_script_chooses_the_gpu(machine, monkeypatch):
    machine(cuda=4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert infer_device() == "cuda:0", "CUDA is not in use yet, or not to be used in this process"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert (resolve_device(None, ALONE), resolve_device("cuda", ALONE), infer_device()) == (
        "cuda:2",
    ) * 3
    assert resolve_device("cuda:1", ALONE) == "cuda:1"
    assert resolve_device("cuda", ranks(3)) == "cuda:3"
    assert resolve_device("cpu", ALONE) == "cpu"
    monkeypatch.setattr(dist.group.WORLD, "bound_device_id", torch.device("cuda:3"))
    assert resolve_device(None, ALONE) == "cuda:3"


@pytest.mark.usefixtures("group")
def test_in_a_group_without_a_launcher_and_without_gpus_it_is_the_cpu(machine):
    machine(cuda=0)
    assert infer_device() == "cpu"


def test_without_a_group_it_is_the_first_gpu_as_ever(machine, monkeypatch):
    machine(cuda=4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert (resolve_device(None, ALONE), resolve_device("cuda", ALONE)) == ("cuda:0", "cuda:0")


def test_processes_of_a_parity_check_share_a_gpu_where_there_are_not_enough(machine, monkeypatch):
    for name, value in (
        ("RANK", "1"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("DDPKIT_PARITY", "/tmp/1"),
    ):
        monkeypatch.setenv(name, value)
    for gpus, expected in ((1, "cuda:0"), (2, "cuda:1")):
        machine(cuda=gpus)
        options = RunOptions(device="cuda").resolved()
        assert (options.device, options.distributed_backend) == (expected, "gloo")


def test_sums_are_kept_in_the_widest_numbers_that_a_device_has():
    assert [widest_float(one) for one in ("cpu", "cuda:1", "mps")] == [
        torch.float64,
        torch.float64,
        torch.float32,
    ]
