"""``--strategy=zero1``: the numbers of DDP to the last bit, with a part of the optimizer state on
each rank.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from ddpkit.checkpoints import Checkpointer, safe_load
from ddpkit.distributed import if_main_process, run_on_main
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, ConfigError, RankFailedError
from ddpkit.run import checkpoint_policy
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    Killed,
    SavesAfterValidation,
    assert_same,
    linear,
    points,
    weights,
    world_size,
)


class Recipe(SavesAfterValidation):
    """A normalised network and a head; saves after every validation."""

    dies_at = None

    def compute_forward(self, batch, stage):
        if stage is Stage.TRAIN and self.dies_at == (self.progress.epoch, self.optimizer_step):
            raise Killed
        return self.modules.head(self.modules.net(batch[0]))


class TwoOptimizers(Recipe):
    """One with two groups, one with a scheduler of its own; the scheduler's rate goes down after
    every step.
    """

    def init_optimizers(self):
        net = self.modules.net
        head = self.modules.head
        self.first = torch.optim.AdamW(
            [{"params": [net[0].weight]}, {"params": [head.bias], "lr": 0.1}],
            lr=0.02,
        )
        self.second = torch.optim.SGD([*net[1].parameters(), head.weight], lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.second, 0.97)
        self.optimizers_dict = {"first": self.first, "second": self.second}
        if self.checkpointer is not None:
            for name in ("first", "second", "scheduler"):
                self.checkpointer.add_recoverable(name, getattr(self, name))

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step:
            self.scheduler.step()


class OwnBatch(TwoOptimizers):
    """Steps one optimizer itself, and looks at its gradients afterwards."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        self.first.step()
        assert all(one.grad is not None for one in self.modules.net[0].parameters())
        self.optimizers_step()
        return loss.detach()


class Growing(Recipe):
    """Gives the optimizer the rest of the parameters in the second epoch."""

    def init_optimizers(self):
        self.optimizer = torch.optim.Adam(self.modules.head.parameters(), lr=0.02)
        self.optimizers_dict = {"adam": self.optimizer}

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN and epoch == 2:
            self.optimizer.add_param_group(
                {"params": list(self.modules.net.parameters()), "lr": 0.01}
            )


class Unfreezing(Recipe):
    """Trains the head alone in its first epoch."""

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN:
            self.modules.net.requires_grad_(epoch > 1)


KINDS = {one.__name__: one for one in (Recipe, TwoOptimizers, OwnBatch, Growing, Unfreezing)}


def make(kind, folder=None, opt=None, norm=nn.BatchNorm1d, **options):
    torch.manual_seed(7)
    # No bias before BatchNorm: its gradient is zero but for rounding, which AdamW would blow up.
    net = nn.Sequential(nn.Linear(3, 5, bias=False), norm(5), nn.Tanh()).double()
    modules = {"net": net, "head": nn.Linear(5, 1).double()}
    opt = opt or (lambda parameters: torch.optim.AdamW(parameters, lr=0.02))
    checkpointer = None if folder is None else Checkpointer(folder, modules)
    return KINDS[kind](modules, opt, None, {**QUIET, "max_grad_norm": 0.5, **options}, checkpointer)


