"""The block at the start says what is so, in lines of 80 columns."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from ddpkit.epoch_loop import EpochCounter
from ddpkit.experiment import close_experiment, create_experiment_directory
from ddpkit.train_logger import FileTrainLogger
from tests.reading_blocks import block_rows
from tests.recipes import Killed, Mortal, Regression, make, points, sgd

COLUMNS = 80


@pytest.fixture
def said(caplog):
    """Return a function that reads the rows of all blocks that were printed, by name."""
    caplog.set_level("INFO", logger="ddpkit")

    def read():
        texts = [one.getMessage() for one in caplog.records if one.name == "ddpkit.run.preflight"]
        return block_rows("\n".join(texts))

    return read


def fit(epochs=(1,), number=8, **options):
    kwargs = options.pop("kwargs", {"batch_size": 2})
    scheduler = options.pop("scheduler", None)
    valid = options.pop("valid", None)
    brain = make(options.pop("cls", Regression), **options)
    brain.scheduler_class = scheduler
    brain.fit(epochs, points(number), valid, train_loader_kwargs=kwargs)
    return brain


# ------------------------------------------------------------------------------- learning rates


def warm_up(optimizer, _):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 8))


def test_the_rate_of_the_first_step_of_a_warm_up_is_said(said):
    fit(scheduler=warm_up, opt=sgd(lr=0.04))
    assert said()["optimizer"] == "SGD, lr 0.04 (now 0, schedule)"


class Stops(Mortal):
    """Dies where a test says so for all of them."""


def resume(folder, **options):
    """Stop a run after two of four steps, and start it once more."""
    fresh = {"folder": folder, "cls": Stops, "ckpt_interval_steps": 1, **options}
    Stops.dies_at = 2
    with pytest.raises(Killed):
        fit(EpochCounter(1), **fresh)
    Stops.dies_at = None
    fit(EpochCounter(1), **fresh)


def test_the_rate_in_the_middle_of_a_schedule_is_said_at_a_resume(said, tmp_path):
    resume(tmp_path, scheduler=warm_up, opt=sgd(lr=0.04))
    assert said()["optimizer"] == "SGD, lr 0.04 (now 0.01, schedule)"


class Halves(Stops):
    """Has a schedule of its own, which torch does not know."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.optimizer.param_groups[0]["lr"] *= 0.5


def test_a_rate_that_the_recipe_has_set_is_said_at_a_resume(said, tmp_path):
    resume(tmp_path, cls=Halves, opt=sgd(lr=0.04))
    assert said()["optimizer"] == "SGD, lr 0.04 (now 0.01, set since the run began)"


def test_a_rate_that_is_scaled_is_said(said):
    options = {"lr_scaling": "linear", "reference_batch_size": 1}
    fit(opt=sgd(lr=0.1), **options)
    assert said()["optimizer"] == "SGD, lr 0.1 (now 0.2, --lr_scaling)"
    fit(
        opt=sgd(lr=0.08),
        scheduler=lambda of, _: torch.optim.lr_scheduler.ConstantLR(of, 0.25),
        **options,
    )
    assert said()["optimizer"] == "SGD, lr 0.08 (now 0.04, schedule and --lr_scaling)"


def test_where_the_rate_is_the_given_one_nothing_more_is_said(said, tmp_path):
    resume(
        tmp_path,
        opt=sgd(lr=0.04),
        scheduler=lambda of, _: torch.optim.lr_scheduler.StepLR(of, 1000),
    )
    assert said()["optimizer"] == "SGD, lr 0.04"


def low(optimizer, _):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1)


@pytest.mark.corner
@pytest.mark.parametrize("scheduler", [warm_up, low, None])
def test_another_rate_in_the_script_is_told_as_the_script_has_it(caplog, tmp_path, scheduler):
    """Not what a schedule has made of it, which from a warm-up of 0 is no difference at all."""
    options = {"folder": tmp_path, "cls": Stops, "ckpt_interval_steps": 1, "scheduler": scheduler}
    Stops.dies_at = 2
    with pytest.raises(Killed):
        fit(EpochCounter(1), opt=sgd(lr=0.04), **options)
    Stops.dies_at = None
    fit(EpochCounter(1), opt=sgd(lr=0.02), **options)
    name = "lr" if scheduler is None else "initial_lr"
    assert (
        f"with which the checkpoint's run began ({name} 0.04 -> 0.02), without effect"
        in caplog.text
    )


