"""Post-local SGD on real ranks: what is averaged and when, exact resume, and what is refused."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

from ddpkit.control import PeriodicSync
from ddpkit.distributed import get_rank
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteLossError,
    RankMismatchError,
    RunStopped,
)
from ddpkit.run import evaluation_stops, stage_runner
from ddpkit.strategies.tensor_averages import average_equal
from tests.recipes import (
    QUIET,
    FrontAndNet,
    Killed,
    Mortal,
    Regression,
    SpeechBrainFitBatch,
    Sums,
    make,
    points,
    sgd,
    weights,
)

LOCAL = {"ddp_comm_hook": "post_local_sgd"}
CLOSE = {"rtol": 0, "atol": 1e-10}
RATE = 0.05


def net_of(seed=2):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=RATE)


def moments(brain):
    states = brain.optimizer.state.values()
    return [
        value.clone()
        for state in states
        for _, value in sorted(state.items())
        if isinstance(value, torch.Tensor)
    ]


def everything(brain):
    return [*weights(brain).values(), *moments(brain)]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ---------------------------------------------------------------------------------- the same as DDP


def train(cls, options, number):
    brain = make(cls, net=net_of(), opt=sgd(weight_decay=0.1), max_grad_norm=0, **options)
    brain.fit([1, 2], points(number), train_loader_kwargs={"batch_size": 2, "shuffle": True})
    return weights(brain), brain.optimizer_step, brain.losses


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("cls", "more"),
    [
        pytest.param(Regression, {}, marks=pytest.mark.slow),
        (Sums, {"local_sgd_start": 3}),
        (Regression, {"grad_accumulation_factor": 3}),
    ],
)
def test_averages_after_every_step_of_plain_sgd_are_ddp(ranks, size, cls, more):
    """Also where one rank has no sample in the last batch: its gradient is zero, and its weights
    count as any.
    """
    own = {"local_sgd_period": 1, "local_sgd_start": 0, **more}
    averaged = {name: value for name, value in more.items() if name == "grad_accumulation_factor"}
    expected, steps, losses = ranks.run(train, cls, averaged, 6 * size + 1, world_size=size)[0]
    found = ranks.run(train, cls, LOCAL | own, 6 * size + 1, world_size=size)
    for mine, steps_there, losses_there in found:
        assert steps_there == steps > 2
        assert same(list(mine.values()), list(found[0][0].values()))
        for key, value in expected.items():
            torch.testing.assert_close(mine[key], value, **CLOSE)
        assert [loss for *_, loss in losses_there] == pytest.approx(
            [loss for *_, loss in losses],
            abs=1e-10,
        )


# ------------------------------------------------------------------------------------- a simulation


def trained_with(optimizer, options, number, epochs):
    brain = make(net=net_of(), opt=optimizer, max_grad_norm=0, **LOCAL, **options)
    brain.fit(range(1, epochs + 1), points(number), train_loader_kwargs={"batch_size": 2})
    return everything(brain)


def averaged(tensors):
    with torch.no_grad():
        for alike in zip(*tensors, strict=True):
            mean = sum(alike) / len(alike)
            for one in alike:
                one.copy_(mean)


class Simulated:
    """Ranks in this process: a copy of the net and an optimizer for each."""

    def __init__(self, make_optimizer, size):
        self.nets = [net_of() for _ in range(size)]
        self.optimizers = [make_optimizer(net.parameters()) for net in self.nets]

    def state(self, rank):
        states = self.optimizers[rank].state.values()
        return [
            *self.nets[rank].parameters(),
            *(value for one in states for _, value in sorted(one.items())),
        ]

    def backward(self, batch):
        size = len(self.nets)
        for net, share in zip(
            self.nets,
            torch.tensor_split(torch.arange(len(batch)), size),
            strict=True,
        ):
            rows = [batch[k] for k in share]
            inputs, targets = (torch.stack(part) for part in zip(*(rows or batch[:1]), strict=True))
            loss = (net(inputs) - targets).square().sum() * size / len(batch)
            (loss if rows else loss * 0).backward()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, number, epochs, *, start, period):
        data = points(number)
        steps = 0
        everybody = range(len(self.nets))
        for _ in range(epochs):
            for first in range(0, number, 2 * len(self.nets)):
                self.backward(data[first : first + 2 * len(self.nets)])
                if steps < start:
                    averaged([[one.grad for one in net.parameters()] for net in self.nets])
                self.step()
                steps += 1
                is_last = first + 2 * len(self.nets) >= number
                if steps > start and ((steps - start) % period == 0 or is_last):
                    averaged([self.state(rank) for rank in everybody])


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("size", "start"), [(2, 0), (3, 2)])
def test_weights_and_moments_are_those_of_ranks_simulated_by_hand(ranks, size, start):
    """Seven steps an epoch, at whose end is an average. One rank has no last sample."""
    number = 2 * size * 6 + 1
    by_hand = Simulated(adamw, size)
    by_hand.train(number, 3, start=start, period=3)
    for found in ranks.run(
        trained_with,
        adamw,
        {"local_sgd_start": start, "local_sgd_period": 3},
        number,
        3,
        world_size=size,
    ):
        for one, value in zip(found, by_hand.state(0), strict=True):
            torch.testing.assert_close(one, value.detach(), rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------- resume


class Stoppable(Mortal):
    """Is asked to stop in a given batch."""

    stops_at = None

    def on_fit_batch_start(self, batch, should_step):
        super().on_fit_batch_start(batch, should_step)
        if (self.progress.epoch, self.step) == self.stops_at and get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class EveryFour(PeriodicSync):
    def __call__(self, step, *args, **kwargs):
        report = super().__call__(step, *args, **kwargs)
        self.due = step + 4
        return report


class Centred(nn.Module):
    """Takes away a running mean: a buffer that moves, and bears on the next step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs):
        if self.training:
            self.mean.lerp_(inputs.mean(0), 0.1)
        return inputs - self.mean


