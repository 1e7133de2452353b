"""Bad input: each ends on every rank, soon, with a message that says what was given, why not, and
what to do.

The first half calls things directly or on ranks of the pool; the second half is the real thing
under torchrun.
"""

from __future__ import annotations

import os
import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import LoopedLoader
from ddpkit.distributed import ddp_init_group, get_rank
from ddpkit.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    MissingFileError,
)
from ddpkit.experiment import close_experiment, create_experiment_directory
from ddpkit.launch import find_launch
from ddpkit.run_opts import parse_arguments
from ddpkit.types import Stage
from tests.disks import fill, mounted
from tests.launching import PATIENCE, Run, python, start_by_hand, torchrun

LIMIT_SECONDS = 100.0  # where a rank would wait for ever
DATA = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
MAIN_RANK = 0
OTHER_RANK = 1


class Line(Brain):
    """Fits a line; fails the test if training starts where it must not."""

    may_train = True

    def compute_forward(self, batch, stage):
        assert self.may_train, "training has started"
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch[1]).square().mean()


class NeverTrained(Line):
    may_train = False


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def make(cls=NeverTrained, modules=None, opt_class=sgd, hparams=None, checkpointer=None, **options):
    run_opts = {"device": "cpu", "noprogressbar": True, **options}
    return cls(modules or {"net": nn.Linear(1, 1)}, opt_class, hparams, run_opts, checkpointer)


def fit(brain, data=None, valid=None, **loader):
    brain.fit(
        [1, 2],
        DATA if data is None else data,
        valid,
        train_loader_kwargs={"batch_size": 2, **loader},
    )


def assert_told(error, *words):
    """Each of the words must be in the message, whatever stands between them."""
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"


def assert_all_told(outcomes, kinds, *words):
    assert [outcome.error_type for outcome in outcomes] == kinds
    for outcome in outcomes:
        assert_told(outcome.error, *words)


# ------------------------------------------------------------------------------------- command line


@pytest.fixture
def yaml(tmp_path):
    path = tmp_path / "hparams.yaml"
    path.write_text("lr: 0.1\nnumber_of_epochs: 2\n")
    return str(path)


def test_missing_yaml(tmp_path):
    with pytest.raises(MissingFileError) as caught:
        parse_arguments([str(tmp_path / "nowhere.yaml")])
    assert_told(
        caught.value,
        "There is no file",
        "nowhere.yaml",
        "to read hyperparameters from",
        "current folder",
    )
    assert isinstance(caught.value, FileNotFoundError)


def test_no_yaml_at_all():
    with pytest.raises(
        ConfigError,
        match="hyperparameter YAML; found: none",
    ):
        parse_arguments(["--debug"])


def test_unknown_key_in_an_override(yaml):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([yaml, "--number_of_epoch=3"])
    assert_told(
        caught.value, "--number_of_epoch is neither a run option nor a key",
        "did you mean --number_of_epochs",
        "Correct the name, or add the key",
    )  # fmt: skip


def test_unknown_precision(yaml):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([yaml, "--precision=fp8"])
    assert_told(caught.value, "got 'fp8'", "fp32, fp16, bf16")
    with pytest.raises(ConfigError, match="precision expects .* got 'fp8'"):
        make(hparams={"precision": "fp8"})


@pytest.mark.skipif(torch.cuda.device_count() > 9, reason="has ten GPUs")
def test_a_device_that_is_not_there(yaml):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([yaml, "--device=cuda:9"])
    reason = "found" if torch.cuda.is_available() else "by torch "
    assert_told(
        caught.value,
        "device='cuda:9'",
        reason,
        "Run with --device=",
        "or leave --device out",
    )
    with pytest.raises(ConfigError, match="device='cuda:9'"):
        make(device="cuda:9")


# ------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "4", True])
def test_batch_size(batch_size):
    with pytest.raises(ConfigError) as caught:
        fit(make(), batch_size=batch_size)
    assert_told(
        caught.value,
        f"batch_size={batch_size!r}",
        "not a positive whole number",
        "Set batch_size to 1 or",
    )


def test_batch_size_of_validation_and_test():
    with pytest.raises(ConfigError, match="batch_size=0"):
        make().fit([1], DATA, DATA, valid_loader_kwargs={"batch_size": 0})
    with pytest.raises(ConfigError, match="batch_size=-2"):
        make().evaluate(DATA, test_loader_kwargs={"batch_size": -2})