def train(kind, folder=None, *, dies_at=None, **options):
    """Run as a script does; return weights, losses, the elements of optimizer state here, and what
    was averaged.
    """
    brain = make(kind, folder, **options)
    counter = EpochCounter(3)
    if folder is not None:
        brain.checkpointer.add_recoverable("counter", counter)
    brain.dies_at = dies_at
    kwargs = {"batch_size": 12 // world_size(), "shuffle": True}
    try:
        brain.fit(counter, points(41), points(7, seed=8), train_loader_kwargs=kwargs)
    except Killed:
        return None
    own = [one.state.values() for one in brain.optimizers_dict.values()]
    elements = sum(
        value.numel()
        for states in own
        for state in states
        for value in state.values()
        if value.dim()
    )
    average = (
        {}
        if brain.ema is None
        else {name: one.clone() for name, one in brain.ema.state_dict().items()}
    )
    return weights(brain), [loss for _, _, loss in brain.losses], elements, average


def train_with(strategy, kind, folder, options):
    torch.set_num_threads(1)
    return train(kind, folder, strategy=strategy, **options)


SETTINGS = [
    (
        "Recipe",
        {"remove_vector_weight_decay": True, "ema_decay": 0.8, "grad_accumulation_factor": 2},
    ),
    ("TwoOptimizers", {"grad_accumulation_factor": 1}),
    pytest.param("Unfreezing", {"find_unused_parameters": True}, marks=pytest.mark.slow),
    pytest.param(
        "OwnBatch",
        {"lr_scaling": "linear", "reference_batch_size": 6},
        marks=pytest.mark.slow,
    ),
    pytest.param("Growing", {"grad_accumulation_factor": 2}, marks=pytest.mark.slow),
]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "options"), SETTINGS)
def test_zero1_has_the_bits_of_ddp_and_the_numbers_of_one_process(ranks, world_size, kind, options):
    alone, alone_losses, whole, alone_average = train_with("zero1", kind, None, options)
    expected = ranks.run(train_with, "ddp", kind, None, options, world_size=world_size)
    found = ranks.run(train_with, "zero1", kind, None, options, world_size=world_size)
    for mine, same in zip(found, expected, strict=True):
        assert_same(mine[0], same[0])
        assert_same(mine[3], same[3])
        assert mine[1] == same[1] == found[0][1]
        assert same[2] == whole
        torch.testing.assert_close(mine[0], alone, rtol=0, atol=1e-10)
        torch.testing.assert_close(mine[3], alone_average, rtol=0, atol=1e-10)
        assert mine[1] == pytest.approx(alone_losses, abs=1e-10)
    parts = [mine[2] for mine in found]
    assert sum(parts) == whole
    assert max(parts) < 0.75 * whole


def run_twice(before, after, kind, folder, options):
    """Die in the third epoch, in a run that goes on with another strategy; return what is saved at
    the end.
    """
    if before is not None:
        assert train_with(before, kind, folder, {**options, "dies_at": (3, 9)}) is None
    if after is None:
        return None
    result = train_with(after, kind, folder, options)
    return (*result, saved(folder, kind))


def saved(folder, kind):
    checkpoint = Checkpointer(folder).find_checkpoint()
    names = ["optimizer"] if kind == "Recipe" else ["first", "second"]
    return [safe_load(checkpoint.paramfiles[name]) for name in names]


def assert_same_states(found, expected):
    for mine, same in zip(found, expected, strict=True):
        assert mine["param_groups"] == same["param_groups"]
        assert mine["state"].keys() == same["state"].keys()
        for number, state in same["state"].items():
            assert_same(mine["state"][number], state)


ONE_AFTER_THE_OTHER = [
    (("zero1", 2), ("zero1", 2)),
    (("ddp", 2), ("zero1", 2)),
    (("zero1", 2), ("ddp", 2)),
    (("zero1", 3), ("zero1", 2)),
    (("zero1", 2), ("single", 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("Recipe", *ONE_AFTER_THE_OTHER[0]),
        *(("TwoOptimizers", *one) for one in ONE_AFTER_THE_OTHER),
    ],
    ids=str,
)
def test_a_run_goes_on_from_a_checkpoint_of_zero1_and_from_one_of_ddp(
    ranks,
    tmp_path,
    kind,
    before,
    after,
):
    """To the last bit on as many processes; what is saved is a plain optimizer's state, whole."""
    options = {"ckpt_interval_steps": 2, "ema_decay": 0.8, "ckpt_async": True}
    if before[1] != after[1]:
        options["norm"] = nn.LayerNorm  # BatchNorm has other batches where one process accumulates
    expected = ranks.run(
        run_twice,
        None,
        "ddp",
        kind,
        tmp_path / "whole",
        options,
        world_size=before[1],
    )[0]
    ranks.run(run_twice, before[0], None, kind, tmp_path / "dead", options, world_size=before[1])
    call = run_twice, None, after[0], kind, tmp_path / "dead", options
    found = ranks.run(*call, world_size=after[1])[0] if after[1] > 1 else run_twice(*call[1:])
    if before[1] == after[1]:
        assert_same(found[0], expected[0])
        assert_same(found[3], expected[3])
        assert_same_states(found[4], expected[4])
    else:
        torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            [one["state"] for one in found[4]],
            [one["state"] for one in expected[4]],
        )