# ------------------------------------------------------------------------- batches, epochs, sets


def test_a_batch_size_that_the_global_one_overrides_is_said(said):
    fit(global_batch_size=4)
    assert said()["batch"].endswith("; batch_size=2 is not used, as global_batch_size=4 decides")
    brain = make(global_batch_size=4)
    brain.fit([1], DataLoader(points(8), batch_size=8))
    assert said()["batch"].endswith("; batch_size=8 is not used, as global_batch_size=4 decides")


@pytest.mark.parametrize(
    "options",
    [{}, {"global_batch_size": 2}, {"global_batch_size": 4, "kwargs": {}}],
    ids=str,
)
def test_nothing_is_said_of_a_batch_size_that_counts_or_was_not_given(said, options):
    fit(**options)
    assert "batch_size=" not in said()["batch"]


@pytest.mark.parametrize(
    ("epochs", "options", "words"),
    [
        ([1, 2, 3], {}, "3 in all, 12 optimizer steps"),
        (
            range(1, 3),
            {"optimizer_step_limit": 6},
            "2 in all, 6 optimizer steps at most (--optimizer_step_limit)",
        ),
        (
            range(1, 10),
            {"optimizer_step_limit": 1},
            "1 in all, 1 optimizer step at most (--optimizer_step_limit)",
        ),
        (EpochCounter(2), {}, "2 in all, 8 optimizer steps"),
        ((number for number in (1, 2)), {}, "an unknown number"),
    ],
    ids=["list", "limit", "short limit", "counter", "generator"],
)
def test_the_number_of_epochs_in_all_is_said(said, epochs, options, words):
    fit(epochs, **options)
    assert said()["epochs"] == words


def test_a_valid_set_of_one_process_is_all_its_own(said):
    fit(valid=points(5))
    assert said()["valid set"] == "5 samples in 5 batches of 1"


def test_a_hook_for_gradients_that_are_not_sent_is_said_to_have_no_effect(said):
    fit(ddp_comm_hook="fp16")
    assert said()["gradients"] == "not sent by one process: ddp_comm_hook=fp16 has no effect"


# ---------------------------------------------------------------------------------------- logs


def test_where_the_logs_go_is_said(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    create_experiment_directory("results/1", save_env_desc=False)
    try:
        fit(hparams={"train_logger": FileTrainLogger("results/1/train_log.txt")})
    finally:
        close_experiment()
    assert said()["logs"] == "log.txt, metrics.jsonl and train_log.txt in results/1"
    fit(hparams={"train_logger": [FileTrainLogger("a/one.txt"), FileTrainLogger("b/two.txt")]})
    assert said()["logs"] == "metrics.jsonl and one.txt in a; metrics.jsonl and two.txt in b"


def test_without_a_file_nothing_is_said_of_logs(said):
    fit()
    assert "logs" not in said()


# ------------------------------------------------------------------------------------- columns


def many_groups(parameters):
    groups = [
        {"params": [one], "lr": 0.123456 / 7**number} for number, one in enumerate(parameters)
    ]
    return torch.optim.SGD(groups, lr=0.1)


LAYOUTS = {
    "plain": {},
    "much": {
        "global_batch_size": 8,
        "micro_batch_size": 3,
        "lr_scaling": "linear",
        "reference_batch_size": 3,
        "ema_decay": 0.999,
        "opt": many_groups,
        "scheduler": warm_up,
        "ddp_comm_hook": "powersgd",
        "valid": points(5),
        "optimizer_step_limit": 3,
    },
    "virtual ranks": {"virtual_ranks": 4, "global_batch_size": 8},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "folder",
    ["s", "one/" * 40 + "save", "n" * 130],
    ids=["short", "deep", "long name"],
)
def test_no_line_has_more_than_80_columns_and_no_word_is_lost(
    caplog,
    tmp_path,
    monkeypatch,
    layout,
    folder,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "ddpkit.run.preflight.host_name",
        lambda: "node-0123456789.cluster.example.com" * 3,
    )
    caplog.set_level("INFO", logger="ddpkit")
    logger = FileTrainLogger(f"{folder}/train_log.txt")
    fit(folder=tmp_path / folder, hparams={"train_logger": logger}, **LAYOUTS[layout])
    (text,) = [one.getMessage() for one in caplog.records if one.name == "ddpkit.run.preflight"]
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert folder in "".join(text.split())
    assert "node-0123456789.cluster.example.com" * 3 in "".join(text.split())
