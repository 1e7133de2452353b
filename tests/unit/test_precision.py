"""Formats, contexts and scaler."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from ddpkit.errors import ConfigError
from ddpkit.precision import (
    AMPConfig,
    Precision,
    StepScaler,
    TorchAutocast,
    fwd_default_precision,
)

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(None, torch.float32), ("fp32", torch.float32), ("fp16", torch.float16), ("bf16", BF16)],
)
def test_formats_by_name(name, dtype):
    assert AMPConfig.from_name(name).dtype is dtype


@pytest.mark.parametrize("name", ["fp8", "", "FP32", 16])
def test_an_unknown_format_is_an_error(name):
    with pytest.raises(ConfigError, match="precision=.* Choose one of fp32, fp16, bf16"):
        AMPConfig.from_name(name)
    with pytest.raises(ValueError, match="fp32, fp16, bf16"):
        Precision("fp32", name, "cpu")


@pytest.mark.parametrize("option", ["precision", "eval_precision"])
def test_fp16_on_a_cpu_is_an_error_that_names_bf16(option):
    names = {"precision": "fp32", "eval_precision": "fp32", option: "fp16"}
    with pytest.raises(
        ConfigError,
        match=rf"^{option}='fp16' .* device='cpu:0'.*bf16 works "
        rf"there.*--{option}=bf16",
    ):
        Precision(**names, device="cpu:0")


def test_the_two_contexts_and_the_scaler():
    precision = Precision("bf16", "fp32", "cpu")
    x = torch.ones(2, 2)
    with precision.training_ctx:
        assert (x @ x).dtype is BF16
    with precision.evaluation_ctx:
        assert (x @ x).dtype is torch.float32
    assert not precision.scaler.is_enabled()
    assert precision.scaler.scale(x) is x


@pytest.mark.filterwarnings(
    "ignore:torch.cuda.amp.GradScaler is enabled, but CUDA is not available"
)
@pytest.mark.parametrize("names", [("fp16", "fp32"), ("fp32", "fp16")])
def test_the_scaler_scales_for_fp16_training_on_cuda_only(names):
    precision = Precision(*names, "cuda:0")
    wanted = names[0] == "fp16" and torch.cuda.is_available()
    assert precision.scaler.is_enabled() is wanted
    assert precision.training_ctx.device_type == "cuda"


def test_gradients_are_unscaled_once_in_a_step():
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = StepScaler("cpu", init_scale=8.0)
    for _ in range(2):
        scaler.scale(3 * weight).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        assert weight.grad == 3.0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert weight == 1.0 - 2 * 0.5 * 3.0


def autocast_is_on():
    return torch.is_autocast_enabled("cpu")


def test_entered_inside_itself_and_left_by_an_exception():
    context = TorchAutocast(device_type="cpu", dtype=BF16)

    def enter_twice_and_fail():
        with context:
            with context:
                assert autocast_is_on()
            assert autocast_is_on()
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            enter_twice_and_fail()
        assert not autocast_is_on()


def test_float32_leaves_an_outer_autocast_alone():
    with torch.autocast("cpu", dtype=BF16), TorchAutocast(device_type="cpu", dtype=torch.float32):
        assert autocast_is_on()


def test_float32_costs_nothing_to_speak_of():
    context = Precision("fp32", "fp32", "cpu").training_ctx
    assert not context.enabled

    calls = []
    sys.setprofile(
        lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None,
    )
    with context:
        pass
    sys.setprofile(None)
    assert calls == ["__enter__", "__exit__"]


class Module(torch.nn.Module):
    @fwd_default_precision
    def forward(self, x, more=None, scale=None):
        assert autocast_is_on() is False
        return x.dtype, *(m.dtype for m in (more or {}).get("list", [])), scale

    @fwd_default_precision(cast_inputs=None)
    def as_it_is(self, x):
        return x.dtype, autocast_is_on()

    @fwd_default_precision(cast_inputs=torch.float64)
    def wide(self, x):
        return x * 2

    @fwd_default_precision
    def state(self, x):
        return autocast_is_on()


def test_fwd_default_precision():
    module = Module()
    x = torch.ones(2, dtype=BF16)
    n = torch.ones(2, dtype=torch.int64)
    assert module(x) == (BF16, None)
    with torch.autocast("cpu", dtype=BF16):
        more = {"list": [x, n, x.double()]}
        assert module(x, more=more, scale=2) == (
            torch.float32,
            torch.float32,
            torch.int64,
            torch.float64,
            2,
        )
        assert more["list"][0] is x
        assert module.as_it_is(x) == (BF16, True)
        assert module.wide(x).dtype is torch.float64
        assert module.state(x) is False
        assert module.state(x, force_allow_autocast=True) is True
        assert autocast_is_on()
    assert Module.forward.__name__ == "forward"


def test_autocast_is_asked_of_the_device_of_the_arguments(monkeypatch):
    asked = []
    layer = nn.Linear(1, 1, device="meta")
    meta = torch.ones(1, device="meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: asked.append(kind) or False)
    forward = fwd_default_precision(lambda *values: None)
    for values in [(1, None), (layer,), (layer, torch.ones(1)), ("a", {"x": [1, meta]})]:
        forward(*values)
    assert asked == ["cpu", "meta", "cpu", "meta"]
