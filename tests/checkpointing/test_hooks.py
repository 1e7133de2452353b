from __future__ import annotations

import errno
import functools
import mmap
import sys
import threading
import types
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import profile

from ddpkit import checkpoints
from ddpkit.base import mark_as_loader, mark_as_saver, mark_as_transfer, register_checkpoint_hooks
from ddpkit.checkpointing import threaded_loading
from ddpkit.checkpointing.file_loading import safe_load
from ddpkit.checkpointing.hook_lookup import (
    find_load_hook,
    find_save_hook,
    find_transfer_hook,
    get_default_hook,
    saves_on_every_rank,
)
from ddpkit.checkpointing.hooks import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS,
    DEFAULT_TRANSFER_HOOKS,
    torch_parameter_transfer,
    torch_recovery,
    torch_save,
)
from ddpkit.checkpointing.state_names import map_old_state_dict_weights
from ddpkit.errors import CheckpointError, CheckpointUsageError, ConfigError
from tests.speechbrain_marks import CHECKPOINTS, Normalization, Scheduler, mark


@pytest.fixture(autouse=True)
def _tables():
    """Give the tables back as they were."""
    tables = (DEFAULT_SAVE_HOOKS, DEFAULT_LOAD_HOOKS, DEFAULT_TRANSFER_HOOKS)
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def make_counter(**options):
    @register_checkpoint_hooks(**options)
    class Counter:
        def __init__(self, count=0):
            self.count = count

        @mark_as_saver
        def _save(self, path):
            path.write_text(str(self.count))

        @mark_as_loader
        def _load(self, path, end_of_epoch):
            self.count = int(path.read_text()) + end_of_epoch

        @mark_as_transfer
        def _transfer(self, path):
            self.count = -int(path.read_text())

    return Counter


# -------------------------------------------------------------------------------------------- marks


@pytest.mark.parametrize("options", [{}, {"save_on_main_only": True}, {"save_on_main_only": False}])
def test_marked_methods_become_the_hooks_of_the_class(tmp_path, options):
    counter = make_counter(**options)
    path = tmp_path / "a.ckpt"
    find_save_hook(counter(3))(counter(3), path)
    assert path.read_text() == "3"
    loaded = counter()
    find_load_hook(loaded)(loaded, path, True)
    assert loaded.count == 4
    find_transfer_hook(loaded)(loaded, path)
    assert loaded.count == -3
    assert saves_on_every_rank(find_save_hook(loaded)) == (
        options.get("save_on_main_only") is False
    )


def test_the_nearest_class_with_a_hook_or_speechbrain_s_mark_decides(tmp_path):
    class Sub(Normalization):
        def _save(self, path):  # not marked: the base's mark names it
            path.write_text(f"sub {self.count}")

    class State(Scheduler):
        def state_dict(self):
            raise AssertionError

        load_state_dict = state_dict

    @register_checkpoint_hooks
    class Own(Normalization):
        @mark_as_saver
        def own(self, path):
            path.write_text("own")

    class Below(Own):
        @mark("saver")
        def below(self, path):
            path.write_text("below")

    path = tmp_path / "a.ckpt"
    for one, text in ((Sub(), "sub 0"), (State(2), "2"), (Own(), "own"), (Below(), "below")):
        find_save_hook(one)(one, path)
        assert path.read_text() == text
    assert find_save_hook(nn.Linear(1, 1)) is torch_save
    DEFAULT_SAVE_HOOKS[Sub] = torch_save
    assert find_save_hook(Sub()) is torch_save


def test_speechbrain_s_mark_for_a_transfer_counts(tmp_path):
    torch.save({"count": 7}, tmp_path / "a.ckpt")
    norm = Normalization()
    find_transfer_hook(norm)(norm, tmp_path / "a.ckpt")
    assert norm.count == 7


@pytest.mark.parametrize("every_rank", [False, True])
def test_a_saver_that_speechbrain_runs_on_every_rank_is_run_on_every_rank(monkeypatch, every_rank):
    method = vars(Scheduler)["save"]
    library = types.ModuleType(CHECKPOINTS)
    library.DEFAULT_SAVE_HOOKS = {Scheduler: method if every_rank else functools.partial(method)}
    monkeypatch.setitem(sys.modules, CHECKPOINTS, library)
    assert saves_on_every_rank(find_save_hook(Scheduler())) is every_rank


