"""The block that a run prints when it begins, from made-up processes."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from ddpkit.comm import software_facts
from ddpkit.launch import LaunchInfo
from ddpkit.logger import close_logging, setup_logging
from ddpkit.precision import TorchAutocast
from ddpkit.reporting import start_report
from ddpkit.reporting.start_report import (
    Place,
    StartReport,
    evaluation_row,
    loss_row,
    optimizer_row,
    place_rows,
    precision_row,
    records_row,
    start_row,
)


def placed(*per_node, device="cuda (NVIDIA H200)"):
    return [Place(node, f"gpu{node:02d}", device) for node, count in enumerate(per_node) for _ in range(count)]


@pytest.mark.parametrize(
    ("places", "info", "launcher", "devices"),
    [
        (
            placed(4, 4),
            LaunchInfo("torchrun"),
            "torchrun, 8 processes on 2 nodes (gpu00, gpu01)",
            "8 x cuda (NVIDIA H200)",
        ),
        (
            placed(1, 1),
            LaunchInfo("slurm"),
            "srun, 2 processes on 2 nodes (gpu00, gpu01)",
            "2 x cuda (NVIDIA H200)",
        ),
        (
            placed(2),
            LaunchInfo("torchrun"),
            "torchrun, 2 processes on gpu00",
            "2 x cuda (NVIDIA H200)",
        ),
        (
            placed(2, 1),
            LaunchInfo("openmpi"),
            "mpirun (Open MPI), 2 + 1 processes on 2 nodes (gpu00, gpu01)",
            "3 x cuda (NVIDIA H200)",
        ),
        (
            placed(*[8] * 100),
            LaunchInfo("torchrun", restart_count=2),
            "torchrun (restart 2), 800 processes on 100 nodes (gpu00, gpu01, gpu02, gpu03, and 96 more)",
            "800 x cuda (NVIDIA H200)",
        ),
        (
            [Place(0, "a", "cuda (A)"), Place(0, "a", "cuda (B)"), Place(0, "a", "cuda (A)")],
            LaunchInfo("environment"),
            "plain variables (RANK, WORLD_SIZE), 3 processes on a",
            "2 x cuda (A) and 1 x cuda (B)",
        ),
        (
            placed(1, device="cpu"),
            LaunchInfo(),
            "a process group that the script has started, one process on gpu00",
            "cpu",
        ),
    ],
)
def test_who_runs_where(places, info, launcher, devices):
    rows = place_rows(places, info, "nccl", software_facts())
    assert rows["launcher"] == launcher
    assert rows["devices"] == f"{devices}, backend nccl"
    assert rows["versions"].startswith("Python 3.")
    assert f"torch {torch.__version__}, numpy " in rows["versions"]


def test_one_process_without_a_launcher():
    rows = place_rows(placed(1, device="cpu"), LaunchInfo(), None, software_facts())
    assert rows["launcher"] == "none, one process on gpu00"
    assert rows["devices"] == "cpu"


def test_two_nodes_with_one_name_are_two():
    """Containers may all be called alike; the launcher knows better."""
    rows = place_rows(
        [Place(0, "box", "cpu"), Place(1, "box", "cpu")], LaunchInfo("torchrun"), "gloo", software_facts()
    )
    assert rows["launcher"] == "torchrun, 2 processes on 2 nodes (box, box)"


def test_the_seat_of_a_cpu_tells_its_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert Place.here(1, "cpu").device == "cpu (3 threads)"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card of {device}")
    assert Place.here(1, "cuda:1").device == "cuda (card of cuda:1)"


@pytest.mark.parametrize(
    ("options", "scaled", "trains", "words"),
    [
        (("fp32", "fp32"), False, True, "fp32"),
        (("bf16", "fp32"), False, True, "bf16, evaluation fp32"),
        (("fp16", "fp16"), True, True, "fp16 with scaled gradients, evaluation fp16"),
        (("bf16", "fp32"), False, False, "fp32"),
    ],
)
def test_formats_that_are_in_force(options, scaled, trains, words):
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    training, evaluation = (TorchAutocast("cuda", dtypes[name]) for name in options)
    scaler = SimpleNamespace(is_enabled=lambda: scaled)
    assert precision_row(training, evaluation, scaler, torch.nn.Linear(1, 1), trains=trains) == words


def test_a_context_of_a_recipes_own_may_not_tell_its_format():
    scaler = SimpleNamespace(is_enabled=lambda: False)
    assert precision_row(
        object(), SimpleNamespace(dtype=torch.float64), scaler, torch.nn.Linear(1, 1), trains=True
    ) == ("unknown, evaluation float64")


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        ([torch.float64], "float64"),
        ([torch.bfloat16], "bf16"),
        ([torch.float64, torch.float32], "fp32"),
        ([], "fp32"),
        ([torch.complex64], "fp32"),
    ],
)
def test_where_nothing_is_cast_the_format_is_that_of_the_weights(dtypes, words):
    context, scaler = TorchAutocast("cuda", torch.float32), SimpleNamespace(is_enabled=lambda: False)
    net = torch.nn.ModuleList(torch.nn.Linear(1, 1, dtype=dtype) for dtype in dtypes)
    assert precision_row(context, context, scaler, net, trains=True) == words


def test_how_evaluation_goes():
    assert evaluation_row(1, divided=False) == ""
    assert evaluation_row(2, divided=False) == "every rank the whole set; --shard_evaluation divides it"
    assert "ddpkit.metrics or Brain.gather" in evaluation_row(2, divided=True)


def test_what_training_starts_from():
    found = Path("save/CKPT+1")
    assert start_row(found, "save", "auto", "7 optimizer steps done") == "from save/CKPT+1: 7 optimizer steps done"
    assert start_row(None, None, "auto", "") == "from scratch, and no checkpointer to save with"
    assert start_row(None, "save", "auto", "") == "from scratch: there is no checkpoint in save"
    assert start_row(None, "save", "never", "") == "from scratch, as --resume=never says; checkpoints go to save"


class Padded(NamedTuple):
    data: torch.Tensor
    lengths: torch.Tensor


TWO, ONE = torch.zeros(2, 4), torch.zeros(1, 4)


class OwnBatch:
    def __init__(self, tokens):
        self.id, self.tokens = ["a", "bcd"], tokens


@pytest.mark.parametrize(
    ("batch", "sign"),
    [
        ({"input_ids": TWO, "attention_mask": torch.tensor([[1, 1], [1, 0]])}, "attention_mask"),
        (UserDict({"input_ids": TWO, "attention_mask": torch.tensor([[1, 1], [1, 0]])}), "attention_mask"),
        ({"x": TWO, "src_key_padding_mask": torch.tensor([[False, True]])}, "src_key_padding_mask"),
        ({"x": TWO, "seq_lens": [3, 4]}, "seq_lens"),
        (OwnBatch(Padded(TWO, torch.tensor([1.0, 0.5]))), "lengths"),
        ((Padded(TWO, torch.tensor([1.0, 0.5])), torch.zeros(2)), "lengths"),
        ({"x": TWO, "length": torch.zeros(2, device="meta")}, "length"),
        ([{"x": TWO, "lengths": [3, 4]}], "lengths"),
        ((nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]), torch.zeros(2)), "batch_sizes"),
    ],
)
def test_samples_of_different_lengths_are_seen(batch, sign):
    assert loss_row(batch) == (
        f"one number, and samples differ in length ({sign}): return a mean over tokens as (loss_sum, count)"
    )


@pytest.mark.parametrize(
    "batch",
    [
        TWO,
        [TWO, torch.zeros(2)],
        {"x": TWO, "y": torch.zeros(2, dtype=torch.int64)},
        {"input_ids": TWO, "attention_mask": torch.ones(2, 4)},
        {"x": TWO, "lengths": torch.tensor([4, 4]), "mask": torch.tensor([[0, 1], [1, 1]])},
        {"x": TWO, "seq_len": 4},
        OwnBatch(TWO),
        ["a cat", "dogs"],
        [(TWO, 3), (TWO, 4)],
        [torch.zeros(3, 8, 8), torch.zeros(3, 8, 9)],
        [torch.zeros(()), TWO, ONE],
        None,
        3.0,
        [],
        {},
        {"lengths": torch.zeros(0)},
        nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(2)]),
        [ONE, TWO],
        {"lens": [torch.tensor([1, 2]), torch.tensor([1, 3])]},
    ],
)
def test_where_all_samples_are_as_long_or_nobody_knows_nothing_is_said_of_the_loss(batch):
    assert loss_row(batch) == ""


def test_learning_rates_are_shortened():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(6)]
    groups = [{"params": [weight], "lr": 0.1 / 2**n} for n, weight in enumerate(weights)]
    sgd, adam = torch.optim.SGD(groups), torch.optim.Adam(weights[:1], lr=torch.tensor(1e-4))
    assert optimizer_row({"one": sgd}) == "SGD, lr 0.1, 0.05, 0.025, 0.0125, and 2 more"
    assert optimizer_row({"generator": adam, "critic": adam}) == "generator: Adam, lr 0.0001; critic: Adam, lr 0.0001"
    assert optimizer_row({"own": SimpleNamespace(param_groups=[{"params": []}])}) == "SimpleNamespace"
    assert optimizer_row({}) == ""


def test_where_the_records_are():
    assert records_row([]) == ""
    assert records_row(["one/log.txt"]) == "one/log.txt"
    assert records_row([Path.cwd() / "one/log.txt", "one/metrics.jsonl"]) == "log.txt and metrics.jsonl in one"
    assert records_row(["/logs/own.log", "one/metrics.jsonl"]) == "/logs/own.log and one/metrics.jsonl"


def test_the_block_is_aligned_and_says_nothing_twice(monkeypatch):
    monkeypatch.setattr(start_report, "__version__", "1.2")
    rows = {"launcher": "none", "precision": "fp32", "evaluation": "", "start": "from scratch"}
    first = StartReport()
    assert first.block("Training", rows).splitlines() == [
        "Training with ddpkit 1.2:",
        "  launcher   none",
        "  precision  fp32",
        "  start      from scratch",
    ]
    assert first.block("Training", rows) == ""
    assert first.block("Training", rows | {"precision": "bf16"}).splitlines()[1:] == ["  precision  bf16"]
    assert first.block("Training", rows).splitlines()[1:] == ["  precision  fp32"], "it has changed back"


@pytest.mark.parametrize("with_logging", [False, True])
def test_the_block_comes_out_with_and_without_logging(monkeypatch, capfd, tmp_path, with_logging):
    if with_logging:
        setup_logging(log_file=tmp_path / "log.txt")
    else:
        monkeypatch.setattr(start_report.logger.logger, "hasHandlers", lambda: False)  # pytest has some
    StartReport().announce("Training", {"precision": "fp32", "start": "from 10 %"})
    StartReport().announce("Training", {"precision": ""})
    close_logging()
    err = capfd.readouterr().err
    assert err.splitlines()[1:] == ["  precision  fp32", "  start      from 10 %"]
    if with_logging:
        assert "  precision  fp32\n" in (tmp_path / "log.txt").read_text()
