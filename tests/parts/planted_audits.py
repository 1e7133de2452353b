"""Bits of gradients that are flipped on one rank, and audits that must find them.

    python -m tests.parts.planted_audits --flips 100 --audits 2000

Each flip is a training of its own, on two or three ranks: in a drawn step and rank one bit of a
drawn number of a drawn tensor is flipped once; or, on three ranks, each time that this rank
computes it, as a machine that is wrong in the same way again. The audit has to end the run on all
ranks before the step, and to name that rank. Then trainings without a flip, with dropout, batch
statistics, sums and counts, accumulation, a stream and divided optimizers, in which no audit may
find anything.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from dataclasses import dataclass

import torch
from torch import nn

from ddpkit.brain import Brain, run_of
from ddpkit.distributed import get_rank
from ddpkit.errors import AuditError
from tests.recipes import QUIET, weights

SAMPLES = 24
WIDTH = 6
CLASSES = 4
STEPS = 4  # in which a flip is drawn


@dataclass(frozen=True)
class Flip:
    """A bit that is flipped in a gradient.

    Attributes:
        rank: that computes it.
        step: the optimizer step.
        tensor: the number of the parameter.
        place: of the number in it, as a part of its size.
        bit: of 32.
        always: whether it is flipped whenever this rank computes it, and not only the first time.
    """

    rank: int
    step: int
    tensor: int = 0
    place: float = 0.0
    bit: int = 3
    always: bool = False


def modules():
    torch.manual_seed(5)
    first = [nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)]
    return {"net": nn.Sequential(*first, nn.Linear(8, 8)), "head": nn.Linear(8, CLASSES)}


def points(number=SAMPLES):
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(number, WIDTH, generator=draw)
    return list(zip(inputs, torch.randint(0, CLASSES, (number,), generator=draw), strict=True))


class Audited(Brain):
    """A small classifier; one rank flips a bit. Keeps the weights of before each step."""

    flip = None
    counts = False

    def plant(self):
        """Flip the bit as soon as the backward pass has the gradient."""
        flip = self.flip
        if flip is None or flip.rank != (get_rank() or 0):
            return
        parameter = list(self.modules.parameters())[flip.tensor]
        flipped = []

        def change(changed):
            is_now = self.optimizer_step == flip.step - 1
            if is_now and (flip.always or not flipped):
                flipped.append(True)
                numbers = changed.grad.view(-1).view(torch.int32)
                mask = torch.tensor(1 << flip.bit, dtype=torch.int64).to(torch.int32)
                numbers[int(flip.place * len(numbers))] ^= mask

        parameter.register_post_accumulate_grad_hook(change)

    def compute_forward(self, batch, stage):
        return self.modules.head(self.modules.net(batch[0]))

    def compute_objectives(self, predictions, batch, stage):
        if self.counts:
            losses = nn.functional.cross_entropy(predictions, batch[1], reduction="none")
            return losses.sum(), len(losses)
        return nn.functional.cross_entropy(predictions, batch[1])

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.after_step = weights(self)


class Counting(Audited):
    """Returns sums and counts."""

    counts = True


class Stream(torch.utils.data.IterableDataset):
    """Yields the points one by one."""

    def __iter__(self):
        return iter(points())


@dataclass(frozen=True)
class Ended:
    """How a training has ended on a rank.

    Attributes:
        words: of the audit; empty: it has found nothing.
        steps: optimizer steps that were made.
        is_before: whether the weights are those of before the step.
        audits: that were made.
    """

    words: str
    steps: int
    is_before: bool
    audits: int


def train(flip=None, kind=Audited, epochs=1, data=None, loading=None, **options):
    """Train with audits on this rank; return how that has ended."""
    torch.manual_seed(9)
    planted = type("Planted", (kind,), {"flip": flip})
    brain = planted(
        modules(),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        run_opts={**QUIET, "virtual_ranks": 6, "audit_every": 1, **options},
    )
    brain.plant()
    brain.after_step = weights(brain)
    audits = []
    strategy = run_of(brain).context.strategy
    told = strategy.finish_gradients

    def finish(optimizers=()):
        audits.append(strategy.witness)
        told(optimizers)

    strategy.finish_gradients = finish
    words = ""
    try:
        brain.fit(
            range(1, epochs + 1),
            points() if data is None else data,
            train_loader_kwargs={"batch_size": 2, **(loading or {})},
        )
    except AuditError as error:
        words = str(error)
    now = weights(brain)
    linear = [name for name in now if "running" not in name and "tracked" not in name]
    is_before = all(torch.equal(now[name], brain.after_step[name]) for name in linear)
    return Ended(words, brain.optimizer_step, is_before, audits[-1].audits)


def is_caught(flip, ended):
    """Say whether a flip was caught on all ranks before its step, and its rank was named."""
    return all(
        f"audit_every: rank {flip.rank} (host" in one.words
        and "computed other bits than the other" in one.words
        and f"in optimizer step {flip.step}" in one.words
        and one.steps == flip.step - 1
        and one.is_before
        for one in ended
    )


def draw(drawn, world_size):
    """Draw a flip; one that stays only where there is a majority."""
    return Flip(
        drawn.randrange(world_size),
        drawn.randint(1, STEPS),
        drawn.randrange(8),
        drawn.random(),
        drawn.randrange(32),
        world_size > 2 and drawn.random() < 0.5,
    )


#: Trainings in which nothing is flipped.
STILL = (
    {"kind": Audited},
    {"kind": Counting},
    {"kind": Counting, "grad_accumulation_factor": 2},
    {"kind": Audited, "strategy": "zero1", "grad_accumulation_factor": 2},
    {"kind": Audited, "data": Stream(), "virtual_ranks": 2},
    {"kind": Audited, "precision": "bf16"},
)


def flips(pool, number, seed):
    """Train with so many flips; return how many were caught."""
    drawn = random.Random(seed)
    caught = 0
    for trial in range(number):
        world_size = 2 + trial % 2
        flip = draw(drawn, world_size)
        # each rank has one shard, so that each gradient is audited
        run = functools.partial(train, flip, virtual_ranks=world_size)
        ended = pool.run(run, world_size=world_size)
        is_found = is_caught(flip, ended)
        caught += is_found
        if not is_found:
            print(f"NOT CAUGHT on {world_size} ranks: {flip}: {ended[0]}", flush=True)
    return caught


def false_alarms(pool, number):
    """Audit at least so many shards without a flip; return how many audits, and of how many runs
    something was found.
    """
    audits = alarms = 0
    trial = 0
    while audits < number:
        options = dict(STILL[trial % len(STILL)])
        trial += 1
        world_size = 3 if trial % 4 == 0 and options.get("virtual_ranks") != 2 else 2
        ended = pool.run(functools.partial(train, epochs=25, **options), world_size=world_size)
        audits += sum(one.audits for one in ended)
        found = [one.words for one in ended if one.words]
        alarms += bool(found)
        for words in found[:1]:
            print(f"FALSE ALARM with {options}: {words}", flush=True)
    return audits, alarms


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--audits", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    from tests.rank_pool import RankPool  # so that the ranks need not load it

    with RankPool(timeout=600) as pool:
        caught = flips(pool, options.flips, options.seed)
        print(f"{caught} of {options.flips} flips caught before the step, and the rank named")
        audits, alarms = false_alarms(pool, options.audits)
        print(f"{alarms} false alarms in {audits} audits")
    sys.exit(caught != options.flips or alarms > 0)


if __name__ == "__main__":
    main()
