"""How modules are wrapped and reached, and what is refused; DDP itself with a group of one
process.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit.base import unwrap
from ddpkit.checkpoints import torch_parameter_transfer, torch_recovery, torch_save
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.run_opts import RunOptions
from ddpkit.strategies.batch_norm_layers import has_moving_buffers
from ddpkit.strategies.choice import choose_strategy, make_strategy
from ddpkit.strategies.data_parallel import DataParallel, WrappedDataParallel
from ddpkit.strategies.ddp import DDP
from ddpkit.strategies.entries import modules_on_device, refuse_shared_parameters
from ddpkit.strategies.meta_modules import give_values, is_on_meta
from ddpkit.strategies.single import SingleDevice
from ddpkit.strategies.virtual_ranks import VirtualRanks
from ddpkit.strategies.wrapped_ddp import WrappedDDP
from ddpkit.syncbn import SyncBatchNorm
from tests.needs import needs_torch
from tests.pretended_devices import pretend_devices


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """A model with attributes that others want to reach."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.dim = 7
        self.memory = None

    def forward(self, x):
        return self.layer(x)

    def describe(self):
        return f"a net of {self.dim}"

    @property
    def width(self):
        return self.layer.in_features


def frozen(module):
    return module.requires_grad_(requires_grad=False)


# ----------------------------------------------------------------------------------------- choosing


def test_make_strategy(group):
    assert type(make_strategy("cpu")) is DDP
    ddp = choose_strategy(RunOptions(device="cpu", find_unused_parameters=True))
    assert type(ddp) is DDP
    assert ddp.options.find_unused_parameters


def test_one_process_without_a_group():
    assert type(make_strategy("cpu")) is SingleDevice
    assert (
        type(choose_strategy(RunOptions(device="cuda:0", data_parallel_backend=True)))
        is DataParallel
    )


def test_choices_that_cannot_work(group):
    with pytest.raises(
        ConfigError,
        match="data_parallel_backend=True is for one process, which has all GPUs of the machine, "
        "and this one is in a process group of 1. Start one: python train.py",
    ):
        choose_strategy(RunOptions(device="cuda:0", data_parallel_backend=True))


def test_data_parallel_needs_a_gpu():
    words = r"^data_parallel_backend=True needs a GPU, and the device is 'cpu'.*torchrun"
    with pytest.raises(ConfigError, match=words):
        choose_strategy(RunOptions(device="cpu", data_parallel_backend=True))


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        choose_strategy(RunOptions(device="cpu", **options))
    return str(caught.value)


@pytest.mark.parametrize("name", ["auto", "ddp", "single"])
def test_one_process_needs_no_strategy(name):
    assert type(choose_strategy(RunOptions(device="cpu", strategy=name))) is SingleDevice


WHY = {
    "data_parallel_backend": "it is a strategy itself",
    "virtual_ranks": "for the same bits on any number of processes",
}


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1"])
def test_strategies_that_do_not_go_with_others(name):
    others = {"data_parallel_backend": True}
    if name == "ddp":
        others["virtual_ranks"] = 4
    for option, value in others.items():
        found = refused(strategy=name, **{option: value})
        assert f"{option}={value} does not work with strategy={name}: {WHY[option]}" in found
    assert "data_parallel_backend" in refused(strategy="single", data_parallel_backend=True)
    options = RunOptions(device="cpu", strategy="single", virtual_ranks=4)
    assert choose_strategy(options).division().each == 4
    for strategy, kind in [("zero1", "VirtualZero1"), ("fsdp", "VirtualFSDP")]:
        options = RunOptions(device="cpu", strategy=strategy, virtual_ranks=4)
        assert type(choose_strategy(options)).__name__ == kind


def refused_as_single():
    return refused(strategy="single")


def test_one_process_is_no_strategy_where_a_launcher_has_started_several(ranks):
    for words in ranks.run(refused_as_single):
        assert "strategy='single' is for one process, and a launcher has started 2" in words


def test_post_local_sgd_is_for_several_processes():
    options = {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 2}
    assert type(choose_strategy(RunOptions(device="cpu", **options))) is SingleDevice
    words = (
        "ddp_comm_hook=post_local_sgd does not work with data_parallel_backend=True: it is for "
        "several processes"
    )
    assert refused(data_parallel_backend=True, **options).startswith(words)


def test_one_device_does_nothing():
    modules = nn.ModuleDict({"net": Net()})
    net = modules.net
    strategy = SingleDevice()
    strategy.wrap(modules)
    assert modules.net is net
    with strategy.no_sync():
        pass
    strategy.finish_gradients()


