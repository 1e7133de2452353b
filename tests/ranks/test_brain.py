"""The Brain on real ranks: what differs from one process is only that it is several."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from ddpkit.brain import run_of
from ddpkit.checkpoints import Checkpointer
from ddpkit.control import Requests
from ddpkit.dataloader import make_dataloader
from ddpkit.distributed import control_group, if_main_process, run_on_main
from ddpkit.epoch_loop import EpochCounter, EpochCounterWithStopper
from ddpkit.errors import CheckpointUsageError, NonFiniteLossError
from ddpkit.run.intra_epoch_saves import IntraEpochSaves
from ddpkit.seed import seed_everything
from ddpkit.syncbn import SyncBatchNorm
from ddpkit.train_logger import FileTrainLogger
from ddpkit.types import Stage
from tests.rank_pool import RankPoolError
from tests.recipes import (
    QUIET,
    FrontAndNet,
    Gan,
    Killed,
    Mortal,
    Poisoned,
    Regression,
    SavesAfterTraining,
    SpeechBrainFitBatch,
    gan_modules,
    linear,
    make,
    points,
    seen_in,
    sgd,
    weights,
    world_size,
)

CLOSE = {"rtol": 0, "atol": 1e-10}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            msg=lambda text, name=name: f"{name}: {text}",
            **CLOSE,
        )


def assert_alike(results):
    """Every rank returned the same."""
    for rank, result in enumerate(results[1:], 1):
        assert result == results[0], f"rank {rank} differs from rank 0"


# ---------------------------------------------------------------------------------- the same answer


def train_gan(joined):
    brain = Gan(gan_modules(), None, None, QUIET)
    kwargs = {"batch_size": joined // world_size(), "shuffle": True}
    brain.fit([1, 2], points(24), points(5), train_loader_kwargs=kwargs)
    wrapped = [isinstance(module, DistributedDataParallel) for module in brain.modules.values()]
    return weights(brain), brain.optimizer_step, wrapped


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 3])
def test_a_gan_has_the_same_weights_as_in_one_process(ranks, world):
    expected, steps, _ = train_gan(6)
    for found, steps_there, wrapped in ranks.run(train_gan, 6, world_size=world):
        assert_close(found, expected)
        assert steps_there == steps == 8
        assert wrapped == [True, True]


def train_own_fit_batch(joined, factor, cls_name):
    cls = {"own": SpeechBrainFitBatch, "default": Regression}[cls_name]
    brain = make(cls, grad_accumulation_factor=factor, opt=sgd(momentum=0.9))
    brain.fit(
        [1, 2],
        points(30),
        train_loader_kwargs={"batch_size": joined // world_size(), "shuffle": True},
    )
    return weights(brain), brain.optimizer_step, brain.losses


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("cls_name", ["own", "default"])
@pytest.mark.parametrize(("world", "factor"), [(2, 1), (2, 2), (3, 4), (2, 9)])
def test_an_overridden_fit_batch_is_stepped_alike(ranks, world, factor, cls_name):
    expected, steps, losses = train_own_fit_batch(6, factor, cls_name)
    for found, steps_there, losses_there in ranks.run(
        train_own_fit_batch,
        6,
        factor,
        cls_name,
        world_size=world,
    ):
        assert_close(found, expected)
        assert steps_there == steps == 2 * math.ceil(5 / factor)
        assert [loss for _, _, loss in losses_there] == pytest.approx(
            [loss for _, _, loss in losses]
        )


class WholeBatches(Dataset):
    """Gives whole batches of two."""

    def __init__(self, number):
        rows = points(2 * number)
        self.batches = [
            tuple(torch.stack(part) for part in zip(*rows[k : k + 2], strict=True))
            for k in range(0, 2 * number, 2)
        ]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def train_whole_batches(number, factor):
    brain = make(grad_accumulation_factor=factor)
    brain.fit([1, 2], WholeBatches(number), train_loader_kwargs={"batch_size": None})
    return weights(brain), brain.losses, len(brain.trained_on)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("number", "world"), [(4, 2), (5, 2), (4, 3)])
def test_whole_batches_are_dealt_out_and_a_repeated_one_weighs_nothing(ranks, number, world):
    # in one process: windows of as many batches
    expected, losses, _ = train_whole_batches(number, world)
    for found, losses_there, trained_on in ranks.run(
        train_whole_batches,
        number,
        1,
        world_size=world,
    ):
        assert_close(found, expected)
        assert trained_on == 2 * math.ceil(number / world)
        assert [loss for _, _, loss in losses_there] == pytest.approx(
            [loss for _, _, loss in losses]
        )


class Branching(nn.Module):
    """Leaves one of two layers out, which one depends on the first number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.left = nn.Linear(3, 1).double()
        self.right = nn.Linear(3, 1).double()

    def forward(self, inputs):
        return (self.left if inputs[0, 0] > 0 else self.right)(inputs)


