"""The part AveragedWeights: which weights it takes, what is evaluated, statistics that are renewed,
and runs that go on.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.parts import AveragedWeights
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, assert_same, points, sgd, world_size

SLOW = pytest.mark.slow
BATCH = 4
DATA = points(22)


def network(*, dropout=0.0):
    torch.manual_seed(3)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 1)]
    return nn.Sequential(*layers).double()


class Recipe(Brain):
    """Keeps the weights after each batch, and the losses of validations; saves after these."""

    dies_at = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.history = []
        self.drawn = []
        self.losses = []

    def compute_forward(self, batch, stage):
        self.log("mean", batch[0].mean())
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        weight = self.raw_modules.net[0].weight
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.history.append(whole.detach().clone())
        if self.optimizer_step == self.dies_at:
            raise Killed

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.drawn.append(torch.rand(1).item())
        if stage is Stage.VALID:
            self.losses.append(stage_loss)
            if self.checkpointer is not None:
                self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def make(part=None, *, folder=None, dropout=0.0, **options):
    net = network(dropout=dropout)
    checkpointer = None if folder is None else Checkpointer(folder, {"net": net})
    given = {**QUIET, **options}
    parts = [] if part is None else [part]
    return Recipe({"net": net}, sgd(momentum=0.9), None, given, checkpointer, parts=parts)


def fit(brain, epochs=2, valid=True):
    kwargs = {"batch_size": BATCH // world_size(), "shuffle": True}
    valid_set = points(6, seed=8) if valid else None
    counter = EpochCounter(epochs)
    if brain.checkpointer is not None:
        brain.checkpointer.add_recoverable("counter", counter)
    brain.fit(counter, DATA, valid_set, train_loader_kwargs=kwargs)
    return brain


def averaged(brain, name="net.0.weight"):
    value = brain.ema.state_dict()[name]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


# ---------------------------------------------------------------------- what is taken


TAKEN = {
    "each": ({}, range(1, 13)),
    "late": ({"start_step": 5}, range(5, 13)),
    "every third": ({"every_steps": 3}, (3, 6, 9, 12)),
    "late and every third": ({"start_step": 5, "every_steps": 3}, (6, 9, 12)),
    "from an epoch on": ({"start_epoch": 2}, range(7, 13)),
    "after each epoch": ({"at_epoch_end": True}, (6, 12)),
    "after later epochs": ({"at_epoch_end": True, "start_epoch": 2}, (12,)),
}


@pytest.mark.parametrize(("settings", "steps"), TAKEN.values(), ids=TAKEN)
def test_a_mean_is_over_the_weights_that_are_taken(settings, steps):
    brain = fit(make(AveragedWeights(kind="mean", **settings)), valid=False)
    taken = torch.stack([brain.history[step - 1] for step in steps])
    torch.testing.assert_close(averaged(brain), taken.mean(0), rtol=0, atol=1e-12)
    assert brain.ema.updates == len(taken)


def test_a_moving_average_that_begins_late():
    brain = fit(make(AveragedWeights(decay=0.75, start_step=4)), valid=False)
    expected = brain.history[3]
    for weight in brain.history[4:]:
        expected = 0.75 * expected + 0.25 * weight
    torch.testing.assert_close(averaged(brain), expected, rtol=0, atol=1e-12)


@pytest.mark.costly
def test_the_option_and_the_part_save_the_same_bytes(tmp_path):
    fit(make(folder=tmp_path / "option", ema_decay=0.9, evaluate_ema=True))
    fit(make(AveragedWeights(decay=0.9), folder=tmp_path / "part"))
    files = [
        Checkpointer(tmp_path / name, {}).find_checkpoint().paramfiles["ema"].read_bytes()
        for name in ("option", "part")
    ]
    assert files[0] == files[1]


# ---------------------------------------------------------------------- evaluation


def test_validation_uses_the_average_once_there_is_one(caplog):
    plain = fit(make())
    late = fit(make(AveragedWeights(kind="mean", start_epoch=2)))
    unused = fit(make(AveragedWeights(kind="mean", evaluate=False)))
    assert late.losses[0] == plain.losses[0]
    assert late.losses[1] != plain.losses[1]
    assert unused.losses == plain.losses
    assert "no weights are averaged yet, and VALID uses the weights themselves" in caplog.text
    assert "The average begins in epoch 2" in caplog.text


# ---------------------------------------------------------------------- renewed statistics


def statistics_by_hand(average, batches):
    """Return the statistics of batches of all ranks together, and their unbiased variance."""
    linear = nn.Linear(3, 4).double()
    linear.load_state_dict({name: average[f"net.0.{name}"] for name in ("weight", "bias")})
    with torch.no_grad():
        outputs = [linear(rows) for rows in batches]
    means = torch.stack([rows.mean(0) for rows in outputs]).mean(0)
    return means, torch.stack([rows.var(0) for rows in outputs]).mean(0)


def test_statistics_are_renewed_for_the_averaged_weights():
    brain = fit(make(AveragedWeights(kind="mean", renew_batch_statistics=3)))
    order = list(brain.train_sampler)[:3]  # of the last epoch
    batches = [torch.stack([DATA[index][0] for index in indices]) for indices in order]
    state = brain.ema.state_dict()
    mean, variance = statistics_by_hand(state, batches)
    torch.testing.assert_close(state["net.1.running_mean"], mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(state["net.1.running_var"], variance, rtol=0, atol=1e-12)


def test_to_renew_them_does_not_move_the_training():
    plain = fit(make(dropout=0.5))
    renewed = fit(make(AveragedWeights(renew_batch_statistics=2), dropout=0.5))
    for found, expected in zip(renewed.history, plain.history, strict=True):
        assert torch.equal(found, expected)
    assert_same(renewed.modules.net.state_dict(), plain.modules.net.state_dict())
    modes = [part.training for part in renewed.modules.net.modules()]
    assert modes == [part.training for part in plain.modules.net.modules()]
    assert renewed.modules.net[1].momentum == plain.modules.net[1].momentum
    assert (renewed.logged, renewed.drawn) == (plain.logged, plain.drawn)


def train_with(settings, options):
    brain = fit(make(AveragedWeights(**settings), **options))
    names = ("net.0.weight", "net.1.running_mean", "net.1.running_var")
    return [*brain.losses, *(averaged(brain, name).tolist() for name in names)]


def assert_equal_on_two(ranks, settings, **options):
    alone = train_with(settings, {})
    for found in ranks.run(train_with, settings, options, world_size=2):
        for value, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(
                torch.tensor(value), torch.tensor(expected), rtol=0, atol=1e-10
            )


RENEWED = {"kind": "mean", "start_step": 3, "renew_batch_statistics": 4}


@pytest.mark.costly
def test_two_processes_average_and_renew_as_one(ranks):
    assert_equal_on_two(ranks, RENEWED)


@SLOW
@pytest.mark.parametrize("options", [{"strategy": "zero1"}, {"strategy": "fsdp"}], ids=str)
@pytest.mark.parametrize("number", [1, 6, 9])
def test_so_with_other_strategies_and_more_batches_than_there_are(ranks, options, number):
    assert_equal_on_two(ranks, {**RENEWED, "renew_batch_statistics": number}, **options)


# ---------------------------------------------------------------------- a run that goes on


@pytest.mark.costly
@pytest.mark.parametrize("dies_at", [5, *(pytest.param(one, marks=SLOW) for one in (2, 3, 8, 11))])
def test_a_late_start_is_exact_after_a_kill(tmp_path, dies_at):
    new = functools.partial(AveragedWeights, **RENEWED)
    options = {"ckpt_interval_steps": 2}
    whole = fit(make(new(), folder=tmp_path / "whole"))
    killed = make(new(), folder=tmp_path / "killed", **options)
    killed.dies_at = dies_at
    with pytest.raises(Killed):
        fit(killed)
    resumed = fit(make(new(), folder=tmp_path / "killed", **options))
    assert_same(resumed.ema.state_dict(), whole.ema.state_dict())
    assert resumed.losses == whole.losses[-len(resumed.losses) :]


@pytest.mark.costly
def test_statistics_are_not_renewed_again_after_a_kill_where_nothing_was_averaged_since(tmp_path):
    new = functools.partial(AveragedWeights, kind="mean", every_steps=10, renew_batch_statistics=2)
    options = {"ckpt_interval_steps": 2}
    whole = fit(make(new(), folder=tmp_path / "whole"), epochs=3)
    killed = make(new(), folder=tmp_path / "killed", **options)
    killed.dies_at = 13
    with pytest.raises(Killed):
        fit(killed, epochs=3)
    resumed = fit(make(new(), folder=tmp_path / "killed", **options), epochs=3)
    assert_same(resumed.ema.state_dict(), whole.ema.state_dict())
    assert resumed.losses == whole.losses[-len(resumed.losses) :]


def test_other_settings_are_told(tmp_path, caplog):
    fit(make(AveragedWeights(kind="mean"), folder=tmp_path), epochs=1)
    fit(make(AveragedWeights(kind="mean", every_steps=2), folder=tmp_path))
    assert "goes on with every_steps=2. The run was saved with every_steps=1" in caplog.text


def test_the_part_goes_on_with_what_the_option_has_averaged(tmp_path):
    first = fit(make(folder=tmp_path, ema_decay=0.9), epochs=1)
    second = make(AveragedWeights(decay=0.9), folder=tmp_path)
    fit(second)
    assert (first.ema.updates, second.ema.updates) == (6, 12)


# ---------------------------------------------------------------------- what is refused


BAD = [
    ({"decay": 1.0}, "decay=1.0 must be at least 0 and less than 1"),
    ({"kind": "swa"}, "kind='swa' must be 'ema'"),
    ({"every_steps": 0}, "every_steps=0 must be a whole number >= 1"),
    ({"start_step": -1}, "start_step=-1 must be a whole number >= 0"),
    ({"renew_batch_statistics": 1.5}, "renew_batch_statistics=1.5 must be a whole number"),
    ({"every_steps": 2, "at_epoch_end": True}, "contradict each other"),
]


@pytest.mark.parametrize(("settings", "words"), BAD)
def test_arguments_that_cannot_be_used(settings, words):
    with pytest.raises(ConfigError, match=words):
        AveragedWeights(**settings)


WITH_OPTIONS = [
    ({"ema_decay": 0.9}, {}, "ema_decay=0.9 is given, too"),
    ({"sync_batchnorm": False}, {}, "sync_batchnorm=False"),
    ({"virtual_ranks": 2}, {"renew_batch_statistics": 2}, "virtual_ranks each has its own rows"),
]


@pytest.mark.parametrize(("options", "settings", "words"), WITH_OPTIONS)
def test_options_that_do_not_go_with_it(options, settings, words):
    with pytest.raises(ConfigError, match=words):
        fit(make(AveragedWeights(**settings), **options))


def test_a_second_average():
    brain = make(AveragedWeights())
    brain.ema = None
    with pytest.raises(ConfigError, match="another average stands in Brain.ema"):
        fit(brain)


def test_a_stream_cannot_be_read_once_more():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(DATA)

    brain = make(AveragedWeights(renew_batch_statistics=2))
    with pytest.raises(ConfigError, match="of Stream it cannot"):
        brain.fit([1], Stream(), train_loader_kwargs={"batch_size": BATCH})


def test_an_average_of_other_modules_is_refused(tmp_path):
    fit(make(AveragedWeights(), folder=tmp_path), epochs=1)
    other = make(AveragedWeights(), folder=tmp_path)
    other.modules["more"] = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match="other modules"):
        fit(other)


PAGE = Path(__file__).parents[2] / "docs/how-to/averaged-weights.md"


def test_the_page_is_true():
    blocks = [text.split("```")[0] for text in PAGE.read_text().split("```python\n")[1:]]
    (block,) = [block for block in blocks if "AveragedWeights" in block]
    shown = {}
    exec(compile(block, str(PAGE), "exec"), shown)
    assert (shown["result"].epochs, shown["brain"].ema.updates) == (5, 3)
