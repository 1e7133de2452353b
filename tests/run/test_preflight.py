"""The block that a run prints when it begins, from made-up processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddpkit.comm import software_facts
from ddpkit.launch import LaunchInfo
from ddpkit.logger import close_logging, setup_logging
from ddpkit.precision import TorchAutocast
from ddpkit.run import preflight
from ddpkit.run.preflight import (
    Place,
    StartReport,
    evaluation_row,
    place_rows,
    precision_row,
    start_row,
)
from ddpkit.run.start_rows import optimizers_row


def placed(*per_node, device="cuda (NVIDIA H200)"):
    return [
        Place(node, f"gpu{node:02d}", device)
        for node, count in enumerate(per_node)
        for _ in range(count)
    ]


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
            "slurm, 2 processes on 2 nodes (gpu00, gpu01)",
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
            "openmpi, 3 processes on 2 nodes (gpu00, gpu01)",
            "3 x cuda (NVIDIA H200)",
        ),
        (
            placed(*[8] * 100),
            LaunchInfo("torchrun", restart_count=2),
            (
                "torchrun (restart 2), 800 processes on 100 nodes (gpu00, gpu01, gpu02, gpu03, "
                "and 96 more)"
            ),
            "800 x cuda (NVIDIA H200)",
        ),
        (
            [Place(0, "a", "cuda (A)"), Place(0, "a", "cuda (B)"), Place(0, "a", "cuda (A)")],
            LaunchInfo("environment"),
            "environment, 3 processes on a",
            "2 x cuda (A) and 1 x cuda (B)",
        ),
        (
            placed(1, device="cpu"),
            LaunchInfo(),
            "none, one process on gpu00",
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
        [Place(0, "box", "cpu"), Place(1, "box", "cpu")],
        LaunchInfo("torchrun"),
        "gloo",
        software_facts(),
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
    assert (
        precision_row(training, evaluation, scaler, torch.nn.Linear(1, 1), trains=trains) == words
    )


def test_a_context_of_a_recipes_own_may_not_tell_its_format():
    scaler = SimpleNamespace(is_enabled=lambda: False)
    assert precision_row(
        object(),
        SimpleNamespace(dtype=torch.float64),
        scaler,
        torch.nn.Linear(1, 1),
        trains=True,
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
    context = TorchAutocast("cuda", torch.float32)
    scaler = SimpleNamespace(is_enabled=lambda: False)
    net = torch.nn.ModuleList(torch.nn.Linear(1, 1, dtype=dtype) for dtype in dtypes)
    assert precision_row(context, context, scaler, net, trains=True) == words


def test_how_evaluation_goes():
    assert evaluation_row(1, divided=False) == ""
    assert evaluation_row(2, divided=False) == (
        "every rank the whole set; --shard_evaluation divides it"
    )
    assert "ddpkit.metrics or Brain.gather" in evaluation_row(2, divided=True)


def test_what_training_starts_from():
    found = Path("save/CKPT+1")
    assert start_row(found, "save", "auto", "7 optimizer steps done") == (
        "from save/CKPT+1: 7 optimizer steps done"
    )
    assert start_row(None, None, "auto", "") == "from scratch, and no checkpointer to save with"
    assert start_row(None, "save", "auto", "") == "from scratch: there is no checkpoint in save"
    assert start_row(None, "save", "never", "") == (
        "from scratch: no checkpoint in save was loaded (--resume=never)"
    )


def test_learning_rates_are_shortened():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(6)]
    groups = [{"params": [weight], "lr": 0.1 / 2**n} for n, weight in enumerate(weights)]
    sgd = torch.optim.SGD(groups)
    adam = torch.optim.Adam(weights[:1], lr=torch.tensor(1e-4))
    assert optimizers_row({"one": sgd}, {}) == "SGD, lr 0.1, 0.05, 0.025, 0.0125, and 2 more"
    two = {"generator": adam, "critic": adam}
    assert optimizers_row(two, {}) == "generator: Adam, lr 0.0001; critic: Adam, lr 0.0001"
    assert (
        optimizers_row({"own": SimpleNamespace(param_groups=[{"params": []}])}, {})
        == "SimpleNamespace"
    )
    assert optimizers_row({}, {}) == ""


def test_the_block_is_aligned_and_says_nothing_twice(monkeypatch, caplog):
    caplog.set_level("INFO", logger="ddpkit.run.preflight")
    monkeypatch.setattr(preflight, "__version__", "1.2")
    rows = {"launcher": "none", "precision": "fp32", "evaluation": "", "start": "from scratch"}
    report = StartReport()
    for given in (rows, rows, rows | {"precision": "bf16"}, rows):
        report.announce("Training", given)
    assert [record.getMessage().splitlines() for record in caplog.records] == [
        [
            "Training with ddpkit 1.2:",
            "  launcher   none",
            "  precision  fp32",
            ("  start      from scratch"),
        ],
        ["Training with ddpkit 1.2:", "  precision  bf16"],
        ["Training with ddpkit 1.2:", "  precision  fp32"],
    ]


@pytest.mark.parametrize("with_logging", [False, True])
def test_the_block_comes_out_with_and_without_logging(monkeypatch, capfd, tmp_path, with_logging):
    if with_logging:
        setup_logging(log_file=tmp_path / "log.txt")
    else:
        # pytest has some
        monkeypatch.setattr(preflight.logger.logger, "hasHandlers", lambda: False)
    StartReport().announce("Training", {"precision": "fp32", "start": "from 10 %"})
    StartReport().announce("Training", {"precision": ""})
    close_logging()
    err = capfd.readouterr().err
    assert err.splitlines()[1:] == ["  precision  fp32", "  start      from 10 %"]
    if with_logging:
        assert "  precision  fp32\n" in (tmp_path / "log.txt").read_text()