# ------------------------------------------------------------------------------------------ modules


def test_modules_on_device():
    class Mover(nn.Module):
        """Holds a plain tensor, which only its own ``to`` moves."""

        moved = None

        def to(self, device):
            self.moved = device
            return super().to(device)

    modules = modules_on_device({"mover": Mover(), "net": Net()}, "meta")
    assert modules.mover.moved == "meta"
    assert modules.net.layer.weight.device.type == "meta"
    assert list(modules_on_device({}, "cpu")) == []
    with pytest.raises(
        ConfigError,
        match=r"^modules is a Net, not modules by name: pass "
        r"{'net': net}\.$",
    ):
        modules_on_device(Net(), "cpu")
    with pytest.raises(ConfigError, match=r"^modules\['lr'\] is a float, not a torch.nn.Module"):
        modules_on_device({"net": Net(), "lr": 0.1}, "cpu")
    with pytest.raises(ConfigError, match=r"^modules\['size'\] is an int, not a torch.nn.Module"):
        modules_on_device({"size": 3}, "cpu")


OWN = ["weight", "scale", "count", "mask"]


class Table(nn.Module):
    """Has a weight, a buffer, a count and a mask of its own, and a layer; sets what it is told
    to.
    """

    def __init__(self, sets=OWN):
        super().__init__()
        self.sets = sets
        self.layer = nn.Linear(3, 2)
        self.weight = nn.Parameter(torch.empty(2, 2), requires_grad=False)
        self.register_buffer("scale", torch.empty(2), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def reset_parameters(self):
        for name in self.sets:
            nn.init.ones_(getattr(self, name))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.out = nn.Linear(3, 4)
        self.out.weight = self.table.weight
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.BatchNorm1d(3)


def made_on_meta(kind, *args, name="net"):
    with torch.device("meta"):
        module = kind(*args)
    give_values(name, module, "cpu")
    return module


def test_modules_on_the_meta_device_get_values(monkeypatch):
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "5")
    given = {"whole": nn.Linear(1, 1)}
    with torch.device("meta"):
        given["net"] = net = Tied()
    before = torch.get_rng_state()
    modules = modules_on_device(given, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert not is_on_meta(modules)
    assert net.out.weight is net.table.weight
    assert net.norm.running_var.tolist() == [1, 1, 1]
    assert net.norm.num_batches_tracked == 0
    # set by the attention after the layer inside of it
    assert not net.attention.out_proj.bias.any()
    again = made_on_meta(Tied)
    named = made_on_meta(Tied, name="x")
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "6")
    other = made_on_meta(Tied)
    for name, value in net.named_parameters():
        assert torch.equal(value, again.get_parameter(name)), name
    assert not torch.equal(net.out.bias, other.out.bias)
    assert not torch.equal(net.out.bias, named.out.bias)


def test_a_part_has_the_same_values_whatever_is_made_with_it():
    whole = made_on_meta(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": Table()}))
    part = made_on_meta(Table, name="net.b")
    assert part.scale.tolist() == [1, 1]
    assert not part.weight.requires_grad
    assert "scale" not in part.state_dict()
    for name, value in part.named_parameters():
        assert torch.equal(value, whole["b"].get_parameter(name)), name


@pytest.mark.parametrize("left", OWN)
def test_what_reset_parameters_leaves_without_values_is_named(left):
    sets = [name for name in OWN if name != left]
    words = (
        r"^modules: net is on the meta device, .* and Table.reset_parameters\(\) leaves some: "
        rf"{left}\. Give"
    )
    with pytest.raises(ConfigError, match=words):
        made_on_meta(Table, sets)


class Odd(nn.Module):
    """Has a weight with a mark and two names, and a buffer of bytes."""

    def __init__(self):
        super().__init__()
        self.weight = self.other = nn.Parameter(torch.empty(2))
        self.weight.decays = False
        self.register_buffer("bytes", torch.zeros(2, dtype=torch.uint8))

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bytes)


def test_tensors_that_get_values_stay_the_same_objects():
    with torch.device("meta"):
        odd = Odd()
    sgd = torch.optim.SGD(odd.parameters(), lr=0.1)
    give_values("net", odd, "cpu")
    assert odd.other is odd.weight is sgd.param_groups[0]["params"][0]
    assert odd.weight.decays is False
    assert odd.weight.requires_grad
    assert odd.bytes.tolist() == [0, 0]


