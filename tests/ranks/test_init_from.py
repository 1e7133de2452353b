"""``--init_from`` on several ranks: the same weights, whatever holds them; a file that one rank
cannot read, or reads with other bytes, ends all.
"""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import whole_state_dict
from ddpkit.distributed import get_rank
from tests.launching import Run, torchrun
from tests.recipes import QUIET, Regression, points

DATA = points(8)


class Net(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.body = nn.Linear(3, 3, device=device, dtype=torch.float64)
        self.head = nn.Linear(3, 1, device=device, dtype=torch.float64)

    def forward(self, rows):
        return self.head(self.body(rows))


def begun(path, device="cpu", **options):
    """Return what the run begins with, as the main process would save it."""
    torch.manual_seed(get_rank() or 0)
    brain = Regression(
        {"net": Net(device)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        run_opts={**QUIET, "init_from": path, **options},
    )
    brain.fit([1], DATA, train_loader_kwargs={"batch_size": 2})
    return whole_state_dict(brain.modules.net)


def weights_of_file(path, options, device="cpu"):
    found = begun(path, device, **options)
    expected = torch.load(path, weights_only=True)
    same = [torch.equal(found[name], value) for name, value in expected.items()] if found else []
    return all(same) and len(same) == (0 if get_rank() else 4)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"strategy": "fsdp"}, "meta"),
        ({"ckpt_load": "broadcast"}, "cpu"),
        pytest.param({}, "cpu", marks=pytest.mark.slow),
        pytest.param({"strategy": "fsdp"}, "cpu", marks=pytest.mark.slow),
        pytest.param({"strategy": "zero1"}, "cpu", marks=pytest.mark.slow),
        pytest.param({"virtual_ranks": 4}, "cpu", marks=pytest.mark.slow),
        pytest.param(
            {"strategy": "fsdp", "ckpt_load": "broadcast"}, "meta", marks=pytest.mark.slow
        ),
    ],
)
def test_all_ranks_begin_with_the_weights_of_the_file(ranks, tmp_path, options, device):
    torch.manual_seed(5)
    torch.save(Net().state_dict(), tmp_path / "base.pt")
    found = ranks.run(weights_of_file, tmp_path / "base.pt", options, device, world_size=2)
    assert found == [True, True]


@pytest.mark.costly
def test_what_does_not_fit_is_the_same_error_on_all(ranks, tmp_path):
    torch.save({"body.weight": torch.ones(3, 3)}, tmp_path / "base.pt")
    outcomes = ranks.outcomes(begun, tmp_path / "base.pt", world_size=2)
    assert [one.error_type for one in outcomes] == ["CheckpointUsageError"] * 2
    assert all("missing      net.head.weight (1, 3)" in one.error for one in outcomes)


def test_a_path_that_is_not_there_is_the_same_error_on_all(ranks, tmp_path):
    outcomes = ranks.outcomes(begun, tmp_path / "none.pt", world_size=2)
    assert [one.error_type for one in outcomes] == ["MissingFileError"] * 2


SCRIPT = """
    import os, signal, sys

    import torch

    import ddpkit as sb
    from ddpkit.checkpoints import Checkpointer
    from tests.recipes import SavesAfterTraining, linear, points

    class DiesBeforeItSaves(SavesAfterTraining):
        def on_fit_start(self):
            if "dies" in sys.argv and self.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    options = {"device": "cpu", "noprogressbar": True}
    if "anew" in sys.argv:
        options.update(resume="never", init_from="save/latest")
    sb.ddp_init_group(options)
    net = linear(seed=8 if "anew" in sys.argv else 1)
    brain = DiesBeforeItSaves(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        run_opts=options,
        checkpointer=Checkpointer("save", {"net": net}),
    )
    brain.fit([1], points(8), train_loader_kwargs={"batch_size": 2})
    if sb.if_main_process():
        torch.save(net.state_dict(), f"{sys.argv[1]}.pt")
"""


@pytest.mark.slow
@pytest.mark.launch
def test_killed_after_the_move_it_begins_with_the_same_weights_again(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    for name, words in {"old": [], "killed": ["anew", "dies"], "again": ["anew"]}.items():
        command = [*torchrun(2), "train.py", name, *words]
        ended = Run(command, tmp_path, name=name, warm=True).wait()
        assert (ended.code == 0) == ("dies" not in words), ended.tail()
        if name == "killed":
            assert not list((tmp_path / "save").glob("CKPT+*"))
    states = [torch.load(tmp_path / f"{name}.pt") for name in ("old", "again")]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
