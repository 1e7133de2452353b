"""DDP by torch's names, on real ranks: the same answer, the same bits after a resume, and clear
refusals.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpkit.brain import run_of
from ddpkit.distributed import gather_objects
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from tests.recipes import (
    Killed,
    Mortal,
    Regression,
    SpeechBrainFitBatch,
    make,
    points,
    sgd,
    weights,
    world_size,
)

CLOSE = {"rtol": 0, "atol": 1e-10}


class Net(nn.Module):
    """Several buckets at 0.001 MiB; a layer that only some models use; a buffer that no forward
    pass changes.
    """

    def __init__(self, *, uses_extra=True):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(3, 40)
        self.extra = nn.Linear(40, 40)
        self.last = nn.Linear(40, 1)
        self.uses_extra = uses_extra
        self.register_buffer("offset", torch.full((3,), 0.1))
        self.double()

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs + self.offset))
        return self.last(torch.tanh(self.extra(hidden)) if self.uses_extra else hidden)


# ---------------------------------------------------------------------------------- the same answer


def train(cls, factor, options):
    brain = make(cls, net=Net(), opt=sgd(momentum=0.9), grad_accumulation_factor=factor, **options)
    brain.fit(
        [1, 2],
        points(22),
        train_loader_kwargs={"batch_size": 4 // world_size(), "shuffle": True},
    )
    return weights(brain), brain.optimizer_step, brain.losses


STATIC = {"static_graph": True}
VIEWS = {"gradient_as_bucket_view": True}
SMALL = {"bucket_cap_mb": 0.001}
LEVERS = {
    "static graph": STATIC,
    "views": VIEWS,
    "copies": {"gradient_as_bucket_view": False},
    "small buckets": SMALL,
    "buffers": {"broadcast_buffers": True},
    "no buffers": {"broadcast_buffers": False},
    "several": STATIC | VIEWS | SMALL,
}


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("cls", [Regression, SpeechBrainFitBatch])
@pytest.mark.parametrize(
    "name",
    [
        "several",
        "static graph",
        *(pytest.param(name, marks=pytest.mark.slow) for name in list(LEVERS)[1:-1]),
    ],
)
def test_the_options_change_no_number(ranks, name, cls, factor):
    """Also with a short last window, and a rank without a sample in the last batch."""
    expected, steps, losses = train(cls, factor, {})
    for found, steps_there, losses_there in ranks.run(
        train,
        cls,
        factor,
        LEVERS[name],
        world_size=2,
    ):
        assert steps_there == steps
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, **CLOSE)
        assert [loss for *_, loss in losses_there] == pytest.approx(
            [loss for *_, loss in losses],
            abs=1e-10,
        )


# ------------------------------------------------------------------------- gradients in fewer bytes


def sent_dtypes(cls, factor, options):
    """Train; return the weights, and the dtypes in which DDP has sent gradients."""
    sent = []
    real = dist.all_reduce

    def noted(tensor, *args, **kwargs):
        sent.append(tensor.dtype)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = noted
    try:
        found, *_ = train(cls, factor, options)
    finally:
        dist.all_reduce = real
    return found, set(sent)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("cls", "factor"), [(Regression, 1), (SpeechBrainFitBatch, 3)])
@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_gradients_travel_in_half_precision_and_are_the_same_on_all_ranks(
    ranks,
    name,
    dtype,
    cls,
    factor,
):
    exact = train(cls, factor, {})[0]
    (first, sent), (second, _) = ranks.run(
        sent_dtypes,
        cls,
        factor,
        {"ddp_comm_hook": name},
        world_size=2,
    )
    assert dtype in sent
    for key, value in exact.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], value, rtol=0, atol=0.01)
    assert any(not torch.equal(first[key], value) for key, value in exact.items())


POWER = {
    "ddp_comm_hook": "powersgd",
    "start_powersgd_iter": 2,
    "bucket_cap_mb": 0.001,
    "max_grad_norm": 0,
}


def power_factor(cls, options):
    """Return the numbers sent per step, the loss of each epoch, and whether the ranks' weights are
    the same bits.
    """
    sent = []
    real = dist.all_reduce

    def noted(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    brain = make(cls, net=Net(), opt=sgd(0.05), **options)
    brain.fit([1], points(16), train_loader_kwargs={"batch_size": 2})
    dist.all_reduce = noted
    try:
        brain.fit(range(2, 12), points(16), train_loader_kwargs={"batch_size": 2})
    finally:
        dist.all_reduce = real
    everybody = gather_objects(lambda: weights(brain))
    alike = all(
        torch.equal(one, everybody[0][key]) for other in everybody for key, one in other.items()
    )
    return sum(sent), [loss for *_, loss in brain.losses], alike


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", [Regression, pytest.param(SpeechBrainFitBatch, marks=pytest.mark.slow)]
)
def test_powersgd_sends_thin_matrices_and_learns_what_it_has_left_out(ranks, cls):
    steps = 10 * 4
    gradients = sum(one.numel() for one in Net().parameters())
    exact = ranks.run(power_factor, cls, {"max_grad_norm": 0})[0][1]
    for sent, losses, alike in ranks.run(power_factor, cls, POWER, world_size=2):
        assert alike
        assert steps < sent < steps * gradients / 5
        assert losses[-1] < 0.7 * losses[0]
        assert losses[-1] == pytest.approx(exact[-1], rel=0.3)


class PoisonedOnce(Regression):
    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return (
            loss * float("nan") if self.optimizer_step == 5 and not self.nonfinite_count else loss
        )


@pytest.mark.costly
def test_powersgd_goes_on_after_a_step_that_was_not_finite(ranks):
    for _, losses, alike in ranks.run(power_factor, PoisonedOnce, POWER, world_size=2):
        assert alike
        assert losses[-1] < 0.7 * losses[0]


class Sums(Regression):
    def compute_objectives(self, predictions, batch, stage):
        return 1e6 * (predictions - batch[1]).square().sum(), 1e6 * len(batch[1])


@pytest.mark.costly
def test_a_large_sum_fits_into_fp16(ranks):
    """It is divided by a power of two near the count before it is sent, as where a scaler
    multiplies it.
    """
    expected, steps, _ = train(Sums, 1, {})
    for found, steps_there, _ in ranks.run(train, Sums, 1, {"ddp_comm_hook": "fp16"}, world_size=2):
        assert steps_there == steps == 12
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0.01)


# ------------------------------------------------------------------------------------------- resume


def train_mortal(folder, dies_at, options):
    counter = EpochCounter(2)
    given = {"opt": sgd(momentum=0.9), "ckpt_interval_steps": 2, "bucket_cap_mb": 0.001, **options}
    brain = make(
        Mortal,
        net=Net().float(),
        folder=folder,
        recoverables={"counter": counter},
        **given,
    )
    brain.dies_at = dies_at
    data = [(inputs.float(), target.float()) for inputs, target in points(36)]
    try:
        brain.fit(counter, data, train_loader_kwargs={"batch_size": 2, "shuffle": True})
    except Killed:
        return None
    return weights(brain), brain.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dies_at"),
    [
        ({"static_graph": True, "grad_accumulation_factor": 2}, (2, 4)),
        ({"ddp_comm_hook": "bf16"}, (2, 4)),
        (POWER, (1, 2)),
        (POWER | {"grad_accumulation_factor": 2}, (2, 4)),
    ],
    ids=str,
)
def test_a_resumed_run_has_the_same_bits(ranks, tmp_path, options, dies_at):
    """On three ranks, where the last bit of a sum depends on the order in which DDP makes its
    buckets.
    """
    [whole, *_] = ranks.run(train_mortal, tmp_path / "whole", None, options, world_size=3)
    assert ranks.run(train_mortal, tmp_path / "dead", dies_at, options, world_size=3) == [None] * 3
    for found, losses in ranks.run(train_mortal, tmp_path / "dead", None, options, world_size=3):
        assert all(torch.equal(found[key], value) for key, value in whole[0].items())
        assert losses == whole[1][-len(losses) :]


# ----------------------------------------------------------------------------------------- refusals


def outcome(make_and_fit, *args):
    try:
        make_and_fit(*args)
    except ConfigError as error:
        return str(error)
    return None


def train_unused(cls, options):
    brain = make(cls, net=Net(uses_extra=False), **options)
    before = weights(brain)
    try:
        brain.fit([1], points(12), train_loader_kwargs={"batch_size": 2})
    except ConfigError:
        assert all(torch.equal(value, before[key]) for key, value in weights(brain).items())
        raise


def test_unused_parameters_are_named_before_a_step_is_made_with_gradients_that_are_not_averaged(
    ranks,
):
    for text in ranks.run(outcome, train_unused, Regression, {}, world_size=2):
        assert text.startswith(
            "modules['net'] has parameters that the last batch of this optimizer step did not "
            "use: extra.w"
        )
        assert "give --find_unused_parameters" in text


@pytest.mark.costly
def test_a_static_graph_leaves_out_what_every_step_leaves_out(ranks):
    for text in ranks.run(outcome, train_unused, Regression, {"static_graph": True}, world_size=2):
        assert text is None, text


CONTRADICTIONS = {
    "static_graph=True does not work with find_unused_parameters=True: in a static graph": {
        "static_graph": True,
        "find_unused_parameters": True,
    },
    "ddp_comm_hook=fp16 does not work with check_parity=2": {
        "check_parity": 2,
        "ddp_comm_hook": "fp16",
    },
    "ddp_comm_hook=powersgd does not work with static_graph=True: DDP rebuilds": {
        "static_graph": True,
        "ddp_comm_hook": "powersgd",
    },
    "ddp_comm_hook=powersgd does not work with precision=fp16": {
        "precision": "fp16",
        "ddp_comm_hook": "powersgd",
    },
    "virtual_ranks=2 does not work with ddp_comm_hook=bf16": {
        "virtual_ranks": 2,
        "ddp_comm_hook": "bf16",
    },
    **{
        f"{chosen} does not work with {name}={value}: {why}": {**given, name: value}
        for chosen, given in (
            ("virtual_ranks=2", {"virtual_ranks": 2}),
            ("strategy=fsdp", {"strategy": "fsdp"}),
        )
        for name, values, why in (
            ("static_graph", [True], "it is DDP's"),
            ("bucket_cap_mb", [5.0], "it is DDP's"),
            ("gradient_as_bucket_view", [True, False], "it is DDP's"),
            ("broadcast_buffers", [True, False], "it is DDP's"),
        )
        for value in values
    },
    "virtual_ranks=2 does not work with sync_batchnorm=True: each virtual rank has": {
        "virtual_ranks": 2,
        "sync_batchnorm": True,
    },
    "sync_batchnorm=False does not work with evaluate_ema": {
        "sync_batchnorm": False,
        "ema_decay": 0.9,
        "evaluate_ema": True,
    },
}


ALLOWED = [
    {"virtual_ranks": 2, "sync_batchnorm": "auto"},
    {"virtual_ranks": 2, "sync_batchnorm": False, "static_graph": False},
    {"strategy": "fsdp", "sync_batchnorm": True, "static_graph": False},
    {"strategy": "zero1", "bucket_cap_mb": 5, "broadcast_buffers": False},
    {"auto_micro_batch": True, "global_batch_size": 8},
    {"check_parity": 2},
]


def allowed():
    return [outcome(lambda options=options: make(**options)) for options in ALLOWED]


def test_what_says_no_more_than_the_default_is_not_refused(ranks):
    assert allowed() == [None] * len(ALLOWED)
    assert ranks.run(allowed, world_size=2) == [[None] * len(ALLOWED)] * 2


def refused():
    return [outcome(lambda options=options: make(**options)) for options in CONTRADICTIONS.values()]


def test_what_does_not_go_together_is_refused_on_every_rank(ranks):
    for found in ranks.run(refused, world_size=2):
        for text, words in zip(found, CONTRADICTIONS, strict=True):
            assert text is not None
            assert text.startswith(words)


# -------------------------------------------------------------------------- batch norm of each rank


class Normed(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        [norm] = [one for one in self.modules.modules() if hasattr(one, "running_mean")]
        self.means = [*getattr(self, "means", []), gather_objects(norm.running_mean.clone)]


def train_normed(options):
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    brain = make(Normed, net=net, **options)
    brain.fit([1, 2], points(24), points(6), train_loader_kwargs={"batch_size": 4})
    report = run_of(brain).preflight.report
    return (
        weights(brain),
        brain.means,
        brain.losses,
        None if report is None else report.said.get("batch norm"),
    )


@pytest.mark.costly
def test_without_synchronisation_each_rank_normalises_its_rows_and_rank_0s_statistics_count(ranks):
    shared = ranks.run(train_normed, {}, world_size=2)
    own = ranks.run(train_normed, {"sync_batchnorm": False}, world_size=2)
    (first, means, losses, told), (second, _, losses_there, _) = own
    assert told == "each process by its own rows, as --sync_batchnorm=off says"
    assert shared[0][3] == "over the rows of all processes (--sync_batchnorm=auto)"
    assert losses == losses_there
    assert all(torch.equal(first[key], value) for key, value in second.items())
    assert all(torch.equal(one, other) for one, other in means)
    assert any(
        not torch.equal(first[key], value) for key, value in shared[0][0].items() if "weight" in key
    )