def test_entries_on_the_meta_device_share_what_they_have_shared():
    with torch.device("meta"):
        first = nn.Linear(2, 2)
        second = nn.Linear(2, 2)
    second.weight = first.weight
    modules = modules_on_device({"a": first, "b": second}, "cpu")
    assert second.weight is first.weight
    with pytest.raises(ConfigError, match="share the parameter 'weight'"):
        refuse_shared_parameters(modules)


def test_a_class_without_reset_parameters_is_named():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    with pytest.raises(
        ConfigError,
        match=r"^modules: net.1 is on .* and Plain has no "
        r"reset_parameters\(\)\. Give",
    ):
        made_on_meta(lambda: nn.Sequential(nn.Linear(1, 1), Plain()))


def test_shared_parameters():
    shared = nn.Linear(2, 2)
    with pytest.raises(
        ConfigError,
        match=r"^modules\['b'\] and modules\['a'\] share the "
        r"parameter 'weight'",
    ):
        refuse_shared_parameters(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    refuse_shared_parameters(nn.ModuleDict({"tied": tied}))  # within one entry it is DDP's affair
    refuse_shared_parameters(nn.ModuleDict({"a": frozen(shared), "b": nn.Sequential(shared)}))
    with pytest.raises(ConfigError, match="or it would get two values from the meta device"):
        refuse_shared_parameters(
            nn.ModuleDict({"a": shared.to("meta"), "b": nn.Sequential(shared)})
        )


def test_moving_buffers():
    class Codebook(nn.Module):
        def __init__(self, dtype=torch.float32, *, persistent=True):
            super().__init__()
            self.register_buffer("book", torch.zeros(2, dtype=dtype), persistent=persistent)

    assert has_moving_buffers(Codebook())
    assert has_moving_buffers(nn.Sequential(nn.BatchNorm1d(2), Codebook()))
    assert not has_moving_buffers(Codebook(torch.int64))
    assert not has_moving_buffers(Codebook(persistent=False))
    assert not has_moving_buffers(
        nn.Sequential(nn.BatchNorm1d(2), SyncBatchNorm(2), nn.Linear(1, 1))
    )


@pytest.mark.costly
def test_unwrap(group):
    net = Net()
    assert unwrap(net) is net
    assert unwrap(WrappedDataParallel(net)) is net
    assert unwrap(WrappedDDP(net)) is net
    compiled = torch.compile(net, backend="eager")
    assert unwrap(compiled) is net
    assert unwrap(WrappedDDP(compiled)) is net


# --------------------------------------------------------------------------------- reaching through

WRAPPERS = [WrappedDataParallel, WrappedDDP]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_attributes_are_read_and_written_through_the_wrapper(group, wrapper):
    net = Net()
    wrapped = wrapper(net)
    assert (wrapped.dim, wrapped.width, wrapped.describe()) == (7, 2, "a net of 7")
    assert wrapped.layer is net.layer
    wrapped.memory = [1, 2]
    wrapped.new = "new"
    assert (net.memory, net.new) == ([1, 2], "new")
    assert wrapped.new == "new"
    wrapped.layer = nn.Linear(3, 1)
    assert wrapped.width == 3
    assert sum(1 for _ in wrapped.parameters()) == 2, "the parameters are the module's, once"
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'missing'"):
        _ = wrapped.missing
    assert not hasattr(wrapped, "missing")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_the_wrapper_has_is_its_own(group, wrapper):
    net = Net()
    wrapped = wrapper(net)
    wrapped.eval()
    assert (wrapped.training, net.training) == (False, False)
    wrapped.train()
    wrapped.device_ids = [3]
    assert "device_ids" not in net.__dict__
    other = Net()
    wrapped.module = other
    assert wrapped.module is other
    assert not hasattr(other, "module")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_containers_are_containers(group, wrapper):
    wrapped = wrapper(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert len(wrapped) == 2
    assert isinstance(wrapped[1], nn.ReLU)
    assert [type(part) for part in wrapped] == [nn.Linear, nn.ReLU]
    assert bool(wrapper(nn.Sequential(nn.Linear(1, 1))))
    assert bool(wrapper(Net())), "true, although it has no len()"
    with pytest.raises(TypeError):
        len(wrapper(Net()))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_copies_stand_alone(group, wrapper):
    wrapped = wrapper(Net())
    wrapped.dim = 9
    copied = copy.deepcopy(wrapped)
    copied.dim = 11
    assert (wrapped.dim, copied.dim) == (9, 11)
    assert copied.module is not wrapped.module
    assert copied(torch.ones(1, 2)).shape == (1, 1)


# ---------------------------------------------------------------------------------- nn.DataParallel


def test_data_parallel_begins_with_the_gpu_of_the_modules(monkeypatch):
    """``nn.DataParallel`` wants the parameters on the first of its devices."""
    given = {}

    def note(self, module, **options):
        nn.Module.__init__(self)
        self.module = module
        given.update(options)

    monkeypatch.setattr(nn.DataParallel, "__init__", note)
    pretend_devices(monkeypatch, "cuda", cuda=3)
    for device, expected in (("cuda:1", [1, 0, 2]), ("cuda:0", [0, 1, 2]), ("cuda:2", [2, 0, 1])):
        strategy = choose_strategy(RunOptions(device=device, data_parallel_backend=True))
        strategy.wrap(nn.ModuleDict({"net": Net()}))
        assert given["device_ids"] == expected


@pytest.fixture
def accelerator(monkeypatch):
    """A CPU as the accelerator of ``torch.nn.parallel``: its own threads run the replicas, with its
    own autocast.
    """
    module = sys.modules["torch.nn.parallel.parallel_apply"]
    monkeypatch.setattr(module, "_get_device_index", lambda device, optional: 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    for name in ("current_stream", "device_index"):
        monkeypatch.setattr(torch.accelerator, name, lambda device: contextlib.nullcontext())
    real = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": real(kind))


class Multiplied(nn.Module):
    def __init__(self):
        super().__init__()
        self.threads = []

    def forward(self, x):
        self.threads.append(threading.get_ident())
        return x @ x


@needs_torch("2.13", "it looks for a driver of GPUs, where replicas are on the CPU")
@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_replicas_compute_in_the_dtype_of_autocast_that_the_brain_has_entered(dtype):
    """The dtype of autocast is kept per thread, and each replica has a thread; a thread begins with
    the default.
    """
    net = Multiplied()
    wrapped = WrappedDataParallel(net)
    wrapped.src_device_obj = torch.device("cpu")
    wrapped.device_ids = [0, 0]
    x = torch.ones(2, 2)

    def run():
        return [
            output.dtype for output in wrapped.parallel_apply([net, net], [(x,), (x,)], [{}, {}])
        ]

    with torch.autocast("cpu", dtype=dtype):
        assert run() == [dtype, dtype]
    assert run() == [torch.float32, torch.float32], "autocast is off"
    assert threading.get_ident() not in net.threads


# ---------------------------------------------------------------------------------------------- DDP


def wrap(**modules):
    made = nn.ModuleDict(modules)
    strategy = DDP(RunOptions(device="cpu"))
    strategy.wrap(made)
    return made, strategy


def test_wrapping(group):
    modules, strategy = wrap(
        net=Net(),
        fixed=frozen(Net()),
        plain=nn.ReLU(),
        norm=nn.BatchNorm1d(3),
    )
    assert [type(module) for module in modules.values()] == [WrappedDDP, Net, nn.ReLU, WrappedDDP]
    assert type(modules.norm.module) is SyncBatchNorm
    assert len(strategy.wrapped) == 2
    before = dict(modules.items())
    strategy.wrap(modules)
    assert dict(modules.items()) == before, "what is wrapped is not wrapped again"


def test_shared_parameters_are_refused_before_anything_is_wrapped(group):
    shared = nn.Linear(2, 2)
    modules = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    with pytest.raises(ConfigError, match="share the parameter"):
        DDP(RunOptions(device="cpu")).wrap(modules)
    assert modules.a is shared


def test_ddp_follows_what_is_frozen_and_unfrozen(group):
    modules, strategy = wrap(
        net=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)),
        fixed=frozen(Net()),
        same=Net(),
    )
    net = modules.net.module
    first = modules.net
    same = modules.same
    strategy.begin_epoch(modules)
    assert modules.net is first, "nothing has changed"
    net[0].requires_grad_(requires_grad=False)
    modules.fixed.requires_grad_(requires_grad=True)
    strategy.begin_epoch(modules)
    assert modules.net is not first
    assert modules.net.module is net
    assert type(modules.fixed) is WrappedDDP
    assert modules.same is same
    assert {id(one) for one in strategy.wrapped} == {id(one) for one in modules.values()}
    modules.net(torch.ones(1, 2)).sum().backward()
    strategy.finish_gradients()
    assert net[0].weight.grad is None
    frozen(net)
    strategy.begin_epoch(modules)
    assert modules.net is net, "nothing of it is trained any more"
    assert len(strategy.wrapped) == 2


def test_evaluation_goes_past_ddp(group, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("DDP's forward was used")

    modules, _ = wrap(net=Net())
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "forward", refuse)
    batch = torch.ones(1, 2)
    with torch.no_grad():
        modules.net(batch)
    modules.eval()
    modules.net(batch)
    modules.train()
    with pytest.raises(AssertionError, match="DDP's forward was used"):
        modules.net(batch)


def test_no_sync_puts_back_what_was(group):
    modules, strategy = wrap(net=Net(), other=nn.Linear(1, 1))
    modules.other.require_backward_grad_sync = False
    with strategy.no_sync():
        assert not modules.net.require_backward_grad_sync
        with strategy.no_sync():
            pass
        assert not modules.net.require_backward_grad_sync, "nested"
    assert modules.net.require_backward_grad_sync
    assert not modules.other.require_backward_grad_sync, "as it was before"
    with pytest.raises(KeyError), strategy.no_sync():
        raise KeyError
    assert modules.net.require_backward_grad_sync


def count_reductions(monkeypatch):
    calls = []
    real = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counting)
    return calls


