"""``hash_every``: a chain of SHA-256 over the steps of a run, in one process."""

from __future__ import annotations

import functools
import hashlib
import json

import pytest
import torch
from torch import nn

from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.parts.hash_chain import HashChain, chained
from ddpkit.parts.state_digests import by_module, digest_of
from ddpkit.see.diff.hashed_run import differing
from ddpkit.train_logger import set_run_log
from ddpkit.types import Stage
from tests.recipes import (
    Killed,
    Mortal,
    Regression,
    SavesAfterValidation,
    Value,
    make,
    points,
    weights,
)

DATA = points(12)
LOADING = {"batch_size": 2, "shuffle": True}  # 6 steps of an epoch
FIELDS = ("step", "samples", "weights", "optimizer", "gradients", "settings", "loss", "modules")


@pytest.fixture
def log(tmp_path):
    """The records of hashes that were written so far."""
    path = tmp_path / "metrics.jsonl"
    set_run_log(path)

    def records():
        events = map(json.loads, path.read_text().splitlines())
        return [event for event in events if event["event"] == "hash"]

    yield records
    set_run_log(None)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


class Saving(Mortal, SavesAfterValidation):
    """Saves after each epoch; may die."""


def train(cls=Regression, epochs=2, data=DATA, **options):
    counter = EpochCounter(epochs)
    brain = make(cls, opt=adam, recoverables={"counter": counter}, **{"hash_every": 1, **options})
    brain.fit(counter, data, DATA[:2], train_loader_kwargs=LOADING)
    return brain


def steps(records):
    return [record["step"] for record in records]


def compared(records):
    return [{name: record[name] for name in FIELDS} for record in records]


def test_each_record_is_chained_with_the_one_before(log):
    train(hash_every=3)
    records = log()
    assert steps(records) == [3, 6, 9, 12]
    previous = ""
    for record in records:
        assert record["previous"] == previous
        assert record["chain"] == chained(previous, record) != previous
        previous = record["chain"]
    assert records[-1]["labels"]["torch"] == torch.__version__


def test_records_of_two_equal_runs_are_equal_and_rarer_ones_are_among_them(log):
    for every in (1, 1, 4):
        train(hash_every=every)
    records = compared(log())
    assert records[:12] == records[12:24]
    assert records[24:] == records[3:12:4]


def test_without_the_option_nothing_is_recorded_and_no_part_hears(log):
    brain = make()
    heard = []

    class Listening(Regression):
        def on_fit_batch_start(self, batch, should_step):
            heard.append(brain_step.on_gradients or brain_step.after_window)

    brain = make(Listening)
    brain_step = brain._Brain__run.train_step
    brain.fit([1], DATA, train_loader_kwargs=LOADING)
    assert heard == [None] * 6
    assert log() == []


class Changed(Regression):
    """Has a difference in step 4 of the training, and nowhere else."""

    what = ""

    def on_fit_batch_start(self, batch, should_step):
        if self.optimizer_step != 3:
            return
        if self.what == "optimizer":
            state = next(iter(self.optimizer.state.values()))
            state["exp_avg_sq"] += 1e-9
        elif self.what == "settings":
            self.optimizer.param_groups[0]["lr"] *= 1 + 1e-9

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        if self.what == "loss" and self.optimizer_step == 3 and stage is Stage.TRAIN:
            loss = loss * (1 + 1e-9)
        return loss


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("loss", {"loss", "gradients", "weights", "optimizer", "modules"}),
        ("optimizer", {"weights", "optimizer", "modules"}),
        ("settings", {"weights", "settings", "modules"}),
    ],
)
def test_a_small_difference_shows_in_its_step_and_in_what_follows_from_it(log, what, fields):
    train(epochs=1)
    train(type("Other", (Changed,), {"what": what}), epochs=1)
    first, second = compared(log())[:6], compared(log())[6:]
    assert first[:3] == second[:3]
    assert {name for name in FIELDS if first[3][name] != second[3][name]} == fields


