"""What is said when a step runs out of memory."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpkit.errors import ConfigError
from ddpkit.parts import Part
from ddpkit.parts.events import PartEvents
from ddpkit.run.memory_report import MemoryReport, is_out_of_memory
from ddpkit.types import Stage
from tests.recipes import Regression, make, points


class Full(Regression):
    """Runs out of memory in its third batch; really so, if no error is given."""

    error = None

    def compute_forward(self, batch, stage):
        if self.step == 3:
            if self.error is not None:
                raise self.error
            torch.empty(1 << 55, dtype=torch.uint8)
        return super().compute_forward(batch, stage)


def told(caplog):
    return [text for text in caplog.messages if text.startswith("Memory of rank")]


def test_a_step_that_finds_no_memory_says_what_has_taken_it(caplog):
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        make(Full).fit([1], points(8))
    (text,) = told(caplog)
    first, process, machine, parts, rest, title, weight, bias = text.splitlines()
    assert first == "Memory of rank 0 on cpu, when it ran out:"
    assert process.startswith("  the process has used up to ")
    assert machine.startswith("  the machine has ")
    assert parts == "  weights 32 B, gradients 0 B, optimizers 0 B"
    assert rest.startswith("  the rest is what a step computes: activations")
    assert (title, weight) == ("  the largest weights:", "    net.weight (1, 3) float64: 24 B")
    assert bias == "    net.bias (1,) float64: 8 B"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=repr,
)
def test_each_way_of_saying_so_is_known_and_the_error_stays_what_it_is(error, caplog):
    brain = make(Full)
    brain.error = error
    with pytest.raises(type(error)) as caught:
        brain.fit([1], points(8))
    assert caught.value is error
    assert len(told(caplog)) == 1


def test_another_error_says_nothing_of_memory(caplog):
    brain = make(Full)
    brain.error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes"):
        brain.fit([1], points(8))
    assert not told(caplog)
    assert not is_out_of_memory(OSError("out of memory"))


class Nested(Full):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.TRAIN:
            self.error = torch.OutOfMemoryError("CUDA out of memory")
            self.evaluate(points(4))


def test_it_is_said_once_of_an_error_that_goes_through_two_stages(caplog):
    brain = make(Nested)
    brain.error = None
    with pytest.raises(torch.OutOfMemoryError):
        brain.fit([1], points(2))
    assert len(told(caplog)) == 1


@pytest.mark.slow
def test_a_size_that_no_step_has_memory_for_is_told_of(caplog):
    class Always(Regression):
        def compute_forward(self, batch, stage):
            raise torch.OutOfMemoryError("CUDA out of memory")

    brain = make(Always, auto_micro_batch=True, global_batch_size=4)
    with pytest.raises(ConfigError, match="one sample at a time is too much"):
        brain.fit([1], points(4))
    assert len(told(caplog)) == 1


# ---------------------------------------------------------------------- a GPU, as torch tells of it


GIB = 1 << 30


def pretend_gpu(monkeypatch):
    """Give answers for the functions of ``torch.cuda`` that are asked; return what the recorder is
    told. No optimizer can step from then on: torch built for GPUs would look for a driver.
    """
    calls = []

    def dump(path):
        calls.append("dump")
        with open(path, "wb") as file:  # noqa: PTH123 -- as torch does
            pickle.dump({"segments": []}, file)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 60 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 71 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda **given: calls.append(given),
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return calls


def report_of(parts):
    net = nn.ModuleDict({"net": nn.Linear(3, 1)})
    optimizer = torch.optim.Adam(net.parameters())
    net["net"](torch.ones(2, 3)).sum().backward()
    optimizer.step()
    context = SimpleNamespace(modules=net, device="cuda:0", parts=parts)
    step = SimpleNamespace(named_optimizers=lambda: {"optimizer": optimizer})
    return MemoryReport(context, step)


def test_the_summary_of_a_gpu_names_the_option_that_shows_more(monkeypatch, caplog):
    report = report_of(PartEvents())
    calls = pretend_gpu(monkeypatch)
    report.tell(torch.OutOfMemoryError("CUDA out of memory"))
    assert not calls
    (summary,) = caplog.messages
    lines = summary.splitlines()
    assert lines[1:4] == [
        "  allocated 60.0 GiB, reserved by torch 70.0 GiB, at most allocated 71.0 GiB",
        "  the device has 80.0 GiB, 2.00 GiB free; 8.00 GiB are its driver's and other processes'",
        "  weights 16 B, gradients 16 B, optimizers 40 B",
    ]
    assert lines[-1] == "--memory_snapshot_on_oom records who allocates what, for a picture of it."


class Hears(Part):
    def __init__(self):
        self.heard = []

    def on_out_of_memory(self, error):
        self.heard.append(error)


def test_parts_hear_once_that_there_is_no_memory(caplog):
    brain = make(Nested, hparams={"parts": [part := Hears()]})
    with pytest.raises(torch.OutOfMemoryError) as caught:
        brain.fit([1], points(2))
    assert part.heard == [caught.value]
    assert len(told(caplog)) == 1
