"""``--auto_micro_batch``: a step that one rank has no memory for is repeated on all, with smaller
micro-batches.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import get_rank, sum_over_ranks
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.metric_stats import MetricStats
from ddpkit.metrics import Sum
from tests.cells import some_of
from tests.recipes import QUIET, Killed, Mortal, points


class Small(nn.Module):
    """A model whose memory, on one rank, is enough for so many rows; it runs out forwards or
    backwards.
    """

    def __init__(
        self,
        most,
        on_rank=0,
        backward=False,
        norm=nn.Identity,
        noise=0.0,
        after=0,
        shrinks_at=0,
    ):
        super().__init__()
        torch.manual_seed(7)
        self.shrinks_at = shrinks_at  # so many rows leave less memory behind
        self.net = nn.Sequential(
            nn.Linear(3, 4),
            norm(4),
            nn.Tanh(),
            nn.Dropout(noise),
            nn.Linear(4, 1),
        ).double()
        # DDP sends it, as it may move
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))
        self.most = most
        self.on_rank = on_rank
        self.backward = backward
        self.after = after
        self.steps = 0

    def forward(self, x):
        out = self.net(x) * self.scale
        self.most -= self.training and len(x) == self.shrinks_at
        self.steps += self.training
        if (
            self.training
            and len(x) > self.most
            and (get_rank() or 0) == self.on_rank
            and self.steps > self.after
        ):
            if not self.backward:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words."
                )
            out.register_hook(fail)
        return out


def fail(gradient):
    raise torch.OutOfMemoryError("CUDA out of memory, backwards")


class Regression(Mortal):
    """Says all that must not depend on the attempts."""

    counts = False

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        errors = (predictions - batch[1]).square()
        self.log("large", (errors > 1).sum(), count=errors.numel())
        self.log("error", errors.mean())
        return (errors.sum(), float(errors.numel())) if self.counts else errors.mean()

    def on_fit_batch_start(self, batch, should_step):
        self.seen = [*getattr(self, "seen", []), (self.optimizer_step, batch[1].flatten().tolist())]
        super().on_fit_batch_start(batch, should_step)


class Counting(Regression):
    counts = True


SAMPLES = 50
GLOBAL = 12


def make(kind=Regression, folder=None, most=100, model=None, **options):
    model = model or {}
    modules = {"model": Normalised(most, **model) if "places" in model else Small(most, **model)}
    given = {**QUIET, "global_batch_size": GLOBAL, "auto_micro_batch": True, **options}
    checkpointer = None if folder is None else Checkpointer(folder, modules)
    return kind(
        modules,
        lambda of: torch.optim.AdamW(of, lr=0.05),
        run_opts=given,
        checkpointer=checkpointer,
    )


def told(brain, result):
    weights = {name: one.tolist() for name, one in brain.raw_modules.state_dict().items()}
    return weights, result.train_loss, result.valid_loss, result.logged, result.optimizer_steps


def sizes(brain):
    return brain.micro_batch_size, brain.grad_accumulation_factor


def train(kind=Regression, most=100, loading=None, **options):
    """Return what a training comes to, the size of its micro-batches, and the samples of its last
    epoch.
    """
    brain = make(kind, most=most, **options)
    data = points(SAMPLES)
    result = brain.fit(
        range(1, 4),
        data,
        data[:7],
        train_loader_kwargs=loading or {"shuffle": True},
    )
    return told(brain, result), sizes(brain), brain.seen


OWN_NORM = {"norm": nn.BatchNorm1d}

# What is given, and the micro-batch that then fits on two processes.
IN_THE_FIRST_STEP = {
    "zero1": ({"most": 2, "strategy": "zero1", "model": {"on_rank": 1, "backward": True}}, 2),
    "forwards on rank 0": ({"most": 2}, 2),
    "forwards on the last rank": ({"most": 3, "model": {"on_rank": 1}}, 3),
    "backwards": ({"most": 3, "model": {"backward": True}}, 3),
    "counts": ({"kind": Counting, "most": 2, "model": {"backward": True, "on_rank": 1}}, 2),
    "noise": ({"most": 3, "model": {"noise": 0.4}}, 3),
    "workers": (
        {"most": 3, "loading": {"num_workers": 1, "persistent_workers": True, "shuffle": True}},
        3,
    ),
    "bf16": ({"most": 3, "precision": "bf16"}, 3),
    "BatchNorm": (
        {"most": 3, "sync_batchnorm": False, "model": OWN_NORM, "loading": {"drop_last": True}},
        3,
    ),
    "unused parameters": ({"most": 3, "find_unused_parameters": True}, 3),
}
LATER = {
    "zero1": (
        {
            "most": 2,
            "strategy": "zero1",
            "model": {"after": 9, "on_rank": 1},
            "micro_batch_size": 3,
        },
        1,
    ),
    "forwards": ({"most": 2, "model": {"after": 9}, "micro_batch_size": 3}, 1),
    "backwards": ({"most": 3, "model": {"after": 7, "on_rank": 1, "backward": True}}, 3),
    "counts": (
        {"kind": Counting, "most": 2, "model": {"after": 12, "on_rank": 1}, "micro_batch_size": 5},
        1,
    ),
    "in the last step of an epoch": ({"most": 1, "model": {"after": 4}, "micro_batch_size": 6}, 1),
}


def both(given):
    """Train with a memory that is too small; and from the start with the micro-batches that fit."""
    found, size, seen = train(**given)
    expected, begun, _ = train(**{**given, "most": 100, "micro_batch_size": size[0]})
    return found, size, expected, begun, seen


def assert_close(found, expected):
    assert [*found[0]] == [*expected[0]]
    for name, values in expected[0].items():
        torch.testing.assert_close(
            torch.tensor(found[0][name]),
            torch.tensor(values),
            rtol=0,
            atol=1e-10,
        )
    assert found[1:3] == pytest.approx(expected[1:3], rel=1e-10)
    assert found[3]["train"] == pytest.approx(expected[3]["train"], rel=1e-10)
    assert found[4] == expected[4]


def quick(cases, number):
    return [
        one if place < number else pytest.param(one, marks=pytest.mark.slow)
        for place, one in enumerate(cases)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(IN_THE_FIRST_STEP, 1))
def test_the_same_bits_as_with_the_size_that_fits_where_the_first_step_shows_it(ranks, case):
    given, micro = IN_THE_FIRST_STEP[case]
    for found, size, expected, begun, _ in ranks.run(both, given, world_size=2):
        assert found == expected
        assert size == begun == (micro, GLOBAL // 2 // micro)


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(LATER, 1))
@pytest.mark.parametrize("number", some_of([2, 3], [2]))
def test_no_sample_is_lost_or_counted_twice_where_memory_runs_out_later(ranks, case, number):
    given, micro = LATER[case]
    run = ranks.run(both, given, world_size=number)
    shown = [(step, sample) for *_, seen in run for step, batch in seen for sample in batch]
    for epoch in range(3):
        steps = range(5 * epoch, 5 * (epoch + 1))
        once = sorted(sample for step, sample in set(shown) if step in steps)
        assert once == sorted(one[1].item() for one in points(SAMPLES))
    for found, size, expected, begun, _ in run:
        assert_close(found, expected)
        assert size == begun
        assert size[0] == micro or number != 2


# Memory lacks in the second micro-batch of a step: the first has told its loss and its values
# already.
IN_THE_SECOND_BATCH = {  # what the model is like, and the sizes that the run ends with
    "of a later step": ({"after": 3}, (3, 4)),
    "of a later step, backwards": ({"after": 3, "backward": True}, (3, 4)),
    "of the first step, where a larger size is tried after it": ({"after": 1}, (4, 3)),
}


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("case", IN_THE_SECOND_BATCH)
def test_the_epoch_in_which_memory_runs_out_tells_each_sample_once(case):
    model, found = IN_THE_SECOND_BATCH[case]
    shown = {}
    for option, given in {True: {"most": 4, "model": model}, False: {}}.items():
        brain = make(auto_micro_batch=option, micro_batch_size=6, **given)
        shown[option] = told(brain, brain.fit([1], points(SAMPLES), points(7)))
        assert sizes(brain) == (found if option else (6, 2))
    assert_close(shown[True], shown[False])


@pytest.mark.slow
def test_the_noise_of_an_attempt_that_failed_is_drawn_again():
    found, size, expected, begun, _ = both(IN_THE_FIRST_STEP["noise"][0])
    assert found == expected
    assert size == begun == (3, 4)


# Samples of a step and how many fit on one of two processes; the sizes that are tried, None for all
# at once.
SEARCHES = {
    (48, 3): [None, 12, 6, 3, 4, 3],
    (48, 4): [None, 12, 6, 3, 4, 5, 4],
    (48, 5): [None, 12, 6, 3, 4, 5],
    (48, 11): [None, 12, 6, 8],
    (48, 23): [None, 12],
    (48, 24): [None],
    (22, 2): [None, 4, 2, 3, 2],
    (22, 3): [None, 4, 2, 3],
    (20, 1): [None, 5, 2, 1],
}


class Tries(Regression):
    def on_fit_batch_start(self, batch, should_step):
        self.seen = [*getattr(self, "seen", []), self.micro_batch_size]


def search(cases):
    return [
        both({"kind": Tries, "global_batch_size": whole, "most": most}) for whole, most in cases
    ]


@pytest.mark.exhaustive
def test_the_first_step_finds_the_largest_size_that_fits(ranks):
    for run in ranks.run(search, [*SEARCHES], world_size=2):
        for (found, size, expected, begun, seen), tried in zip(run, SEARCHES.values(), strict=True):
            assert [one for one, _ in itertools.groupby(seen)] == tried
            assert found == expected
            assert size == begun


def shrink():
    return both({"kind": Tries, "global_batch_size": 22, "most": 2, "model": {"shrinks_at": 3}})


@pytest.mark.slow
def test_a_size_that_fits_once_and_then_no_longer_is_halved(ranks):
    for found, size, expected, begun, seen in ranks.run(shrink, world_size=2):
        assert [one for one, _ in itertools.groupby(seen)] == [None, 4, 2, 3, 2, 1]
        assert found == expected
        assert size == begun


@pytest.mark.slow
def test_a_larger_size_must_leave_room_for_what_an_optimizer_keeps(monkeypatch):
    rooms = []
    empty = torch.empty

    def short(*given, **named):
        if named.get("dtype") is torch.uint8:
            rooms.append(given[0])
            fail(None)
        return empty(*given, **named)

    monkeypatch.setattr(torch, "empty", short)
    brain = make(most=2)
    brain.fit([1], points(SAMPLES))
    assert sizes(brain) == (1, GLOBAL)  # two samples fit, but not with that room
    assert rooms == [2 * 8 * sum(one.numel() for one in brain.raw_modules.parameters())]


def ends(strategy):
    """The weights of a run that finds its micro-batches."""
    brain = make(most=2, strategy=strategy)
    result = brain.fit([1], points(SAMPLES))
    return told(brain, result)[0]


@pytest.mark.slow
def test_zero1_has_the_bits_of_ddp(ranks):
    assert ranks.run(ends, "zero1", world_size=2) == ranks.run(ends, "ddp", world_size=2)


@pytest.mark.slow
def test_on_one_process_batch_statistics_move_once():
    found, size, expected, begun, _ = both({"most": 3, "model": OWN_NORM})
    assert found == expected
    assert size == begun == (3, 4)


@pytest.mark.slow
def test_without_a_lack_of_memory_the_answer_is_that_of_ddp(ranks):
    for (agreed, size, _), (plain, _, _) in zip(
        ranks.run(train, world_size=2),
        ranks.run(train_plainly, world_size=2),
        strict=True,
    ):
        assert_close(agreed, plain)
        assert size == (None, 1)


def train_plainly():
    return train(auto_micro_batch=False)


# --------------------------------------------------------------------------- synchronised BatchNorm


class Lacks(nn.Module):
    """Passes rows on; on some ranks there is memory for so many only, and it runs out forwards or
    backwards.
    """

    def __init__(self, most, on_ranks, backward, after):
        super().__init__()
        self.most = most
        self.on_ranks = on_ranks
        self.backward = backward
        self.after = after
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        if (
            self.training
            and len(x) > self.most
            and get_rank() in self.on_ranks
            and self.passes > self.after
        ):
            if not self.backward:
                fail(None)
            x.register_hook(fail)
        return x


class Normalised(nn.Module):
    """Three layers of BatchNorm; memory lacks before the first, between two, or after the last,
    each on some ranks.
    """

    def __init__(self, most, places, backward=False, after=0):
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(3, 4))
        for place in range(4):
            self.net.append(Lacks(most, places.get(place, ()), backward, after))
            self.net.append(nn.BatchNorm1d(4) if place < 3 else nn.Tanh())
            self.net.append(nn.Linear(4, 4 if place < 3 else 1))
        self.double()

    def forward(self, x):
        return self.net(x)


ALL = (0, 1, 2)
NORMALISED = {
    "between two, backwards": {"places": {1: [1]}, "backward": True},
    "between two": {"places": {2: [1]}},
    "on two ranks in two places": {"places": {0: [1], 2: [0]}},
    "before the first": {"places": {0: [0]}},
    "after the last": {"places": {3: [0]}},
    "before the last, backwards": {"places": {3: [0]}, "backward": True},
    "after the first, backwards": {"places": {0: [1]}, "backward": True},
    "on all ranks": {"places": {1: ALL}},
    "on all ranks, backwards": {"places": {2: ALL}, "backward": True},
    "on two ranks in two places, backwards": {"places": {0: [1], 2: [0]}, "backward": True},
}
# after so many passes; options; and the size that is found on two ranks, and on three
SITUATIONS = {
    "in the first step": (0, {"global_batch_size": 24}, (3, 3)),
    "in a later step": (7, {}, (3, 2)),
    "in a later batch of a later step": (
        3,
        {"global_batch_size": 24, "micro_batch_size": 6},
        (3, 2),
    ),
    "in a block that is computed again": (8, {"activation_checkpointing": ["Sequential"]}, (3, 2)),
}


def lack(model, options):
    """Train, once with the given lack of memory, once where all ranks lack it before anything is
    sent of a batch.
    """
    before = {"places": {0: ALL}, "after": model["after"]}
    return [train(most=3, model=one, **options)[:2] for one in (model, before)]


def lacks():
    """Name all that can be combined on two ranks, and each case once on three.

    In every check each case and each situation comes once.
    """
    on_two = [(case, situation, 2) for case in NORMALISED for situation in SITUATIONS]
    on_three = [(*pair, 3) for pair in zip(NORMALISED, itertools.cycle(SITUATIONS), strict=False)]
    number = max(len(NORMALISED), len(SITUATIONS))
    cases = itertools.islice(itertools.cycle(NORMALISED), number)
    kept = [(*pair, 2) for pair in zip(cases, itertools.cycle(SITUATIONS), strict=False)]
    return [
        pytest.param(*values, marks=() if values in kept else pytest.mark.exhaustive)
        for values in [*on_two, *on_three]
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "situation", "number"), lacks())
def test_ranks_whose_batch_statistics_wait_for_each_other_leave_a_step_together(
    ranks,
    case,
    situation,
    number,
):
    after, options, size = SITUATIONS[situation]
    for found, expected in ranks.run(
        lack,
        {**NORMALISED[case], "after": after},
        options,
        world_size=number,
    ):
        assert found == expected
        assert found[1][0] == size[number - 2]


@pytest.mark.slow
def test_a_block_that_lacks_memory_when_it_is_computed_again_is_left_together(ranks):
    # of the passes every other is in a backward pass
    given = {"places": {0: [1], 2: [0]}, "after": 7}
    for found, expected in ranks.run(
        lack,
        given,
        {"activation_checkpointing": ["Sequential"]},
        world_size=2,
    ):
        assert found == expected
        assert found[1][0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("case", some_of(NORMALISED, [*NORMALISED][::2]))
def test_synchronised_batch_norm_has_the_bits_of_the_size_that_fits(ranks, case):
    for found, size, expected, begun, _ in ranks.run(
        both,
        {"most": 3, "model": NORMALISED[case]},
        world_size=2,
    ):
        assert found == expected
        assert size == begun == (3, 2)


# ------------------------------------------------------------------------- killed, and gone on with


def go_on(folder, after, dies_at=None):
    brain = make(
        Counting,
        folder,
        most=2,
        model={"after": after, "on_rank": 1},
        ckpt_interval_steps=1,
    )
    brain.dies_at = dies_at
    counter = EpochCounter(3)
    brain.checkpointer.add_recoverables({"counter": counter})
    data = points(SAMPLES)
    try:
        result = brain.fit(counter, data, train_loader_kwargs={"shuffle": True})
    except Killed:
        return None
    return told(brain, result)[0], sizes(brain), brain.seen[0]


@pytest.mark.slow
@pytest.mark.parametrize(("after", "dies_at"), [(0, 1), (3, 4), (3, 8)])
def test_a_resumed_run_begins_with_the_size_that_was_found_and_ends_with_the_same_bits(
    ranks,
    tmp_path,
    after,
    dies_at,
):
    whole = ranks.run(go_on, tmp_path / "whole", after, world_size=2)
    ranks.run(go_on, tmp_path / "parts", after, dies_at, world_size=2)
    again = ranks.run(go_on, tmp_path / "parts", after, world_size=2)
    for (weights, size, first), expected in zip(again, whole, strict=True):
        assert (weights, size) == expected[:2]
        assert first[0] == dies_at
        assert len(first[1]) == size[0]


# --------------------------------------------------------------------------------- what cannot work


@pytest.mark.costly
def test_one_sample_that_is_too_large_is_an_error_on_every_rank(ranks):
    for outcome in ranks.outcomes(train, Regression, 0, world_size=2):
        assert not outcome.ok
        assert "one sample at a time is too much for the memory" in outcome.error


class OwnBatch(Regression):
    def fit_batch(self, batch):
        return super().fit_batch(batch)


class StepsByItself(Regression):
    def optimizers_step(self):
        self.optimizer.step()
        self.zero_grad()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(points(SAMPLES))


def refused(kind=Regression, data=None, loading=None, scaler=None, **options):
    brain = make(kind, **options)
    brain.scaler = scaler or brain.scaler
    with pytest.raises(ConfigError) as error:
        brain.fit([1], data or points(SAMPLES), train_loader_kwargs=loading or {})
    return str(error.value)


def test_a_hook_of_gradients_is_refused_as_the_brain_is_made():
    with pytest.raises(ConfigError, match="ddp_comm_hook=.* does not work with auto_micro_batch"):
        make(Regression, ddp_comm_hook="fp16")


def test_what_cannot_be_repeated_or_divided_is_refused():
    assert "without global_batch_size" in refused(global_batch_size=None)
    assert "with virtual ranks" in refused(virtual_ranks=2)
    assert "with static_graph." in refused(static_graph=True)
    assert "with fp16, whose scale" in refused(scaler=torch.amp.GradScaler("cpu"))
    assert "with a fit_batch of its own, as OwnBatch has it" in refused(OwnBatch)
    assert "with a StreamLoader, whose batches it cannot divide" in refused(data=Stream())
    assert "with a LoopedLoader" in refused(loading={"looped_nominal_epoch": 4})
    batches = BatchSampler(SequentialSampler(range(SAMPLES)), 4, drop_last=False)
    assert "made already, by a batch_sampler" in refused(loading={"batch_sampler": batches})


@pytest.mark.costly
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_recipe_that_steps_by_itself_has_the_bits_of_the_size_that_fits(ranks, number):
    """The processes agree before its optimizers_step is called."""
    given = {"kind": StepsByItself, "most": 2, "model": {"on_rank": number - 1, "backward": True}}
    for found, size, expected, begun, _ in ranks.run(both, given, world_size=number):
        assert found == expected
        assert size == begun == (2, GLOBAL // number // 2)


def test_torchs_own_synchronised_batch_norm_is_refused(ranks):
    for message in ranks.run(refuse_torchs, world_size=2):
        assert "with torch.nn.SyncBatchNorm, where" in message


def refuse_torchs():
    return refused(model={"norm": nn.SyncBatchNorm})


class OwnSum(Regression):
    """Sends something between the ranks in the forward pass, before which one of them runs out of
    memory.
    """

    def compute_forward(self, batch, stage):
        if get_rank() and self.optimizer_step == 2:
            fail(None)
        sum_over_ranks([1.0])
        return super().compute_forward(batch, stage)


@pytest.mark.costly
def test_a_recipe_that_sends_something_itself_ends_with_an_error(ranks):
    for outcome in ranks.outcomes(train, OwnSum, world_size=2):
        assert outcome.error_type == "RankMismatchError"


@pytest.mark.costly
def test_a_step_that_is_repeated_is_no_resume_to_metrics(caplog):
    brain = make(most=2, model={"after": 7}, micro_batch_size=4)
    brain.seen_samples = Sum()
    brain.fit([1], points(SAMPLES))
    assert brain.grad_accumulation_factor > 3
    assert "no totals of these metrics" not in caplog.text


class Collecting(Counting):
    """Skips a batch that has a given sample, and counts samples by a metric of ddpkit."""

    skips = frozenset()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.samples = Sum()

    def compute_objectives(self, predictions, batch, stage):
        self.samples.update(len(batch[1]))
        loss = super().compute_objectives(predictions, batch, stage)
        return loss if self.skips.isdisjoint(batch[1].flatten().tolist()) else None

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told = self.samples.compute(), self.progress.meter.skipped


def collected(after=0):
    """Rank 0 has no memory for the step in which rank 1 skips a batch."""
    data = points(SAMPLES)
    model = {"on_rank": 0, "after": after}
    brain = make(Collecting, most=4, model=model, global_batch_size=12)
    # of rank 1 in whole batches and in halves
    brain.skips = {data[10][1].item(), data[22][1].item()}
    brain.fit([1], data)
    return brain.told


@pytest.mark.costly
@pytest.mark.parametrize("after", [0, 1])
def test_what_is_counted_in_a_step_that_is_made_again_counts_once(ranks, after):
    assert ranks.run(collected, after, world_size=2) == [(SAMPLES, 0), (SAMPLES, 2)]


class Listing(Counting):
    """Lists samples in a metric that grows, and in one of torchmetrics' kind."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scores = MetricStats(lambda values: values.flatten())
        self.by_name = {"listed": Listed()}

    def compute_objectives(self, predictions, batch, stage):
        targets = batch[1].flatten()
        self.scores.append(targets.tolist(), targets)
        self.by_name["listed"].update(targets)
        return super().compute_objectives(predictions, batch, stage)


