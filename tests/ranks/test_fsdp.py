"""``--strategy=fsdp``: the same answer from weights, gradients and optimizer states that are
divided over the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
import types
import warnings
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile

from ddpkit.base import is_sharded, local_part
from ddpkit.checkpointing import arrival, shard_writing
from ddpkit.checkpoints import (
    Checkpointer,
    mark_as_loader,
    register_checkpoint_hooks,
    safe_load,
    torch_recovery,
    torch_save,
    whole_state_dict,
)
from ddpkit.distributed import if_main_process, run_on_main
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    LaunchError,
    MainProcessError,
    RankFailedError,
    RankMismatchError,
)
from ddpkit.run import checkpoint_policy, shared_folder
from ddpkit.strategies.base import WholeState
from ddpkit.types import Stage
from tests.cells import some_of
from tests.needs import needs_torch
from tests.recipes import QUIET, Killed, SavesAfterValidation, assert_same

FEATURES = 6
CLASSES = 3


def data(number=37):
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(number, FEATURES, generator=draw, dtype=torch.float64)
    return list(zip(inputs, torch.randint(0, CLASSES, (number,), generator=draw), strict=True))


class Block(nn.Module):
    def __init__(self, width, *, norm):
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.layer = nn.Linear(width, width, bias=not norm)

    def forward(self, inputs):
        return inputs + torch.tanh(self.layer(self.norm(inputs)))


def make_net(*, norm=False):
    torch.manual_seed(11)
    blocks = [Block(5, norm=norm) for _ in range(2)]  # 5 rows: uneven on 2 ranks and 3
    return nn.Sequential(nn.Linear(FEATURES, 5), *blocks, nn.Linear(5, CLASSES)).double()


def net_on_meta():
    """As the net above, without values; its blocks, too, have a weight of their own."""
    os.environ["DDPKIT_GLOBAL_SEED"] = "4"
    with torch.device("meta"):
        return Scaled(*make_net(norm=True)).double()


class Scaled(nn.Sequential):
    """Has a weight beside its parts, and a table that is no weight."""

    resets_parts = False

    def __init__(self, *parts):
        super().__init__(*parts)
        self.scale = nn.Parameter(torch.empty(CLASSES))
        self.register_buffer("table", torch.empty(CLASSES, dtype=torch.bool), persistent=False)

    def reset_parameters(self):
        nn.init.normal_(self.scale)
        nn.init.ones_(self.table)
        if self.resets_parts:
            nn.init.ones_(self[1].layer.weight)

    def forward(self, inputs):
        return super().forward(inputs) * self.scale * self.table


class Classifier(SavesAfterValidation):
    keeping: ClassVar = {"num_to_keep": 9}
    counts = False
    dies_at = None
    poisoned_at = None

    def compute_forward(self, batch, stage):
        if stage is Stage.TRAIN and self.dies_at == (self.progress.epoch, self.optimizer_step):
            raise Killed
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        losses = nn.functional.cross_entropy(predictions, batch[1], reduction="none")
        if (
            stage is Stage.TRAIN
            and self.poisoned_at == self.optimizer_step
            and self.progress.nonfinite == 0
        ):
            losses = losses * math.nan
        if stage is Stage.TRAIN and not self.progress.window.count:
            losses = losses / 0.0  # of a sample that is repeated to keep step, which must not count
        if self.counts:
            real = (batch[1] > 0).double() * 0.7
            return (losses * real).sum(), real.sum()
        return losses.mean()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told = [*getattr(self, "told", []), stage_loss]
        super().on_stage_end(stage, stage_loss, epoch)


def make(kind=Classifier, folder=None, net=None, **options):
    net = net or make_net()
    counter = EpochCounter(2)
    given = {
        **QUIET,
        "max_grad_norm": 0.4,
        "global_batch_size": 12,
        "strategy": "fsdp",
        "fsdp_min_parameters": 30,
    }
    checkpointer = (
        None if folder is None else Checkpointer(folder, {"net": net, "counter": counter})
    )
    brain = kind(
        {"net": net},
        lambda p: torch.optim.AdamW(p, lr=0.02),
        None,
        {**given, **options},
        checkpointer,
    )
    return brain, counter


def whole(brain):
    """The weights, and their average: plain tensors on every rank, gathered by torch."""
    average = (
        {}
        if brain.ema is None
        else {f"ema {name}": one for name, one in brain.ema.state_dict().items()}
    )
    state = {**brain.raw_modules.state_dict(), **average}
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone()
        for name, one in state.items()
    }


def train(*arguments, samples=25, valid=7, dies_at=None, poisoned_at=None, counts=False, **options):
    brain, counter = make(*arguments, **options)
    brain.dies_at = dies_at
    brain.poisoned_at = poisoned_at
    brain.counts = counts
    try:
        brain.fit(counter, data(samples), data(valid), train_loader_kwargs={"shuffle": True})
    except Killed:
        return None
    return {"weights": whole(brain), "told": brain.told, "steps": brain.optimizer_step}


def close(one, other, tolerance=1e-10):
    assert one["steps"] == other["steps"] > 0
    assert one["told"] == pytest.approx(other["told"], rel=tolerance, abs=tolerance)
    for name, value in one["weights"].items():
        torch.testing.assert_close(
            value,
            other["weights"][name],
            rtol=tolerance,
            atol=tolerance,
            msg=name,
        )


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        make(**options)
    return str(caught.value)


def refused_on_ranks(given):
    return [refused(**options) for options in given]


def test_what_cannot_work_is_refused_by_name(ranks):
    given = {
        "is for one process, and a launcher has started 2": {"strategy": "single"},
        "fsdp_param_dtype=bf16 does not work with check_parity=2: it would": {
            "check_parity": 2,
            "fsdp_param_dtype": "bf16",
        },
        "find_unused_parameters=True: all ranks": {"find_unused_parameters": True},
        "skip_nonfinite_grads=True: each rank": {"skip_nonfinite_grads": True},
        "static_graph=True": {"static_graph": True},
        "precision=fp16": {"precision": "fp16"},
    }
    for messages in ranks.run(refused_on_ranks, list(given.values())):
        for words, message in zip(given, messages, strict=True):
            assert words in message


def train_all(cases):
    return [train(**options) for options in cases]


CASES = [
    {},
    {"counts": True, "fsdp_reshard_after_forward": False},
    {"micro_batch_size": 3, "fsdp_whole_gradients": True},
    {"micro_batch_size": 3, "counts": True, "poisoned_at": 2},
    # a rank without a sample in the last batch
    {"samples": 25, "shard_evaluation": True, "fsdp_blocks": ["Block"]},
    # ranks without a batch
    {"ema_decay": 0.8, "evaluate_ema": True, "shard_evaluation": True, "valid": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("size", some_of([2, 3], [2]))
def test_the_same_answer(ranks, size):
    expected = [train(**{**one, "micro_batch_size": None}) for one in CASES]
    for results in ranks.run(train_all, CASES, world_size=size):
        for result, alone in zip(results, expected, strict=True):
            close(result, alone)


def count_reduce_scatters(**options):
    """Count them in two epochs of two steps of two micro-batches each."""
    with profile(acc_events=False) as profiler:
        train(samples=24, micro_batch_size=3, fsdp_blocks=["Block"], measure_steps="off", **options)
    events = profiler.profiler.kineto_results.events()
    return sum(
        "reduce_scatter" in event.name() for event in events if event.name().startswith("c10d::")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keeps_whole", "per_step"),
    [(True, 3), pytest.param(False, 6, marks=pytest.mark.slow)],
)
def test_whole_gradients_are_divided_once_per_step_instead_of_in_each_micro_batch(
    ranks,
    keeps_whole,
    per_step,
):
    """Two blocks and the rest."""
    count = functools.partial(count_reduce_scatters, fsdp_whole_gradients=keeps_whole)
    assert ranks.run(count) == [4 * per_step] * 2


# Three steps in an epoch, of which the last has no sample for a rank but the first.
SAVING = {
    "ema_decay": 0.8,
    "evaluate_ema": True,
    "ckpt_interval_steps": 2,
    "micro_batch_size": 3,
    "samples": 25,
}


def through():
    return train(**SAVING)


def parts(**options):
    """How many elements of weights, and of the optimizer's state, this rank has."""
    brain, counter = make(**options)
    brain.fit(counter, data(12), data(7))
    state = [one for known in brain.optimizer.state.values() for one in known.values() if one.ndim]
    return [
        sum(local_part(one).numel() for one in known)
        for known in (brain.modules.parameters(), state)
    ]