# ------------------------------------------------------------------------------ shards of the state


def files_of(folder):
    newest = Checkpointer(folder).find_checkpoint().path
    return newest, sorted(path.name for path in newest.glob("*.safetensors"))


@pytest.mark.costly
def test_each_rank_writes_the_states_that_it_owns(ranks, tmp_path):
    ranks.run(train_with, "zero1", "TwoOptimizers", tmp_path, {})
    newest, files = files_of(tmp_path)
    assert files == [
        f"{name}-shard-{rank}-of-2.safetensors" for name in ("first", "second") for rank in range(2)
    ]
    shards = [safetensors.torch.load_file(newest / name) for name in files[:2]]
    assert sorted([*shards[0], *shards[1]]) == [
        f"state/{number}/{name}" for number in range(2) for name in ("exp_avg", "exp_avg_sq")
    ]
    assert len(shards[0]) == len(shards[1]) == 2
    table = torch.load(newest / "first.ckpt", weights_only=True)["state"]["state"]
    whole = safe_load(newest / "first.ckpt")["state"]
    assert sorted(whole) == [0, 1]
    for number, state in whole.items():
        assert table[number]["step"] == state["step"] == 12
        assert table[number]["exp_avg"].is_meta
        (own,) = [shard for shard in shards if f"state/{number}/exp_avg" in shard]
        assert torch.equal(own[f"state/{number}/exp_avg"], state["exp_avg"])


@pytest.mark.costly
def test_the_states_can_be_gathered(ranks, tmp_path):
    ranks.run(train_with, "zero1", "TwoOptimizers", tmp_path / "shards", {})
    ranks.run(train_with, "zero1", "TwoOptimizers", tmp_path / "whole", {"ckpt_layout": "whole"})
    newest, files = files_of(tmp_path / "whole")
    assert files == []
    for name in ("first", "second"):
        plain = torch.load(newest / f"{name}.ckpt", weights_only=True)
        assert_same_states([safe_load(files_of(tmp_path / "shards")[0] / f"{name}.ckpt")], [plain])


def load_and_note(folder):
    """Load the newest checkpoint; return which shards this rank has read."""
    read = set()
    plain = Path.open

    def note(path, *args, **kwargs):
        read.update({path.name} if "-shard-" in path.name else ())
        return plain(path, *args, **kwargs)

    with mock.patch.object(Path, "open", note):  # rank 0 alone would verify all of them
        result = train_with("zero1", "TwoOptimizers", folder, {"ckpt_verify": "off"})
    return sorted(read), result[0]


@pytest.mark.costly
def test_each_rank_reads_the_states_that_it_owns(ranks, tmp_path):
    expected = ranks.run(train_with, "zero1", "TwoOptimizers", tmp_path / "shards", {})
    for rank, (read, loaded) in enumerate(ranks.run(load_and_note, tmp_path / "shards")):
        assert read[0] == f"first-shard-{rank}-of-2.safetensors"
        assert all(f"-shard-{rank}-" in name for name in read)
        assert_same(loaded, expected[rank][0])


def load_and_look_at_mappings(folder):
    train_with("zero1", "TwoOptimizers", folder, {})
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if ".ckpt" in line]


@pytest.mark.costly
def test_nothing_stays_mapped_of_a_file_of_whole_states(ranks, tmp_path):
    ranks.run(train_with, "zero1", "TwoOptimizers", tmp_path, {"ckpt_layout": "whole"})
    assert ranks.run(load_and_look_at_mappings, tmp_path) == [[], []]


def load_with_torch(obj, path, end_of_epoch):
    """A recipe's own loader: it knows files of torch.save."""
    obj.load_state_dict(torch.load(path, weights_only=True))


class OwnLoader(TwoOptimizers):
    def init_optimizers(self):
        super().init_optimizers()
        self.checkpointer.custom_load_hooks["first"] = load_with_torch


KINDS["OwnLoader"] = OwnLoader


def stop_and_go_on(folder, kind):
    options = {"ckpt_interval_steps": 2}
    assert train_with("zero1", kind, folder, {**options, "dies_at": (3, 9)}) is None
    return train_with("zero1", kind, folder, options)[0]


