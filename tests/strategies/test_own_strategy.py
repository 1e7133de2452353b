"""A strategy from outside of the package: the one that its page shows, as a user has it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.distributed import get_rank
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError, RankMismatchError
from ddpkit.strategies import Strategy, average_over_ranks
from tests.launching import Run, torchrun
from tests.recipes import Killed, Mortal, OwnFitBatch, Regression, Sums, make, points, sgd, weights

PAGE = Path(__file__).parents[2] / "docs/how-to/own-strategy.md"
EACH_STEP = {"ckpt_interval_steps": 1, "ckpt_async": False}
NAME = "my_package.averaging:AverageEvery"
BLOCK = re.compile(r"^```python\n# (?P<file>\S+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def install(folder):
    """Write the package of the page."""
    blocks = list(BLOCK.finditer(PAGE.read_text(encoding="utf-8")))
    files = [block["file"] for block in blocks]
    assert files == ["my_package/averaging.py", "my_package/with_memory.py"]
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    for block in blocks:
        (folder / block["file"]).write_text(block["text"])


def imported(folder):
    """Import the package of a folder anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        from my_package.averaging import AverageEvery
    finally:
        sys.path.remove(str(folder))
    return AverageEvery


def net_of():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def train(folder, cls, every, number):
    strategy = "ddp" if every is None else imported(folder)(every)
    brain = make(cls, net=net_of(), opt=sgd(), max_grad_norm=0, strategy=strategy)
    brain.fit([1, 2], points(number), train_loader_kwargs={"batch_size": 2, "shuffle": True})
    return weights(brain), brain.optimizer_step, [loss for *_, loss in brain.losses]


@pytest.mark.costly
@pytest.mark.parametrize("cls", [Regression, pytest.param(Sums, marks=pytest.mark.slow)])
def test_averages_after_every_step_of_plain_sgd_are_ddp(ranks, tmp_path, cls):
    install(tmp_path)
    expected, steps, losses = ranks.run(train, tmp_path, cls, None, 13)[0]
    found = ranks.run(train, tmp_path, cls, 1, 13)
    for mine, steps_there, losses_there in found:
        assert steps_there == steps > 2
        assert same(mine, found[0][0])
        assert losses_there == pytest.approx(losses, abs=1e-10)
        for key, value in expected.items():
            torch.testing.assert_close(mine[key], value, rtol=0, atol=1e-10)
    rarely = ranks.run(train, tmp_path, cls, 3, 13)
    assert same(rarely[0][0], rarely[1][0])
    assert not same(rarely[0][0], found[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 4, 7])
def test_ranks_without_a_sample_take_part_in_the_averages(ranks, tmp_path, number):
    install(tmp_path)
    found = ranks.run(train, tmp_path, Regression, 2, number, world_size=3)
    for mine, steps, losses in found:
        assert steps == found[0][1] > 0
        assert losses == found[0][2]
        assert same(mine, found[0][0])


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_mortal(folder, save, dies_at):
    brain = make(
        Mortal,
        net=net_of(),
        opt=momentum,
        folder=save,
        recoverables={"counter": (counter := EpochCounter(2))},
        strategy=imported(folder)(3),
        **EACH_STEP,
    )
    brain.dies_at = dies_at
    try:
        brain.fit(counter, points(28), train_loader_kwargs={"batch_size": 2, "shuffle": True})
    except Killed:
        return None
    return weights(brain), brain.optimizer_step


@pytest.mark.slow
def test_a_run_that_died_between_two_averages_is_resumed_with_the_same_bits(ranks, tmp_path):
    install(tmp_path)
    whole = ranks.run(train_mortal, tmp_path, tmp_path / "whole", None)
    assert ranks.run(train_mortal, tmp_path, tmp_path / "again", (2, 6)) == [None, None]
    resumed = ranks.run(train_mortal, tmp_path, tmp_path / "again", None)
    for rank in range(2):
        assert resumed[rank][1] == whole[rank][1] == 14
        assert same(resumed[rank][0], whole[rank][0])
    assert same(whole[0][0], whole[1][0])


class Remembers(Strategy):
    """Counts the windows of this process, and works alone."""

    windows = 0

    def runs_alone(self):
        return True

    def after_window(self, modules):
        self.windows += 1

    def rank_state(self):
        return {"windows": self.windows}

    def load_rank_state(self, modules, state):
        self.windows = state.get("windows", 0)