def normed():
    torch.manual_seed(2)
    return nn.Sequential(
        Centred(),
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.2),
        nn.Linear(4, 1),
    ).double()


def train_mortal(folder, at, options):
    counter = EpochCounter(2)
    options = {"sync_batchnorm": False, "local_sgd_start": 2, "local_sgd_period": 3, **options}
    brain = make(
        Stoppable,
        net=normed(),
        opt=adamw,
        folder=folder,
        recoverables={"counter": counter},
        **LOCAL,
        **options,
    )
    for name, place in at.items():
        setattr(brain, name, place)
    try:
        brain.fit(counter, points(48), train_loader_kwargs={"batch_size": 2, "shuffle": True})
    except (Killed, RunStopped):
        return brain.optimizer_step
    return everything(brain), brain.losses


def stopped(folder, at, options):
    """Train where the ranks confer after every fourth step of an epoch, beginning with the
    first.
    """
    real = stage_runner.PeriodicSync
    stage_runner.PeriodicSync = evaluation_stops.PeriodicSync = EveryFour
    try:
        return train_mortal(folder, at, options)
    finally:
        stage_runner.PeriodicSync = evaluation_stops.PeriodicSync = real


def assert_resumed(ranks, tmp_path, at, options, size, begin=train_mortal):
    """Return after how many optimizer steps the first run ended."""
    whole = ranks.run(train_mortal, tmp_path / "whole", {}, options, world_size=size)
    ended = ranks.run(begin, tmp_path / "dead", at, options, world_size=size)
    found = ranks.run(train_mortal, tmp_path / "dead", {}, options, world_size=size)
    for (mine, losses), (expected, through) in zip(found, whole, strict=True):
        assert same(mine, expected)
        assert same(mine, found[0][0])
        assert losses == through[-len(losses) :]
    return ended[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dies_at", [(2, 7), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_a_run_that_died_between_averages_is_resumed_with_the_same_bits(
    ranks,
    tmp_path,
    dies_at,
    size,
):
    """It goes on from the newest save, which came at an average and not after two steps as asked
    for.
    """
    assert_resumed(ranks, tmp_path, {"dies_at": dies_at}, {"ckpt_interval_steps": 2}, size)


@pytest.mark.slow
def test_a_stop_waits_for_the_next_average(ranks, tmp_path):
    """Asked for in step 6, known to all in step 9; averages come after steps 2 + 3, 2 + 6 and
    2 + 9.
    """
    assert assert_resumed(ranks, tmp_path, {"stops_at": (1, 6)}, {}, 2, begin=stopped) == 11


@pytest.mark.slow
def test_a_stop_waits_for_the_average_at_the_end_of_an_epoch_where_none_comes_before(
    ranks,
    tmp_path,
):
    """Without a validation nothing else ends the run before the next epoch."""
    options = {"local_sgd_period": 1000}
    assert assert_resumed(ranks, tmp_path, {"stops_at": (1, 6)}, options, 2, begin=stopped) == 12


