"""What is read between two optimizer steps, by a validation, a save or a part, has the buffers that
all ranks have.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit import Part, Stage, parts
from ddpkit.distributed import get_rank
from tests.recipes import QUIET, Regression, points, sgd, world_size

DATA = points(12)


class Centred(nn.Linear):
    """Keeps a running mean of its inputs, which for equal parts of a batch is that of the batch."""

    def __init__(self):
        torch.manual_seed(2)
        super().__init__(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.double()

    def forward(self, inputs):
        outputs = super().forward(inputs - self.mean)
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.3)
        return outputs


def net():
    return nn.Sequential(Centred(), nn.BatchNorm1d(3, track_running_stats=True), nn.Linear(3, 1))


class Watched(Regression):
    """Notes its buffers in the hook after a step, and in each validation; freezes all optimizers
    in some epochs.
    """

    frozen_in = ()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.after_steps = []
        self.evaluated = []

    def freeze_optimizers(self, optimizers):
        return {} if self.progress.epoch in self.frozen_in else optimizers

    def buffers(self):
        return [buffer.tolist() for buffer in self.raw_modules.buffers()]

    def compute_forward(self, batch, stage):
        if stage is Stage.VALID:
            self.evaluated.append(self.buffers())
        return super().compute_forward(batch, stage)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step:
            self.after_steps.append(self.buffers())


class Looks(Part):
    """Notes the buffers after each step at which a validation, or a save, is possible."""

    def __init__(self):
        self.seen = []

    def is_validation_due(self, brain, moment):
        self.seen.append((brain.step, brain.buffers()))
        return False


def trained(*parts, frozen_in=(), layers=None, **options):
    layers = layers or net()
    brain = Watched(
        {"net": layers.double()}, sgd(), run_opts={**QUIET, "seed": 4, **options}, parts=parts
    )
    brain.frozen_in = frozen_in
    each = {"batch_size": 4 // (options.get("virtual_ranks") or world_size())}
    brain.fit([1, 2], DATA, DATA[:4], train_loader_kwargs=each, valid_loader_kwargs=each)
    return brain


def centred(options):
    looks = Looks()
    layers = nn.Sequential(Centred(), nn.Linear(3, 1))
    brain = trained(looks, layers=layers, frozen_in=[2], **options)
    at_steps = [buffers for step, buffers in looks.seen if step]
    return torch.tensor(brain.after_steps), torch.tensor(at_steps)


@pytest.mark.costly
def test_buffers_of_virtual_ranks_are_averaged_where_no_optimizer_steps(ranks):
    found = centred({"virtual_ranks": 2})
    torch.testing.assert_close(found, centred({}), rtol=0, atol=1e-12)
    for of_rank in ranks.run(centred, {"virtual_ranks": 2}, world_size=2):
        assert all(map(torch.equal, of_rank, found))


def validated(options):
    return trained(parts.ValidationSchedule(every_steps=1), **options).evaluated


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {"sync_batchnorm": False},
        {"shard_evaluation": True},
        pytest.param({"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "zero1"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_rank_evaluates_the_buffers_of_rank_0(ranks, options):
    of_main, of_other = ranks.run(validated, options, world_size=2)
    assert len(of_main) >= 6
    assert of_main == of_other


def seen_with_local_steps():
    looks = Looks()
    local = {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 2, "sync_batchnorm": False}
    trained(looks, frozen_in=[2], **local)
    return looks.seen


@pytest.mark.costly
def test_ranks_that_step_alone_differ_where_only_buffers_have_moved(ranks):
    of_main, of_other = ranks.run(seen_with_local_steps, world_size=2)
    assert of_main
    assert of_main == of_other


class Codebook(nn.Module):
    """Has nothing to train: it keeps a running mean of its inputs, and how many batches it saw."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        outputs = inputs - self.mean
        if self.training:
            self.mean = self.mean.lerp(inputs.detach().mean(0), 0.3)
            self.seen += 1
        return outputs


class Quantized(Watched):
    """Feeds what an entry without parameters returns to one that is trained."""

    def compute_forward(self, batch, stage):
        inputs, targets = batch
        return super().compute_forward([self.modules.codebook(inputs), targets], stage)