class Empty(torch.utils.data.Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_empty_dataset():
    for run in (
        lambda: fit(make(), Empty()),
        lambda: fit(make(), DATA, Empty()),
        lambda: make().evaluate(Empty()),
    ):
        with pytest.raises(DataError) as caught:
            run()
        assert_told(
            caught.value,
            "the dataset is empty",
            "len(Empty) is 0",
            "Check the paths and filters",
        )
        assert str(caught.value).split(":")[0] in {"TRAIN", "VALID", "TEST"}


@pytest.mark.parametrize("given", [None, 3], ids=["None", "a number"])
def test_what_is_no_dataset(given):
    words = (
        f"{type(given).__name__} has no length: give a map-style dataset, a stream, or batches "
        "without"
    )
    for call in ("evaluate", "predict"):
        with pytest.raises(DataError, match=f"TEST: {words}"):
            getattr(make(), call)(given)
    with pytest.raises(DataError, match=f"TRAIN: {words}"):
        make().fit([1], given)


def test_a_dataset_without_a_length_needs_a_sampler():
    class Endless(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return DATA[index % len(DATA)]

    with pytest.raises(DataError, match="TRAIN: Endless has no length"):
        fit(make(), Endless())
    brain = make(Line)
    fit(brain, Endless(), sampler=[3, 0, 9])
    assert brain.optimizer_step == 4
    brain.fit(
        [1],
        DataLoader(Endless(), batch_size=2, sampler=torch.utils.data.SequentialSampler(range(5))),
    )
    assert brain.optimizer_step == 7


def test_loader_arguments_in_the_place_of_the_progress_bar():
    """The fourth parameter of fit is ``progressbar``, as in SpeechBrain."""
    words = (
        r"progressbar must be True, False or None, got \{'batch_size': 2\}\. "
        r"Give train_loader_kwargs and such by name"
    )
    with pytest.raises(ConfigError, match=words):
        make().fit([1], DATA, DATA, {"batch_size": 2})
    with pytest.raises(ConfigError, match=words):
        make().evaluate(DATA, None, None, {"batch_size": 2})


def test_a_checkpoint_that_is_named_without_a_checkpointer(caplog):
    fit(make(Line, resume="/no/where"))
    assert "Without effect, as the Brain has no checkpointer: resume=/no/where." in caplog.messages


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_call_that_would_end_the_pass_is_refused(call):
    """Without a checkpointer, too; at the end of a stage it may be called then."""

    class Calls(Line):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if self.step == self.at:
                getattr(self, call)(DATA)

        def on_stage_end(self, stage, loss, epoch=None):
            if self.at is None and stage is Stage.TRAIN:
                getattr(self, call)(DATA)

    brain = make(Calls)
    brain.at = 2
    with pytest.raises(
        ConfigError,
        match=f"{call} was called inside fit: .* or end the pass that is running",
    ):
        fit(brain)
    brain = make(Calls)
    brain.at = None
    fit(brain)


@pytest.mark.parametrize("given", [3, None])
def test_what_yields_no_epochs(given):
    with pytest.raises(
        ConfigError,
        match=rf"is {given}, which yields no epochs: give "
        r"EpochCounter\(limit=N\) or",
    ):
        make().fit(given, DATA)


def test_epochs_whose_number_cannot_be_asked_for_are_counted_as_they_come():
    brain = make(Line)
    brain.fit(tqdm(iter([1, 2]), disable=True), DATA, train_loader_kwargs={"batch_size": 2})
    assert brain.optimizer_step == 8


@pytest.mark.parametrize(
    "given",
    ["hparams.yaml", SimpleNamespace(lr=0.1)],
    ids=["a path", ("a namespace")],
)
def test_hparams_that_are_no_mapping(given):
    with pytest.raises(
        ConfigError,
        match=f"hparams is a {type(given).__name__}, not a mapping: give what",
    ):
        make(hparams=given)


def test_empty_stream():
    with pytest.raises(DataError) as caught:
        fit(make(), Stream([]))
    assert_told(
        caught.value,
        "the stream gives a first batch to 0 of 1 rank(s) only",
        "it is empty",
        "Look at the",
    )


def test_drop_last_that_leaves_nothing():
    with pytest.raises(DataError) as caught:
        fit(make(), DATA, batch_size=9, drop_last=True)
    assert_told(caught.value, "yields no batch", "does not fill one global batch", "drop_last=True")
    assert_told(caught.value, "smaller batch_size", "drop_last=False")


def small(samples):
    brain = make(Line)
    fit(brain, DATA[:samples])
    return brain.optimizer_step


@pytest.mark.slow
def test_dataset_smaller_than_the_world(ranks):
    """No error: the ranks without a sample take part with weight 0 (see
    tests/ranks/test_same_answer.py).
    """
    assert ranks.run(small, 2, world_size=3, timeout=LIMIT_SECONDS) == [2, 2, 2]


def empty_here(rank):
    fit(make(), Empty() if get_rank() == rank else DATA)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dataset_that_is_empty_on_one_rank(ranks, rank):
    """The other rank does not wait in a collective: it is told."""
    outcomes = ranks.outcomes(empty_here, rank, timeout=LIMIT_SECONDS)
    kinds = ["DataError" if number == rank else "RankFailedError" for number in range(2)]
    assert_all_told(outcomes, kinds, "the dataset is empty")
    assert f"rank {rank}: ddpkit.errors.DataError" in outcomes[1 - rank].error


# ------------------------------------------------------------------------------------- losses


class Faulty(Line):
    def __init__(self, loss, *args, **kwargs):
        self.loss = loss
        super().__init__(*args, **kwargs)

    def compute_objectives(self, predictions, batch, stage):
        return self.loss(predictions)


def wrong_loss(loss):
    brain = Faulty(
        loss,
        {"net": nn.Linear(1, 1)},
        sgd,
        None,
        {"device": "cpu", "noprogressbar": True},
    )
    fit(brain)


def no_scalar(predictions):
    return predictions


def a_float(predictions):
    return 3.0


def three(predictions):
    return predictions.sum(), 2, 3


def a_pair_of_many(predictions):
    return predictions, 2


def a_negative_count(predictions):
    return predictions.sum(), -1


def detached(predictions):
    return predictions.mean().detach()


def a_new_tensor(predictions):
    return torch.tensor(1.0)


LOSSES = [
    (no_scalar, "a tensor of shape (2, 1), not one number: return its mean over the batch"),
    (a_float, "a float, not a tensor: return the loss itself, without .item()"),
    (three, "a tuple of 3: return the mean loss, or (loss_sum, count)"),
    (a_pair_of_many, "in (loss_sum, count) a tensor of shape (2, 1), not one number"),
    (a_negative_count, "the count -1, which is not a number >= 0"),
    (
        detached,
        (
            "does not require a gradient: it does not depend on a trainable parameter. Look for "
            "torch.no_grad()"
        ),
    ),
    (a_new_tensor, "does not require a gradient"),
]


@pytest.mark.parametrize(
    ("loss", "words"),
    LOSSES,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_loss(loss, words):
    with pytest.raises(BatchError) as caught:
        wrong_loss(loss)
    assert_told(caught.value, "Faulty.compute_objectives returned ", words)


@pytest.mark.corner
@pytest.mark.parametrize(
    ("loss", "words"),
    LOSSES,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_loss_on_two_ranks(ranks, loss, words):
    outcomes = ranks.outcomes(wrong_loss, loss, timeout=LIMIT_SECONDS)
    assert_all_told(outcomes, ["BatchError"] * 2, "Faulty.compute_objectives returned ", words)


def test_loss_in_accumulation():
    """The first micro-batches of a window are not synchronised; their losses are looked at all the
    same.
    """
    brain = make(Line, grad_accumulation_factor=4)
    brain.compute_objectives = lambda predictions, batch, stage: predictions
    with pytest.raises(
        BatchError,
        match=r"Line.compute_objectives returned a tensor of shape "
        r"\(2, 1\)",
    ):
        fit(brain)


@pytest.mark.parametrize("stage", [Stage.VALID, Stage.TEST])
@pytest.mark.parametrize(
    ("loss", "words"),
    [LOSSES[0], LOSSES[2]],
    ids=["no_scalar", "three"],
)
def test_loss_of_an_evaluation(stage, loss, words):
    brain = make(Line)
    right = brain.compute_objectives
    brain.compute_objectives = lambda predictions, batch, now: (
        loss(predictions) if now is stage else right(predictions, batch, now)
    )
    twos = {"batch_size": 2}
    runs = {
        Stage.VALID: lambda: brain.fit([1], DATA, DATA, valid_loader_kwargs=twos),
        Stage.TEST: lambda: brain.evaluate(DATA, test_loader_kwargs=twos),
    }
    with pytest.raises(BatchError) as caught:
        runs[stage]()
    assert_told(
        caught.value,
        "Line.compute_objectives returned ",
        words.split(":", maxsplit=1)[0].split("(")[0],
    )


def test_a_method_that_is_not_there():
    class Bare(Brain):
        pass

    with pytest.raises(
        NotImplementedError,
        match=r"Bare must define compute_forward\(self, "
        r"batch, stage\)",
    ):
        fit(make(Bare))


# --------------------------------------------------------------------------- modules and optimizers


@pytest.mark.parametrize(
    "modules",
    [{}, {"net": nn.ReLU()}, {"net": nn.Linear(1, 1).requires_grad_(False)}],
    ids=["none", "relu", "frozen"],
)
def test_modules_without_a_trainable_parameter(modules):
    brain = NeverTrained(modules, sgd, None, {"device": "cpu", "noprogressbar": True})
    with pytest.raises(ConfigError) as caught:
        fit(brain)
    assert_told(
        caught.value,
        "opt_class was given",
        "no entry of modules has a trainable",
        "leave opt_class out",
    )


def test_a_module_that_is_none():
    with pytest.raises(ConfigError) as caught:
        make(modules={"net": nn.Linear})
    assert_told(caught.value, "modules", "'net'", "type")


class NoOptimizer:
    def __init__(self, parameters):
        pass


@pytest.mark.parametrize(
    ("opt_class", "what"),
    [(lambda parameters: None, "NoneType"), (NoOptimizer, "NoOptimizer"), (list, "list")],
)
def test_opt_class_that_returns_no_optimizer(opt_class, what):
    with pytest.raises(ConfigError) as caught:
        fit(make(opt_class=opt_class))
    assert_told(
        caught.value,
        "opt_class must return an optimizer",
        f"got a {what}",
        "without param_groups",
    )


def test_an_optimizer_of_weights_that_were_on_the_meta_device_trains_them():
    net = nn.Linear(1, 1, device="meta")
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    trained = net.weight
    brain = make(modules={"net": net}, opt_class=lambda parameters: early)
    brain.may_train, before = True, net.weight.detach().clone()
    fit(brain)
    assert net.weight is trained
    assert not torch.equal(net.weight, before)


def no_optimizer():
    fit(make(opt_class=NoOptimizer))


def test_opt_class_that_returns_no_optimizer_on_two_ranks(ranks):
    outcomes = ranks.outcomes(no_optimizer, timeout=LIMIT_SECONDS)
    assert_all_told(
        outcomes,
        ["ConfigError"] * 2,
        "opt_class must return an optimizer, got a NoOptimizer",
    )


# ------------------------------------------------------------------------------------- launchers


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LOCAL_RANK": "0"}, ["RANK is not set", "LOCAL_RANK='0'"]),
        ({"RANK": "0", "LOCAL_RANK": "0"}, ["WORLD_SIZE is not set"]),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, ["RANK=2 is not below WORLD_SIZE=2"]),
        ({"RANK": "0", "LOCAL_RANK": "2", "WORLD_SIZE": "2"}, ["LOCAL_RANK=2 is not below"]),
        ({"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, ["RANK='-1' is not a whole number"]),
        (
            {"RANK": "one", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            [("RANK='one' is not a whole number")],
        ),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_a_launcher_that_contradicts_itself(monkeypatch, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    remedies = [
        "torchrun --standalone --nproc_per_node=N train.py hparams.yaml",
        ("unset RANK LOCAL_RANK WORLD_SIZE"),
    ]
    for start in (find_launch, make, lambda: ddp_init_group({"device": "cpu"})):
        with pytest.raises(LaunchError) as caught:
            start()
        assert_told(caught.value, *words, *remedies)


def test_variables_that_number_the_nodes_are_answered_with_torchrun_for_several_nodes(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for start in (find_launch, make, lambda: ddp_init_group({"device": "cpu"})):
        with pytest.raises(LaunchError) as caught:
            start()
        assert_told(
            caught.value,
            "LOCAL_RANK is not",
            "node 0 of 2 nodes",
            "torchrun --nnodes=2",
            "--node_rank=0",
        )


@pytest.mark.parametrize(
    "variables",
    [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}],
)
def test_ranks_that_cannot_find_each_other(monkeypatch, variables):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        ddp_init_group({"device": "cpu"})
    assert_told(
        caught.value,
        "MASTER_PORT",
        "not both set",
        "cannot find each other",
        "launch with torchrun",
    )


# -------------------------------------------------------------------------------- ranks that differ


def differing(what):
    """Train on two ranks that do not mean the same; ``what`` names the difference."""
    rank = dist.get_rank()
    differs = {what} if rank else set()
    modules = {"net": nn.Linear(1, 2 if "shape" in differs else 1)}
    if "extra module" in differs:
        modules["more"] = nn.Linear(1, 1)
    if "frozen" in differs:
        modules["net"].bias.requires_grad_(False)
    if "dtype" in differs:
        modules["net"] = modules["net"].double()
    if what == "order":
        names = ["b", "a"] if rank else ["a", "b"]
        modules = {name: nn.Linear(1, 1) for name in names}
    lr = 0.5 if "lr" in differs else 0.1
    brain = make(
        modules=modules,
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        max_grad_norm=1.0 if "option" in differs else 5.0,
        grad_accumulation_factor=2 if "accumulation" in differs else 1,
    )
    data = DATA[:6] if "samples" in differs else DATA
    valid = DATA[:3] if "valid samples" in differs else DATA
    if "no valid" in differs:
        valid = None
    if "stream" in differs:
        data = Stream(DATA)
    fit(
        brain,
        data,
        valid,
        batch_size=1 if "batch size" in differs else 2,
        shuffle="shuffle" in differs,
    )


@pytest.mark.corner
@pytest.mark.parametrize(
    ("what", "line"),
    [
        (
            "shape",
            (
                "net.weight: (1, 1) torch.float32 trained on rank 0; (2, 1) torch.float32 trained "
                "on rank 1"
            ),
        ),
        (
            "extra module",
            ("parameter more.weight: missing on rank 0; (1, 1) torch.float32 trained on rank 1"),
        ),
        (
            "frozen",
            (
                "parameter net.bias: (1,) torch.float32 trained on rank 0; (1,) torch.float32 "
                "frozen on rank 1"
            ),
        ),
        (
            "dtype",
            (
                "net.weight: (1, 1) torch.float32 trained on rank 0; (1, 1) torch.float64 trained "
                "on rank 1"
            ),
        ),
        ("order", "the order of the parameters"),
        ("option", "option max_grad_norm: 5.0 on rank 0; 1.0 on rank 1"),
        ("accumulation", "option grad_accumulation_factor: 1 on rank 0; 2 on rank 1"),
        ("samples", "train samples: 8 on rank 0; 6 on rank 1"),
        ("valid samples", "valid samples: 8 on rank 0; 3 on rank 1"),
        ("no valid", "valid samples: 8 on rank 0; missing on rank 1"),
        ("stream", "train batches: 2 on rank 0; None on rank 1"),
        ("batch size", "train batch size: 2 on rank 0; 1 on rank 1"),
        ("shuffle", "train shuffling: False on rank 0; True on rank 1"),
        ("lr", "optimizer opt_class group 0 lr: 0.1 on rank 0; 0.5 on rank 1"),
    ],
    ids=lambda value: value if ":" not in value and "the" not in value else "",
)
def test_ranks_that_differ(ranks, what, line):
    """Found on every rank before a batch is trained on, naming what differs and on which rank."""
    outcomes = ranks.outcomes(differing, what, timeout=LIMIT_SECONDS)
    assert_all_told(outcomes, ["RankMismatchError"] * 2, "not about to run the same training", line)
    assert all("Start every rank with the same script" in outcome.error for outcome in outcomes)


def ready_batches():
    """Two batch samplers of different lengths."""
    sampler = [[0, 1]] * (4 + 2 * dist.get_rank())
    brain = make()
    brain.fit([1], DATA, train_loader_kwargs={"batch_sampler": sampler})


def test_ranks_with_different_batch_counts(ranks):
    outcomes = ranks.outcomes(ready_batches, timeout=LIMIT_SECONDS)
    assert_all_told(outcomes, ["RankMismatchError"] * 2, "train batches: 2 on rank 0; 3 on rank 1")


def test_three_ranks_that_differ(ranks):
    outcomes = ranks.outcomes(three_options, world_size=3, timeout=LIMIT_SECONDS)
    assert_all_told(
        outcomes,
        ["RankMismatchError"] * 3,
        "option max_grad_norm: 5.0 on ranks 0, 2; 1.0 on rank 1",
    )


def three_options():
    fit(make(max_grad_norm=1.0 if get_rank() == 1 else 5.0))


# ------------------------------------------------------------------------------------- folders


@pytest.fixture
def read_only(tmp_path):
    """A folder that nobody can write to, root neither."""
    with mounted(tmp_path / "read_only", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs") as folder:
        yield folder


@pytest.fixture
def full(tmp_path):
    """A folder on a disk without room."""
    with mounted(tmp_path / "full", "-t", "tmpfs", "-o", "size=64k", "tmpfs") as folder:
        fill(folder)
        yield folder


def create(folder):
    try:
        create_experiment_directory(folder)
    finally:
        close_experiment()


def save_in(folder):
    net = nn.Linear(1, 1)
    saver = Checkpointer(folder, {"net": net})

    class Saves(Line):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.VALID:
                self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])

    fit(make(Saves, {"net": net}, checkpointer=saver), DATA, DATA)


@pytest.mark.costly
def test_read_only_output_folder(ranks, read_only):
    outcomes = ranks.outcomes(create, str(read_only / "out"), timeout=LIMIT_SECONDS)
    assert_all_told(
        outcomes, ["ConfigError"] * 2, f"experiment_directory='{read_only}/out' cannot be written",
        "Read-only file system", "Give another folder, such as --output_folder=",
    )  # fmt: skip


@pytest.mark.costly
def test_full_output_folder(ranks, full):
    outcomes = ranks.outcomes(create, str(full / "out"), timeout=LIMIT_SECONDS)
    assert_all_told(
        outcomes, ["ConfigError"] * 2, f"experiment_directory='{full}/out' cannot be written",
        "No space left on device",
    )  # fmt: skip


@pytest.mark.costly
def test_a_file_in_the_place_of_the_output_folder(ranks, tmp_path):
    (tmp_path / "out").write_text("")
    outcomes = ranks.outcomes(create, str(tmp_path / "out"), timeout=LIMIT_SECONDS)
    assert_all_told(
        outcomes,
        ["ConfigError"] * 2,
        f"experiment_directory='{tmp_path}/out' cannot be written",
    )


@pytest.mark.parametrize(
    ("disk", "reason"),
    [("read_only", "read-only file system"), ("full", ("no space left"))],
)
def test_checkpoints_that_cannot_be_written(ranks, request, disk, reason):
    folder = request.getfixturevalue(disk)
    outcomes = ranks.outcomes(save_in, str(folder / "save"), timeout=LIMIT_SECONDS)
    kinds = [outcome.error_type for outcome in outcomes]
    first = "ConfigError" if disk == "read_only" else "CheckpointUsageError"
    assert kinds[0] == first
    assert kinds[1] in {first, "MainCheckpointError", "MainProcessError", "RankFailedError"}
    for outcome in outcomes:
        assert_told(outcome.error.lower(), reason, str(folder))


def test_the_classes_are_what_a_caller_catches():
    for kind, built_in in (
        (ConfigError, ValueError),
        (MissingFileError, FileNotFoundError),
        (DataError, ValueError),
        (BatchError, TypeError),
        (LaunchError, RuntimeError),
        (CheckpointError, RuntimeError),
    ):
        assert issubclass(kind, built_in)


# ----------------------------------------------------------------------------------- the real thing

# Either by the main thread, which has lost a connection, or by the watchdog, which ends it where it
# still waits.
SECOND_HAND = (
    r"(\[rank0\]: ddpkit.errors.RankFailedError|\[ddpkit\] rank 0 ends): rank 1 \(.*, pid \d+\) "
    r"failed first, in TRAIN of epoch 1 at step \d+, at train.py:\d+ in boom: OverflowError: boom "
    r"in forward"
)

RECIPE = """
import os, sys, time
from pathlib import Path

import torch
from hyperpyyaml import load_hyperpyyaml

import ddpkit as sb
from ddpkit.distributed import ddp_init_group

RANK = os.environ.get("RANK", "0")
FAULT = os.environ.get("FAULT", "")


def note_time():
    Path(f"time.{RANK}").write_text(str(time.time()))


def boom(where):
    note_time()
    raise OverflowError(f"boom {where}")


class Points(list):
    def __getitem__(self, index):
        if FAULT == "worker" and RANK == "1" and index > 15:
            boom("in a worker")
        return super().__getitem__(index)


class Line(sb.Brain):
    def compute_forward(self, batch, stage):
        if FAULT == "killed" and RANK == "1" and self.step == 3:
            note_time()
            os.kill(os.getpid(), 9)
        if FAULT == "valid" and RANK == "1" and stage is sb.Stage.VALID:
            boom("in validation")
        if FAULT == "forward" and RANK == "1" and self.step == 3:
            boom("in forward")
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        loss = (predictions - batch[1]).square().mean()
        if FAULT == "no_grad":
            return loss.detach()
        if FAULT == "nan" and RANK == "1":
            note_time()
            return loss * float("nan")
        return loss


if __name__ == "__main__":
    note_time()
    if FAULT == "options" and RANK == "1":
        sys.argv.append("--max_grad_norm=1")
    hparams_file, run_opts, overrides = sb.parse_arguments()
    if FAULT == "before":
        boom("before the group")
    ddp_init_group(run_opts)
    with open(hparams_file) as file:
        hparams = load_hyperpyyaml(file, overrides)
    sb.create_experiment_directory(hparams["output_folder"], hparams_file, overrides, save_env_desc=False)
    if FAULT == "recipe" and RANK == "1":
        boom("in the recipe")
    data = Points((torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(24))
    note_time()
    brain = Line(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    workers = 2 if FAULT == "worker" else 0
    epochs = range(1, 5 if FAULT == "epochs" and RANK == "1" else 4)
    brain.fit(epochs, data, data, train_loader_kwargs={"batch_size": 2, "num_workers": workers})
    Path(f"finished.{RANK}").touch()
"""  # noqa: E501

YAML = """
output_folder: results
lr: 0.001
net: !new:torch.nn.Linear
    in_features: 1
    out_features: 1
modules:
    net: !ref <net>
opt_class: !name:torch.optim.SGD
    lr: !ref <lr>
"""


def launch(folder, *words, fault="", ranks=2, warm=True):
    (folder / "train.py").write_text(RECIPE)
    (folder / "hparams.yaml").write_text(YAML)
    command = torchrun(ranks, "train.py", *words) if ranks > 1 else python("train.py", *words)
    run = Run(command, folder, {"FAULT": fault}, warm=warm).wait(60)
    assert (
        time.time() - max(float(path.read_text()) for path in folder.glob("time.*"))
        < 10.0 * PATIENCE
    ), run.err
    return run


def assert_reason_last(run, *words, rank=None, closed=0, lines=15):
    """The command failed, all of it is gone, and its last lines say who, what and why."""
    assert run.code not in {0, None}
    assert not (run.folder / f"finished.{rank or 0}").exists()
    tail = run.tail(lines)
    for word in words:
        assert word in tail, run.err
    if rank is not None:
        assert f"[rank{rank}]" in tail
        summary = run.err.rpartition("Root Cause")[2]
        assert re.search(rf"rank +: {rank} \(local_rank: {rank}\)", summary), run.err
    assert run.err.count("Connection closed by peer") <= closed, run.err
    assert "Traceback" not in run.out


def test_real_run_of_the_recipe_itself(tmp_path):
    """What follows fails for its fault alone."""
    run = launch(tmp_path, "hparams.yaml", "--device=cpu", "--noprogressbar")
    assert run.code == 0, run.err
    assert (tmp_path / "finished.0").exists()
    assert (tmp_path / "finished.1").exists()


@pytest.mark.corner
@pytest.mark.parametrize(
    ("words", "fault", "says", "rank"),
    [
        # Those that end as another does are slow: they say other words.
        pytest.param(
            ["nowhere.yaml"],
            "",
            ["train.py: error: There is no file 'nowhere.yaml'"],
            None,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["hparams.yaml", "--precision=fp8"],
            "",
            ["train.py: error: --precision expects", "got 'fp8'", "fp32, fp16, bf16"],
            None,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["hparams.yaml"],
            "before",
            ["OverflowError: boom before the group"],
            None,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["hparams.yaml"],
            "recipe",
            ["OverflowError: boom in the recipe"],
            1,
            marks=pytest.mark.slow,
        ),
        (["hparams.yaml"], "forward", ["OverflowError: boom in forward"], 1),
        pytest.param(
            ["hparams.yaml"],
            "valid",
            ["OverflowError: boom in validation"],
            1,
            marks=pytest.mark.slow,
        ),
        (["hparams.yaml"], "worker", ["OverflowError: boom in a worker"], 1),
        (["hparams.yaml"], "epochs", ["came to the end of its script"], 1),
        pytest.param(
            ["hparams.yaml"],
            "no_grad",
            [": Line.compute_objectives returned a loss that does not require a gradient"],
            None,
            marks=pytest.mark.slow,
        ),
        (
            ["hparams.yaml"],
            "options",
            ["RankMismatchError", ("max_grad_norm: 5.0 on rank 0; 1.0 on rank 1")],
            None,
        ),
        (
            ["hparams.yaml", "--nonfinite_patience=2"],
            "nan",
            [("NonFiniteLossError: 3 steps of epoch 1")],
            None,
        ),
    ],
    ids=[
        "missing_yaml",
        "bad_option",
        "before_group",
        "recipe_rank1",
        "forward_rank1",
        "valid_rank1",
        "worker_rank1",
        "epochs",
        "no_grad",
        "options",
        "nan",
    ],
)
def test_the_reason_stands_last_under_torchrun(tmp_path, words, fault, says, rank):
    run = launch(tmp_path, *words, "--device=cpu", "--noprogressbar", fault=fault)
    assert_reason_last(run, *says, "rank", rank=rank)
    if fault == "forward":
        assert re.search(SECOND_HAND, run.err), run.err


@pytest.mark.slow
def test_the_reason_stands_last_in_a_cold_start(tmp_path):
    words = ("hparams.yaml", "--device=cpu", "--noprogressbar")
    run = launch(tmp_path, *words, fault="forward", warm=False)
    assert_reason_last(run, "OverflowError: boom in forward", "rank", rank=1)


def test_a_rank_that_is_killed(tmp_path):
    run = launch(tmp_path, "hparams.yaml", "--device=cpu", "--noprogressbar", fault="killed")
    assert_reason_last(run, "rank      : 1 (local_rank: 1)", "exitcode  : -9", "SIGKILL", closed=2)


@pytest.mark.slow
def test_the_reason_stands_last_without_torchrun(tmp_path):
    """The rank that is left says which one failed, and why."""
    (tmp_path / "train.py").write_text(RECIPE)
    (tmp_path / "hparams.yaml").write_text(YAML)
    command = python("train.py", "hparams.yaml", "--device=cpu", "--noprogressbar")
    main, other = (
        run.wait(30) for run in start_by_hand(command, tmp_path, 2, warm=True, FAULT="forward")
    )
    assert (main.code, other.code) == (1, 1)
    assert "[rank1]: OverflowError: boom in forward\n" in other.err
    assert re.search(SECOND_HAND.partition("rank 1")[2], other.tail(1))
    assert re.fullmatch(SECOND_HAND, main.tail(1))


@pytest.mark.slow
def test_a_read_only_folder_for_real(tmp_path, read_only):
    run = launch(tmp_path, "hparams.yaml", "--device=cpu", f"--output_folder={read_only}/out")
    assert_reason_last(
        run,
        "train.py: error: ",
        f"experiment_directory='{read_only}/out'",
        "Read-only file system",
    )


def test_the_same_in_one_process(tmp_path):
    run = launch(tmp_path, "hparams.yaml", "--device=cpu", fault="no_grad", ranks=1)
    assert run.code == 2
    assert run.tail(2).startswith("train.py: error: Line.compute_objectives returned")


def test_the_environment_of_a_failing_rank_is_not_needed(tmp_path):
    """LOCAL_RANK alone, as a shell may have kept it: refused before anything is started."""
    (tmp_path / "train.py").write_text(RECIPE)
    (tmp_path / "hparams.yaml").write_text(YAML)
    run = Run(python("train.py", "hparams.yaml"), tmp_path, {"LOCAL_RANK": "0"}, warm=True).wait(30)
    assert run.code == 2
    assert "train.py: error: RANK is not set" in run.tail(15)
    assert "unset RANK LOCAL_RANK WORLD_SIZE" in run.tail(1)
    assert os.environ.get("LOCAL_RANK") is None


class OwnLoader:
    """Yields batches, and is nothing that torch knows."""

    def __iter__(self):
        return iter([(torch.ones(2, 1), torch.ones(2, 1))] * 4)


class TurnedAround(DataLoader):
    def __iter__(self):
        return ((inputs, -targets) for inputs, targets in super().__iter__())


def test_global_batch_size_that_cannot_divide_what_was_given():
    for data, loader in (
        (OwnLoader(), {}),
        (LoopedLoader(OwnLoader(), 2), {}),
        (TurnedAround(DATA, batch_size=2), {}),
        (DATA, {"batch_sampler": [[0, 1], [2, 3]]}),
        (Stream(DATA), {"batch_size": None}),
        (DataLoader(Stream(DATA), batch_size=None), {}),
    ):
        brain = make(global_batch_size=4)
        with pytest.raises(
            ConfigError,
            match=r"^global_batch_size=4 cannot divide .* Leave "
            r"global_batch_size out",
        ):
            brain.fit([1], data, train_loader_kwargs=loader)


def test_nominal_epochs_of_micro_batches():
    for data, loader in (
        (LoopedLoader(DataLoader(DATA), 2), {}),
        (DATA, {"looped_nominal_epoch": 2}),
    ):
        brain = make(global_batch_size=4, micro_batch_size=2)
        with pytest.raises(
            ConfigError,
            match=r"^micro_batch_size=2 lets the batches per step "
            r"depend",
        ):
            brain.fit([1], data, train_loader_kwargs=loader)


def test_a_loader_with_a_way_of_its_own_keeps_it():
    """On one process and on several: its batches are dealt out, and not made anew from its
    dataset.
    """
    seen = []

    class Looking(Line):
        def compute_objectives(self, predictions, batch, stage):
            seen.append(batch[1].sum().item())
            return super().compute_objectives(predictions, batch, stage)

    brain = make(Looking)
    brain.fit([1], TurnedAround(DATA, batch_size=4))
    assert seen == [
        -sum(target.item() for _, target in DATA[start : start + 4]) for start in (0, 4)
    ]