def test_gradients_are_finished_only_where_ddp_has_not_averaged(group, monkeypatch):
    calls = count_reductions(monkeypatch)
    modules, strategy = wrap(net=Net())
    batch = torch.ones(1, 2)
    modules.net(batch).sum().backward()
    strategy.finish_gradients()
    assert calls == [], "DDP did it"
    with strategy.no_sync():
        modules.net(batch).sum().backward()
    before = [parameter.grad.clone() for parameter in modules.net.parameters()]
    strategy.finish_gradients()
    assert calls == [3 + 2], "a weight of two and a bias, and which of them exist, in one piece"
    assert all(
        torch.equal(p.grad, old) for p, old in zip(modules.net.parameters(), before, strict=True)
    )
    modules.net.module(batch).sum().backward()  # past DDP
    strategy.finish_gradients()
    assert calls == [5, 5]
    modules.zero_grad()
    strategy.finish_gradients()
    assert calls == [5, 5], "without gradients there is nothing to do"


class Copies(TorchDispatchMode):
    """Notes how tensors are copied to a device that takes its time: whether somebody waits for
    it.
    """

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "meta":
            self.waits.append(not kwargs.get("non_blocking"))
        return function(*args, **kwargs)


@pytest.mark.parametrize("count", [torch.tensor(3), torch.tensor([2.5])], ids=str)
def test_minor_2_a_count_on_the_cpu_is_sent_to_the_gpu_without_waiting_for_it(
    group,
    monkeypatch,
    count,
):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **kwargs: dist.Work())
    with Copies() as copies:
        DDP(RunOptions(device="meta")).start_average(count, "meta")
    assert copies.waits == [False]


