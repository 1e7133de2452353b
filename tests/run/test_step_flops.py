"""The operations of one step, counted in a run: on request, once, on the main process; no number of
the run changes.
"""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ddpkit.brain import run_of
from ddpkit.train_logger import set_run_log
from tests.recipes import Failing, OwnFitBatch, Regression, make as usual, points


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch):
    """What other tests have compiled is not of this run."""
    import torch._dynamo.utils as inside

    monkeypatch.setattr(inside, "counters", {})


@pytest.fixture
def log(tmp_path):
    set_run_log(tmp_path / "metrics.jsonl")
    yield tmp_path / "metrics.jsonl"
    set_run_log(None)


def events(log, kind="flops"):
    found = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [one for one in found if one["event"] == kind]


make = functools.partial(usual, count_flops=True)

# One batch of 4 rows, 3 inputs that need no gradient, 1 output: a product forwards and one
# backwards.
OF_A_STEP = 2 * 2 * 4 * 3 * 1
FOUR = {"train_loader_kwargs": {"batch_size": 4}}


@pytest.mark.parametrize("cls", [Regression, OwnFitBatch])
@pytest.mark.parametrize("factor", [1, 3])
def test_a_step_is_counted_once_in_a_run(cls, factor, log):
    brain = make(cls, grad_accumulation_factor=factor)
    brain.fit([1, 2], points(36 * factor), **FOUR)
    brain.fit([3], points(36), **FOUR)
    (event,) = events(log)
    assert event["per_step"] == factor * OF_A_STEP
    assert event["device"] == "cpu"
    assert "peak_per_second" not in event
    assert run_of(brain).stages.speed.flops_per_step == event["per_step"]


def test_the_second_step_may_be_in_another_epoch_and_a_run_of_one_step_has_no_count(log):
    brain = make()
    brain.fit([1], points(4), **FOUR)
    assert not events(log)
    brain.fit([2], points(4), **FOUR)
    assert [one["per_step"] for one in events(log)] == [OF_A_STEP]


class Watches(Regression):
    """Notes whether the operations of its batches go past a mode of torch."""

    def compute_forward(self, batch, stage):
        self.seen = [*getattr(self, "seen", []), is_in_torch_dispatch_mode()]
        return super().compute_forward(batch, stage)


@pytest.mark.parametrize("options", [{}, {"measure_steps": "all"}], ids=str)
def test_nothing_goes_between_a_recipe_and_torch_unless_a_count_is_asked_for(options, log):
    brain = usual(Watches, **options)
    brain.fit([1], points(36), **FOUR)
    assert brain.seen == [False] * 9
    assert not events(log)
    counted = make(Watches, **options)
    counted.fit([1], points(36), **FOUR)
    assert counted.seen == [False, True, *[False] * 7]
    assert events(log)


def test_steps_need_not_be_measured_to_be_counted(log):
    make(measure_steps="off").fit([1], points(36), **FOUR)
    assert [one["per_step"] for one in events(log)] == [OF_A_STEP]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_in_a_profile_nothing_is_counted_and_the_run_says_so(log, tmp_path, caplog):
    options = {"profile_training": True, "profile_warmup": 1, "profile_steps": 2}
    brain = make(Watches, hparams={"output_folder": str(tmp_path)}, **options)
    brain.fit([1, 2], points(36), **FOUR)
    assert not any(brain.seen)
    assert not events(log)
    (said,) = [one for one in caplog.messages if "count_flops" in one]
    assert "nothing is counted in this call of fit" in said