@pytest.mark.costly
def test_each_rank_holds_a_part(ranks):
    weights, states = zip(*ranks.run(parts), strict=True)
    assert [sum(weights), sum(states)] == parts()
    assert max(weights) < 0.7 * sum(weights), "rows of 5 are 3 and 2"


class InBfloat16(Classifier):
    def compute_forward(self, batch, stage):
        outputs = self.modules.net(batch[0].float())
        assert outputs.dtype == torch.bfloat16
        return outputs.float()


def train_in_bfloat16():
    brain, counter = make(InBfloat16, net=make_net().float(), fsdp_param_dtype="bf16")
    brain.fit(counter, data(), data(7), train_loader_kwargs={"shuffle": True})
    assert {one.dtype for one in brain.modules.parameters()} == {torch.float32}
    return brain.told


@pytest.mark.slow
def test_blocks_are_computed_in_bfloat16(ranks):
    for told in ranks.run(train_in_bfloat16):
        assert told == pytest.approx(train(samples=37)["told"], rel=0.01)


def train_compiled():
    warnings.simplefilter("ignore")  # torch's own, of its compiler
    return train(fsdp_blocks=["Block"], compile_blocks=["Block"])


@pytest.mark.exhaustive
def test_blocks_are_compiled(ranks):
    for result in ranks.run(train_compiled, timeout=500):
        close(result, train())