class SavesInABatch(Regression):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.checkpointer.save_checkpoint(end_of_epoch=False)


def saved_between(folder):
    brain = make(SavesInABatch, folder=folder, **LOCAL, local_sgd_period=3)
    with pytest.raises(CheckpointError):
        brain.fit([1], points(20), train_loader_kwargs={"batch_size": 2})
    return len(list(folder.glob("CKPT*")))


@pytest.mark.costly
def test_nothing_is_saved_while_the_weights_are_not_the_same(ranks, tmp_path):
    assert ranks.run(saved_between, tmp_path, world_size=2) == [0, 0]


# -------------------------------------------------------------------------------------- steps alike


def averaged_count(number):
    count = torch.tensor(number)
    average_equal([torch.ones(2), count], torch.device("cpu"))
    return count.item()


@pytest.mark.costly
def test_the_average_of_equal_counts_of_steps_is_their_number(ranks):
    """In float32 three times this is rounded, and a third of that is no whole number."""
    assert ranks.run(averaged_count, 6000001.0, world_size=3) == [6000001.0] * 3


class Poisoned(Regression):
    """Has infinite gradients on one rank in some steps, and other steps clipped on each."""

    steps = ()

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return (
            loss * float("nan") if get_rank() == 1 and self.optimizer_step in self.steps else loss
        )

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.counts = self.nonfinite_count, self.progress.clipped, self.optimizer_step


def poisoned(steps):
    brain = make(Poisoned, net=net_of(), opt=adamw, max_grad_norm=0.5, **LOCAL, local_sgd_period=3)
    brain.steps = steps
    try:
        brain.fit([1], points(32), train_loader_kwargs={"batch_size": 2})
    except NonFiniteLossError as error:
        return str(error)
    return brain.counts, everything(brain)


@pytest.mark.costly
def test_a_rank_whose_gradients_are_not_finite_steps_with_zeros_and_all_count_alike(ranks):
    (counts, first), (counts_there, second) = ranks.run(poisoned, (0, 4), world_size=2)
    assert counts == counts_there
    assert (counts[0], counts[2]) == (2, 8)
    assert 0 < counts[1] <= 8
    assert same(first, second)
    assert all(one.isfinite().all() for one in first)


@pytest.mark.costly
def test_too_many_such_steps_end_all_ranks_at_the_same_average(ranks):
    first, second = ranks.run(poisoned, range(8), world_size=2)
    assert first == second
    assert first.startswith(
        "6 steps of epoch 1 had gradients that are not finite (on the rank with the most), and "
    )


def half():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    brain = make(
        net=net,
        opt=adamw,
        precision="bf16",
        **LOCAL,
        local_sgd_start=3,
        local_sgd_period=4,
    )
    data = [(inputs.float(), inputs.float().sum(0, keepdim=True)) for inputs, _ in points(64)]
    brain.fit(range(1, 7), data, train_loader_kwargs={"batch_size": 4})
    return everything(brain), [loss for *_, loss in brain.losses]


@pytest.mark.slow
def test_bf16_trains(ranks):
    (first, losses), (second, _) = ranks.run(half, world_size=2)
    assert same(first, second)
    assert losses[-1] < 0.5 * losses[0]


def averaged_mask():
    mask = torch.full((3,), torch.finfo(torch.float32).min)
    average_equal([mask], torch.device("cpu"))
    return mask.unique().tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_the_average_of_the_lowest_number_is_not_infinite(ranks, size):
    assert ranks.run(averaged_mask, world_size=size) == [[torch.finfo(torch.float32).min]] * size


def mean_of_an_untrained_entry():
    modules = {"net": net_of(), "front": Centred().double()}
    brain = FrontAndNet(modules, sgd(), None, {**QUIET, **LOCAL, "local_sgd_period": 3})
    brain.fit([1], points(24), train_loader_kwargs={"batch_size": 2})
    return brain.modules.front.mean


@pytest.mark.costly
def test_buffers_of_an_entry_without_parameters_are_averaged_too(ranks):
    first, second = ranks.run(mean_of_an_untrained_entry, world_size=2)
    assert same([first], [second])
    assert first.any()


# ----------------------------------------------------------------------------------------- refusals


class Lists(torch.optim.SGD):
    """Keeps what cannot be averaged."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [parameter.sum()]


class Adaptive(torch.optim.SGD):
    """Notes in its groups what follows from its gradients."""

    def step(self, closure=None):
        self.param_groups[0]["size"] = float(self.param_groups[0]["params"][0].grad.sum())
        super().step(closure)


class NotTorchs:
    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]

    def step(self):
        """Do nothing."""

    def zero_grad(self, set_to_none=True):
        """Do nothing."""


class Branching(nn.Module):
    """Each rank uses another layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 1) for _ in range(2)).double()

    def forward(self, inputs):
        return self.layers[get_rank()](inputs)


