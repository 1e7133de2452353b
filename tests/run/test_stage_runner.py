"""One stage with a stub for the Brain: what a loop is fed, what it reports, when it saves."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ddpkit.control import SignalListener
from ddpkit.dataloader import LoopedLoader, Sharding, make_dataloader, resume_at, set_epoch, shard
from ddpkit.parts import PartEvents
from ddpkit.run import intra_epoch_saves, stage_runner
from ddpkit.run.early_end import EarlyEnd
from ddpkit.run.stage_runner import StageRunner
from ddpkit.run.validations import Validations
from ddpkit.run_opts import RunOptions
from ddpkit.strategies import Strategy
from ddpkit.train_logger import set_run_log
from ddpkit.training import Accumulation, Progress, counts_of, length_of
from ddpkit.types import Stage


class Stream(IterableDataset):
    def __init__(self, size=4):
        self.size = size
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(range(self.size))


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def options(**given):
    return RunOptions.from_dictionary({"device": "cpu", "noprogressbar": True, **given}).resolved(
        {}
    )


class Host:
    """Stands for the recipe and for all parts of a run: the loss of a batch is its mean."""

    freezes = waits_for_window = False
    ema = schedule = base_seed = None
    device = "cpu"

    def __init__(self, **given):
        self.options = options(**given)
        self.accumulation = Accumulation(self.options)
        self.progress = Progress()
        self.modules = nn.ModuleDict()
        self.rank_state = self.run_state = self.recipe = self
        self.profiler = None
        self.batches = []
        self.asked = []
        self.flushed = 0
        self.due = lambda seconds, steps: False
        self.signals = SignalListener()
        self.saved_at = []
        self.strategy = Strategy()
        self.parts = PartEvents()
        self.stopped_by = []

    def save_inside_epoch(self):
        self.saved_at.append(self.progress.step)

    def warning_without_steps(self):
        return contextlib.nullcontext()

    def tighten_timeouts(self):
        self.settled = True

    def forget_window(self):
        """Nothing waits for the end of a window."""

    end_window = forget_window

    def drop_frozen_gradients(self):
        """No optimizer is frozen."""

    def warn_if_diverged(self):
        """There is one rank."""

    def cause(self):
        return "SIGTERM" if self.signals.stop_signal else ""

    def stop_training(self, cause, *, is_saved):
        self.stopped_by.append((cause, self.progress.step))

    def fit_batch(self, batch):
        self.batches.append(torch.as_tensor(batch).flatten().tolist())
        self.progress.optimizer_step += self.progress.window.closes
        return torch.as_tensor(batch, dtype=torch.float64).mean()

    def evaluate_batch(self, batch, stage):
        return torch.as_tensor(batch, dtype=torch.float64).mean()

    def save_if_due(self, seconds, steps):
        due = self.due(seconds, steps)
        self.asked.append((self.progress.step, steps, due))
        return due

    def prepare_flush(self, hooks):
        self.flushed += 1
        return False

    def begin_pass(self, loader):
        self.passes = [loader]
        return resume_at(loader, self.progress.step, None), lambda: self.passes.append("ready")

    def gather_for_save(self):
        self.passes.append("over")


def runner_of(host):
    runner = StageRunner(*[host] * 4, Validations(host, EarlyEnd()))
    runner.observers.profile.profiler = host.profiler
    return runner


def train(host, loader, epoch=1, *, enable_bar=False):
    runner = runner_of(host)
    with runner._logging(Stage.TRAIN, epoch):
        return runner._pass(host, loader, epoch, enable_bar=enable_bar)


def evaluate(host, loader, stage, epoch):
    runner = runner_of(host)
    with runner._logging(stage, epoch):
        trained = 5 if epoch is None else epoch, host.progress.optimizer_step
        return runner._evaluate(host, loader, stage, epoch, trained, enable_bar=False)


@pytest.mark.parametrize("loader", [[[1], [2], [3], [4], [5]], DataLoader(Stream(5), batch_size=1)])
def test_batches_that_are_read_again_are_no_steps_of_the_profiler(loader):
    """Of five batches two are done: a step is over after each of the others but the last, as in any
    epoch.
    """
    counted = {}
    for done in (0, 2):
        host = Host()
        steps = []
        host.profiler = SimpleNamespace(step=lambda steps=steps: steps.append(1))
        host.progress.step = done
        train(host, loader)
        assert len(host.batches) == 5 - done
        counted[done] = len(steps)
    assert counted[0] - counted[2] == 2


# ------------------------------------------------------------------------------- looking at loaders


def test_counts_of():
    planned = shard(range(5), Sharding(), batch_size=2)
    assert counts_of(planned) is planned.batch_sampler
    dealt = shard(range(5), Sharding(), batch_sampler=[[0, 1], [2]])
    assert counts_of(dealt) is dealt.batch_sampler
    whole = shard(range(5), Sharding(1, 2), batch_size=None)
    assert [counts_of(whole).count(batch) for batch in range(3)] == [1, 1, 0]
    looped = LoopedLoader(planned, 4)
    assert counts_of(looped) is looped
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    for loader in (
        [1, 2],
        DataLoader(range(4)),
        DataLoader(Stream()),
        LoopedLoader([1], 3),
        shard(range(4), Sharding(0, 2), sampler=sampler),
    ):
        assert counts_of(loader) is None


def test_length_of():
    assert length_of(shard(range(5), Sharding(0, 2), batch_size=2)) == 2
    assert length_of(shard(range(5), Sharding(0, 2), batch_size=None)) == 3
    assert length_of(LoopedLoader(DataLoader(Stream()), 7)) == 7
    assert length_of(DataLoader(range(5), 2)) == 3
    assert length_of([1, 2]) == 2
    assert length_of(DataLoader(Stream())) is None
    assert length_of(shard(Stream(), Sharding(0, 2))) is None
    assert length_of(iter([1])) is None


def test_set_epoch_reaches_everything_inside():
    for loader in (
        DataLoader(Stream()),
        shard(Stream(), Sharding(0, 2)),
        shard(Stream(), Sharding()),
    ):
        set_epoch(loader, 4)
        stream = getattr(loader.dataset, "whole", loader.dataset)
        assert stream.epochs == [4]
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    for loader in (
        DataLoader(range(4), sampler=sampler),
        DataLoader(range(4), batch_sampler=BatchSampler(sampler, 2, drop_last=False)),
        shard(range(4), Sharding(), sampler=sampler),
    ):
        sampler.set_epoch(0)
        set_epoch(loader, 6)
        assert sampler.epoch == 6
    told = []
    own = SimpleNamespace(set_epoch=told.append)
    set_epoch(own, 2)
    assert told == [2]


# ----------------------------------------------------------------------------------------- training


def test_an_epoch_of_training():
    host = Host(grad_accumulation_factor=2)
    loader = shard(range(7), Sharding(), batch_size=2, shuffle=True)
    mean = train(host, loader, epoch=3)
    assert mean == pytest.approx(3.0), "over samples, not over batches"
    assert sorted(flat(host.batches)) == list(range(7))
    assert (host.progress.step, host.progress.optimizer_step, host.flushed) == (4, 2, 1)
    again = shard(range(7), Sharding(), batch_size=2, shuffle=True)
    again.set_epoch(3)
    assert [batch.tolist() for batch in again] == host.batches, "the epoch's own order"


RESUMABLE = {
    "planned": lambda: shard(range(12), Sharding(), batch_size=2, shuffle=True),
    "dealt": lambda: shard(
        range(12),
        Sharding(),
        batch_sampler=[[n, n + 1] for n in range(0, 12, 2)],
    ),
    "whole": lambda: shard([[n, n + 1] for n in range(6)], Sharding(), batch_size=None),
    "list": lambda: [[n, n + 1] for n in range(6)],
    "divided": lambda: DataLoader(
        range(24),
        2,
        sampler=DistributedSampler(range(24), num_replicas=2, rank=0, shuffle=True),
    ),
    "stream": lambda: DataLoader(Stream(12), 2),
}


@pytest.mark.parametrize("kind", RESUMABLE)
@pytest.mark.parametrize("start", [2, 4, 6])
def test_an_epoch_goes_on_where_it_was(kind, start):
    """Law 2 for every kind of loader, whether it can skip by itself or not."""
    whole = Host(grad_accumulation_factor=2)
    rest = Host(grad_accumulation_factor=2)
    train(whole, RESUMABLE[kind](), epoch=2)
    assert len(whole.batches) == 6
    rest.progress.step = start
    rest.progress.optimizer_step = start // 2
    train(rest, RESUMABLE[kind](), epoch=2)
    assert rest.batches == whole.batches[start:]
    assert (rest.progress.step, rest.progress.optimizer_step) == (6, 3)


def test_a_looped_loader_goes_on_by_itself(tmp_path):
    def make():
        return make_dataloader(range(10), looped_nominal_epoch=4, batch_size=2, shuffle=True)

    whole = Host()
    loader = make()
    for epoch in (1, 2, 3):
        whole.progress.step = 0
        train(whole, loader, epoch)
    assert [len(host.batches) for host in [whole]] == [12]
    for stop in (2, 6, 8, 11):
        first = Host()
        loader = make()
        for epoch in range(1, 1 + -(-stop // 4)):
            first.progress.step = 0
            left = min(4, stop - 4 * (epoch - 1))
            first.options = options(optimizer_step_limit=first.progress.optimizer_step + left)
            train(first, loader, epoch)
        loader.save(tmp_path / "looped.ckpt")
        second = Host()
        again = make()
        again.load(tmp_path / "looped.ckpt", end_of_epoch=False)
        second.progress.step = first.progress.step
        for epoch in range(-(-stop // 4), 4):
            train(second, again, epoch)
            second.progress.step = 0
        assert first.batches + second.batches == whole.batches, stop


def test_a_limit_on_optimizer_steps():
    host = Host(optimizer_step_limit=3)
    train(host, shard(range(20), Sharding(), batch_size=2))
    assert host.progress.optimizer_step == 3


@pytest.mark.parametrize(
    "make",
    [RESUMABLE["planned"], RESUMABLE["stream"], RESUMABLE["list"], lambda: [[1]] * 2],
)
def test_debugging_takes_few_batches(make):
    host = Host(debug=True, debug_batches=2)
    train(host, make())
    assert len(host.batches) == 2
    assert evaluate(host, make(), Stage.VALID, 1) >= 0


def test_a_profiler_is_told_of_every_step():
    host = Host()
    host.profiler = SimpleNamespace(steps=0)
    host.profiler.step = lambda: setattr(host.profiler, "steps", host.profiler.steps + 1)
    train(host, shard(range(6), Sharding(), batch_size=2))
    assert host.profiler.steps >= 2


def test_a_loss_that_is_not_finite_is_left_out_and_told(caplog):
    host = Host()
    with caplog.at_level(logging.WARNING):
        mean = train(host, [[1.0], [math.nan], [3.0], [math.inf]])
    assert mean == 2.0
    assert (
        "TRAIN: 2 batches had a loss that is not finite; they are left out of the mean."
        in caplog.messages
    )


# -------------------------------------------------------------------------------- saving in between


def test_saves_by_steps_wait_for_the_end_of_a_window():
    host = Host(ckpt_interval_steps=3, grad_accumulation_factor=2)
    host.due = lambda seconds, steps: steps >= 3
    train(host, shard(range(24), Sharding(), batch_size=2))
    saved = [step for step, _, due in host.asked if due]
    assert saved == [4, 8, 12]
    assert [steps for _, steps, due in host.asked if due] == [4, 4, 4]


def test_no_save_while_gradients_wait():
    """An overridden ``fit_batch`` steps when it likes: what it has accumulated is in no
    checkpoint.
    """

    class Own(Host):
        def fit_batch(self, batch):
            step = self.progress.step
            if step % 3:
                self.progress.window.defer(step)
            else:
                self.progress.window.stepped()
            return super().fit_batch(batch)

    host = Own(ckpt_interval_steps=1)
    host.due = lambda seconds, steps: steps >= 1
    train(host, shard(range(12), Sharding()))
    assert [step for step, _, due in host.asked if due] == [3, 6, 9, 12]


def test_saves_by_minutes_follow_the_main_process(monkeypatch):
    now = [1000.0]
    for module in (stage_runner, intra_epoch_saves):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        "ddpkit.control.periodic_sync.time", SimpleNamespace(monotonic=lambda: now[0])
    )

    class Slow(Host):
        def fit_batch(self, batch):
            now[0] += 10.0
            return super().fit_batch(batch)

    host = Slow(ckpt_interval_minutes=0.5)
    host.due = lambda seconds, steps: seconds >= 30
    train(host, shard(range(10), Sharding()))
    assert [step for step, _, due in host.asked if due] == [3, 6, 9]
    host = Slow()
    train(host, shard(range(3), Sharding()))
    assert all(steps == 0 for _, steps, _ in host.asked), (
        "steps are not counted where no interval is given in steps"
    )


# --------------------------------------------------------------------------------------- evaluation


def test_evaluation(caplog):
    host = Host()
    host.progress.meter.append(100.0, 5)
    assert evaluate(host, shard(range(5), Sharding(), batch_size=2), Stage.VALID, 1) == 2.0
    assert host.progress.step == 3
    assert not caplog.records
    assert math.isnan(evaluate(Host(), [], Stage.TEST, None))
    assert "TEST: there was nothing to evaluate: the mean loss is NaN." in caplog.messages


def test_stages_are_written_to_the_log_of_the_run(tmp_path):
    set_run_log(tmp_path / "run.jsonl")
    try:
        host = Host()
        train(host, shard(range(4), Sharding(), batch_size=2), epoch=5)
        evaluate(host, [[8.0]], Stage.TEST, None)
    finally:
        set_run_log(None)
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    found = [
        {key: event[key] for key in ("stage", "epoch", "loss", "samples")}
        for event in events
        if "stage" in event
    ]
    assert found == [
        {"stage": "TRAIN", "epoch": 5, "loss": 1.5, "samples": 4},
        {"stage": "TEST", "epoch": 5, "loss": 8.0, "samples": 1},
    ]
    assert ["clipped_share" in event for event in events] == [True, False]


class Bars:
    """Stands for the bar, and keeps those that were made."""

    made = ()

    def __init__(self, label, total, *, initial=0, enable=True, colour=None, of_run=None):
        self.facts = (label, total, initial, enable, colour)
        self.partial = False
        self.shown = []
        Bars.made = (*Bars.made, self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def show(self, step, loss=None, samples=0.0):
        self.shown.append((step, None if self.partial else loss, samples))


def test_what_the_bar_is_told(monkeypatch):
    monkeypatch.setattr(stage_runner, "ProgressBar", Bars)
    Bars.made = ()
    host = Host(tqdm_colored_bar=True, tqdm_barcolor={"train": "RED", "valid": "MAGENTA"})
    host.progress.step = 2
    host.progress.meter.restore(10.0, 4.0)
    mean = train(host, shard(range(8), Sharding(), batch_size=2), 3, enable_bar=True)
    assert mean == pytest.approx((10 + 4 + 5 + 6 + 7) / 8)
    evaluate(host, shard(range(8), Sharding(0, 2), batch_size=2), Stage.VALID, 3)
    training, valid = Bars.made
    assert training.facts == ("epoch 3 train", 4, 2, True, "RED")
    assert training.shown[0] == (3, pytest.approx((10 + 9) / 6), 2), (
        "the rate counts what this process has seen"
    )
    assert training.shown[-1] == (4, mean, 4), "at the end of the epoch, too"
    assert valid.facts == ("epoch 3 valid", 2, 0, False, "MAGENTA")
    assert valid.shown[0][1] is None, "a part's loss is not the loss"
    assert valid.shown[-1][1] == pytest.approx((0 + 1 + 4 + 5) / 4)
    assert host.progress.avg_train_loss == pytest.approx(19 / 6)