def stop(folder, strategy="fsdp"):
    assert train(Classifier, folder, dies_at=(2, 5), strategy=strategy, **SAVING) is None


def go_on(folder, strategy="fsdp"):
    return train(Classifier, folder, strategy=strategy, **SAVING)


def stop_and_go_on(folder):
    stop(folder)
    return go_on(folder)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(ranks, tmp_path):
    for one, other in zip(ranks.run(through), ranks.run(stop_and_go_on, tmp_path), strict=True):
        assert one["steps"] == other["steps"] > 0
        assert_same(one["weights"], other["weights"])
    newest = Checkpointer(tmp_path).find_checkpoint()
    names = ("net", "ema", "optimizer")
    files = {name: safe_load(newest.paramfiles[name]) for name in names}
    shards = {f"{name}-shard-{rank}-of-2.safetensors" for name in names for rank in range(2)}
    assert {path.name for path in newest.path.glob("*.safetensors")} == shards
    assert {type(one) for one in [*files["net"].values(), *files["ema"].values()]} == {torch.Tensor}
    assert [known["exp_avg"].shape for known in files["optimizer"]["state"].values()] == [
        one.shape for one in make_net().parameters()
    ]


def assert_goes_on(result, expected):
    """Compare a run that went on in the third epoch with one that was not stopped."""
    assert result["steps"] == expected["steps"]
    assert result["told"] == pytest.approx(expected["told"][2:], abs=1e-10)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(
            result["weights"][name],
            value,
            rtol=1e-10,
            atol=1e-10,
            msg=name,
        )


def stop_at(folder, strategy, dies_at):
    assert train(Classifier, folder, dies_at=dies_at, strategy=strategy, **SAVING) is None


@pytest.mark.slow
def test_a_run_goes_on_through_three_sizes_and_two_strategies(ranks, tmp_path):
    """Shards of 3 ranks, a whole file of one process, shards of 2 ranks."""
    expected = through()
    ranks.run(stop_at, tmp_path, "fsdp", (1, 2), world_size=3)
    newest = Checkpointer(tmp_path).find_checkpoint()
    assert len(list(newest.path.glob("net-shard-*-of-3.safetensors"))) == 3
    stop_at(tmp_path, "auto", (2, 4))
    newest = Checkpointer(tmp_path).find_checkpoint()
    assert not list(newest.path.glob("*.safetensors"))
    for result in ranks.run(go_on, tmp_path, world_size=2):
        assert_goes_on(result, expected)


def go_on_gathered(folder):
    return train(Classifier, folder, ckpt_layout="whole", **SAVING)


@pytest.mark.slow
def test_a_checkpoint_can_be_gathered(ranks, tmp_path):
    ranks.run(stop, tmp_path)
    expected = ranks.run(through)
    for one, other in zip(ranks.run(go_on_gathered, tmp_path), expected, strict=True):
        assert_same(one["weights"], other["weights"])
    assert not list(Checkpointer(tmp_path).find_checkpoint().path.glob("*.safetensors"))


def load_with_torch(obj, path, end_of_epoch):
    """A recipe's own loader: it knows files of torch.save."""
    state = torch.load(path, weights_only=True)
    assert not any(value.is_meta for value in state.values())
    torch_recovery(obj, path, end_of_epoch)


@register_checkpoint_hooks
class LoadsItself(nn.Sequential):
    """Is saved as any module, and loaded by its own method."""

    @mark_as_loader
    def _load(self, path, end_of_epoch):
        load_with_torch(self, path, end_of_epoch)


def stop_and_go_on_with_own_loader(folder, kind):
    found = []
    for dies_at in ((2, 5), None):
        net = LoadsItself(*make_net()) if kind == "class" else make_net()
        brain, counter = make(Classifier, folder, net, **SAVING)
        if kind == "hook":
            brain.checkpointer.custom_load_hooks["net"] = load_with_torch
        brain.dies_at = dies_at
        with contextlib.suppress(Killed):
            brain.fit(counter, data(25), data(7), train_loader_kwargs={"shuffle": True})
            found.append(whole(brain))
    return found


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["hook", "class"])
def test_what_has_a_loader_of_its_own_is_not_saved_in_shards(ranks, tmp_path, kind):
    (found,) = ranks.run(stop_and_go_on_with_own_loader, tmp_path, kind)[0]
    assert_same(found, ranks.run(through)[0]["weights"])
    newest = Checkpointer(tmp_path).find_checkpoint().path
    names = {path.name for path in newest.glob("*.safetensors")}
    assert not [name for name in names if name.startswith("net-")]
    assert "optimizer-shard-1-of-2.safetensors" in names


