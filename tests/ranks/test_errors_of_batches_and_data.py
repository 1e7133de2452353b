"""What a hook returns wrongly, and data that cannot be trained on, are told in one sentence with
the recipe's line.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpkit.errors import BatchError, DataError
from tests.launching import Run, python, start_by_hand, torchrun
from tests.recipes import Squares

LIMIT_SECONDS = 100.0
SCRIPT = """import os
import torch
import ddpkit

class Recipe(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        loss = predictions.sum()
        if os.environ["RANK_OF_FAULT"] in {"all", os.environ.get("RANK")} and self.step == 2:
            loss = {"loss": loss, "accuracy": 0.5}
        return loss  # the one way out

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if "log" in os.environ:
            self.log("accuracy", "high")

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if "worker" in os.environ:
            return ddpkit.batch.batch_pad_right([torch.ones(2, 2), torch.ones(3, 3)])
        return torch.ones(1)

if __name__ == "__main__":
    run_opts = {"device": "cpu", "noprogressbar": True}
    ddpkit.ddp_init_group(run_opts)
    brain = Recipe({"net": torch.nn.Linear(1, 1)}, torch.optim.SGD, run_opts=run_opts)
    data = (row for row in Samples()) if "generator" in os.environ else Samples()
    brain.fit([1], data, train_loader_kwargs={"num_workers": int("worker" in os.environ)})
"""
DICT = "Recipe.compute_objectives returned a dict with the keys 'loss', 'accuracy': return one loss"
PLACE = "(in TRAIN of epoch 1 at step 2, at train.py:13 in compute_objectives)"
CODE = "    return loss  # the one way out"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_one_process_says_one_sentence_and_the_line(folder):
    run = Run(python("train.py"), folder, {"RANK_OF_FAULT": "all"}, warm=True).wait()
    assert run.code == 2
    sentence, code = run.lines[-2:]
    assert sentence.startswith(f"train.py: error: {DICT}")
    assert sentence.endswith(PLACE)
    assert code == CODE
    assert "Traceback" not in run.err


@pytest.mark.parametrize(
    ("fault", "said", "code"),
    [
        pytest.param(
            "log",
            "log('accuracy', ...) was given as its value 'high'",
            'self.log("accuracy", "high")',
        ),
        pytest.param(
            "worker",
            "error: shapes [(2, 2), (3, 3)] cannot be padded: tensors may differ in their first "
            "dimension only. (in DataLoader worker process 0) (in TRAIN of epoch 1 at step 0, at "
            "train.py:",
            "return ddpkit.batch.batch_pad_right([torch.ones(2, 2), torch.ones(3, 3)])",
        ),
        pytest.param("generator", "TRAIN: the data is a generator", "brain.fit([1], data, "),
    ],
)
@pytest.mark.slow
def test_each_kind_shows_its_line(folder, fault, said, code):
    run = Run(python("train.py"), folder, {"RANK_OF_FAULT": "none", fault: "1"}, warm=True).wait()
    assert run.code == 2
    assert said in run.lines[-2]
    assert run.lines[-1].strip().startswith(code)
    assert "Traceback" not in run.err


@pytest.mark.slow
def test_the_rank_with_the_fault_says_it_under_torchrun(folder):
    run = Run(torchrun(2, "train.py"), folder, {"RANK_OF_FAULT": "1"}, warm=True).wait()
    assert run.code == 1
    root_cause = run.err.rpartition("Root Cause")[2]
    assert f"traceback : train.py: error on rank 1: {DICT}" in root_cause
    assert "exitcode  : 2" in root_cause
    assert CODE in root_cause
    assert 'train.py", line' not in run.err


@pytest.mark.slow
@pytest.mark.parametrize("start", ["torchrun", "by hand"])
def test_a_fault_of_all_ranks_is_said_once(folder, start):
    if start == "torchrun":
        run = Run(torchrun(2, "train.py"), folder, {"RANK_OF_FAULT": "all"}, warm=True).wait()
        told = run.err
    else:
        runs = start_by_hand(python("train.py"), folder, 2, warm=True, RANK_OF_FAULT="all")
        told = "".join(run.wait().err for run in runs)
        assert [run.code for run in runs] == [2, 2]
    assert (
        told.count(f"train.py: error: {DICT}") + told.count(f"train.py: error on rank 1: {DICT}")
        == 1
    )
    assert told.count(CODE) == 1
    assert 'train.py", line' not in told


# -------------------------------------------------------------------------------- torch's own words


class TwicePerPass(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.shared = nn.Linear(1, 1)

    def forward(self, rows):
        rows = self.first(rows)
        for _ in range(2):
            rows = checkpoint(self.shared, rows, use_reentrant=True)
        return rows


def train(net, rows, **options):
    run_opts = {"device": "cpu", "noprogressbar": True, **options}
    brain = Squares(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        None,
        run_opts,
    )
    brain.fit([1], torch.ones(rows, 1), train_loader_kwargs={"batch_size": 2})
    return brain.optimizer_step


def train_reentrant(static_graph=None):
    return train(TwicePerPass(), 8, **({"static_graph": True} if static_graph else {}))


@pytest.mark.costly
def test_reentrant_checkpointing_under_ddp_names_its_two_cures(ranks):
    assert train_reentrant() == 4
    for outcome in ranks.outcomes(train_reentrant, timeout=LIMIT_SECONDS):
        assert outcome.error_type == "BatchError"
        assert "use_reentrant=True ran the same part of a module again" in outcome.error
        assert "checkpoint(..., use_reentrant=False)" in outcome.error
        assert "--static_graph" in outcome.error
        assert "fit_batch called" not in outcome.error
    assert ranks.run(train_reentrant, True) == [2, 2]


def test_batch_normalization_of_one_row_hints_at_drop_last():
    norm = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    with pytest.raises(
        DataError,
        match=r"Expected more than 1 value per channel .*drop_last=True.*eval\(\)",
    ) as caught:
        train(norm, 5)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "torch.Size([1, 2])" in str(caught.value)


def test_the_hook_of_an_error_survives_another_process():
    error = BatchError("no loss", hook="compute_objectives")
    assert str(error) == "no loss"
    assert error.hook == "compute_objectives"