class LateCodebook(Codebook):
    """Begins to move at its fifth batch, and on one rank only."""

    def __init__(self, moves_on):
        super().__init__()
        self.moves_here = get_rank() == moves_on
        self.batches = 0

    def forward(self, inputs):
        self.batches += self.training
        if self.moves_here and self.batches >= 5:
            return super().forward(inputs)
        return inputs - self.mean


def quantized(options, codebook=Codebook, *arguments):
    torch.manual_seed(2)
    brain = Quantized(
        {"net": nn.Linear(3, 1).double(), "codebook": codebook(*arguments)},
        sgd(),
        run_opts={**QUIET, **options},
        parts=[parts.ValidationSchedule(every_steps=1)],
    )
    brain.frozen_in = [2]
    each = {"batch_size": 2}
    brain.fit([1, 2], DATA, DATA[:4], train_loader_kwargs=each, valid_loader_kwargs=each)
    return brain.after_steps, brain.evaluated


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {"grad_accumulation_factor": 2},
        {"shard_evaluation": True},
        {"virtual_ranks": 2},
        pytest.param({"strategy": "zero1"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "fsdp"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_buffers_of_an_entry_without_parameters_are_those_of_rank_0(ranks, options):
    of_main, of_other = ranks.run(quantized, options, world_size=2)
    assert all(of_main)
    assert of_main == of_other


@pytest.mark.costly
@pytest.mark.parametrize("moves_on", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_buffers_that_begin_to_move_late_and_on_one_rank_are_those_of_rank_0(ranks, moves_on):
    of_main, of_other = ranks.run(quantized, {}, LateCodebook, moves_on, world_size=2)
    assert of_main == of_other
    steps = [str(buffers) for buffers in of_main[0]]
    assert len(set(steps[:4])) == 1
    assert (steps[4] != steps[3]) is (moves_on == 0)


class Spectrum(nn.Module):
    """Has nothing to train, and two buffers that do not move."""

    def __init__(self):
        super().__init__()
        self.register_buffer("filters", torch.arange(9.0, dtype=torch.float64).reshape(3, 3))
        self.register_buffer("window", torch.ones(3, dtype=torch.float64))

    def forward(self, inputs):
        return (inputs * self.window) @ self.filters


class TakingTurns(Regression):
    """Looks with both losses at one spectrum; the critic steps before the maker's backward pass."""

    def init_optimizers(self):
        self.maker_optimizer = torch.optim.SGD(self.modules.maker.parameters(), 0.01)
        self.critic_optimizer = torch.optim.SGD(self.modules.critic.parameters(), 0.01)
        self.optimizers_dict = {"maker": self.maker_optimizer, "critic": self.critic_optimizer}
        self.turn = "critic"

    def freeze_optimizers(self, optimizers):
        return {self.turn: optimizers[self.turn]}

    def fit_batch(self, batch):
        with self.training_ctx:
            spectrum = self.modules.spectrum(self.modules.maker(batch[0]))
            loss = self.modules.critic(spectrum.detach()).square().mean()
        for self.turn, part in (("critic", loss), ("maker", spectrum.square().mean())):
            self.backward(part)
            if self.should_step:
                self.optimizers_step()
        return loss.detach()


def taught_in_turns(options):
    torch.manual_seed(3)
    maker, critic = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
    brain = TakingTurns(
        {"maker": maker, "critic": critic, "spectrum": Spectrum()},
        run_opts={**QUIET, **options},
    )
    brain.fit([1], DATA, train_loader_kwargs={"batch_size": 2})
    weight = maker.weight
    return getattr(weight, "full_tensor", lambda: weight)().tolist()


@pytest.mark.costly
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"strategy": "fsdp"}, marks=pytest.mark.slow)], ids=str
)
def test_buffers_may_be_sent_before_another_loss_goes_backwards_through_them(ranks, options):
    of_main, of_other = ranks.run(taught_in_turns, options, world_size=2)
    assert of_main == of_other