def fit_on_own_disks(folder):
    """Fit where each rank has a folder of its own, as on nodes that share none."""
    brain, counter = make(Classifier, folder / str(dist.get_rank()), **SAVING)
    brain.checkpointer.checkpoints_dir.mkdir(exist_ok=True)
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        brain.fit(counter, data(25), data(7))
    assert time.monotonic() - begin < shard_writing.VISIBLE_SECONDS / 3
    left = [path.name for path in brain.checkpointer.checkpoints_dir.iterdir()]
    return str(caught.value), brain.optimizer_step, left


def test_ranks_that_share_no_folder_are_refused_before_training(ranks, tmp_path):
    for message, steps, left in ranks.run(fit_on_own_disks, tmp_path):
        assert message.startswith("rank 1: ")
        assert "whose own disk it would be on" in message
        assert "give one on a file system that they share" in message
        assert "--ckpt_layout=whole" in message
        assert "--output_folder=s3://BUCKET/FOLDER" in message
        assert steps == 0
        assert [name for name in left if name.startswith(".shared-")] == []


def fit_on_own_disks_with_zero1(folder):
    own = folder / str(dist.get_rank())
    own.mkdir()
    return train(Classifier, own, strategy="zero1", **SAVING)["steps"]


@pytest.mark.costly
def test_ranks_that_share_no_folder_have_rank_0_gather_what_zero1_divides(ranks, tmp_path):
    assert min(ranks.run(fit_on_own_disks_with_zero1, tmp_path)) > 0
    newest = Checkpointer(tmp_path / "0").find_checkpoint()
    assert not list(newest.path.glob("*.safetensors"))
    state = torch.load(newest.paramfiles["optimizer"], weights_only=True)["state"]
    assert len(state) == len(list(make_net().parameters()))


def fit_in_mirrors(folder):
    """Fit where the folder is a mirror on each of two machines."""
    place = (f"machine {dist.get_rank()}", "")
    with (
        mock.patch.object(shared_folder, "mirror_holding", return_value=object()),
        mock.patch.object(shared_folder, "this_place", return_value=place),
    ):
        return train(Classifier, folder, **SAVING)["steps"]


@pytest.mark.costly
def test_mirrors_on_several_machines_get_whole_states(ranks, tmp_path):
    assert min(ranks.run(fit_in_mirrors, tmp_path)) > 0
    assert not list(Checkpointer(tmp_path).find_checkpoint().path.glob("*.safetensors"))


def go_on_by_broadcast(folder):
    """Go on where rank 0 alone reads the folder."""
    return train(Classifier, folder, ckpt_load="broadcast", **SAVING)


@pytest.mark.exhaustive
def test_shards_are_sent_by_the_main_process(ranks, tmp_path, monkeypatch):
    ranks.run(stop, tmp_path)
    expected = ranks.run(through)
    for one, other in zip(ranks.run(go_on_by_broadcast, tmp_path), expected, strict=True):
        assert_same(one["weights"], other["weights"])


def begin_from(path, strategy):
    """Begin a run with the weights of a checkpoint, and return them before a step."""
    brain, _ = make(Classifier, None, make_net(), strategy=strategy, init_from=str(path))
    brain.fit([], data(12))
    return whole(brain)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_run_begins_from_weights_in_shards(ranks, tmp_path, strategy):
    ranks.run(stop, tmp_path)
    newest = Checkpointer(tmp_path).find_checkpoint()
    expected = safe_load(newest.paramfiles["net"])
    for found in ranks.run(begin_from, newest.path, strategy, world_size=3):
        assert {name.removeprefix("net."): value for name, value in found.items()}.keys() == (
            expected.keys()
        )
        for name, value in expected.items():
            assert torch.equal(found[f"net.{name}"], value), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "fsdp"), (3, "fsdp")),
        pytest.param((2, "fsdp"), (2, "ddp"), marks=pytest.mark.slow),
        pytest.param((2, "fsdp"), (1, "auto"), marks=pytest.mark.slow),
        pytest.param((2, "fsdp"), (3, "zero1"), marks=pytest.mark.slow),
        pytest.param((3, "zero1"), (2, "fsdp"), marks=pytest.mark.slow),
        pytest.param((2, "ddp"), (2, "fsdp"), marks=pytest.mark.slow),
        pytest.param((1, "auto"), (3, "fsdp"), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_and_to_other_strategies(ranks, tmp_path, before, after):
    expected = through()
    for (size, strategy), run in ((before, stop), (after, go_on)):
        results = (
            [run(tmp_path, strategy)]
            if size == 1
            else ranks.run(run, tmp_path, strategy, world_size=size)
        )
    for result in results:
        assert_goes_on(result, expected)


# ----------------------------------------------------------------------------- what a recipe may do


class OwnBatch(Classifier):
    """Its own step, with a look at the weights between backward pass and step, and predictions
    after it.
    """

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        with torch.no_grad():
            # leaves the weights whole with fsdp_reshard_after_forward=False
            self.modules.net(batch[0])
        if self.should_step:
            self.optimizers_step()
        return loss.detach()


class Unfreezes(Classifier):
    """Trains the first block from the second epoch on."""

    def on_stage_start(self, stage, epoch=None):
        self.modules.net[1].requires_grad_(requires_grad=epoch != 1)


class TwoNets(Classifier):
    """Two entries of modules, one of them frozen, and an optimizer for each."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0]) + self.modules.other(batch[0])

    def init_optimizers(self):
        nets = self.modules.net.parameters(), self.modules.other.parameters()
        self.optimizers_dict = {
            "net": torch.optim.AdamW(nets[0], lr=0.02),
            "other": torch.optim.SGD(nets[1], lr=0.1, momentum=0.9),
        }


class Tied(nn.Module):
    """Two blocks with one weight, which is that of the first layer, too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(FEATURES, norm=False), Block(FEATURES, norm=False))
        self.head = nn.Linear(FEATURES, FEATURES, bias=False)
        self.last = nn.Linear(FEATURES, CLASSES)
        self.head.weight = self.blocks[0].layer.weight

    def forward(self, inputs):
        return self.last(self.head(self.blocks(inputs)))