@pytest.mark.costly
def test_a_state_with_a_loader_of_its_own_is_gathered(ranks, tmp_path):
    expected = ranks.run(train_with, "zero1", "TwoOptimizers", tmp_path / "whole", {})
    found = ranks.run(stop_and_go_on, tmp_path / "dead", "OwnLoader")
    assert_same(found[0], expected[0][0])
    _, files = files_of(tmp_path / "dead")
    assert files == [f"second-shard-{rank}-of-2.safetensors" for rank in range(2)]


class Strided(torch.optim.SGD):
    """Keeps what lies in memory in another order, a sparse one, and numbers."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["turned"] = parameter.detach().clone().T.contiguous().T
                state["sparse"] = parameter.detach().to_sparse()
                state["number"] = torch.tensor(3.0)
                state["none"] = torch.empty(0, 2)
        return super().step(closure)


def strides_of(folder):
    def optimizer(parameters):
        return Strided([one for one in parameters if one.ndim == 2], lr=0.1)

    train("Recipe", folder, strategy="zero1", opt=optimizer)
    dist.barrier()
    # rank 0 sends its file and the shards
    train("Recipe", folder, strategy="zero1", opt=optimizer, ckpt_load="broadcast")
    state = safe_load(Checkpointer(folder).find_checkpoint().paramfiles["optimizer"])["state"]
    return [
        (one["turned"].stride(), one["sparse"].is_sparse, float(one["number"]), one["none"].shape)
        for _, one in sorted(state.items())
    ]


@pytest.mark.costly
def test_what_a_shard_cannot_hold_is_sent(ranks, tmp_path):
    for found in ranks.run(strides_of, tmp_path):
        assert found == [((1, 5), True, 3.0, (0, 2)), ((5, 1), True, 3.0, (0, 2))]


# --------------------------------------------------------------------------------- what cannot work


class Ordering(torch.optim.SGD):
    """Counts in its groups what it has stepped, as optimizers do that scale by a norm over all
    parameters.
    """

    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + sum(one.numel() for one in group["params"])
        return super().step(closure)


class OwnState(torch.optim.SGD):
    def state_dict(self):
        return {"mine": super().state_dict()}


class NotTorchs:
    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    def step(self):
        pass

    def zero_grad(self, set_to_none=True):
        pass


REFUSED = {
    "LBFGS": (torch.optim.LBFGS, "works on all parameters together"),
    "OwnState": (lambda parameters: OwnState(parameters, lr=0.1), "has a state_dict of its own"),
    "NotTorchs": (NotTorchs, "is no torch.optim.Optimizer"),
    "Ordering": (lambda parameters: Ordering(parameters, lr=0.1), "group 0 seen"),
}


def refused(name):
    with pytest.raises(ConfigError) as caught:
        train_with("zero1", "Recipe", None, {"opt": REFUSED[name][0]})
    return str(caught.value)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_be_divided_are_refused(ranks, name):
    for message in ranks.run(refused, name):
        assert f"strategy='zero1' cannot divide the optimizer 'opt_class': {name}" in message
        assert REFUSED[name][1] in message


class Saves(Recipe):
    how = None

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if self.how == "state_dict":
            self.optimizer.state_dict()
        elif self.how == "main only":
            run_on_main(self.checkpointer.save_checkpoint)
        elif if_main_process():
            self.checkpointer.save_checkpoint()


KINDS["Saves"] = Saves


def saves_alone(folder, how):
    waits = checkpoint_policy.WAIT_SECONDS
    Saves.how = how
    checkpoint_policy.WAIT_SECONDS = 0.2
    try:
        with pytest.raises((ConfigError, CheckpointError, RankFailedError)) as caught:
            train_with("zero1", "Saves", folder, {})
    finally:
        checkpoint_policy.WAIT_SECONDS = waits
    return f"{caught.typename}: {caught.value}"


@pytest.mark.slow
def test_a_state_that_is_not_whole_is_not_given_away(ranks, tmp_path):
    for message in ranks.run(saves_alone, tmp_path, "state_dict"):
        assert "AdamW.state_dict() has a part of the state only" in message
    for message in ranks.run(saves_alone, tmp_path, "main only"):
        assert "Call save_checkpoint or save_and_keep_only on every rank" in message
    first, second = ranks.run(saves_alone, tmp_path, "one-sided")
    assert first.startswith(
        "CheckpointError: strategy='zero1' divides weights or states of optimizers over the ranks"
    )
    assert "rank 0" in second


class PastTheBrain(Recipe):
    """Back-propagates a loss that is not computed through DDP."""

    def fit_batch(self, batch):
        loss = nn.functional.mse_loss(
            self.raw_modules.head(self.raw_modules.net(batch[0])),
            batch[1],
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


KINDS["PastTheBrain"] = PastTheBrain


def not_averaged():
    with pytest.raises(ConfigError) as caught:
        train_with("zero1", "PastTheBrain", None, {})
    return str(caught.value)


def test_gradients_that_are_not_averaged_are_refused(ranks):
    for message in ranks.run(not_averaged):
        assert "the gradients of the optimizer 'opt_class' are not the same on all ranks" in message


def one_tensor(strategy):
    brain = Recipe(
        {"net": linear(), "head": nn.Identity()},
        adam,
        None,
        {**QUIET, "strategy": strategy},
    )
    brain.fit(range(1, 3), points(24), train_loader_kwargs={"batch_size": 2})
    return weights(brain), len(brain.optimizer.state)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


@pytest.mark.slow
def test_a_rank_may_have_no_parameter_of_its_own(ranks):
    expected = ranks.run(one_tensor, "ddp", world_size=3)[0][0]
    found = ranks.run(one_tensor, "zero1", world_size=3)
    assert sorted(number for _, number in found) == [0, 1, 1]
    for own, _ in found:
        assert_same(own, expected)


OPTIMIZERS = {
    **{
        f"{name} {way}": (name, {way: True})
        for name in ("Adam", "AdamW", "SGD")
        for way in ("foreach", "fused")
    },
    **{
        name: (name, {})
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
    "Adafactor": ("Adafactor", {}),
    "AdamW amsgrad": ("AdamW", {"amsgrad": True}),
}


def with_optimizer(strategy):
    found = {}
    for shown, (name, options) in OPTIMIZERS.items():
        opt = lambda parameters, name=name, options=options: getattr(torch.optim, name)(
            parameters,
            lr=0.01,
            **options,
        )
        brain = Recipe(
            {"net": linear(), "head": nn.Identity()},
            opt,
            None,
            {**QUIET, "strategy": strategy},
        )
        brain.fit(range(1, 3), points(24), train_loader_kwargs={"batch_size": 2})
        assert len(brain.optimizer.state) <= (2 if strategy == "ddp" else 1), shown
        found[shown] = weights(brain)
    return found


@pytest.mark.slow
def test_optimizers_of_torch_also_on_a_rank_without_a_parameter(ranks):
    expected = ranks.run(with_optimizer, "ddp", world_size=3)[0]
    for own in ranks.run(with_optimizer, "zero1", world_size=3):
        for name, weights_of_ddp in expected.items():
            assert_same(own[name], weights_of_ddp)


def half_precision(strategy):
    brain = Recipe(
        {"net": linear().float(), "head": nn.Identity()},
        adam,
        None,
        {**QUIET, "strategy": strategy},
    )
    # the first steps overflow
    brain.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=3)
    data = [(one.float(), other.float()) for one, other in points(24)]
    brain.fit(range(1, 3), data, train_loader_kwargs={"batch_size": 2})
    return weights(brain), brain.scaler.get_scale(), brain.optimizer_step


@pytest.mark.slow
def test_fp16_skips_the_same_steps(ranks):
    expected = ranks.run(half_precision, "ddp")
    found = ranks.run(half_precision, "zero1")
    for mine, same in zip(found, expected, strict=True):
        assert_same(mine[0], same[0])
        assert mine[1:] == same[1:]
        assert mine[2] < 2 * 6


def with_leftovers(strategy):
    """Train as a recipe does whose first process has worked with the weights before."""
    brain = make("Unfreezing", opt=None, strategy=strategy)
    if if_main_process():
        for one in brain.modules.parameters():
            one.grad = torch.ones_like(one)
    brain.fit(range(1, 3), points(24), train_loader_kwargs={"batch_size": 6})
    return weights(brain)


@pytest.mark.costly
def test_gradients_of_before_are_of_no_step(ranks):
    for strategy in ("ddp", "zero1"):
        first, second = ranks.run(with_leftovers, strategy)
        assert_same(first, second)
