"""Which modules are compiled, and what happens when that fails."""

from __future__ import annotations

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpkit.errors import ConfigError
from ddpkit.training.module_options import compile_modules, has_cuda_graphs


def options(**given):
    return SimpleNamespace(
        **{
            "compile": False,
            "compile_module_keys": None,
            "compile_blocks": None,
            "compile_mode": "default",
            "compile_using_fullgraph": False,
            "compile_using_dynamic_shape_tracing": False,
            **given,
        }
    )


@pytest.fixture
def modules():
    return nn.ModuleDict({"net": nn.Linear(2, 2), "head": nn.Linear(2, 1), "loss": nn.Identity()})


@pytest.fixture
def wrapped(monkeypatch):
    """Record what would be compiled instead of compiling it."""
    calls = []

    def fake(function, **kwargs):
        calls.append((function.__self__, kwargs))
        return function

    monkeypatch.setattr(torch, "compile", fake)
    return calls


def names(modules, calls):
    return [name for module, _ in calls for name, entry in modules.items() if entry is module]


def test_nothing_asked_nothing_done(modules, wrapped):
    before = dict(modules)
    compile_modules(modules, options())
    assert wrapped == []
    assert dict(modules) == before


def test_compile_means_every_module_with_the_options(modules, wrapped):
    keys = list(modules.state_dict())
    compile_modules(
        modules,
        options(compile=True, compile_mode="max-autotune", compile_using_fullgraph=True),
    )
    assert names(modules, wrapped) == ["net", "head", "loss"]
    assert wrapped[0][1] == {"mode": "max-autotune", "fullgraph": True, "dynamic": False}
    assert list(modules.state_dict()) == keys
    assert type(modules["net"]) is nn.Linear


@pytest.mark.parametrize("keys", [["head", "net"], {"net", "head"}, "net,head"])
def test_keys_choose(modules, wrapped, keys):
    compile_modules(modules, options(compile=True, compile_module_keys=keys))
    assert names(modules, wrapped) == ["net", "head"]


def test_keys_without_compile_work_and_warn(modules, wrapped, caplog):
    compile_modules(modules, options(compile_module_keys=["net"]))
    assert names(modules, wrapped) == ["net"]
    assert "compile_module_keys=['net'] is given without compile" in caplog.text


def test_an_unknown_key_names_the_known_ones(modules, wrapped):
    with pytest.raises(
        ConfigError,
        match=r"compile_module_keys=\['nett'\] names 'nett', .* "
        r"'net', 'head', 'loss'",
    ):
        compile_modules(modules, options(compile=True, compile_module_keys=["nett"]))
    assert wrapped == []


def test_a_second_call_changes_nothing(modules, wrapped):
    for _ in range(2):
        compile_modules(modules, options(compile=True, compile_module_keys=["net"]))
    assert names(modules, wrapped) == ["net"]


def test_what_cannot_be_wrapped_is_left_with_the_reason(modules, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fail)
    compile_modules(modules, options(compile=True, compile_module_keys=["net"]))
    assert "module 'net' could not be wrapped by torch.compile" in caplog.text
    assert "RuntimeError: no compiler here" in caplog.text


def test_a_mode_that_torch_does_not_know_is_logged(modules, caplog):
    compile_modules(
        modules,
        options(compile=True, compile_module_keys=["net"], compile_mode="bogus"),
    )
    assert "Unrecognized mode=bogus" in caplog.text
    modules["net"](torch.ones(1, 2))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("gcc") is None,
    reason="torch.compile needs a C compiler on the CPU",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside its compiler
def test_a_compiled_module_computes_and_copies_and_saves_as_before(modules):
    x = torch.randn(4, 2)
    expected = modules["net"](x)
    compile_modules(modules, options(compile=True, compile_module_keys=["net"]))
    found = modules["net"](x)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    assert modules["net"].weight.grad is not None
    twin = copy.deepcopy(modules["net"])
    twin.load_state_dict(modules["net"].state_dict())
    torch.testing.assert_close(twin(x), expected)


@pytest.mark.parametrize(
    ("given", "has"),
    [
        ({"compile": True, "compile_mode": "reduce-overhead"}, True),
        ({"compile_blocks": ["Linear"], "compile_mode": "max-autotune"}, True),
        ({"compile": True, "compile_mode": "max-autotune-no-cudagraphs"}, False),
        ({"compile": True}, False),
        ({"compile_mode": "reduce-overhead"}, False),
        ({"compile": True, "compile_mode": "reduce-overhead", "device": "cpu"}, False),
    ],
)
def test_which_options_make_cuda_graphs(given, has):
    assert has_cuda_graphs(options(**{"device": "cuda:0", **given})) == has
