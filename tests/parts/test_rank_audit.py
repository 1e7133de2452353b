"""``audit_every`` in one process: nothing is left behind, and what cannot be audited is refused."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
import torch
from torch import nn

from ddpkit.brain import run_of
from ddpkit.control import is_shown_without_traceback
from ddpkit.errors import AuditError, ConfigError
from ddpkit.metrics import Mean
from ddpkit.parts.audit_verdict import judged
from ddpkit.parts.batch_copies import copied, restored
from ddpkit.parts.kept_attributes import kept_attributes
from tests.parts.planted_audits import Audited, Flip, points, train
from tests.recipes import Mortal, OwnFitBatch, Regression, make, weights


class Busy(Regression):
    """Leaves something behind wherever a recipe may: a log, metrics, counters, its own noise."""

    def __init__(self, *given):
        super().__init__(*given)
        self.seen = 0
        self.by_class = {"all": []}
        self.mean = Mean()
        self.draws = torch.Generator().manual_seed(1)
        self.total = torch.zeros(())
        self.modules.net.calls = 0

    def compute_forward(self, batch, stage):
        self.seen += 1
        self.modules.net.calls += 1
        self.noise = torch.rand(1, generator=self.draws)
        self.by_class["all"].append(len(batch[0]))
        batch[0].mul_(2)  # as a recipe that normalises in place
        return super().compute_forward(batch, stage) + torch.rand(())

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        self.log("loss", loss)
        self.mean.update(loss.detach(), len(batch[0]))
        self.total += loss.detach()
        if self.sums:
            return loss * len(batch[0]), len(batch[0])
        return loss

    sums = False

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.told = (stage_loss, dict(self.logged), self.mean.compute(), torch.rand(1).item())


class Sums(Busy):
    sums = True


def busy(kind, **options):
    """Train; return all that a recipe could see of it."""
    data = [(torch.tensor([float(x)]), torch.tensor([float(x % 3)])) for x in range(10)]
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    brain = make(kind, net=net, virtual_ranks=2, **options)
    brain.fit([1], data, train_loader_kwargs={"batch_size": 2, "drop_last": True})
    seen = (brain.seen, brain.by_class, net.calls, brain.told, brain.total.item())
    state = brain.draws.get_state().tolist(), random.random()
    trained = [batch.tolist() for batch in brain.trained_on]
    return seen, state, trained, {name: one.tolist() for name, one in weights(brain).items()}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Busy, {}), (Sums, {"grad_accumulation_factor": 2})],
    ids=["means", "sums and accumulation"],
)
def test_an_audit_leaves_nothing_behind(kind, options):
    random.seed(1)
    plain = busy(kind, **options)
    random.seed(1)
    assert busy(kind, audit_every=1, **options) == plain


class AlwaysOther(Audited):
    """Computes other bits each time: what it counts is in an object of its own."""

    works: ClassVar = []

    def compute_objectives(self, predictions, batch, stage):
        self.works.append(stage)
        return super().compute_objectives(predictions, batch, stage) * len(self.works)


@pytest.mark.parametrize(
    ("flip", "kind", "words"),
    [
        (Flip(0, 1), Audited, "The first answer is not the two later ones, which are equal"),
        (None, AlwaysOther, "All three differ"),
    ],
)
def test_a_process_alone_cannot_name_a_fault(flip, kind, words):
    ended = train(flip, kind, virtual_ranks=1)
    assert "three times, with different bits" in ended.words
    assert "the first that differs is the gradient of net.0.weight" in ended.words
    assert words in ended.words
    assert (ended.steps, ended.is_before) == (0, True)


def test_a_single_fault_in_a_shard_that_is_not_in_turn_is_not_found():
    """docs/how-to/audit.md says so."""
    flipped = Flip(0, 2, tensor=4)  # in the first shard, while step 2 audits the second one
    ended = train(flipped, virtual_ranks=2)
    assert (ended.words, ended.audits) == ("", 6)
    assert train(Flip(0, 1, tensor=4), virtual_ranks=2).steps == 0


def test_the_shards_come_in_turn():
    brain = make(Audited, net=nn.Linear(6, 4), virtual_ranks=3, audit_every=2)
    brain.modules.head = nn.Identity()
    audited = []
    strategy = run_of(brain).context.strategy
    again = strategy.begin_again
    strategy.begin_again = lambda number, rank: (audited.append(number), again(number, rank))
    brain.fit([1], points(24), train_loader_kwargs={"batch_size": 1})
    assert [number // 3 + 1 for number in audited] == [2, 4, 6, 8]  # steps
    assert [number % 3 for number in audited] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Regression, {}, "give --virtual_ranks"),
        (Regression, {"virtual_ranks": 2, "strategy": "fsdp"}, "use strategy=zero1"),
        (OwnFitBatch, {"virtual_ranks": 2}, "a fit_batch of its own, as OwnFitBatch has it"),
        (Mortal, {"virtual_ranks": 2}, "on_fit_batch_start, as Mortal has it"),
    ],
)
def test_what_cannot_be_audited_is_refused_by_name(kind, options, words):
    brain = make(kind, audit_every=5, **options)
    with pytest.raises(ConfigError, match=f"audit_every=5 does not work with .*{words}"):
        brain.fit([1], points(4), train_loader_kwargs={"batch_size": 1})


class Saving(Audited):
    """Saves after each epoch."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_checkpoint()


