from __future__ import annotations

import torch
from torch import nn

from ddpkit.checkpointing import SnapshotMemory
from ddpkit.checkpoints import Checkpointer, safe_load


def is_pinned(storage):
    # A storage's own is_pinned() warns in torch 2.11, of an argument that it passes itself.
    return torch.empty(0, dtype=torch.uint8).set_(storage).is_pinned()


def test_a_state_on_the_gpu_is_copied_to_pinned_memory_that_is_used_again():
    model = nn.Linear(1000, 1000, device="cuda")
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    memory = SnapshotMemory()
    for _ in range(2):
        taken = memory.take({"model": model.state_dict()})
        places = [storage.data_ptr() for storage in memory._kept]
    assert all(map(is_pinned, memory._kept))
    with torch.no_grad():
        model.weight.zero_()
    copy = taken["model"]
    assert all(
        value.device.type == "cpu" and torch.equal(value, before[name])
        for name, value in copy.items()
    )
    memory.take({"model": model.state_dict()})
    assert [storage.data_ptr() for storage in memory._kept] == places


def test_training_on_the_gpu_goes_on_while_its_state_is_written(tmp_path):
    model = nn.Linear(2000, 2000, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer})
    checkpointer.asynchronous = True
    expected = []
    for number in range(3):
        model(torch.ones(8, 2000, device="cuda")).sum().backward()
        optimizer.step()
        expected.append(model.weight.detach().cpu().clone())
        checkpointer.save_checkpoint(name=str(number))
        for _ in range(20):
            optimizer.step()
    checkpointer.wait()
    for number, weight in enumerate(expected):
        assert torch.equal(safe_load(tmp_path / f"CKPT+{number}" / "model.ckpt")["weight"], weight)


def test_an_empty_tensor_on_the_gpu_comes_back_on_the_cpu():
    copy = SnapshotMemory().take(
        {"a": {"none": torch.empty(0, 3, device="cuda"), "one": torch.ones(1, device="cuda")}}
    )
    state = copy["a"]
    assert (state["none"].device.type, state["none"].shape) == ("cpu", (0, 3))
    assert state["one"].tolist() == [1.0]