@pytest.mark.costly
@pytest.mark.parametrize("dies_at", [(1, 3), (2, 1)])
def test_what_a_strategy_keeps_is_saved_and_goes_on(tmp_path, dies_at):
    def train(at, strategy):
        counter = EpochCounter(2)
        kept = {"counter": counter}
        brain = make(Mortal, folder=tmp_path, recoverables=kept, strategy=strategy, **EACH_STEP)
        brain.dies_at = at
        brain.fit(counter, points(8), train_loader_kwargs={"batch_size": 2})

    with pytest.raises(Killed):
        train(dies_at, Remembers())
    train(None, resumed := Remembers())
    assert resumed.windows == 8
    train(None, "single")  # a strategy that knows nothing of it goes on from the same checkpoint


def averaged(shape):
    numbers = torch.full(shape[get_rank()], float(get_rank()))
    try:
        average_over_ranks([numbers, steps := torch.tensor(3 + get_rank())], "cpu")
    except RankMismatchError as error:
        return str(error)
    return [*numbers.tolist(), steps.item()]


@pytest.mark.costly
def test_averages_are_compared_before_they_are_made(ranks):
    assert ranks.run(averaged, [(2,), (2,)]) == [[0.5, 0.5, 3]] * 2
    for words in ranks.run(averaged, [(2,), (3,)]):
        assert words.startswith("The ranks have other tensors to average (here ")


def refused(folder, options, cls=Regression):
    kind = imported(folder)
    with pytest.raises(ConfigError) as caught:
        make(cls, strategy=kind(2), **options)
    return str(caught.value)


@pytest.mark.costly
def test_what_it_refuses_is_refused_on_every_rank(ranks, tmp_path):
    install(tmp_path)
    for option, why in {
        "ema_decay": "AverageEvery does not work with ema_decay=0.9: each process makes steps of",
        "bucket_cap_mb": f"strategy={NAME} does not work with bucket_cap_mb=0.9: it is DDP's",
    }.items():
        for words in ranks.run(refused, tmp_path, {option: 0.9}):
            assert words.startswith(why)
    for words in ranks.run(refused, tmp_path, {}, OwnFitBatch):
        assert words == "AverageEvery: a fit_batch of the recipe may step unseen."


TRAIN = """
import os, signal, sys
import torch
import ddpkit

class Line(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch[1]).square().mean()

    def on_fit_batch_start(self, batch, should_step):
        if self.hparams.dies_at == self.optimizer_step:
            os.kill(os.getpid(), signal.SIGKILL)

file, run_opts, overrides = ddpkit.parse_arguments()
hparams = ddpkit.load_hparams(file, overrides)
torch.manual_seed(1)
net = torch.nn.Linear(2, 1)
counter = ddpkit.epoch_loop.EpochCounter(3)
keeper = ddpkit.checkpoints.Checkpointer(hparams["save"], {"net": net, "counter": counter})
brain = Line({"net": net}, lambda p: torch.optim.SGD(p, 0.1), hparams, run_opts, keeper)
data = [(torch.tensor([x / 16, 1 - x / 16]), torch.tensor([x / 8])) for x in range(24)]
brain.fit(counter, data, train_loader_kwargs={"batch_size": 2})
ddpkit.run_on_main(lambda: torch.save(net.state_dict(), hparams["save"] + ".pt"))
"""
HPARAMS = """
save: save
dies_at: null
average_every: 4
ckpt_interval_steps: 1
"""


def start(folder, *words):
    run = Run([*torchrun(2, "train.py", "hparams.yaml"), *words], folder, name=words[0], warm=True)
    return run.wait()


@pytest.mark.slow
@pytest.mark.launch
def test_a_user_starts_it_kills_it_and_goes_on_and_a_rank_that_fails_in_it_is_named(tmp_path):
    install(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    yaml = page.partition("```yaml\n")[2].partition("```")[0].replace("average_every: 4\n", "")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hparams.yaml").write_text(HPARAMS + yaml)
    whole = start(tmp_path, "--save=whole")
    assert whole.code == 0, whole.tail()
    assert "each process alone, averaged every 4 steps" in whole.err
    killed = start(tmp_path, "--save=again", "--dies_at=7", "--ckpt_async=False")
    assert killed.code != 0
    resumed = start(tmp_path, "--save=again")
    assert resumed.code == 0, resumed.tail()
    assert "4 optimizer steps done" in resumed.err
    ends = [torch.load(tmp_path / f"{name}.pt") for name in ("whole", "again")]
    assert same(*ends)
    path = tmp_path / "my_package/averaging.py"
    broken = path.read_text().replace(
        "if self.progress",
        "if dist.get_rank() and self.progress.optimizer_step == 3:\n"
        "            raise RuntimeError('planted')\n"
        "        if self.progress",
    )
    path.write_text(broken)
    failed = start(tmp_path, "--save=failed")
    assert failed.code != 0
    assert re.search(r"rank 1 .*failed.*averaging\.py:\d+ in after_window", failed.err)