def test_the_newest_checkpoint_of_before_is_named(tmp_path):
    brain = make(
        type("Planted", (Saving,), {"flip": Flip(0, 3, 0)}),
        net=nn.Linear(6, 4),
        folder=tmp_path,
        virtual_ranks=1,
        audit_every=1,
    )
    brain.modules.head = nn.Identity()
    brain.plant()
    words = r"Up to optimizer step 2 .* up to there is .*CKPT\+"
    with pytest.raises(AuditError, match=words) as caught:
        brain.fit([1, 2], points(2), train_loader_kwargs={"batch_size": 1})
    assert is_shown_without_traceback(caught.value)


def test_a_fit_that_is_too_short_for_an_audit_is_told(caplog):
    rows = [(torch.ones(3).double(), torch.ones(1).double())] * 3
    for every in (4, 3):
        brain = make(virtual_ranks=1, audit_every=every)
        brain.fit([1], rows, train_loader_kwargs={"batch_size": 1})
    assert caplog.text.count("audit_every=4 is more than the 3 optimizer steps") == 1
    assert "audit_every=3 is" not in caplog.text


# ------------------------------------------------------------------------------------- its pieces


@pytest.mark.parametrize(
    ("answers", "wrong", "unsteady"),
    [
        ({0: "aa", 1: "ba", 2: "a"}, {1}, {1}),
        ({0: "aa", 1: "bb", 2: "a"}, {1}, set()),
        ({0: "a", 1: "ab", 2: "ca", 3: "a"}, {2}, {1, 2}),
        ({0: "aa", 1: "ba"}, {1}, {1}),
        ({0: "aa", 1: "bb"}, set(), set()),
        ({0: "ac", 1: "bd"}, set(), {0, 1}),
        ({0: "ab", 1: "cc", 2: "d"}, set(), {0}),
    ],
)
def test_who_is_wrong(answers, wrong, unsteady):
    verdict = judged(answers)
    assert (verdict.wrong, verdict.unsteady) == (wrong, unsteady)
    assert verdict.is_repeatable == (unsteady <= wrong)


def test_a_copy_of_a_batch_lies_in_memory_as_the_batch_does():
    whole = torch.arange(60, dtype=torch.float64).view(5, 12)
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    batch = {"rows": whole[1:3], "image": image, "half": torch.ones(3).bfloat16(), "n": 3}
    batch["again"] = batch["rows"]
    assert batch["rows"].data_ptr() % 64
    again = restored(copied(batch), "cpu")
    for name in ("rows", "image", "half"):
        assert torch.equal(again[name], batch[name])
        assert again[name].stride() == batch[name].stride()
        assert again[name].data_ptr() % 64 == batch[name].data_ptr() % 64
    assert again["again"] is again["rows"]
    assert len(copied(whole[:1])) < 500  # the part that it shows, and not the whole


def test_other_tensors_of_a_batch_are_copied_as_pickle_does():
    batch = [torch.ones(3).to_sparse(), torch.ones(1).expand(4), torch.empty(0), torch.ones(())]
    for before, after in zip(batch, restored(copied(batch), "cpu"), strict=True):
        assert torch.equal(before.to_dense(), after.to_dense())


def test_a_batch_that_cannot_be_copied_is_refused():
    with pytest.raises(ConfigError, match="a batch of the training, list, cannot be copied"):
        copied([lambda: 1])


def test_contents_of_attributes_are_put_back():
    class Recipe:
        pass

    recipe = Recipe()
    recipe.tensor = torch.zeros(2)
    recipe.array = torch.zeros(2).numpy()
    recipe.python = random.Random(1)
    recipe.drawn = {1}
    before = dict(vars(recipe)), recipe.python.getstate()
    with kept_attributes([recipe]):
        recipe.tensor += 1
        recipe.array[0] = 1
        recipe.python.random()
        recipe.drawn.add(2)
        del recipe.python
        recipe.more = 1
    assert vars(recipe).keys() == before[0].keys()
    assert recipe.tensor.tolist() == recipe.array.tolist() == [0, 0]
    assert recipe.python.getstate() == before[1]
    assert recipe.drawn == {1}