def make_tied():
    torch.manual_seed(4)
    return Tied().double()


def fit(kind, modules, samples=37, **options):
    given = {
        **QUIET,
        "max_grad_norm": 0.4,
        "global_batch_size": 12,
        "strategy": "fsdp",
        "fsdp_min_parameters": 30,
    }
    brain = kind(modules, lambda p: torch.optim.AdamW(p, lr=0.02), None, {**given, **options})
    brain.fit(range(1, 3), data(samples), data(7), train_loader_kwargs={"shuffle": True})
    outputs = torch.stack(brain.predict(data(7), loader_kwargs={"batch_size": 2}))
    tested = brain.evaluate(data(5))
    return {
        "weights": whole(brain),
        "told": [*brain.told, tested],
        "steps": brain.optimizer_step,
        "outputs": outputs,
    }


def other():
    torch.manual_seed(5)
    return nn.Linear(FEATURES, CLASSES).double()


class Moving(nn.Module):
    """Has a buffer that is another on each rank after a forward pass, as codebooks have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.double()

    def forward(self, inputs):
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return self.layer(inputs - self.mean)


def fit_moving(strategy):
    return fit(Classifier, {"net": Moving()}, strategy=strategy)


@pytest.mark.slow
def test_buffers_that_move_are_those_of_rank_0_as_with_ddp(ranks):
    found = ranks.run(fit_moving, "fsdp")
    expected = ranks.run(fit_moving, "ddp")
    close(found[0], expected[0])


def fit_one(name):
    if name == "two nets":
        return fit(TwoNets, {"net": make_net(), "other": other()})
    if name == "a frozen net":
        return fit(
            TwoNets,
            {"net": make_net(), "other": other().requires_grad_(requires_grad=False)},
        )
    if name == "batch norm":
        return fit(Classifier, {"net": make_net(norm=True)}, samples=36)
    if name == "own fit_batch":
        return fit(OwnBatch, {"net": make_net()}, fsdp_reshard_after_forward=False)
    if name == "unfreezes":
        return fit(Unfreezes, {"net": make_net()})
    if name == "tied":
        return fit(Classifier, {"net": make_tied()})
    if name == "recomputed":
        return fit(
            Classifier,
            {"net": make_net()},
            activation_checkpointing=["Block"],
            fsdp_blocks=["Block"],
        )
    assert name == "offloaded"
    return fit(Classifier, {"net": make_net()}, fsdp_cpu_offload=True, ema_decay=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "two nets",
        "own fit_batch",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                "batch norm",
                "a frozen net",
                "unfreezes",
                "tied",
                "recomputed",
                "offloaded",
            )
        ),
    ],
)
def test_recipes_of_all_kinds(ranks, name):
    expected = fit_one(name)
    for result in ranks.run(fit_one, name):
        close(result, expected)
        torch.testing.assert_close(result["outputs"], expected["outputs"], rtol=1e-10, atol=1e-10)


class Penalised(Classifier):
    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        if stage is Stage.TRAIN:
            (gradient,) = torch.autograd.grad(loss, self.inputs, create_graph=True)
            loss = loss + gradient.square().mean()
        return loss

    def compute_forward(self, batch, stage):
        self.inputs = batch[0].requires_grad_()
        return super().compute_forward(batch, stage)


class InPlace(Classifier):
    """Its outputs are views, as those of a linear layer of three dimensions are."""

    def compute_forward(self, batch, stage):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what follows
            outputs = self.modules.net(batch[0][:, None])
        outputs /= 2
        return outputs[:, 0]


class InAnObject(Classifier):
    def compute_forward(self, batch, stage):
        return super().compute_forward(batch, stage).scores


def fails(kind):
    net = make_net()
    if kind is InAnObject:
        net.register_forward_hook(
            lambda _module, _inputs, outputs: types.SimpleNamespace(scores=outputs),
        )
    return message_of(kind, BatchError, None, {"net": net})


@pytest.mark.corner
@pytest.mark.parametrize("kind", [Penalised, InPlace, InAnObject])
def test_weights_that_are_needed_after_they_were_freed(ranks, kind):
    for message in ranks.run(fails, kind):
        words = "{}: the backward pass came to weights that --strategy=fsdp has freed"
        assert message.startswith(words.format(kind.__name__))
        assert "outputs = outputs + 1" in message


class PastItsModule(Classifier):
    def compute_forward(self, batch, stage):
        return self.modules.net[3](self.modules.net[0](batch[0]))


class Decayed(Classifier):
    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return loss + 1e-3 * self.modules.net[0].weight.square().sum()


class PastItAtTheEnd(PastItsModule):
    def compute_forward(self, batch, stage):
        return (
            self.modules.net(batch[0])
            if stage is Stage.TRAIN
            else super().compute_forward(batch, stage)
        )


@pytest.mark.corner
@pytest.mark.parametrize("kind", [PastItsModule, PastItAtTheEnd, Decayed])
def test_a_weight_that_is_used_outside_of_a_forward_pass(ranks, kind):
    """In training, in an evaluation, and in a loss whose backward pass fails."""
    for message in ranks.run(message_of, kind, BatchError, None):
        assert message.startswith(
            'A weight that is divided over the ranks met a whole tensor: "aten.'
        )
        assert "in the forward of the module that has it" in message


class Drops(nn.Module):
    """Uses another block on each rank, from some forward pass on."""

    def __init__(self, after):
        super().__init__()
        torch.manual_seed(5)
        self.first = Block(FEATURES, norm=False)
        self.second = Block(FEATURES, norm=False)
        self.last = nn.Linear(FEATURES, CLASSES)
        self.after = after
        self.number = 0
        self.double()

    def forward(self, inputs):
        self.number += 1
        is_other = self.training and self.number > self.after and not if_main_process()
        return self.last((self.second if is_other else self.first)(inputs))


def drop(after, *, reshard):
    options = {"fsdp_blocks": ["Block"], "fsdp_reshard_after_forward": reshard}
    with pytest.raises(RankMismatchError) as caught:
        fit(Classifier, {"net": Drops(after)}, **options)
    return str(caught.value)


class Chooses(nn.Module):
    """Two layers of one shape in one block, of which each rank uses another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(FEATURES, CLASSES).double()
        self.second = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs):
        return (self.second if self.training and not if_main_process() else self.first)(inputs)