def test_a_backward_pass_decides_whether_to_average_also_in_a_copy(group, monkeypatch):
    """DDP asks about each bucket, whatever the forward pass expected; in one process an average is
    the same number.
    """
    averaged = []
    real = torch.distributed.all_reduce
    monkeypatch.setattr(
        torch.distributed,
        "all_reduce",
        lambda *a, **k: averaged.append(1) or real(*a, **k),
    )
    strategy = DDP(RunOptions(device="cpu"), has_own_fit_batch=True)
    modules = nn.ModuleDict({"net": nn.Linear(1, 1)})
    strategy.wrap(modules)
    other = DDP(RunOptions(device="cpu"))
    other.wrapped = [copy.deepcopy(modules.net)]
    for each in (strategy, other):
        [net] = each.wrapped
        for closes, messages in ((False, 0), (True, 1)):
            averaged.clear()
            loss = net(torch.ones(1, 1)).sum()
            with each.backward_pass(net, closes=closes, counts=True):
                loss.backward()
            assert len(averaged) == messages
        assert net.module.weight.grad.item() == 2.0


def test_a_backward_pass_that_counts_nothing_leaves_zeros(group):
    strategy = DDP(RunOptions(device="cpu"))
    modules = nn.ModuleDict({"net": nn.Linear(1, 1)})
    strategy.wrap(modules)
    loss = modules.net(torch.full((1, 1), float("inf"))).sum()
    with strategy.backward_pass(modules, closes=True, counts=False):
        (0.0 * loss).backward()
    assert [one.grad.item() for one in modules.parameters()] == [0.0, 0.0]
    modules.net(torch.ones(1, 1)).sum().backward()
    assert [one.grad.item() for one in modules.parameters()] == [1.0, 1.0]