def test_the_decorator_works_plain_and_as_a_call():
    class A:
        @mark_as_saver
        def save(self, path):
            pass

    assert register_checkpoint_hooks(A) is A
    assert DEFAULT_SAVE_HOOKS[A].name == "save"
    assert A not in DEFAULT_LOAD_HOOKS
    assert register_checkpoint_hooks(A, save_on_main_only=False) is A
    assert saves_on_every_rank(DEFAULT_SAVE_HOOKS[A])


def test_a_subclass_that_overrides_by_name_has_its_methods_used(tmp_path):
    class Tens(make_counter()):
        def _save(self, path):
            path.write_text(str(self.count * 10))

        def _load(self, path, end_of_epoch):
            self.count = int(path.read_text()) // 10

    path = tmp_path / "a.ckpt"
    find_save_hook(Tens(3))(Tens(3), path)
    assert path.read_text() == "30"
    loaded = Tens()
    find_load_hook(loaded)(loaded, path, True)
    assert loaded.count == 3


def test_marks_of_a_base_class_count_for_a_registered_subclass(tmp_path):
    class Base:
        @mark_as_saver
        def _save(self, path):
            path.write_text("base")

    @register_checkpoint_hooks
    class Sub(Base):
        def _save(self, path):
            path.write_text("sub")

    find_save_hook(Sub())(Sub(), tmp_path / "a")
    assert (tmp_path / "a").read_text() == "sub"
    assert find_save_hook(Base()) is None


def test_a_module_with_marked_methods_uses_them_instead_of_torchs():
    @register_checkpoint_hooks
    class Odd(nn.Linear):
        @mark_as_saver
        def _save(self, path):
            pass

    odd = Odd(1, 1)
    assert find_save_hook(odd) is not torch_save
    assert find_load_hook(odd) is torch_recovery


@pytest.mark.parametrize(
    ("mark", "good", "bad"),
    [
        (mark_as_saver, lambda self, path: None, lambda self: None),
        (mark_as_saver, lambda self, path, more=1: None, lambda self, path, more: None),
        (mark_as_saver, lambda *args: None, lambda: None),
        (mark_as_loader, lambda self, path, end_of_epoch: None, lambda self, path: None),
        (
            mark_as_loader,
            lambda self, path, end_of_epoch, device=None: None,
            lambda self, path, *, end_of_epoch: None,
        ),
        (mark_as_transfer, lambda self, path: None, lambda self, path, end_of_epoch: None),
    ],
)
def test_a_mark_checks_the_signature_at_decoration(mark, good, bad):
    assert mark(good) is good
    with pytest.raises(TypeError, match="must be callable with \\(self, path"):
        mark(bad)


def test_two_methods_with_one_mark_are_an_error():
    class Two:
        @mark_as_saver
        def a(self, path):
            pass

        @mark_as_saver
        def b(self, path):
            pass

    with pytest.raises(ConfigError, match="2 methods marked as saver"):
        register_checkpoint_hooks(Two)


# ------------------------------------------------------------------------------------------- tables


def test_tables_are_extended_from_outside_and_looked_up_by_mro():
    class A:
        pass

    class B(A):
        pass

    class C(B):
        pass

    def hook_a(obj, path):
        pass

    def hook_b(obj, path):
        pass

    assert find_save_hook(C()) is None
    DEFAULT_SAVE_HOOKS[A] = hook_a
    assert find_save_hook(C()) is hook_a
    DEFAULT_SAVE_HOOKS[B] = hook_b
    assert find_save_hook(C()) is hook_b
    assert find_save_hook(A()) is hook_a
    assert not saves_on_every_rank(hook_a)


def test_anything_with_a_state_dict_is_the_last_resort(tmp_path):
    class Meter:
        total = 0.0

        def state_dict(self):
            return {"total": self.total, "seen": [1, np.int64(2)]}

        def load_state_dict(self, state):
            self.total = state["total"]
            self.seen = state["seen"]

    saved = Meter()
    loaded = Meter()
    saved.total = np.float64(2.5)
    path = tmp_path / "meter.ckpt"
    find_save_hook(saved)(saved, path)
    find_load_hook(loaded)(loaded, path, False)
    assert loaded.total == 2.5
    assert type(loaded.total) is float
    assert type(loaded.seen[1]) is int
    assert find_transfer_hook(loaded) is None