def choose():
    with pytest.raises(RankMismatchError) as caught:
        fit(Classifier, {"net": Chooses()})
    return str(caught.value)


def test_ranks_that_use_other_parameters_of_a_block_are_told(ranks):
    for message in ranks.run(choose):
        assert "or not the same parameters" in message


@pytest.mark.parametrize(
    ("after", "reshard"),
    [
        (0, True),
        pytest.param(0, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_use_other_blocks_are_told_before_anything_is_saved(ranks, after, reshard):
    """The last of four steps is looked at where the pass ends: after three steps."""
    for message in ranks.run(functools.partial(drop, reshard=reshard), after):
        assert "the ranks have not used the same blocks in the same order" in message


class SavesAlone(Classifier):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.VALID and if_main_process():
            self.checkpointer.save_checkpoint()


class LooksInside(Classifier):
    """Saves weights by itself: what rank 0 has, and what all have."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        state = whole_state_dict(self.modules.net)
        optimizer = whole_state_dict(self.optimizer)
        if if_main_process():
            torch_save(WholeState(state), self.folder / "whole.ckpt")
            torch_save(WholeState(optimizer), self.folder / "optimizer.ckpt")
        run_on_main(lambda: torch_save(self.modules.net, self.folder / "part.ckpt"))


def message_of(kind, error, folder, modules=None, **options):
    given = {**QUIET, "strategy": "fsdp", **options}
    try:
        opt_class = functools.partial(torch.optim.AdamW, lr=0.02)
        checkpointer = None if folder is None else Checkpointer(folder)
        brain = kind(modules or {"net": make_net()}, opt_class, None, given, checkpointer)
        brain.folder = folder
        brain.fit([1], data(8), data(4), train_loader_kwargs={"batch_size": 2})
    except error as problem:
        return str(problem)
    return None


def saves_alone(folder):
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger(arrival.__name__)
    log.addHandler(handler)
    seconds = checkpoint_policy.WAIT_SECONDS
    checkpoint_policy.WAIT_SECONDS = 0.2
    tells = arrival.TELL_SECONDS
    arrival.TELL_SECONDS = 0.1
    try:
        return message_of(SavesAlone, (CheckpointError, RankFailedError), folder), told
    finally:
        checkpoint_policy.WAIT_SECONDS = seconds
        arrival.TELL_SECONDS = tells
        log.removeHandler(handler)


@pytest.mark.costly
def test_a_save_by_the_main_process_alone_is_an_error(ranks, tmp_path):
    results = ranks.run(saves_alone, tmp_path, timeout=60)
    for message, _ in results:
        assert ("the main process saves alone") in message
    assert "waits for the other ranks to save, too, 0 s in all, and some have not come" in "".join(
        results[0][1]
    )


@pytest.mark.costly
def test_a_recipe_that_saves_a_part_is_told_how_to_save_all(ranks, tmp_path):
    for message in ranks.run(
        message_of,
        LooksInside,
        (CheckpointError, MainProcessError),
        tmp_path,
    ):
        assert "each rank has a part of its tensors" in message
        assert "ddpkit.checkpoints.whole_state_dict" in message
    net = make_net()
    torch_recovery(net, tmp_path / "whole.ckpt", end_of_epoch=True)
    optimizer = torch.optim.AdamW(net.parameters())
    torch_recovery(optimizer, tmp_path / "optimizer.ckpt", end_of_epoch=True)
    assert {one["exp_avg"].shape for one in optimizer.state.values()} == {
        one.shape for one in net.parameters()
    }
    assert not (tmp_path / "part.ckpt").exists()


class PredictsAlone(Classifier):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        run_on_main(lambda: self.modules.net(torch.zeros(2, FEATURES, dtype=torch.float64)))


@pytest.mark.costly
@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_pass_of_the_main_process_alone_is_an_error(ranks, reshard):
    """Not a wait for the others, who wait for the main process."""
    run = functools.partial(message_of, fsdp_reshard_after_forward=reshard)
    for message in ranks.run(run, PredictsAlone, (LaunchError, MainProcessError), None, timeout=60):
        assert (
            "the forward pass of net (strategy='fsdp') was called inside main-only code "
            "(run_on_main"
        ) in message


class GathersAlone(Classifier):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        run_on_main(lambda: whole_state_dict(self.modules.net))


@pytest.mark.costly
def test_whole_states_for_the_main_process_alone_are_an_error(ranks):
    for message in ranks.run(
        message_of,
        GathersAlone,
        (LaunchError, MainProcessError),
        None,
        timeout=60,
    ):
        assert "whole_state_dict was called inside main-only code (run_on_main" in message


class Outside(Classifier):
    def init_optimizers(self):
        self.optimizers_dict = {"outside": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)}


def matrix():
    return {"net": nn.Linear(FEATURES, CLASSES, bias=False).double()}


class Orthogonal(Classifier):
    def init_optimizers(self):
        self.optimizers_dict = {"muon": torch.optim.Muon(self.modules.net.parameters())}


class Sharded(Classifier):
    def on_fit_start(self):
        fully_shard(self.modules.net, mesh=init_device_mesh("cpu", (2,)))
        super().on_fit_start()


def evaluate_sharded(folder=None, *, predicts=False, **options):
    """Evaluate a model that the recipe has sharded, or predict; return the loss, or what refuses
    it.
    """
    net = make_net()
    checkpointer = None if folder is None else Checkpointer(folder)
    if torch.distributed.is_initialized():
        for part in (*net[1:3], net):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    brain = Classifier({"net": net}, None, None, {**QUIET, **options}, checkpointer)
    try:
        return brain.predict(data(7)) if predicts else brain.evaluate(data(7))
    except ConfigError as problem:
        return str(problem)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "options",
    [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"virtual_ranks": 2}],
    ids=str,
)
def test_a_model_that_the_recipe_has_sharded_is_evaluated_without_training(
    ranks,
    tmp_path,
    options,
):
    make(folder=tmp_path, strategy="auto")[0].checkpointer.save_checkpoint()
    expected = pytest.approx(evaluate_sharded(tmp_path), rel=1e-10)
    assert ranks.run(functools.partial(evaluate_sharded, tmp_path, **options)) == [expected] * 2


@pytest.mark.costly
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_model_that_the_recipe_has_sharded_is_not_evaluated_on_other_data_by_each_rank(
    ranks,
    strategy,
):
    for found in ranks.run(
        functools.partial(evaluate_sharded, shard_evaluation=True, strategy=strategy)
    ):
        assert found.startswith("shard_evaluation=True: the recipe has sharded its model")
    for found in ranks.run(functools.partial(evaluate_sharded, predicts=True, strategy=strategy)):
        assert found.startswith("predict: the recipe has sharded its model")
        assert "call evaluate, without shard_evaluation" in found


def messages(folder):
    return [
        message_of(Outside, ConfigError, folder / "a"),
        message_of(
            Classifier,
            ConfigError,
            folder / "c",
            {"net": make_tied()},
            fsdp_blocks=["Block"],
        ),
        message_of(Classifier, ConfigError, folder / "d", fsdp_blocks=["Blok"]),
        message_of(Sharded, ConfigError, folder / "e", strategy="fsdp"),
        message_of(Sharded, ConfigError, folder / "f", strategy="ddp"),
        message_of(Sharded, ConfigError, folder / "k", strategy="zero1"),
        message_of(Sharded, ConfigError, folder / "l", strategy="auto", virtual_ranks=2),
        message_of(OwnBatch, ConfigError, folder / "g", fsdp_whole_gradients=True),
        message_of(Orthogonal, ConfigError, folder / "i", matrix()),
        message_of(
            Classifier,
            ConfigError,
            folder / "j",
            auto_micro_batch=True,
            global_batch_size=4,
        ),
    ]


@pytest.mark.costly
@needs_torch("2.13", "it has no Muon")
def test_what_cannot_be_divided_is_an_error_on_every_rank(ranks, tmp_path):
    for found in ranks.run(messages, tmp_path):
        for words, message in zip(
            [
                "the optimizer 'outside' has parameters that are not in modules",
                "blocks.0 of modules['net'] shares a parameter with a part outside",
                "'Blok'",
                "strategy='fsdp': modules['net'] is wrapped or sharded already",
                "strategy='ddp': modules['net'] is wrapped or sharded already",
                "strategy='zero1': modules['net'] is wrapped or sharded already",
                "virtual_ranks=2: modules['net'] is wrapped or sharded already",
                "a fit_batch of the recipe does not work with fsdp_whole_gradients=True",
                "does not work with the optimizer 'muon', Muon: each rank would step",
                (
                    "auto_micro_batch does not work with fully_shard (FSDP2), which sends weights "
                    "and gradients inside"
                ),
            ],
            found,
            strict=True,
        ):
            assert words in message


# ---------------------------------------------------------------- models on the meta device


def train_from_meta(folder=None, **options):
    return train(Classifier, folder, net_on_meta(), samples=36, **options)


def held_at_most():
    """Train, and note how many values a rank has in memory when a block is divided."""
    held = []
    divide = torch.distributed.fsdp.fully_shard

    def divided(block, **policy):
        tensors = [one for one in net.parameters() if not one.is_meta]
        held.append(sum(local_part(one).numel() for one in tensors))
        return divide(block, **policy)

    net = net_on_meta()
    torch.distributed.fsdp.fully_shard = divided
    try:
        train(Classifier, None, net, samples=36)
    finally:
        torch.distributed.fsdp.fully_shard = divide
    return held, sum(one.numel() for one in net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_on_the_meta_device_has_the_values_of_one_process(ranks, world_size, monkeypatch):
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "4")
    alone = train_from_meta(strategy="auto")
    for strategy in ("fsdp", "zero1"):
        for one in ranks.run(
            functools.partial(train_from_meta, strategy=strategy),
            world_size=world_size,
        ):
            close(one, alone)


@pytest.mark.slow
def test_no_rank_ever_holds_a_model_on_the_meta_device_whole(ranks):
    for held, whole in ranks.run(held_at_most):
        assert max(held) < 0.8 * whole


@pytest.mark.slow
def test_a_run_from_the_meta_device_goes_on(ranks, tmp_path):
    whole = ranks.run(functools.partial(train_from_meta, tmp_path / "whole"))
    ranks.run(
        functools.partial(train_from_meta, tmp_path / "part", dies_at=(2, 5), ckpt_interval_steps=1)
    )
    for one, other in zip(
        ranks.run(functools.partial(train_from_meta, tmp_path / "part")),
        whole,
        strict=True,
    ):
        for name, value in other["weights"].items():
            assert torch.equal(one["weights"][name], value), name


def evaluate_from_meta(folder):
    brain, _ = make(Classifier, folder, net_on_meta())
    loss = brain.evaluate(data(7))
    return loss, sum(map(is_sharded, brain.raw_modules.parameters()))


@pytest.mark.slow
def test_an_evaluation_alone_divides_a_model_on_the_meta_device(ranks, tmp_path):
    told = ranks.run(functools.partial(train_from_meta, tmp_path))[0]["told"]
    for loss, divided in ranks.run(evaluate_from_meta, tmp_path):
        assert loss == pytest.approx(told[-1], rel=1e-10)
        assert divided


def reset_of_others():
    net = net_on_meta()
    net.resets_parts = True
    with pytest.raises(
        ConfigError,
        match=r"^modules: net is .*Scaled.reset_parameters\(\) "
        r"changes parts inside",
    ):
        train(Classifier, None, net)


def test_a_reset_that_reaches_into_blocks_is_refused(ranks):
    ranks.run(reset_of_others)