def test_virtual_ranks_on_a_gpu_compute_with_deterministic_kernels(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        VirtualRanks("cuda:0", 2)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.backends.cudnn.benchmark is False
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_nothing_is_loaded_into_a_module_without_values(tmp_path):
    torch_save(nn.Linear(2, 1), tmp_path / "net.pt")
    for load in (
        torch_parameter_transfer,
        lambda net, path: torch_recovery(net, path, end_of_epoch=True),
    ):
        with pytest.raises(
            CheckpointError,
            match=r"net.pt does not fit this Linear: it is on "
            r"the meta device",
        ):
            load(nn.Linear(2, 1, device="meta"), tmp_path / "net.pt")
    torch_save(nn.BatchNorm1d(2, affine=False), tmp_path / "norm.pt")  # has buffers only
    with pytest.raises(CheckpointError, match="it is on the meta device, .* load it after that"):
        torch_parameter_transfer(
            nn.BatchNorm1d(2, affine=False, device="meta"),
            tmp_path / "norm.pt",
        )


def test_nothing_is_saved_of_a_module_without_values(tmp_path):
    with pytest.raises(
        CheckpointError,
        match="it is on the meta device, without values. .* save it after that",
    ):
        torch_save(nn.Linear(2, 1, device="meta"), tmp_path / "net.pt")
    assert not list(tmp_path.iterdir())


def test_options_of_fsdp_on_the_command_line_without_it_are_told(caplog):
    given = {
        "device": "cpu",
        "fsdp_blocks": ["Block"],
        "fsdp_cpu_offload": True,
        "fsdp_min_parameters": 5_000_000,
    }
    choose_strategy(RunOptions(**given))
    said = (
        "Without effect, as strategy=auto: fsdp_blocks, fsdp_cpu_offload. Give --strategy=fsdp, "
        "too."
    )
    assert [one.getMessage() for one in caplog.records] == [said]


@pytest.mark.parametrize(
    ("given", "main", "with_it"),
    [
        (
            {"matrix_approximation_rank": 2, "start_powersgd_iter": 9},
            "ddp_comm_hook=None",
            "ddp_comm_hook=powersgd",
        ),
        ({"local_sgd_period": 4}, "ddp_comm_hook=None", "ddp_comm_hook=post_local_sgd"),
        ({"reference_batch_size": 8}, "lr_scaling=none", "lr_scaling=sqrt"),
        ({"compile_mode": "max-autotune"}, "compile=False", "compile=True"),
        ({"debug_batches": 3}, "debug=False", "debug=True"),
        ({"profile_steps": 3}, "profile_training=False", "profile_training=True"),
    ],
)
def test_options_that_do_nothing_without_another_are_told(caplog, given, main, with_it):
    choose_strategy(RunOptions(device="cpu", **given))
    advice = with_it.removesuffix("=True").removesuffix("=sqrt")
    said = f"Without effect, as {main}: {', '.join(given)}. Give --{advice}, too."
    assert [one.getMessage() for one in caplog.records] == [said]
    caplog.clear()
    name, _, value = with_it.partition("=")
    choose_strategy(RunOptions(device="cpu", **given, **{name: value}))
    assert caplog.text == ""


def test_options_of_fsdp_that_wait_for_it_are_not(caplog):
    choose_strategy(RunOptions(device="cpu").resolved({"fsdp_blocks": ["Block"]}))
    choose_strategy(RunOptions(device="cpu", strategy="fsdp", fsdp_blocks=["Block"]))
    choose_strategy(RunOptions(**RunOptions(device="cpu").as_dict()))
    assert "Without effect" not in caplog.text


class Labels(nn.Module):
    """What is left out is -1."""

    def __init__(self):
        super().__init__()
        self.register_buffer("labels", torch.empty(4, dtype=torch.long))

    def reset_parameters(self):
        self.labels.fill_(-1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_on_the_meta_device_get_values(kind):
    layer = kind(2, 3, num_layers=2, device="meta")
    weight = layer.weight_ih_l0
    modules = modules_on_device({"net": layer, "labels": made_on_meta(Labels)}, "cpu")
    assert layer.weight_ih_l0 is weight
    modules.net(torch.ones(1, 4, 2))[0].sum().backward()
    assert weight.grad.abs().sum() > 0
    assert modules.labels.labels.tolist() == [-1] * 4