def train_branching():
    brain = make(net=Branching(), find_unused_parameters=True)
    brain.fit([1, 2], points(12), train_loader_kwargs={"batch_size": 2 // world_size()})
    return weights(brain)


@pytest.mark.costly
def test_find_unused_parameters_lets_a_forward_pass_leave_some_out(ranks):
    found = ranks.run(train_branching)
    assert_close(found[1], found[0])
    assert any(
        not torch.equal(value, Branching().state_dict()[name[4:]])
        for name, value in found[0].items()
    )


# ----------------------------------------------------------------------------------------- wrappers


class Encoder(nn.Module):
    """A module whose parts recipes call by themselves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(3, 4).double()
        self.outer = nn.Linear(4, 1).double()
        self.dim = 4
        self.strength = 1.0

    def encode(self, inputs):
        return self.strength * torch.tanh(self.inner(inputs))

    def forward(self, inputs):
        return self.outer(self.encode(inputs))


class PastForward(Regression):
    """Calls parts of the module, never its forward."""

    def compute_forward(self, batch, stage):
        return self.modules.net.outer(self.modules.net.encode(batch[0]))


class Both(Regression):
    """Calls forward, and a part once more."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0]) + self.modules.net.encode(batch[0]).mean(
            dim=1,
            keepdim=True,
        )


class Frozen(Regression):
    """Trains while the module is in evaluation mode, as one does with a pretrained one."""

    def on_fit_batch_start(self, batch, should_step):
        self.modules.net.eval()


def train_encoder(cls_name, factor):
    cls = {"past": PastForward, "both": Both, "frozen": Frozen}[cls_name]
    brain = make(cls, net=Encoder(), grad_accumulation_factor=factor)
    brain.fit([1, 2], points(30), points(4), train_loader_kwargs={"batch_size": 6 // world_size()})
    return weights(brain), brain.losses


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("cls_name", ["past", "both", "frozen"])
def test_gradients_made_past_forward_are_averaged(ranks, cls_name, factor):
    expected, losses = train_encoder(cls_name, factor)
    for found, losses_there in ranks.run(train_encoder, cls_name, factor):
        assert_close(found, expected)
        assert [loss for _, _, loss in losses_there] == pytest.approx(
            [loss for _, _, loss in losses]
        )


def reach():
    brain = make(net=Encoder())
    net = brain.modules.net
    brain.fit([], points(2))
    wrapped = brain.modules.net
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.module is net
    assert wrapped.dim == 4
    assert wrapped.inner is net.inner
    assert wrapped.encode(torch.zeros(1, 3, dtype=torch.float64)).shape == (1, 4)
    wrapped.strength = 3.0  # what is written reaches the module as well
    wrapped.label = "new"
    assert (net.strength, net.label, wrapped.label) == (3.0, "new", "new")
    assert "strength" not in vars(wrapped)
    wrapped.eval()
    assert not net.training
    assert not hasattr(wrapped, "no_such_thing")
    twin = copy.deepcopy(wrapped)  # for a moving average
    twin.strength = 5.0
    assert (twin.module.strength, net.strength) == (5.0, 3.0)
    assert brain.raw_modules.net is net
    return True


@pytest.mark.costly
def test_attributes_are_reached_through_the_wrapper(ranks):
    assert ranks.run(reach) == [True, True]


class Heads(Regression):
    def compute_forward(self, batch, stage):
        first, second = self.modules.net
        assert len(self.modules.net) == 2
        assert bool(self.modules.net)
        return first(batch[0]) + self.modules.net[1](batch[0]) + 0 * second(batch[0])


def train_heads():
    torch.manual_seed(9)
    brain = make(Heads, net=nn.ModuleList([nn.Linear(3, 1).double() for _ in range(2)]))
    brain.fit([1], points(8), train_loader_kwargs={"batch_size": 4 // world_size()})
    return weights(brain)


@pytest.mark.costly
def test_a_list_of_modules_is_a_list_through_the_wrapper(ranks):
    expected = train_heads()
    for found in ranks.run(train_heads):
        assert_close(found, expected)


class WithTeacher(Regression):
    def compute_forward(self, batch, stage):
        return self.modules.net(self.modules.teacher(self.modules.act(batch[0])))


def train_with_teacher():
    # a script that sets no seed
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
    teacher = (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        .double()
        .requires_grad_(requires_grad=False)
    )
    modules = {"net": nn.Linear(3, 1).double(), "teacher": teacher, "act": nn.Tanh()}
    brain = WithTeacher(modules, sgd(), None, QUIET)
    brain.fit([1], points(8), train_loader_kwargs={"batch_size": 2})
    kinds = {
        name: isinstance(module, DistributedDataParallel) for name, module in brain.modules.items()
    }
    return kinds, {
        name: value
        for name, value in weights(brain).items()
        if "running" not in name and "num" not in name
    }


@pytest.mark.costly
def test_what_is_not_trained_is_not_wrapped_and_the_same_everywhere(ranks):
    (kinds, first), (_, second) = ranks.run(train_with_teacher)
    assert kinds == {"net": True, "teacher": False, "act": False}
    assert_close(second, first)


class Thawing(FrontAndNet):
    """Unfreezes a whole entry and a part of another for the second epoch, and freezes it for the
    fourth.
    """

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN:
            self.modules.front.requires_grad_(requires_grad=2 <= epoch <= 3)
            self.modules.net.inner.requires_grad_(requires_grad=2 <= epoch <= 3)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.moments = [*getattr(self, "moments", []), weights(self)]


def train_thawing():
    torch.manual_seed(6)
    front = nn.Linear(3, 3).double().requires_grad_(requires_grad=False)
    net = Encoder()
    net.inner.requires_grad_(requires_grad=False)
    brain = Thawing(
        {"front": front, "net": net},
        sgd(),
        None,
        {**QUIET, "grad_accumulation_factor": 2},
    )
    brain.fit([1, 2, 3, 4], points(18), train_loader_kwargs={"batch_size": 6 // world_size()})
    return brain.moments


@pytest.mark.costly
def test_what_is_unfrozen_later_is_averaged_from_then_on(ranks):
    expected = train_thawing()
    moved = [
        {name for name in after if not torch.equal(after[name], before[name])}
        for before, after in itertools.pairwise(expected)
    ]
    assert [len(names) for names in moved] == [6, 6, 2]
    for moments in ranks.run(train_thawing):
        for found, there in zip(moments, expected, strict=True):
            assert_close(found, there)


def train_behind_frozen_statistics():
    torch.manual_seed(6)
    front = (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
        .double()
        .requires_grad_(requires_grad=False)
    )
    brain = FrontAndNet({"front": front, "net": Encoder()}, sgd(), None, QUIET)
    brain.fit([1, 2], points(20), train_loader_kwargs={"batch_size": 6 // world_size()})
    return weights(brain)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world_size", [2, 3])
def test_batch_norm_of_what_is_not_trained_is_over_the_rows_of_all_ranks(ranks, world_size):
    expected = train_behind_frozen_statistics()
    for found in ranks.run(train_behind_frozen_statistics, world_size=world_size):
        assert_close(found, expected)


class Twice(Regression):
    """One module, two forward passes, one backward pass."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0]) - self.modules.net(-batch[0])


def train_twice():
    brain = make(Twice, net=Encoder(), grad_accumulation_factor=2)
    brain.fit([1, 2], points(18), train_loader_kwargs={"batch_size": 6 // world_size()})
    return weights(brain)


@pytest.mark.costly
def test_two_forward_passes_of_one_module(ranks):
    expected = train_twice()
    for found in ranks.run(train_twice):
        assert_close(found, expected)


def train_normalised(folder):
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(3).double()
    net = linear()
    model = nn.ModuleList([norm, net])  # what a YAML gives to the checkpointer
    brain = FrontAndNet(
        {"front": norm, "net": net},
        sgd(),
        None,
        QUIET,
        Checkpointer(folder, {"model": model}),
    )
    brain.fit([1, 2], points(12), points(5), train_loader_kwargs={"batch_size": 6 // world_size()})
    saved = brain.checkpointer.save_checkpoint(name="done")
    state = torch.load(saved.paramfiles["model"], weights_only=True)
    converted = isinstance(brain.raw_modules.front, SyncBatchNorm)
    return converted, state, weights(brain), brain.losses


@pytest.mark.costly
def test_batchnorm_is_synchronised_and_saved_through_the_recipes_own_reference(ranks, tmp_path):
    _, expected, _, losses = train_normalised(tmp_path / "one")
    for converted, state, _, losses_there in ranks.run(train_normalised, tmp_path / "two"):
        assert converted
        assert_close(dict(state), dict(expected))
        assert [loss for _, _, loss in losses_there] == pytest.approx(
            [loss for _, _, loss in losses]
        )


def fit_twice():
    brain = make(opt=sgd(momentum=0.9))
    brain.fit([1], points(12), train_loader_kwargs={"batch_size": 2})
    wrapper = brain.modules.net
    optimizer = brain.optimizer
    brain.fit([2], points(12), train_loader_kwargs={"batch_size": 2})
    assert brain.modules.net is wrapper
    assert not isinstance(wrapper.module, DistributedDataParallel)
    assert brain.optimizer is optimizer
    return weights(brain)


def fit_once():
    brain = make(opt=sgd(momentum=0.9))
    brain.fit([1, 2], points(12), train_loader_kwargs={"batch_size": 2})
    return weights(brain)


@pytest.mark.costly
def test_fit_twice_wraps_once(ranks):
    for twice, once in zip(ranks.run(fit_twice), ranks.run(fit_once), strict=True):
        assert_close(twice, once)


def no_sync_under_exceptions():
    brain = make(grad_accumulation_factor=2)
    brain.fit([], points(4))
    net = brain.modules.net
    try:
        with brain.no_sync():
            assert not net.require_backward_grad_sync
            with brain.no_sync(use=False):
                assert not net.require_backward_grad_sync
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert net.require_backward_grad_sync
    brain.fit([1], points(8))
    return weights(brain)


@pytest.mark.costly
def test_no_sync_is_left_clean_by_an_exception(ranks):
    first, second = ranks.run(no_sync_under_exceptions)
    assert_close(second, first)


# -------------------------------------------------------------------------------- what a step costs


def count_collectives(factor, cls_name):
    """Train a warm-up epoch, then count in the next: all of c10d's operations, and those of the
    control plane.
    """
    control = []
    real = dist.all_to_all_single

    def counted(*args, **kwargs):
        if kwargs.get("group") is control_group():
            control.append(1)
        return real(*args, **kwargs)

    cls = {"default": Regression, "own": SpeechBrainFitBatch, "past": PastForward}[cls_name]
    # Measured steps send more with a sync of the ranks, and one step is looked at more closely.
    brain = make(cls, net=Encoder(), grad_accumulation_factor=factor, measure_steps="off")
    data = points(120)
    kwargs = {"batch_size": 2}
    brain.fit([1], data, train_loader_kwargs=kwargs)
    before = brain.optimizer_step
    started = time.monotonic()
    dist.all_to_all_single = counted
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            brain._fit_train(brain.make_dataloader(data, Stage.TRAIN, **kwargs), 2, enable=False)
    finally:
        dist.all_to_all_single = real
    found = Counter(
        {
            event.key: event.count
            for event in profiler.key_averages()
            if event.key.startswith("c10d::")
        }
    )
    return found, len(control), brain.optimizer_step - before, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("cls_name", ["default", "own", "past"])
@pytest.mark.parametrize("factor", [1, 3, 4])
def test_gradients_are_sent_once_per_optimizer_step(ranks, factor, cls_name):
    for found, control, steps, seconds in ranks.run(count_collectives, factor, cls_name):
        assert steps == math.ceil(30 / factor)
        # two ranks exchange gradients over gloo (comm.tensor_sums.exchange_tensor)
        assert found == {"c10d::alltoall_base_": steps + control}
        # the epoch's first and last word, and beats: at first ever rarer, then one a second
        assert control <= 2 + math.log2(30) + 1 + seconds


def host_reads(profiler):
    return sum(
        event.count for event in profiler.key_averages() if event.key == "aten::_local_scalar_dense"
    )


class ReadsCounted(Regression):
    """Counts host reads in every call of fit_batch and evaluate_batch."""

    def fit_batch(self, batch):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss = super().fit_batch(batch)
        self.reads = [*getattr(self, "reads", []), host_reads(profiler)]
        return loss

    def evaluate_batch(self, batch, stage):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss = super().evaluate_batch(batch, stage)
        self.evaluation_reads = [*getattr(self, "evaluation_reads", []), host_reads(profiler)]
        return loss


def count_host_reads(factor):
    # Once per process, the first backward pass tries on the CPU how torch's engine can be called.
    # It reads the answers.
    make().fit([1], points(2), train_loader_kwargs={"batch_size": 1})
    brain = make(
        ReadsCounted,
        opt=torch.optim.Adam,
        grad_accumulation_factor=factor,
        measure_steps="off",
    )
    brain.fit([1], points(12), points(6), train_loader_kwargs={"batch_size": 2 // world_size()})
    return brain.reads, brain.evaluation_reads


def bare_host_reads(factor):
    """The same work in a bare loop."""
    net = linear()
    optimizer = torch.optim.Adam(net.parameters())
    reads = []
    for step, (inputs, targets) in enumerate(DataLoader(points(12), batch_size=2), 1):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            (nn.functional.mse_loss(net(inputs), targets) / factor).backward()
            if step % factor == 0:
                norm = nn.utils.clip_grad_norm_(net.parameters(), 5.0)
                if math.isfinite(norm.item()):
                    optimizer.step()
                optimizer.zero_grad()
        reads.append(host_reads(profiler))
    return reads


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 3])
def test_no_more_host_reads_than_a_bare_loop(ranks, factor):
    expected = bare_host_reads(factor)
    assert sum(expected) > 0
    for reads, evaluation_reads in [count_host_reads(factor), *ranks.run(count_host_reads, factor)]:
        assert reads == expected
        assert set(evaluation_reads) == {0}


# ---------------------------------------------------------------------------------------- agreement


class PoisonedOnRankOne(Poisoned):
    """Counts what was not finite."""

    bad_rank = 1

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.counted = [*getattr(self, "counted", []), (self.nonfinite_count, self.optimizer_step)]


def train_poisoned(bad_steps, factor, cls_name="default"):
    class Own(SpeechBrainFitBatch, PoisonedOnRankOne):
        pass

    brain = make(
        {"default": PoisonedOnRankOne, "own": Own}[cls_name], grad_accumulation_factor=factor
    )
    brain.bad_steps = bad_steps
    try:
        brain.fit([1, 2], points(24), train_loader_kwargs={"batch_size": 2})
        message = ""
    except NonFiniteLossError as error:
        message = str(error)
    return weights(brain), brain.nonfinite_count, brain.optimizer_step, brain.losses, message


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("cls_name", ["default", "own"])
@pytest.mark.parametrize("factor", [1, 2])
def test_nan_on_one_rank_is_skipped_by_all(ranks, factor, cls_name):
    first, second = ranks.run(train_poisoned, (2, 5), factor, cls_name)
    assert_close(second[0], first[0])
    assert first[1:] == second[1:]
    assert first[1:3] == (2, 2 * (6 // factor - 2))
    assert all(math.isfinite(loss) for _, _, loss in first[3])
    assert all(torch.isfinite(value).all() for value in first[0].values())


@pytest.mark.costly
def test_all_ranks_give_up_together(ranks):
    first, second = ranks.run(train_poisoned, (1, 2, 4, 5, 6), 1)
    assert "epoch 1, batch 5, after optimizer step 1" in first[4]
    assert first[1:] == second[1:]
    assert first[1:3] == (4, 1)
    assert all(torch.isfinite(value).all() for value in first[0].values())


class RankLoss(Regression):
    """The loss is a number that differs between ranks."""

    def compute_objectives(self, predictions, batch, stage):
        return 0 * predictions.sum() + 1.0 + 2.0 * dist.get_rank()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told = [*getattr(self, "told", []), (stage.name, stage_loss)]


def stage_losses(shard_evaluation):
    brain = make(RankLoss, shard_evaluation=shard_evaluation)
    kwargs = {"batch_size": 2}
    brain.fit([1], points(5), points(3), train_loader_kwargs=kwargs, valid_loader_kwargs=kwargs)
    test = brain.evaluate(points(3), test_loader_kwargs=kwargs)
    return [*brain.told, ("returned", test)]


@pytest.mark.costly
def test_stage_losses_are_one_number_on_all_ranks(ranks):
    full = ranks.run(stage_losses, False)
    assert_alike(full)
    expected = [("TRAIN", (3 * 1 + 2 * 3) / 5), ("VALID", 2.0), ("TEST", 2.0), ("returned", 2.0)]
    assert full[0] == [(name, pytest.approx(loss)) for name, loss in expected]
    sharded = ranks.run(stage_losses, True)
    assert_alike(sharded)
    assert sharded[0][1:] == [
        (name, pytest.approx(5 / 3)) for name in ("VALID", "TEST", "returned")
    ]


class Clipped(Regression):
    """Only the joined gradient of some steps is beyond the norm; by itself each rank would count
    otherwise.
    """

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told = [
            *getattr(self, "told", []),
            (self.progress.clipped, self.progress.clipped_share),
        ]


def clipped_steps(per_step):
    brain = make(Clipped, opt=sgd(lr=0.01), global_batch_size=per_step, max_grad_norm=1.5)
    brain.fit([1, 2], points(37), train_loader_kwargs={"shuffle": True})
    return brain.told


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 3])
def test_the_share_of_clipped_steps_is_one_number_on_all_ranks_and_that_of_one_process(
    ranks,
    world,
):
    expected = clipped_steps(6)
    assert all(0 < clipped < 7 and share == clipped / 7 for clipped, share in expected)
    assert ranks.run(clipped_steps, 6, world_size=world) == [expected] * world


def stop_early():
    counter = EpochCounterWithStopper(20, limit_to_stop=1, limit_warmup=0, direction="min")

    class Stopping(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.VALID:
                # On rank 1 it seems to get better and better.
                counter.update_metric(1.0 / epoch if dist.get_rank() or epoch < 4 else 9.0)

    brain = make(Stopping)
    brain.fit(counter, points(4), points(2))
    return counter.current, counter.best_limit, brain.optimizer_step


@pytest.mark.costly
def test_all_ranks_stop_at_the_same_epoch(ranks):
    assert ranks.run(stop_early) == [(4, 3, 8)] * 2


def random_streams():
    seed_everything(3, verbose=False)
    noise = []

    class Noisy(Regression):
        def compute_forward(self, batch, stage):
            noise.append(torch.rand(2).tolist())
            return super().compute_forward(batch, stage)

        def on_fit_start(self):
            self.drawn_before = torch.rand(2).tolist()
            self.initial = weights(self)
            super().on_fit_start()

    brain = make(Noisy, net=nn.Linear(3, 1).double())
    brain.fit([1], points(8), train_loader_kwargs={"batch_size": 2})
    os.environ.pop("DDPKIT_GLOBAL_SEED", None)
    return (
        {name: value.tolist() for name, value in brain.initial.items()},
        brain.drawn_before,
        noise,
    )


@pytest.mark.costly
def test_weights_begin_equal_and_noise_differs(ranks):
    first, second = ranks.run(random_streams)
    assert first[:2] == second[:2]
    assert len(first[2]) == 2
    assert not any(draw in second[2] for draw in first[2])
    assert ranks.run(random_streams) == [first, second]


# --------------------------------------------------------------------------------------------- data


def positions(train_set, kwargs, epochs=(1, 2), **run_opts):
    """Train; return, for each epoch, this rank's batches as positions in the data."""
    data = points(30)
    brain = make(**run_opts)
    found = []
    for epoch in epochs:
        brain.trained_on = []
        brain.fit([epoch], train_set(data), train_loader_kwargs=kwargs)
        found.append(seen_in(data, brain.trained_on))
    return found, brain.optimizer_step, brain.losses


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


class ShardableStream(Stream):
    """Divides itself, in its own way: the front half to the first."""

    num_shards = 100

    def shard(self, num_shards, index):
        size = math.ceil(len(self.data) / num_shards)
        return self.data[index * size : (index + 1) * size]


KINDS = {
    "dataset": lambda data: data,
    "ready-made": lambda data: DataLoader(data, batch_size=2),
    "ready-made, shuffled": lambda data: DataLoader(data, batch_size=2, shuffle=True),
    "ready-made, sampler": lambda data: DataLoader(
        data,
        batch_size=2,
        sampler=SequentialSampler(data),
    ),
    "ready-made, batches": lambda data: DataLoader(data, batch_sampler=Pairs(data)),
    "saveable": lambda data: make_dataloader(data, batch_size=2, shuffle=True),
}


class Pairs(BatchSampler):
    """An opaque batch sampler."""

    def __init__(self, data):
        super().__init__(SequentialSampler(data), 2, drop_last=False)


def train_on(kind, number):
    kwargs = {"batch_size": 2} if kind == "dataset" else None
    return positions(lambda data: KINDS[kind](data[:number]), kwargs)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("number", [12, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_on_one_rank(ranks, kind, number):
    """Together the ranks see every sample once an epoch; one may be repeated to keep step, and
    weighs nothing.
    """
    results = ranks.run(train_on, kind, number)
    assert_alike([result[1:] for result in results])
    for epoch in range(2):
        per_rank = [result[0][epoch] for result in results]
        assert len(per_rank[0]) == len(per_rank[1])
        seen = Counter(position for batches in per_rank for batch in batches for position in batch)
        assert set(seen) == set(range(number))
        assert sum(seen.values()) <= number + number % 2
    assert (results[0][0][0] != results[0][0][1]) == (kind in {"ready-made, shuffled", "saveable"})


def train_on_stream(kind, number, factor, cls_name="default"):
    cls = {"Stream": Stream, "ShardableStream": ShardableStream}[kind.partition(",")[0]]
    kwargs = {"batch_size": 1}
    data = points(30)
    brain = make(
        {"default": Regression, "own": SpeechBrainFitBatch}[cls_name],
        grad_accumulation_factor=factor,
    )
    stream = cls(data[:number])
    if kind.endswith("ready-made"):
        brain.fit([1, 2], DataLoader(stream, **kwargs))
    elif kind.endswith("made by the Brain"):
        brain.fit([1, 2], brain.make_dataloader(stream, Stage.TRAIN, **kwargs))
    else:
        brain.fit([1, 2], stream, train_loader_kwargs=kwargs)
    return (
        [batch[0] for batch in seen_in(data, brain.trained_on)],
        brain.optimizer_step,
        brain.losses,
        weights(brain),
    )


def sample_losses(number, factor, world):
    """What one process with windows of ``factor * world`` samples reports."""
    brain = make(grad_accumulation_factor=factor * world)
    brain.fit([1, 2], points(30)[:number], train_loader_kwargs={"batch_size": 1})
    return brain.losses, weights(brain)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize(
    "kind",
    ["Stream", "ShardableStream", "Stream, ready-made", ("Stream, made by the Brain")],
)
@pytest.mark.parametrize(("number", "world"), [(7, 2), (8, 2), (7, 3), (8, 3)])
def test_streams_give_every_item_once_and_end_together(ranks, number, world, kind, factor):
    results = ranks.run(train_on_stream, kind, number, factor, world_size=world)
    rounds = math.ceil(number / world)
    seen = [Counter() for _ in range(2)]
    for rank, (items, steps, _, _) in enumerate(results):
        assert len(items) == 2 * rounds
        assert steps == 2 * math.ceil(rounds / factor)
        own = (
            rounds - (rank >= number - world * (rounds - 1))
            if not kind.startswith("Shardable")
            else rounds
        )
        for epoch in range(2):
            seen[epoch].update(set(items[epoch * rounds :][:own]))
    assert seen == [Counter(range(number))] * 2
    assert_alike([result[2] for result in results])
    for _, _, _, found in results[1:]:
        assert_close(found, results[0][3])
    if not kind.startswith("Shardable"):
        losses, expected = sample_losses(number, factor, world)
        assert_close(results[0][3], expected)
        assert [entry[2] for entry in results[0][2]] == pytest.approx(
            [entry[2] for entry in losses]
        )


@pytest.mark.costly
def test_a_stream_under_an_overridden_fit_batch(ranks):
    """A full window is exact; in the last one an item that is repeated to keep step counts, but
    never double.
    """
    first, second = ranks.run(train_on_stream, "Stream", 8, 2, "own")
    assert_close(first[3], second[3])
    assert_close(first[3], sample_losses(8, 2, 2)[1])
    first, second = ranks.run(train_on_stream, "Stream", 1 + 2, 1, "own")
    assert_close(first[3], second[3])
    brain = make(grad_accumulation_factor=2)
    data = points(30)
    brain.fit([1, 2], [data[0], data[1], data[2], data[2]])
    assert_close(first[3], weights(brain))


def too_few(kind):
    train_on_stream(kind, 1, 1)


@pytest.mark.costly
def test_a_stream_too_short_for_the_ranks_ends_all_of_them(ranks):
    with pytest.raises(RankPoolError) as caught:
        ranks.run(too_few, "ShardableStream", timeout=100)
    for outcome in caught.value.outcomes:
        assert outcome.error_type == "DataError"
        assert "a first batch to 1 of 2 rank(s) only" in outcome.error


@pytest.mark.costly
def test_a_stream_of_fewer_items_than_ranks_is_dealt_out_like_a_dataset(ranks):
    losses, expected = sample_losses(1, 1, 2)
    for _, steps, reported, found in ranks.run(train_on_stream, "Stream", 1, 1):
        assert_close(found, expected)
        assert reported == losses
        assert steps == 2


def train_looped(number, length):
    data = points(30)
    brain = make()
    kwargs = {"batch_size": 4 // world_size(), "shuffle": True, "looped_nominal_epoch": length}
    brain.fit([1, 2, 3], data[:number], train_loader_kwargs=kwargs)
    return weights(brain), brain.optimizer_step


@pytest.mark.costly
def test_nominal_epochs_are_the_same_on_two_ranks(ranks):
    expected, steps = train_looped(16, 3)
    for found, steps_there in ranks.run(train_looped, 16, 3):
        assert_close(found, expected)
        assert steps_there == steps == 9


def train_on_divided_loader():
    def train_set(data):
        return DataLoader(
            data[:8],
            batch_size=2,
            sampler=DistributedSampler(data[:8], shuffle=True),
        )

    return positions(train_set, None)


@pytest.mark.costly
def test_a_loader_that_its_maker_has_divided_is_told_the_epoch(ranks):
    results = ranks.run(train_on_divided_loader)
    for epoch in range(2):
        seen = sorted(
            position for result in results for batch in result[0][epoch] for position in batch
        )
        assert seen == list(range(8))
    assert results[0][0][0] != results[0][0][1]


# -------------------------------------------------------------------------------------- checkpoints


class SaveAsYouLike(Regression):
    """Logs and saves on the main process alone, as several shipped recipes do."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if if_main_process():
            self.hparams.train_logger.log_stats({"epoch": epoch}, train_stats={"loss": stage_loss})
            if stage is Stage.VALID:
                self.checkpointer.save_checkpoint(meta={"loss": stage_loss}, name=f"epoch{epoch}")
        self.hparams.train_logger.log_stats({"all": epoch})


def save_one_sided(folder):
    hparams = {"train_logger": FileTrainLogger(str(Path(folder, "log.txt")))}
    brain = make(SaveAsYouLike, folder=Path(folder, "save"), hparams=hparams)
    brain.fit([1, 2], points(8), points(3), train_loader_kwargs={"batch_size": 2})
    loss = brain.evaluate(points(3), min_key="loss")
    return loss, {name: value.tolist() for name, value in weights(brain).items()}


@pytest.mark.costly
def test_one_sided_calls_in_on_stage_end(ranks, tmp_path):
    assert_alike(ranks.run(save_one_sided, tmp_path))
    assert sorted(path.name for path in (tmp_path / "save").glob("CKPT*")) == [
        "CKPT+epoch1",
        "CKPT+epoch2",
    ]
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 10


def evaluate_by_a_key_that_is_not_there(folder):
    brain = make(Regression, folder=folder)
    evaluated = []
    brain.evaluate_batch = lambda batch, stage: evaluated.append(stage) or torch.zeros(())
    told = []
    for calls in (brain.evaluate, brain.predict):
        try:
            calls(points(3), max_key="los")
        except CheckpointUsageError as error:
            told.append(str(error))
    return told, evaluated


def test_a_key_that_no_checkpoint_has_ends_an_evaluation_on_every_rank(ranks, tmp_path):
    Checkpointer(tmp_path, {}).save_checkpoint(meta={"loss": 1.0, "who": "a", "done": True})
    for told, evaluated in ranks.run(evaluate_by_a_key_that_is_not_there, tmp_path):
        assert evaluated == []
        assert told[0] == told[1]
        assert told[0] == (
            f"max_key='los': no checkpoint in {tmp_path} has 'los' in its meta, so none can be the "
            "best by it. The keys with numbers are: 'loss'. Did you mean 'loss'? Name one of them, "
            "or leave max_key out: then the newest checkpoint is taken."
        )


class AsksMain(Regression):
    """Saves, and has the main process answer a question, after every batch."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.answers = [
            *getattr(self, "answers", []),
            run_on_main(lambda: (self.step, self.optimizer_step)),
        ]
        self.checkpointer.save_checkpoint(name=f"step{self.step}")


def ask_after_every_batch(folder, strategy):
    brain = make(
        AsksMain,
        folder=folder,
        strategy=strategy,
        global_batch_size=3,
        micro_batch_size=1,
    )
    brain.fit([1], points(7), train_loader_kwargs={"batch_size": 1})
    return brain.answers


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_main_only_work_in_a_batch_that_a_rank_repeats(ranks, tmp_path, strategy):
    # Rank 1 has no sample in the last micro-batch of a step. In the first step zero1 compares the
    # ranks besides.
    answers = [(1, 0), (2, 1), (3, 1), (4, 2), (5, 3)]
    assert ranks.run(ask_after_every_batch, tmp_path, strategy) == [answers] * 2
    assert len(list(tmp_path.glob("CKPT*"))) == 5


def without_hparams():
    brain = Regression({"net": linear()}, sgd(), None, QUIET)
    brain.fit([1], points(4), points(2))
    return vars(brain.hparams)


@pytest.mark.costly
def test_no_hparams_on_any_rank(ranks):
    assert ranks.run(without_hparams) == [{}, {}]


def debug_folder(folder):
    brain = make(SavesAfterTraining, folder=folder, debug=True)
    brain.fit([1, 2], points(8))
    found = str(brain.checkpointer.checkpoints_dir)
    brain.evaluate(points(4))
    assert Path(found).is_dir()
    return found, {name: value.tolist() for name, value in weights(brain).items()}


@pytest.mark.costly
def test_debug_has_one_folder_for_all_ranks(ranks, tmp_path):
    results = ranks.run(debug_folder, tmp_path)
    assert_alike(results)
    assert not list(tmp_path.glob("CKPT*"))
    assert results[0][0] != str(tmp_path)
    ranks.run(gc.collect)
    assert not Path(results[0][0]).exists(), "the temporary folder is left behind"


def limited(limit, factor):
    brain = make(optimizer_step_limit=limit, grad_accumulation_factor=factor)
    brain.fit(EpochCounter(9), points(20), points(3), train_loader_kwargs={"batch_size": 2})
    return brain.optimizer_step, len(brain.trained_on), [entry[:2] for entry in brain.losses]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("limit", "factor", "batches"), [(3, 1, 3), (7, 1, 7), (2, 3, 5)])
def test_the_step_limit_is_the_same_on_all_ranks(ranks, limit, factor, batches):
    results = ranks.run(limited, limit, factor)
    assert_alike(results)
    assert results[0][:2] == (limit, batches)


def saved_at(folder, run_opts):
    brain = make(Mortal, folder=folder, **run_opts)
    saved = []
    save = run_of(brain).policy.save_inside_epoch

    def watched():
        saved.append((brain.progress.epoch, brain.step))
        save()

    run_of(brain).policy.save_inside_epoch = watched
    real = IntraEpochSaves.tell
    # the clocks disagree
    IntraEpochSaves.tell = lambda self: Requests(0.0 if dist.get_rank() else 100.0)
    try:
        brain.fit([1, 2], points(40), train_loader_kwargs={"batch_size": 2})
    finally:
        IntraEpochSaves.tell = real
    return saved


@pytest.mark.corner
@pytest.mark.parametrize(
    "run_opts",
    [
        pytest.param({"ckpt_interval_steps": 4}, marks=pytest.mark.slow),
        {"ckpt_interval_steps": 4, "grad_accumulation_factor": 3},
        {"ckpt_interval_minutes": 1.0},
    ],
)
def test_all_ranks_save_at_the_same_steps(ranks, tmp_path, run_opts):
    results = ranks.run(saved_at, tmp_path, run_opts)
    assert_alike(results)
    if "ckpt_interval_minutes" in run_opts:
        assert {epoch for epoch, _ in results[0]} == {1, 2}
    else:
        steps = [6, 10] if "grad_accumulation_factor" in run_opts else [4, 8]
        assert results[0] == [(epoch, step) for epoch in (1, 2) for step in steps]


def run_mortal(folder, dies_at, run_opts, how):
    counter = EpochCounter(3)
    net = linear(seed=7 if dies_at else 8)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Mortal({"net": net}, sgd(momentum=0.9), None, {**QUIET, **run_opts}, checkpointer)
    brain.dies_at = dies_at
    data = points(39)
    kwargs = {"batch_size": 2, "shuffle": True} if how == "dataset" else {"batch_size": 2}
    with contextlib.suppress(Killed):
        brain.fit(
            counter,
            data if how == "dataset" else Stream(data),
            data[:3],
            train_loader_kwargs=kwargs,
        )
    return seen_in(data, brain.trained_on), weights(brain), brain.losses, brain.optimizer_step


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("how", ["dataset", "stream"])
@pytest.mark.parametrize("factor", [1, 4])
def test_a_run_on_two_ranks_is_continued_in_the_middle_of_an_epoch(ranks, tmp_path, factor, how):
    run_opts = {"ckpt_interval_steps": 3, "grad_accumulation_factor": factor}
    whole = ranks.run(run_mortal, tmp_path / "whole", (9, 9), run_opts, how)
    ranks.run(run_mortal, tmp_path / "killed", (2, 6), run_opts, how)
    resumed = ranks.run(run_mortal, tmp_path / "killed", None, run_opts, how)
    for after, through in zip(resumed, whole, strict=True):
        assert after[0] == through[0][len(through[0]) - len(after[0]) :]
        assert 10 < len(after[0]) < 20
        assert after[1].keys() == through[1].keys()
        assert all(torch.equal(after[1][name], through[1][name]) for name in after[1])
        assert after[2][0][:2] == ("TRAIN", 2)
        assert [entry[2] for entry in after[2]] == pytest.approx(
            [entry[2] for entry in through[2][2:]]
        )
        assert after[3] == through[3]


def evaluate_after_intra_epoch_checkpoint(folder):
    brain = make(Mortal, folder=folder, ckpt_interval_steps=3)
    brain.fit([1], points(20), train_loader_kwargs={"batch_size": 2})
    loss = brain.evaluate(points(7), test_loader_kwargs={"batch_size": 2})
    inputs, targets = (torch.stack(part) for part in zip(*points(7), strict=True))
    expected = nn.functional.mse_loss(brain.raw_modules.net(inputs), targets).item()
    brain.trained_on = []
    brain.fit([2], points(20), train_loader_kwargs={"batch_size": 2})
    return loss, expected, len(brain.trained_on)


@pytest.mark.costly
def test_evaluate_after_a_checkpoint_of_the_middle(ranks, tmp_path):
    for loss, expected, batches in ranks.run(evaluate_after_intra_epoch_checkpoint, tmp_path):
        assert loss == pytest.approx(expected)
        assert batches == 5


class SquaresOutputs(Regression):
    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()


class FailsOnRankOne(SquaresOutputs):
    def compute_objectives(self, predictions, batch, stage):
        if self.rank == 1 and self.step == 2:
            raise ValueError("boom")
        return super().compute_objectives(predictions, batch, stage)


def caught_on_one_rank():
    data = [(torch.ones(3) * number,) for number in range(16)]
    brain = FailsOnRankOne(
        {"net": torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        run_opts={"device": "cpu", "noprogressbar": True},
    )
    # the recipe goes on as if nothing had happened, on this rank alone
    with contextlib.suppress(ValueError):
        brain.fit([1], data, train_loader_kwargs={"batch_size": 2})
    brain.evaluate(data, test_loader_kwargs={"batch_size": 2})


@pytest.mark.slow  # the other rank is given half a minute
def test_an_exception_that_one_rank_catches_ends_all_of_them(ranks):
    """The other rank is in a collective that nobody joins any more: the one that went on must
    notice, and end.
    """
    outcomes = ranks.outcomes(caught_on_one_rank, world_size=2)
    assert [outcome.ok for outcome in outcomes] == [False, False]
    assert outcomes[1].error_type == "RankFailedError"


def caught_on_all_ranks():
    data = [(torch.full((3,), float("nan")),) for _ in range(16)]
    brain = SquaresOutputs(
        {"net": torch.nn.Linear(3, 4)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        run_opts={"device": "cpu", "noprogressbar": True, "nonfinite_patience": 0},
    )
    try:
        brain.fit([1], data, train_loader_kwargs={"batch_size": 2})
    except NonFiniteLossError:
        time.sleep(6.0 * brain.rank)  # longer than a rank that is alone in trouble would be given
    return math.isnan(brain.evaluate(data, test_loader_kwargs={"batch_size": 2}))


@pytest.mark.slow
def test_an_exception_that_all_ranks_catch_ends_nobody(ranks):
    assert ranks.run(caught_on_all_ranks, world_size=2) == [True, True]
