"""``hash_every`` on several ranks: one digest where the bits are equal, whatever the strategy."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn

from ddpkit.distributed import run_on_main
from ddpkit.epoch_loop import EpochCounter
from ddpkit.train_logger import set_run_log
from tests.needs import needs_own_reduce_scatter
from tests.ranks.test_virtual_ranks import train as train_in_virtual_ranks
from tests.recipes import QUIET, Regression, SavesAfterValidation, make

FIELDS = (
    "step",
    "samples",
    "loss",
    "gradients",
    "weights",
    "optimizer",
    "average",
    "schedule",
    "settings",
    "chain",
)


OPTIONS = {"global_batch_size": 4, "max_grad_norm": 0, "hash_every": 1, "ema_decay": 0.5}


def exact_data():
    """Points whose sums are exact, however they are added up: small whole numbers."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randint(-2, 3, (16, 6), generator=draw).double()
    return list(zip(inputs, torch.randint(-2, 3, (16, 1), generator=draw).double(), strict=True))


def exact_net():
    draw = torch.Generator().manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 5)).double()  # 5 rows: uneven on 2 ranks
    for parameter in net.parameters():
        values = torch.randint(-2, 3, parameter.shape, generator=draw)
        parameter.data.copy_(values / 4)
    return net


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=2.0**-6, momentum=0.5)


class Linear(Regression):
    """Its gradients depend on no weight, so that each sum of theirs is exact in every step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scheduler_class = functools.partial(
            torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5
        )

    def compute_objectives(self, predictions, batch, stage):
        return (predictions * batch[1]).sum(1).mean()


class Saving(Linear, SavesAfterValidation):
    """Saves after each epoch."""


def records_of(folder):
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: event[name] for name in FIELDS} for event in events if event["event"] == "hash"]


def exact(folder, epochs=2, cls=Linear, checkpoints=None, **options):
    """Train with exact sums on one rank or several, and return the records of hashes."""
    set_run_log(folder / "metrics.jsonl")
    counter = EpochCounter(epochs)
    brain = make(
        cls,
        net=exact_net(),
        opt=momentum,
        folder=checkpoints,
        recoverables={"counter": counter},
        **{**QUIET, **OPTIONS, **options},
    )
    loading = {"shuffle": True, "batch_size": 1}
    data = exact_data()
    brain.fit(counter, data, data[:4], train_loader_kwargs=loading)
    set_run_log(None)
    return run_on_main(records_of, [folder])


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return exact(tmp_path_factory.mktemp("single"))


@pytest.mark.costly
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_one_digest_under_each_strategy(ranks, tmp_path, single, strategy):
    options = {"fsdp_blocks": ["Linear"], "fsdp_min_parameters": 1} if strategy == "fsdp" else {}
    found = ranks.run(functools.partial(exact, tmp_path, strategy=strategy, **options))
    assert len(single) == 8
    assert None not in single[0].values()
    assert found == [single] * 2


def virtual(folder, **options):
    set_run_log(folder / "metrics.jsonl")
    train_in_virtual_ranks(hash_every=2, **options)
    set_run_log(None)
    return run_on_main(records_of, [folder])


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [{}, {"grad_accumulation_factor": 2, "loading": {"batch_size": 1}}],
    ids=["plain", "accumulation"],
)
def test_one_chain_of_virtual_ranks_on_one_process_and_on_two(ranks, tmp_path, options):
    (tmp_path / "two").mkdir()
    alone = virtual(tmp_path, **options)
    assert len(alone) > 2
    assert ranks.run(functools.partial(virtual, tmp_path / "two", **options)) == [alone] * 2


@pytest.mark.costly
@pytest.mark.parametrize(
    "strategy", ["zero1", pytest.param("fsdp", marks=needs_own_reduce_scatter)]
)
def test_one_chain_of_virtual_ranks_on_one_process_and_divided(ranks, tmp_path, strategy):
    (tmp_path / "two").mkdir()
    alone = virtual(tmp_path)
    options = {"fsdp_blocks": ["Linear"], "fsdp_min_parameters": 1} if strategy == "fsdp" else {}
    divided = functools.partial(virtual, tmp_path / "two", strategy=strategy, **options)
    assert ranks.run(divided) == [alone] * 2


@pytest.mark.costly
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_run_goes_on_with_its_chain_under_another_strategy(ranks, tmp_path, single, strategy):
    options = {"fsdp_blocks": ["Linear"], "fsdp_min_parameters": 1} if strategy == "fsdp" else {}
    places = {"folder": tmp_path, "checkpoints": tmp_path / "save", "cls": Saving}
    ranks.run(functools.partial(exact, epochs=1, strategy=strategy, **places, **options))
    assert exact(**places) == single


@pytest.mark.slow
def test_a_divided_run_goes_on_with_the_chain_of_one_process(ranks, tmp_path, single):
    places = {"folder": tmp_path, "checkpoints": tmp_path / "save", "cls": Saving}
    exact(**places, epochs=1)
    assert ranks.run(functools.partial(exact, strategy="zero1", **places)) == [single] * 2
