"""What a Brain does with GPUs, as far as it can be seen where there is none: what torch is told,
and when.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ddpkit.brain import Brain
from ddpkit.types import Stage
from tests.pretended_devices import pretend_devices
from tests.recipes import Regression, make, points


@pytest.fixture
def calls(monkeypatch):
    """Pretend to have four GPUs, and note what torch is asked to do with them."""
    noted = []
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    pretend_devices(monkeypatch, "cuda", cuda=4, xpu=4, cpu=1)
    for kind in (torch.cuda, torch.xpu):
        monkeypatch.setattr(
            kind,
            "set_device",
            lambda device: noted.append(("current", str(device))),
        )
    real = torch.nn.Module.to
    monkeypatch.setattr(
        torch.nn.Module,
        "to",
        lambda module, to: noted.append(("moved", str(to))) or real(module, to),
    )
    return noted


@pytest.mark.parametrize("asked", ["cuda:1", "cuda:0", "cuda", "xpu:2"])
def test_the_gpu_of_the_brain_is_the_current_one_before_anything_is_moved_to_it(calls, asked):
    brain = Brain({}, run_opts={"device": asked})
    assert calls[0] == ("current", brain.device)
    assert calls[1:] == [("moved", brain.device)]


def test_the_gpu_is_the_current_one_in_a_group_that_the_script_has_started(calls, monkeypatch):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        monkeypatch.setattr(dist.group.WORLD, "bound_device_id", torch.device("cuda:3"))
        assert Brain({}, run_opts={"noprogressbar": True}).device == "cuda:3"
    finally:
        dist.destroy_process_group()
    assert calls == [("current", "cuda:3"), ("moved", "cuda:3")]


def test_a_cpu_is_nobodys_current_device(calls):
    Brain({}, run_opts={"device": "cpu"})
    assert calls == [("moved", "cpu")]


def test_minor_15_batches_for_a_gpu_are_pinned_unless_the_recipe_says_otherwise(calls):
    def pinned(asked, data=range(4), **loader_kwargs):
        brain = Brain({}, run_opts={"device": asked})
        return brain.make_dataloader(data, Stage.TRAIN, **loader_kwargs).pin_memory

    assert pinned("cuda:1") is True
    assert pinned("cuda:1", batch_size=2) is True
    assert pinned("cuda:1", pin_memory=False) is False
    assert pinned("cpu") is False
    batches = {"a batch": 1, "another": 2}.keys()
    assert pinned("cuda:1", batches) is False, "batches come as their source makes them"


class Overwriting(Regression):
    """Its losses and counts are overwritten when the next batch comes, as the outputs of CUDA
    graphs are.
    """

    form = "mean"
    given = ()

    def on_fit_batch_start(self, batch, should_step):
        self.overwrite()

    def compute_objectives(self, predictions, batch, stage):
        if stage is not Stage.TRAIN:
            self.overwrite()
        loss = super().compute_objectives(predictions, batch, stage)
        count = torch.tensor(float(len(batch[0])), dtype=torch.float64)
        self.given = (loss.detach(), count)
        return loss if self.form == "mean" else (loss * count, count)

    def overwrite(self):
        for one in self.given:
            one.fill_(1e3)

    def predict_batch(self, batch):
        return self.compute_forward(batch, Stage.TEST)


@pytest.mark.parametrize("virtual_ranks", [None, 2])
@pytest.mark.parametrize("form", ["mean", "sum"])
def test_minor_14_losses_that_cuda_graphs_overwrite_are_copied_and_each_batch_is_a_step(
    form,
    virtual_ranks,
    monkeypatch,
):
    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))

    def losses(kind):
        monkeypatch.setattr(kind, "form", form, raising=False)
        brain = make(kind, grad_accumulation_factor=2, virtual_ranks=virtual_ranks)
        brain.fit([1], points(8), points(4), train_loader_kwargs={"batch_size": 2})
        brain.predict(points(4), loader_kwargs={"batch_size": 2})
        return brain.losses

    class Usual(Overwriting):
        def overwrite(self):
            pass

    usual = losses(Usual)
    assert not marks
    monkeypatch.setattr("ddpkit.run.stage_runner.has_cuda_graphs", lambda options: True)
    assert losses(Overwriting) == usual
    assert len(marks) == 4 + 4 + 2  # validation without loader_kwargs: a sample each