def test_an_object_that_nothing_can_save_has_no_hook():
    assert find_save_hook(object()) is None
    assert find_load_hook([1]) is None


# -------------------------------------------------------------------------------------------- torch


def schedulers(optimizer):
    lr = torch.optim.lr_scheduler
    yield lr.StepLR(optimizer, 2)
    yield lr.ReduceLROnPlateau(optimizer)
    yield lr.CyclicLR(optimizer, 0.1, 0.2)
    yield lr.CyclicLR(optimizer, 0.1, 0.2, scale_fn=lambda x: 1.0)
    yield lr.OneCycleLR(optimizer, 0.1, 10)
    yield lr.LambdaLR(optimizer, lambda step: 0.5**step)
    yield lr.SequentialLR(
        optimizer,
        [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.5)],
        [2],
    )


@pytest.mark.parametrize("number", range(7))
def test_every_scheduler_of_torch_is_saved_and_loaded(tmp_path, number):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return optimizer, list(schedulers(optimizer))[number]

    def step(optimizer, scheduler):
        optimizer.step()
        needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        scheduler.step(1.0) if needs_metric else scheduler.step()

    # torch's own, about the order of steps and deprecated arguments
    warnings.simplefilter("ignore")
    optimizer, scheduler = make()
    for _ in range(3):
        step(optimizer, scheduler)
    for name, obj in (("o", optimizer), ("s", scheduler)):
        find_save_hook(obj)(obj, tmp_path / f"{name}.ckpt")
    other_optimizer, other_scheduler = make()
    for name, obj in (("o", other_optimizer), ("s", other_scheduler)):
        find_load_hook(obj)(obj, tmp_path / f"{name}.ckpt", True)
    for _ in range(3):
        step(optimizer, scheduler)
        step(other_optimizer, other_scheduler)
        assert [g["lr"] for g in optimizer.param_groups] == [
            g["lr"] for g in other_optimizer.param_groups
        ]


def test_an_optimizer_goes_on_as_if_nothing_had_happened(tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, torch.optim.Adam(model.parameters(), lr=np.float64(0.01))

    def step(model, optimizer):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer)
    torch_save(model, tmp_path / "m")
    torch_save(optimizer, tmp_path / "o")
    step(model, optimizer)
    other, other_optimizer = make()
    torch_recovery(other, tmp_path / "m", True)
    torch_recovery(other_optimizer, tmp_path / "o", True)
    step(other, other_optimizer)
    assert torch.equal(model.weight, other.weight)


def test_a_grad_scaler_is_saved_and_loaded(tmp_path):
    def make(scale):
        return torch.amp.GradScaler("cpu", init_scale=scale)

    saved = make(64.0)
    loaded = make(8.0)
    assert find_save_hook(saved) is torch_save
    torch_save(saved, tmp_path / "s")
    torch_recovery(loaded, tmp_path / "s", False)
    assert loaded.get_scale() == 64.0


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    class Odd:
        def state_dict(self):
            return {"array": np.ones(2), "path": Path("x")}

        def load_state_dict(self, state):
            pass

    with pytest.raises(
        CheckpointError,
        match="numpy.*could not be loaded again without running code",
    ):
        torch_save(Odd(), tmp_path / "odd.ckpt")


def test_a_module_of_another_size_names_some_parameters_with_both_shapes_and_what_to_do(tmp_path):
    path = tmp_path / "model.ckpt"
    torch_save(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), path)
    with pytest.raises(CheckpointUsageError) as raised:
        torch_recovery(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), path, True)
    lines = str(raised.value).splitlines()
    assert "0.weight" in lines[1]
    assert "[2, 2]" in lines[1]
    assert "[3, 3]" in lines[1]
    assert lines[6].startswith(
        "\t... and 3 more. Make it as it was when this was saved. Or begin anew from"
    )
    assert len(lines) == 7