class OwnProfiler(Regression):
    """Runs torch's profiler around a step, as a recipe may."""

    def fit_batch(self, batch):
        if self.step != 2:
            return super().fit_batch(batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            loss = super().fit_batch(batch)
        self.products = sum(one.count for one in profiler.key_averages() if one.key == "aten::mm")
        return loss


def test_a_profiler_of_the_recipe_around_the_step_sees_what_torch_runs(log):
    brain = usual(OwnProfiler)
    brain.fit([1], points(36), **FOUR)
    assert brain.products == 1  # of the backward pass; that of the forward pass is an addmm
    counted = make(OwnProfiler)
    counted.fit([1], points(36), **FOUR)
    # through the counter, and in torch; that of 2.8 shows the profiler one of the two
    assert counted.products == (1 if torch.__version__ < "2.9" else 2)
    assert [one["per_step"] for one in events(log)] == [OF_A_STEP]


def test_after_the_count_the_batches_come_straight_from_the_feed(log):
    brain = make()
    flops = run_of(brain).stages.observers.flops
    feed = SimpleNamespace()
    assert flops.feed(feed) is not feed
    brain.fit([1], points(36), **FOUR)
    assert flops.feed(feed) is feed
    assert events(log)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.one = nn.Linear(3, 1)
        self.other = nn.Linear(3, 1)

    def forward(self, inputs):
        return torch.cond(inputs.sum() > 0, self.one, self.other, (inputs,))


def branched(begin, **options):
    brain = begin(net=Branches().double(), **options)
    brain.fit([1], points(16), **FOUR)
    return list(brain.modules.state_dict().values())


@pytest.mark.slow  # torch.cond compiles
def test_a_model_that_chooses_a_branch_in_torch_trains_alike_counted_or_not(log):
    weights = branched(usual, measure_steps="off")
    assert all(map(torch.equal, branched(usual), weights))
    assert not events(log)
    assert all(map(torch.equal, branched(make), weights))
    (event,) = events(log)
    assert event["problem"] == "cond does not show what it computes"


def test_a_block_that_is_computed_again_counts_once(log):
    class Block(nn.Sequential):
        pass

    for options in ({}, {"activation_checkpointing": ["Block"]}):
        parts = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)
        net = nn.Sequential(Block(*parts)).double()
        make(net=net, **options).fit([1], points(36), **FOUR)
    plain, again = events(log)
    assert plain["per_step"] == again["per_step"] == 2 * 4 * (2 * 3 * 5 + 3 * 5 * 1)


@pytest.mark.parametrize("how", ["in place", "a function"])
def test_of_what_is_compiled_nothing_is_counted(how, log, monkeypatch):
    brain = make()
    if how == "in place":
        monkeypatch.setattr(
            brain.modules["net"],
            "_compiled_call_impl",
            brain.modules["net"].forward,
        )
    else:
        import torch._dynamo.utils as inside

        monkeypatch.setattr(inside, "counters", {"frames": {"total": 1}})
    brain.fit([1], points(36), **FOUR)
    (event,) = events(log)
    assert event["per_step"] is None
    assert "compiled" in event["problem"]
    assert run_of(brain).stages.speed.flops_per_step is None


def test_an_error_in_the_counted_step_ends_the_count_and_says_that_it_was_counted(log, caplog):
    brain = make(Failing)
    brain.fails_at = 2
    with pytest.raises(RuntimeError, match="planted"):
        brain.fit([1], points(36), **FOUR)
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None
    (said,) = [one for one in caplog.messages if "some do not run under a counter" in one]
    assert "--count_flops" in said
    assert not events(log)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.parts = nn.Sequential(
            nn.Linear(3, 8),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(8, 1),
        )

    def forward(self, inputs):
        return self.parts(inputs)


def trained(**options):
    torch.manual_seed(3)
    brain = make(net=Norm().double(), **options)
    brain.fit([1, 2], points(24), **FOUR)
    return [one.detach().clone() for one in brain.modules.state_dict().values()]


@pytest.mark.parametrize(
    "options",
    [{}, {"grad_accumulation_factor": 2}, {"ema_decay": 0.9}],
    ids=str,
)
def test_no_bit_of_a_training_is_another(options, log):
    counted = trained(**options)
    assert events(log)[0]["per_step"]
    assert all(map(torch.equal, counted, trained(**options, count_flops=False)))


def of_rank(folder, options):
    """Train; return what the log of this rank has of it, and this rank's part of the weights."""
    import torch._dynamo.utils as inside

    inside.counters.clear()
    path = set_run_log(f"{folder}/metrics.jsonl").path
    try:
        torch.manual_seed(3)
        brain = make(**options)
        brain.fit([1], points(48), **FOUR)
    finally:
        set_run_log(None)
    weights = brain.modules.state_dict().values()
    own = [one.to_local() if isinstance(one, DTensor) else one for one in weights]
    return events(path) if brain.rank == 0 else None, own


MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.slow
def test_divided_weights_with_momentum_are_the_same_bits_counted_or_not(ranks, tmp_path):
    options = {"strategy": "fsdp", "opt": MOMENTUM}
    plain = ranks.run(of_rank, str(tmp_path / "plain"), {**options, "count_flops": False})
    counted = ranks.run(of_rank, str(tmp_path / "counted"), options)
    assert [one["per_step"] for one in counted[0][0]] == [OF_A_STEP]
    for (_, own), (_, other) in zip(counted, plain, strict=True):
        assert len(own) == len(other)
        assert all(map(torch.equal, own, other))


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp"}, {"strategy": "zero1"}], ids=str)
def test_on_several_ranks_the_first_counts_its_own_part(ranks, options, tmp_path):
    (found, _), *others = ranks.run(of_rank, str(tmp_path), options)
    assert [one["per_step"] for one in found] == [OF_A_STEP]
    assert all(one is None for one, _ in others)