def test_other_samples_show_where_their_weights_are_equal(log):
    still = {"opt": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    for shuffle in (True, False):
        loading = {**LOADING, "shuffle": shuffle}
        make(hash_every=1, **still).fit([1], DATA, train_loader_kwargs=loading)
    one, other = log()[:6], log()[6:]
    assert [record["weights"] for record in one] == [record["weights"] for record in other]
    assert [record["samples"] for record in one] != [record["samples"] for record in other]


@pytest.mark.costly
def test_a_killed_run_goes_on_with_its_chain(log, tmp_path):
    train(Saving, folder=tmp_path / "whole")
    whole = log()
    with pytest.raises(Killed):
        train(type("Dies", (Saving,), {"dies_at": 8}), folder=tmp_path / "killed")
    train(Saving, folder=tmp_path / "killed")
    killed = log()[len(whole) :]
    assert steps(killed) == [*range(1, 9), *range(7, 13)]
    chains = {record["step"]: record["chain"] for record in killed}
    assert chains == {record["step"]: record["chain"] for record in whole}


def test_a_second_call_of_fit_goes_on_with_the_chain(log, tmp_path):
    brain = make(opt=adam, folder=tmp_path / "save", hash_every=1)
    for epoch in (1, 2):
        brain.fit([epoch], DATA, train_loader_kwargs=LOADING)
    records = log()
    assert steps(records) == [*range(1, 13)]
    assert records[6]["previous"] == records[5]["chain"]


def test_weights_that_do_not_fit_to_the_chain_of_their_checkpoint_are_told(log, tmp_path, caplog):
    made = train(Saving, epochs=1, folder=tmp_path)
    (file,) = tmp_path.glob("CKPT*/net.ckpt")
    content = file.read_bytes()
    changed = weights(made)["net.weight"].numpy()
    place = content.index(changed.tobytes())
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    train(Saving, folder=tmp_path, ckpt_verify="off")
    assert "the weights are not those that the chain has for optimizer step 6" in caplog.text
    assert steps(log())[-1] == 12


def test_a_checkpoint_that_fits_says_nothing(log, tmp_path, caplog):
    train(Saving, epochs=1, folder=tmp_path)
    train(Saving, folder=tmp_path)
    assert "hash_every" not in caplog.text
    assert steps(log()) == [*range(1, 13)]


def test_a_run_whose_checkpoint_has_no_chain_says_that_one_begins(log, tmp_path, caplog):
    train(Saving, epochs=1, folder=tmp_path, hash_every=0)
    train(Saving, folder=tmp_path)
    assert "goes on at optimizer step 6, and its checkpoint has no chain" in caplog.text
    assert log()[0]["previous"] == ""


def test_a_name_of_a_checkpoint_that_is_taken_is_refused(tmp_path):
    mine = {"part-HashChain": Value(3)}
    with pytest.raises(ConfigError, match="the checkpointer saves Value under this name"):
        make(folder=tmp_path, recoverables=mine, hash_every=1).fit([1], DATA)


def test_a_stream_has_records_without_samples(log):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(DATA)

    make(hash_every=1).fit([1], Stream(), train_loader_kwargs={"batch_size": 4})
    assert [record["samples"] for record in log()] == [None] * 3


class TwoSteps(Regression):
    """Steps two optimizers in one batch, one after the other."""

    now = "weight"

    def init_optimizers(self):
        self.optimizers_dict = {
            "weight": torch.optim.SGD([self.modules.net.weight], lr=0.1),
            "bias": torch.optim.SGD([self.modules.net.bias], lr=0.1),
        }

    def freeze_optimizers(self, optimizers):
        return {self.now: optimizers[self.now]}

    def fit_batch(self, batch):
        for self.now in ("weight", "bias"):
            self.zero_grad()
            loss = self.compute_objectives(
                self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN
            )
            self.backward(loss)
            self.optimizers_step()
        return loss.detach()


RATE = torch.optim.lr_scheduler.StepLR


class Averaging(Saving):
    """Averages its weights, and halves its rate after each three steps."""

    schedule = functools.partial(RATE, step_size=3, gamma=0.5)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scheduler_class = self.schedule


def test_averaged_weights_and_the_scheduler_are_in_the_chain(log):
    def records(decay, gamma=0.5):
        made = functools.partial(RATE, step_size=50, gamma=gamma)
        cls = type("Other", (Averaging,), {"schedule": made})
        train(cls, epochs=1, ema_decay=decay)
        return log()[-6:]

    one, same, averaged, planned = records(0.9), records(0.9), records(0.8), records(0.9, 0.25)
    assert [record["chain"] for record in one] == [record["chain"] for record in same]
    # the first average is a copy
    assert differing(one[0], averaged[0]) == []
    assert differing(one[1], averaged[1]) == ["average"]
    assert differing(one[0], planned[0]) == ["schedule"]
    assert one[0]["modules"]["average"].keys() == {"n_averaged", "net"}
    for other in (averaged, planned):
        assert one[1]["chain"] != other[1]["chain"]


def test_a_run_without_them_says_so(log):
    train(epochs=1)
    assert (log()[0]["average"], log()[0]["schedule"]) == (None, None)


@pytest.mark.costly
@pytest.mark.parametrize("every", ["step", "epoch"])
def test_a_killed_run_goes_on_with_its_averages_and_schedule(log, tmp_path, caplog, every):
    options = {"ema_decay": 0.9, "scheduler_every": every}
    train(Averaging, folder=tmp_path / "whole", **options)
    whole = {record["step"]: record["chain"] for record in log()}
    with pytest.raises(Killed):
        train(type("Dies", (Averaging,), {"dies_at": 8}), folder=tmp_path / "killed", **options)
    train(Averaging, folder=tmp_path / "killed", **options)
    assert {record["step"]: record["chain"] for record in log()[12:]} == whole
    assert "hash_every" not in caplog.text


def test_averages_that_do_not_fit_to_the_chain_of_their_checkpoint_are_told(log, tmp_path, caplog):
    train(Averaging, epochs=1, folder=tmp_path, ema_decay=0.9)
    (file,) = tmp_path.glob("CKPT*/ema.ckpt")
    state = torch.load(file, weights_only=True)
    state["net.weight"][0, 0] += 1e-3
    torch.save(state, file)
    train(Averaging, folder=tmp_path, ema_decay=0.9, ckpt_verify="off")
    assert "the averaged weights are not those that the chain has for optimizer step 6" in (
        caplog.text
    )


def test_a_chain_of_before_goes_on_and_is_checked_by_its_own_rule(log, tmp_path, caplog):
    """Records of the first version know no average and no scheduler, in checkpoints too."""
    part = HashChain(None, 1)
    part.load_state_dict({"step": 6, "chain": "a", "weights": "b", "optimizer": "c"})
    assert "average" not in part.state_dict()
    link = {"step": 1, "samples": None, "weights": "a", "optimizer": "b"}
    before = '["", 1, null, "a", "b"]'
    assert chained("", link) == hashlib.sha256(before.encode()).hexdigest()
    newer = {**link, "version": 2, "average": None, "schedule": None}
    assert chained("", newer) not in {
        chained("", link),
        chained("", {**newer, "average": "c"}),
        chained("", {**newer, "schedule": "c"}),
    }


def test_several_steps_of_a_window_are_one_record(log):
    make(TwoSteps, hash_every=2).fit([1], DATA, train_loader_kwargs=LOADING)
    assert steps(log()) == [2, 4, 6]


def test_a_fit_that_is_too_short_for_a_record_is_told(log, caplog):
    for every in (len(DATA) + 1, 1):
        make(hash_every=every).fit([1], DATA, train_loader_kwargs={"batch_size": 1})
    words = f"is more than the {len(DATA)} optimizer steps up to the end of this fit"
    assert caplog.text.count(words) == 1


def test_records_that_go_nowhere_are_told_once(caplog):
    make(hash_every=2).fit([1], DATA, train_loader_kwargs=LOADING)
    assert caplog.text.count("the record of optimizer step 2 is written nowhere") == 1
    assert "create_experiment_directory" in caplog.text


def test_digests_know_dtype_shape_and_each_bit():
    one = torch.arange(6.0).reshape(2, 3)
    flipped = one.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    digests = {digest_of(tensor) for tensor in (one, one.double(), one.reshape(3, 2), flipped)}
    assert len(digests) == 4
    assert digest_of(one) == digest_of(one.T.contiguous().T)
    assert digest_of(one.to_sparse()) == digest_of(one)
    special = [torch.tensor(True), torch.empty(0), one.bfloat16(), one.to(torch.complex64)]
    assert len({digest_of(tensor) for tensor in special}) == 4


def test_modules_are_named_as_deep_as_the_names_allow():
    net = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1))
    digests = {f"net.{name}": digest_of(value) for name, value in net.named_parameters()}
    assert [*by_module(digests)] == ["net.0.0", "net.0.1", "net.1"]
    assert [*by_module(digests, most=2)] == ["net.0", "net.1"]
    states = {f"optimizer/{name}/exp_avg": digest for name, digest in digests.items()}
    assert [*by_module(states)] == ["net.0.0", "net.0.1", "net.1"]


def test_a_part_that_was_given_no_checkpoint_has_an_empty_chain():
    assert HashChain(None, 1).state_dict()["chain"] == ""