OPTIMIZERS = {
    Lists: "Lists keeps state['history'], a list, not a tensor",
    Adaptive: "Adaptive keeps numbers in its groups that are not the same",
    NotTorchs: "NotTorchs is not a torch.optim.Optimizer. Use one",
}


def refused(net, optimizer):
    brain = make(
        net=net(),
        opt=lambda parameters: optimizer(parameters, **RATES.get(optimizer, {})),
        **LOCAL,
        local_sgd_period=2,
    )
    with pytest.raises((ConfigError, RankMismatchError)) as caught:
        brain.fit([1], points(16), train_loader_kwargs={"batch_size": 2})
    return str(caught.value)


RATES = {Lists: {"lr": 0.1}, Adaptive: {"lr": 0.1}}


@pytest.mark.corner
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_that_cannot_be_averaged_are_named(ranks, optimizer):
    for text in ranks.run(refused, net_of, optimizer, world_size=2):
        start = (
            "ddp_comm_hook=post_local_sgd cannot average the optimizer 'opt_class' over the ranks: "
        )
        assert text.startswith(start + OPTIMIZERS[optimizer])


def test_ranks_that_use_other_parameters_are_told(ranks):
    for text in ranks.run(refused, Branching, torch.optim.AdamW, world_size=2):
        assert text.startswith(
            "ddp_comm_hook=post_local_sgd: the ranks have other numbers to average (here 18 in all)"
        )


class UsesMore(Regression):
    def compute_forward(self, batch, stage):
        found = self.modules.net(batch[0])
        return found if get_rank() else found + self.modules.other(batch[0])


def uneven():
    brain = UsesMore(
        {"net": net_of(), "other": net_of()},
        adamw,
        None,
        {**QUIET, **LOCAL, "local_sgd_period": 2},
    )
    with pytest.raises(RankMismatchError) as caught:
        brain.fit([1], points(16), train_loader_kwargs={"batch_size": 2})
    return str(caught.value)


def test_an_entry_that_some_ranks_do_not_use_is_told_before_numbers_are_sent(ranks):
    for text in ranks.run(uneven, world_size=2):
        assert text.startswith(
            "ddp_comm_hook=post_local_sgd: the ranks have other numbers to average (here "
        )


PERIOD = {"local_sgd_period": 4}
CONTRADICTIONS = [
    ({**LOCAL}, "ddp_comm_hook=post_local_sgd needs --local_sgd_period: it needs"),
    ({**LOCAL, "local_sgd_period": 0}, "local_sgd_period"),
    ({**LOCAL, **PERIOD, "local_sgd_start": -1}, "local_sgd_start"),
    *(
        (
            {**LOCAL, **PERIOD, name: value},
            (f"ddp_comm_hook=post_local_sgd does not work with {name}={value}: "),
        )
        for name, value in {
            "strategy": "zero1",
            "virtual_ranks": 2,
            "check_parity": 2,
            "precision": "fp16",
            "ema_decay": 0.9,
            "skip_nonfinite_grads": True,
            "find_unused_parameters": True,
            "static_graph": True,
        }.items()
    ),
    (
        {**LOCAL, **PERIOD, "ema_decay": 0.0},
        ("ddp_comm_hook=post_local_sgd does not work with ema_decay=0.0: "),
    ),
    (
        {**LOCAL, **PERIOD, "strategy": "fsdp"},
        ("ddp_comm_hook=post_local_sgd does not work with strategy=fsdp: "),
    ),
]


def outcomes():
    found = []
    for cls, options in [
        *((Regression, options) for options, _ in CONTRADICTIONS),
        (SpeechBrainFitBatch, LOCAL | PERIOD),
    ]:
        with pytest.raises(ConfigError) as caught:
            make(cls, **options)
        found.append(str(caught.value))
    return found


def test_what_does_not_go_together_is_refused_on_every_rank(ranks):
    for *found, own in ranks.run(outcomes, world_size=2):
        for text, (_, words) in zip(found, CONTRADICTIONS, strict=True):
            assert text.startswith(words)
        assert own.startswith(
            "a fit_batch of the recipe does not work with ddp_comm_hook=post_local_sgd"
        )