def test_an_optimizer_of_an_older_version_or_with_entries_of_a_recipe_is_loaded(tmp_path):
    path = tmp_path / "optimizer.ckpt"
    weights = [nn.Parameter(torch.ones(1))]
    older = torch.optim.SGD(weights, lr=0.1).state_dict()
    del older["param_groups"][0]["nesterov"]
    torch.save(older, path)
    torch_recovery(torch.optim.SGD(weights, lr=0.2), path, True)
    torch_save(torch.optim.SGD([{"params": weights, "of_recipe": 1}], lr=0.1), path)
    loaded = torch.optim.SGD(weights, lr=0.2)
    torch_recovery(loaded, path, True)
    assert loaded.param_groups[0]["lr"] == 0.1


def test_a_state_that_does_not_fit_names_the_file_and_the_keys(tmp_path):
    path = tmp_path / "model.ckpt"
    torch_save(nn.Sequential(nn.Linear(2, 1)), path)
    with pytest.raises(
        CheckpointError,
        match=r"model.ckpt does not fit this "
        r"Linear(.|\n)*weight(.|\n)*0.weight",
    ):
        torch_recovery(nn.Linear(2, 1), path, True)
    with pytest.raises(CheckpointError, match=r"does not fit this SGD"):
        torch_recovery(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), path, True)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match=r"holds a list where a module's state was expected"):
        torch_recovery(nn.Linear(2, 1), path, True)


# ----------------------------------------------------------------------------------------- wrappers


class Compiled(nn.Module):
    """As torch.compile wraps a module, without loading the compiler: attributes are forwarded."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def __getattr__(self, name):
        if name == "_orig_mod":
            return self._modules["_orig_mod"]
        return getattr(self._modules["_orig_mod"], name)


class Net(nn.Module):
    """Has a submodule that is really called "module"."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.body = wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        self.module = nn.Linear(2, 1)


PLAIN = {
    "body.0.bias",
    "body.0.weight",
    "body.1.bias",
    "body.1.num_batches_tracked",
    "body.1.running_mean",
    "body.1.running_var",
    "body.1.weight",
    "module.bias",
    "module.weight",
}

WRAPS = {
    "plain": Net,
    "outside": lambda: nn.DataParallel(Net()),
    "inside": lambda: Net(nn.DataParallel),
    "compiled": lambda: Compiled(Net()),
    "compiled inside": lambda: Net(Compiled),
    "all": lambda: nn.DataParallel(Compiled(Net(lambda m: Compiled(nn.DataParallel(m))))),
}


@pytest.mark.parametrize("saved_as", WRAPS)
def test_modules_are_stored_unwrapped_and_load_into_any_wrapping(tmp_path, saved_as):
    path = tmp_path / "net.ckpt"
    net = WRAPS[saved_as]()
    for parameter in net.parameters():
        nn.init.uniform_(parameter)
    torch_save(net, path)
    state = safe_load(path)
    assert set(state) == PLAIN
    assert state._metadata["body.1"] == {"version": 2}
    for name, make in WRAPS.items():
        loaded = make()
        torch_recovery(loaded, path, True)
        torch_save(loaded, tmp_path / "again.ckpt")
        again = safe_load(tmp_path / "again.ckpt")
        assert all(torch.equal(again[key], state[key]) for key in PLAIN), name


@pytest.mark.parametrize("saved_as", WRAPS)
def test_files_with_wrapped_names_load_too(tmp_path, saved_as):
    path = tmp_path / "net.ckpt"
    net = WRAPS[saved_as]()
    torch.save(net.state_dict(), path)
    loaded = Net()
    torch_recovery(loaded, path, True)
    assert torch.equal(loaded.module.weight, list(net.parameters())[-2])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_module_is_saved_and_loaded_like_any_other(tmp_path):
    plain = nn.Sequential(nn.Linear(2, 1))
    torch_save(torch.jit.script(plain), tmp_path / "net.ckpt")
    loaded = nn.Sequential(nn.Linear(2, 1))
    torch_recovery(torch.jit.script(loaded), tmp_path / "net.ckpt", True)
    assert torch.equal(loaded[0].weight, plain[0].weight)


@pytest.mark.costly
def test_torch_compile_really_names_its_module_so(tmp_path):
    compiled = torch.compile(nn.Linear(2, 1), backend="eager")
    torch_save(compiled, tmp_path / "a")
    assert set(safe_load(tmp_path / "a")) == {"weight", "bias"}
    torch_recovery(compiled, tmp_path / "a", True)


