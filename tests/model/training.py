"""One training, described by plain values, of which each has a simplest one; and how its samples
make up optimizer steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import torch

SEED = 17
REFERENCE = 5  # samples per step that the learning rate is meant for, with lr_scaling
MOMENTS = ("batch", "step", "save", "epoch", "saved")


@dataclass(frozen=True)
class Training:
    """A recipe, its data, its options, and how the run is killed and goes on.

    The defaults are the simplest training. A failing one is made smaller towards them.

    Attributes:
        world: number of ranks.
        samples: of the training set.
        epochs: how many.
        batch: samples of a batch of one process; not used with ``whole``.
        factor: batches per optimizer step; not used with ``micro``.
        whole: samples of an optimizer step over all ranks, or None.
        micro: most samples at a time on a process, with ``whole``; or None.
        data: ``list``, ``sampler``, ``batches``, ``stream`` or ``divided stream``.
        shuffle: of a list.
        drop_last: of a list.
        counts_tokens: whether the loss is a sum over tokens, and their number.
        weighting: ``samples``, or ``batches`` that count the same.
        norm: whether the net has a BatchNorm layer.
        frozen: whether its second layer is not trained.
        thaws: whether that layer is trained from the second epoch on.
        optimizers: one, or two of which each has a part of the net.
        adam: instead of SGD with momentum.
        own_fit_batch: whether the recipe has a ``fit_batch`` of its own.
        strategy: ``auto``, ``zero1`` or ``fsdp``.
        virtual_ranks: a number that the numbers of ranks divide, or None.
        max_norm: of the gradients, or 0.
        ema_decay: of averaged weights, or None.
        evaluates_average: whether the validation is that of averaged weights.
        schedule: ``step``, ``epoch``, ``plateau`` or None.
        step_limit: the optimizer steps after which the run ends, or None.
        scales_rate: whether learning rates follow the samples of a step.
        validation: samples of the validation set.
        shard_evaluation: whether it is divided over the ranks.
        save_every: batches from one checkpoint to the next; 0: at the end of an epoch alone.
        saves_in_background: whether checkpoints are written by a thread.
        sends_checkpoints: whether one rank reads them for all.
        killed: the moment of the kill: a ``batch`` begins, a ``step`` has been made, a ``save`` is
            under way, the validation of an ``epoch`` is over, or the epoch is ``saved``; or None.
        killed_at: the number of this batch, step, save or epoch.
        world_after: number of ranks on which the run goes on.
        strategy_after: the strategy with which it goes on.
    """

    world: int = 1
    samples: int = 4
    epochs: int = 1
    batch: int = 2
    factor: int = 1
    whole: int | None = None
    micro: int | None = None
    data: str = "list"
    shuffle: bool = False
    drop_last: bool = False
    counts_tokens: bool = False
    weighting: str = "samples"
    norm: bool = False
    frozen: bool = False
    thaws: bool = False
    optimizers: int = 1
    adam: bool = False
    own_fit_batch: bool = False
    strategy: str = "auto"
    virtual_ranks: int | None = None
    max_norm: float = 0.0
    ema_decay: float | None = None
    evaluates_average: bool = False
    schedule: str | None = None
    step_limit: int | None = None
    scales_rate: bool = False
    validation: int = 1
    shard_evaluation: bool = False
    save_every: int = 0
    saves_in_background: bool = False
    sends_checkpoints: bool = False
    killed: str | None = None
    killed_at: int = 1
    world_after: int = 1
    strategy_after: str = "auto"

    def __str__(self) -> str:
        """Return the call that makes it, with what is not the simplest."""
        values = ((one.name, getattr(self, one.name), one.default) for one in FIELDS)
        words = ", ".join(f"{name}={value!r}" for name, value, least in values if value != least)
        return f"Training({words})"

    # ------------------------------------------------------------------ the numbers of the oracle

    @property
    def parts(self) -> int:
        """Ranks, or virtual ranks, that work on a batch."""
        return self.virtual_ranks or self.world

    @property
    def keeps_its_parts(self) -> bool:
        """Whether batches are divided alike after a kill."""
        same = self.world == self.world_after or self.virtual_ranks is not None
        return self.killed is None or same

    @property
    def batches_of_a_step(self) -> int:
        if self.whole is not None and self.micro is not None:
            return -(-self.whole // (self.micro * self.parts))
        return self.factor

    @property
    def samples_of_a_step(self) -> int:
        return self.whole or self.batch * self.parts * self.factor

    @property
    def is_stream(self) -> bool:
        return self.data in {"stream", "divided stream"}

    @property
    def rate_scale(self) -> float:
        return self.samples_of_a_step / REFERENCE if self.scales_rate else 1.0

    def weights(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what each sample of a batch of all ranks weighs in its step."""
        if self.counts_tokens:
            return tokens.double()
        weight = 1.0 / len(tokens) if self.weighting == "batches" else 1.0
        return torch.full((len(tokens),), weight, dtype=torch.float64)

    def rate(self, epochs: list) -> object:
        """Return the factor of the learning rate, by the steps or epochs that are done.

        It knows how many there will be; of a stream only what a limit says.
        """
        ends = list(itertools.accumulate(map(len, epochs)))
        limit = self.step_limit
        if self.schedule == "epoch":
            is_cut = limit and not self.is_stream
            return rate_after(1 + sum(end < limit for end in ends[:-1]) if is_cut else len(ends))
        return rate_after(limit if self.is_stream else min(ends[-1], limit or ends[-1]))

    # ------------------------------------------------------------------ who has which samples

    def steps(self) -> list[list[list[list[int]]]]:
        """Return the epochs: optimizer steps, their batches over all ranks, their samples."""
        return [self._steps_of(self.order(epoch)) for epoch in range(1, self.epochs + 1)]

    def order(self, epoch: int) -> list[int]:
        """Return the order of an epoch."""
        if self.data == "sampler":
            return sampled(self.samples)
        return shuffled(self.samples, epoch) if self.shuffle else list(range(self.samples))

    def _steps_of(self, order: list[int]) -> list[list[list[int]]]:
        if self.whole is not None and not self.is_stream:
            cut = pieces(order, self.whole, whole_only=self.drop_last)
            return [self._batches_of(samples) for samples in cut]
        factor = self.batches_of_a_step
        size = self.samples_of_a_step // factor
        if self.data == "divided stream":
            own = [pieces(order[rank :: self.parts], self.batch) for rank in range(self.parts)]
            rounds = itertools.zip_longest(*own, fillvalue=[])
            batches = [list(itertools.chain.from_iterable(one)) for one in rounds]
        else:
            batches = pieces(order, size, whole_only=self.drop_last)
        return pieces(batches, factor)

    def _batches_of(self, samples: list[int]) -> list[list[int]]:
        """Divide a global batch; a smaller one into no more batches than it needs."""
        number = self.batches_of_a_step
        if len(samples) < self.whole:
            number = -(-len(samples) // -(-self.whole // number))
        each, more = divmod(len(samples), number)
        sizes = [each + (place < more) for place in range(number)]
        ends = [sum(sizes[: place + 1]) for place in range(number)]
        return [samples[end - size : end] for size, end in zip(sizes, ends, strict=True)]


FIELDS = dataclasses.fields(Training)


def shuffled(samples: int, epoch: int) -> list[int]:
    """Return the order of an epoch: samples sorted by a hash of seed, epoch and number.

    So it is for up to 16,384 samples.
    """
    key = mixed(mixed(SEED) ^ epoch)
    return sorted(range(samples), key=lambda number: mixed(number ^ key))


def mixed(value: int) -> int:
    """Return the next number of SplitMix64."""
    bits = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & bits
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & bits
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & bits
    return value ^ (value >> 31)


def pieces(things: list, size: int, *, whole_only: bool = False) -> list[list]:
    """Cut a list into pieces of a size; the last may be shorter, or is left out."""
    end = len(things) // size * size if whole_only else len(things)
    return [things[start : start + size] for start in range(0, end, size)]


def sampled(samples: int) -> list[int]:
    """Return the order of a sampler of the recipe's own: as if sorted by length."""
    return sorted(range(samples), key=lambda number: (number % 3, number))


def rate_after(total: int | None):
    """Return a schedule's factor for a number of steps in all; None: it is not known."""
    if total is None:
        return lambda done: 0.9**done
    return lambda done: 1.0 - 0.8 * min(done / total, 1.0)


def rows_of(first: int, samples: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make inputs, targets and tokens of samples by their numbers."""
    numbers = torch.arange(first, first + samples, dtype=torch.float64).unsqueeze(1)
    inputs = torch.sin(numbers * torch.tensor([0.7, 1.1, 2.3], dtype=torch.float64) + 0.3)
    targets = inputs.sum(1, keepdim=True).tanh() + 0.1 * (numbers % 3)
    tokens = (torch.arange(first, first + samples) * 2) % 5
    return inputs, targets, tokens