class Listed(nn.Module):
    """Keeps a list, as metrics of torchmetrics do."""

    sync_on_compute = True

    def __init__(self):
        super().__init__()
        self._defaults = {"values": []}
        self.values = []

    def update(self, targets):
        self.values.append(targets)


@pytest.mark.costly
@pytest.mark.parametrize("after", [0, 3])
def test_samples_that_are_listed_in_a_step_that_is_made_again_are_there_once(after):
    data = points(SAMPLES)
    brain = make(Listing, most=4, model={"after": after})
    brain.fit([1], data)
    assert brain.grad_accumulation_factor > 1
    wanted = sorted(target.item() for _, target in data)
    assert sorted(brain.scores.ids) == wanted
    assert sorted(torch.cat(brain.by_name["listed"].values).tolist()) == wanted


def test_another_failure_is_not_taken_for_a_lack_of_memory(caplog):
    class Fails(Regression):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            raise torch.OutOfMemoryError("after the step")

    with pytest.raises(torch.OutOfMemoryError, match="after the step"):
        make(Fails).fit([1], points(SAMPLES))
    assert "ran out of memory" not in caplog.text


@pytest.mark.parametrize("option", [True, False])
def test_without_the_option_a_lack_of_memory_names_it(option, caplog):
    brain = make(most=0, micro_batch_size=4, auto_micro_batch=option)
    with pytest.raises((torch.OutOfMemoryError, ConfigError)):
        brain.fit([1], points(SAMPLES))
    assert (
        "In training, --auto_micro_batch cuts the global batch into parts" in caplog.text
    ) is not option


class Assigns(nn.Module):
    """Assigns a buffer anew in each forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(3, 1).double()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs):
        if self.training:
            self.mean = 0.7 * self.mean + 0.3 * inputs.detach().mean(0)
        return self.layer(inputs - self.mean)


def assign(option):
    given = {**QUIET, "global_batch_size": GLOBAL, "auto_micro_batch": option}
    brain = Regression({"model": Assigns()}, lambda of: torch.optim.SGD(of, lr=0.1), None, given)
    brain.fit([1], points(SAMPLES))
    return brain.raw_modules.model.layer.weight.tolist()


@pytest.mark.costly
def test_buffers_that_are_assigned_anew_are_sent_as_without_the_option(ranks):
    assert ranks.run(assign, True) == ranks.run(assign, False)