@pytest.mark.parametrize(
    "load",
    [torch_parameter_transfer, functools.partial(torch_recovery, end_of_epoch=True)],
)
def test_a_path_may_be_a_text(tmp_path, load):
    saved = nn.Linear(2, 1)
    loaded = nn.Linear(2, 1)
    torch_save(saved, tmp_path / "a")
    load(loaded, str(tmp_path / "a"))
    assert torch.equal(loaded.weight, saved.weight)


def test_transfer_is_not_strict_and_names_what_is_missing_and_unused(tmp_path, caplog):
    path = tmp_path / "pretrained.ckpt"
    torch.save({"weight": torch.full((1, 2), 7.0), "old": torch.ones(1)}, path)
    model = nn.Linear(2, 1)
    bias = model.bias.clone()
    torch_parameter_transfer(nn.DataParallel(model), path)
    assert torch.equal(model.weight, torch.full((1, 2), 7.0))
    assert torch.equal(model.bias, bias)
    assert "has no bias" in caplog.text
    assert "has old" in caplog.text
    torch.save({"weight": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match="does not fit this Linear"):
        torch_parameter_transfer(model, path)


# ------------------------------------------------------------------------------------------- safety


class Evil:
    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return (open, (self.target, "w"))


@pytest.mark.parametrize("variable", ["0", "1"])
@pytest.mark.parametrize("as_zip", [True, False])
def test_loading_runs_no_code_whatever_the_environment_says(
    tmp_path,
    monkeypatch,
    variable,
    as_zip,
):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", variable)
    # else torch's warning, an error in tests, would stop an unsafe load
    warnings.simplefilter("ignore")
    path = tmp_path / "model.ckpt"
    target = tmp_path / "touched"
    torch.save({"weight": Evil(target)}, path, _use_new_zipfile_serialization=as_zip)
    for load in (
        lambda: safe_load(path),
        lambda: torch_recovery(nn.Linear(1, 1), path, True),
        lambda: torch_parameter_transfer(nn.Linear(1, 1), path),
    ):
        with pytest.raises(CheckpointError, match="model.ckpt"):
            load()
        assert not target.exists()
    if as_zip:
        with pytest.raises(CheckpointError, match="would run code"):
            safe_load(path)


def test_the_variable_would_run_code_in_a_bare_load(tmp_path, monkeypatch):
    """Else the test above shows nothing."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "model.ckpt"
    target = tmp_path / "touched"
    torch.save({"weight": Evil(target)}, path)
    with pytest.warns(UserWarning, match="forcing weights_only=False"):
        torch.load(path)["weight"].close()
    assert target.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"PK", b"\x80\x02garbage", b"hello", b"PK\x03\x04" + b"\x00" * 100],
)
@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, mmap):
    path = tmp_path / "model.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot load .*model.ckpt"):
        safe_load(path, mmap=mmap)
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        safe_load(path, mmap=mmap)


@pytest.mark.parametrize("place", ["cpu", "meta", torch.device("meta")])
@pytest.mark.parametrize("mmap", [False, True])
def test_sparse_tensors_are_loaded_and_nothing_is_said_of_them(tmp_path, place, mmap):
    path = tmp_path / "model.ckpt"
    torch.save({"sparse": torch.eye(3).to_sparse(), "dense": torch.ones(2)}, path)
    loaded = safe_load(path, place, mmap=mmap)
    assert loaded["sparse"].is_sparse
    assert [one.shape for one in loaded.values()] == [(3, 3), (2,)]
    if place == "cpu":
        assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))


class Keeps(nn.Linear):
    """Keeps the tensor that it is given, as torchmetrics does."""

    def _load_from_state_dict(self, state_dict, prefix, *others):
        self.weight = nn.Parameter(state_dict[prefix + "weight"])


class KeepsByHook(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.zeros(1)
        self.register_load_state_dict_pre_hook(self.keep)

    def keep(self, module, state_dict, *others):
        self.weight = state_dict.pop("weight")


def keeps_by_its_instance():
    module = nn.Linear(4096, 1, bias=False)
    module._load_from_state_dict = functools.partial(Keeps._load_from_state_dict, module)
    return module


def stored(path, how, state=None):
    """Write a state as torch does, as torch did before 1.6, or in a compressed archive."""
    state = state or {"weight": torch.arange(4096.0).reshape(1, -1)}
    torch.save(state, path, _use_new_zipfile_serialization=how != "old")
    if how == "compressed":
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    return state.get("weight")


@pytest.mark.parametrize("how", ["new", "old", "compressed"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4096, 1, bias=False),
        lambda: Keeps(4096, 1),
        KeepsByHook,
        keeps_by_its_instance,
    ],
)
def test_what_was_loaded_depends_on_the_file_no_longer(tmp_path, make, how):
    path = tmp_path / "a.ckpt"
    module = make()
    weight = stored(path, how)
    torch_recovery(module, path, end_of_epoch=True)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(module.weight, weight)


class KeepsState(torch.optim.SGD):
    def __init__(self):
        super().__init__([nn.Parameter(torch.zeros(1))])

    def load_state_dict(self, state):
        self.loaded = state["state"]


def loaded_into_an_optimizer(path, state, monkeypatch, how="new", threads=True):
    """Load a state and overwrite its file; return what the optimizer has kept."""
    optimizer = KeepsState()
    stored(path, how, {"state": state, "param_groups": []})
    if threads:
        monkeypatch.setattr(threaded_loading, "LEAST_MEAN_BYTES", 0)
    torch_recovery(optimizer, path, end_of_epoch=True)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    return optimizer.loaded


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("how", ["new", "old", "compressed"])
def test_the_state_of_an_optimizer_depends_on_its_file_no_longer(
    tmp_path,
    monkeypatch,
    how,
    threads,
):
    whole = torch.arange(5000.0)
    nothing = torch.empty(3, 0)
    kinds = {
        "double": whole.double(),
        "bf16": whole.bfloat16(),
        "complex": torch.complex(whole, whole),
    }
    state = {
        0: {
            "a": whole,
            "b": whole[10:].view(4990, 1),
            "c": whole[:4].view(2, 2).t(),
            "same": whole,
        },
        1: kinds,
    }
    state[2] = {
        "step": torch.tensor(3.0),
        "nothing": nothing,
        "list": [(nothing, torch.ones(2, dtype=torch.bool))],
    }
    loaded = loaded_into_an_optimizer(tmp_path / "a.ckpt", state, monkeypatch, how, threads)
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)
    assert loaded[0]["c"].stride() == (1, 2)
    assert loaded[0]["a"] is loaded[0]["same"]
    loaded[0]["a"].fill_(7)
    assert loaded[0]["b"].eq(7).all()  # they share their memory, as they did
    assert loaded[0]["c"].eq(7).all()


def with_attribute():
    tensor = torch.ones(1)
    tensor.part = torch.ones(5000)
    return tensor


def per_channel():
    return torch.quantize_per_channel(
        torch.ones(5000, 1),
        torch.full((5000,), 0.5),
        torch.zeros(5000),
        0,
        torch.qint8,
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, of sparse and quantized tensors
@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: torch.eye(500).to_sparse(), lambda x: x.to_dense().diagonal()),
        (lambda: torch.eye(99).to_sparse_csr(), lambda x: x.values()),
        (
            lambda: torch.nested.nested_tensor([torch.ones(5000), torch.ones(2)]),
            lambda x: x.unbind()[0],
        ),
        (per_channel, lambda x: x.dequantize()),
        (lambda: torch.complex(torch.ones(5000), torch.ones(5000)).conj(), lambda x: -x.imag),
        (lambda: torch.complex(torch.ones(5000), torch.ones(5000)).conj().imag, lambda x: -x),
        (lambda: nn.Parameter(torch.ones(5000)), lambda x: x.detach()),
        (lambda: torch.ones(5000, requires_grad=True), lambda x: x.detach()),
        (lambda: OrderedDict(a=torch.ones(5000)), lambda x: x["a"]),
        (lambda: {torch.ones(5000): 1}, lambda x: next(iter(x))),
        (lambda: {(torch.ones(5000),): 1}, lambda x: next(iter(x))[0]),
        (with_attribute, lambda x: x.part),
    ],
)
def test_no_state_of_an_optimizer_depends_on_its_file(tmp_path, monkeypatch, make, values):
    loaded = loaded_into_an_optimizer(tmp_path / "a.ckpt", {0: {"a": make()}}, monkeypatch)
    assert values(loaded[0]["a"]).eq(1).all()


@pytest.mark.parametrize("threads", [False, True])
def test_an_optimizer_is_loaded_where_gradients_are_off(tmp_path, monkeypatch, threads):
    with torch.inference_mode():
        loaded = loaded_into_an_optimizer(
            tmp_path / "a.ckpt",
            {0: {"a": torch.ones(5000)}},
            monkeypatch,
            "new",
            threads,
        )
    assert loaded[0]["a"].eq(1).all()


def test_a_tensor_that_is_larger_than_its_record_is_refused(tmp_path, monkeypatch):
    """A mapping would give it the bytes that come next in the file."""
    path = tmp_path / "a.ckpt"
    stored(path, "new", {"state": [torch.ones(5000), torch.ones(9000)], "param_groups": []})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content[:10000] if name.endswith("data/0") else content)
    monkeypatch.setattr(threaded_loading, "LEAST_MEAN_BYTES", 0)
    with pytest.raises(CheckpointError, match="record size"):
        torch_recovery(KeepsState(), path, end_of_epoch=True)


def test_a_damaged_directory_of_an_optimizer_s_file_is_told_with_its_path(tmp_path):
    path = tmp_path / "a.ckpt"
    stored(path, "new", {"state": torch.ones(5000), "param_groups": []})
    content = path.read_bytes()
    # of the first file's entry: its flags are at 8, its name at 46
    place = content.index(b"PK\1\2")
    damaged = bytearray(content)
    damaged[place + 9] |= 8  # the name is UTF-8
    damaged[place + 46] = 0xFF
    path.write_bytes(damaged)
    with pytest.raises(UnicodeDecodeError):
        zipfile.ZipFile(path)
    with pytest.raises(CheckpointError, match=r"cannot load .*a.ckpt"):
        torch_recovery(KeepsState(), path, end_of_epoch=True)


def test_an_optimizer_is_loaded_where_no_thread_can_be_started(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    loaded = loaded_into_an_optimizer(
        tmp_path / "a.ckpt",
        {0: {"a": torch.ones(5000)}},
        monkeypatch,
    )
    assert loaded[0]["a"].eq(1).all()


@pytest.mark.parametrize("make", [KeepsState, lambda: nn.Linear(4096, 1, bias=False)])
def test_a_file_is_not_changed_when_it_is_loaded(tmp_path, monkeypatch, make):
    """torch swaps the bytes of another machine's file in its pages, which a shared mapping writes
    back.
    """
    path = tmp_path / "a.ckpt"
    obj = make()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
        if isinstance(obj, nn.Module):
            stored(path, "new")
        else:
            stored(path, "new", {"state": torch.ones(5000), "param_groups": []})
    content = path.read_bytes()
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        torch_recovery(obj, path, end_of_epoch=True)
    assert path.read_bytes() == content


def test_a_state_that_holds_itself_is_loaded(tmp_path, monkeypatch):
    state = [torch.ones(5000)]
    state.append(state)
    loaded = loaded_into_an_optimizer(tmp_path / "a.ckpt", state, monkeypatch)
    assert loaded[1] is loaded
    assert loaded[0].eq(1).all()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, which will drop such tensors
@pytest.mark.parametrize("channels", [None, 0])
def test_a_quantised_buffer_that_was_loaded_depends_on_the_file_no_longer(tmp_path, channels):
    """A tensor that is quantised per channel shares its scales with the one that it is copied
    from.
    """

    class Quantised(nn.Module):
        def __init__(self, scale):
            super().__init__()
            scales = torch.full((4096,), scale)
            ones = torch.ones(4096, 1)
            whole = torch.quantize_per_tensor(ones, scale, 0, torch.qint8)
            parts = torch.quantize_per_channel(ones, scales, torch.zeros(4096), 0, torch.qint8)
            self.register_buffer("codes", whole if channels is None else parts)

    path = tmp_path / "a.ckpt"
    module = Quantised(0.5)
    torch_save(Quantised(0.25), path)
    torch_recovery(module, path, end_of_epoch=True)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(module.codes.dequantize(), torch.ones(4096, 1))


@pytest.mark.parametrize(
    "load",
    [functools.partial(torch_recovery, end_of_epoch=True), torch_parameter_transfer],
)
def test_a_module_keeps_its_parameters_though_the_file_asks_for_new_ones(tmp_path, load):
    """torch notes ``assign=True`` in the metadata of the state that a caller gave, and does so
    again after a save.
    """
    path = tmp_path / "a.ckpt"
    source = nn.Linear(4, 1)
    module = nn.Linear(4, 1)
    state = source.state_dict()
    nn.Linear(4, 1).load_state_dict(state, assign=True)
    torch.save(state, path)
    weight = module.weight
    load(module, path)
    assert module.weight is weight
    assert torch.equal(weight, source.weight)


def test_a_file_that_cannot_be_mapped_is_read(tmp_path, monkeypatch):
    """As on some network file systems."""
    path = tmp_path / "a.ckpt"
    source = nn.Linear(4, 1)
    module = nn.Linear(4, 1)
    torch_save(source, path)

    def refuse(*_, **__):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(mmap, "mmap", refuse)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    torch_recovery(module, path, end_of_epoch=True)
    assert torch.equal(module.weight, source.weight)


@pytest.mark.parametrize(
    "load",
    [functools.partial(torch_recovery, end_of_epoch=True), torch_parameter_transfer],
)
def test_a_module_is_loaded_without_a_copy_of_its_state_in_memory(tmp_path, load):
    path = tmp_path / "a.ckpt"
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256))
    torch_save(model, path)
    with profile(profile_memory=True, acc_events=False) as profiler:
        load(model, path)
    sizes = [
        event.nbytes()
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert 4 * 256 * 256 not in sizes


def test_types_that_the_user_allows_are_loaded(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"path": np.float64(3)}, path)
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        safe_load(path)
    allowed = [np._core.multiarray.scalar, np.dtype, np.dtypes.Float64DType]
    with torch.serialization.safe_globals(allowed):
        assert safe_load(path) == {"path": 3.0}


# ------------------------------------------------------------------------------ SpeechBrain's names


def test_the_default_hook_is_that_of_the_nearest_class():
    assert get_default_hook(nn.Linear(1, 1), DEFAULT_SAVE_HOOKS) is torch_save
    assert get_default_hook(nn.Linear(1, 1), {nn.Module: 1, nn.Linear: 2}) == 2
    assert get_default_hook(nn.Linear(1, 1), {}) is None
    assert get_default_hook(object(), DEFAULT_LOAD_HOOKS) is None
    assert get_default_hook(Normalization(), DEFAULT_LOAD_HOOKS).name == "_load"
    assert get_default_hook(Normalization(), {nn.Module: torch_save}) is torch_save


def test_names_of_an_old_state_dict_are_replaced_wherever_the_text_stands():
    old = {
        "a.atn.0.weight": torch.ones(1),
        "b.weight": torch.zeros(1),
        "matnx.atn.bias": torch.ones(2),
    }
    expected = dict(
        zip(("a.head.0.weight", "b.weight", "matnx.head.bias"), old.values(), strict=True)
    )
    found = map_old_state_dict_weights(old, {".atn": ".attn", ".attn": ".head"})
    assert found is old
    assert list(found) == list(expected)
    assert all(found[name] is value for name, value in expected.items())


def test_two_entries_of_an_old_state_dict_do_not_become_one():
    old = {"a.old": torch.ones(1), "a.new": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="'a.new' and one before it, would be named 'a.new'"):
        map_old_state_dict_weights(old, {"old": "new"})
    assert list(old) == ["a.old", "a.new"]


def test_the_names_of_files_are_those_of_a_checkpoint(tmp_path):
    saved = checkpoints.Checkpointer(tmp_path, {"net": nn.Linear(1, 1)}).save_checkpoint()
    assert (saved.path / checkpoints.METAFNAME).is_file()
    assert saved.paramfiles["net"].name == f"net{checkpoints.PARAMFILE_EXT}"


def test_an_optimizer_steps_as_the_script_says_and_not_as_its_checkpoint(tmp_path):
    parameter = nn.Parameter(torch.ones(2))
    torch_save(torch.optim.Adam([parameter], fused=False), tmp_path / "o")
    fused = torch.optim.Adam([parameter], fused=True)
    torch_recovery(fused, tmp_path / "o", True)
    assert [group["fused"] for group in fused.param_groups] == [True]
