"""What is drawn, described by plain values: a recipe, and the ways on which it is run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

VIRTUAL_RANKS = 8
# How the options name a strategy; several processes get DDP's place by themselves.
STRATEGIES = {"single": "single", "ddp": "auto", "zero1": "zero1", "fsdp": "fsdp"}
WORLDS = (1, 2, 4, 8)
DIVIDING = ("zero1", "fsdp")
COMBINATIONS = tuple(
    (strategy, world) for strategy in STRATEGIES if strategy != "single" for world in WORLDS
)


@dataclass(frozen=True)
class Recipe:
    """A model, its data, and options. The defaults are the simplest.

    Attributes:
        samples: of the training set.
        epochs: how many.
        batch: samples of a virtual rank's batch; not used with ``whole``.
        factor: batches of a virtual rank per optimizer step; not used with ``micro``.
        whole: samples of an optimizer step over all virtual ranks, or None.
        micro: most samples at a time, with ``whole``; or None.
        data: ``list``, ``sampler``, ``batches``, ``stream`` or ``divided stream``.
        shuffle: of a list.
        drop_last: of a list, or of a sampler.
        noisy_data: whether a list adds noise to its samples when they are read.
        counts_tokens: whether the loss is a sum over tokens, and their number.
        weighting: ``samples``, or ``batches`` that count the same.
        dropout: of the blocks.
        norm: ``layer`` or ``batch``, in the blocks; or None.
        tied: whether two layers ``inside`` of an entry have one weight, or layers of two
            ``entries``; or None.
        unused: whether there is a layer that nothing uses.
        frozen: whether a layer is not trained.
        thaws: whether that layer is trained from the second epoch on.
        recomputes: whether the blocks are computed again in the backward pass.
        optimizer: ``sgd``, ``adamw``, ``nadam``, ``fused`` (AdamW) or ``adafactor``.
        optimizers: one, or two of which each has an entry of the modules.
        own_fit_batch: whether the recipe has a ``fit_batch`` of its own.
        precision: ``fp32``, or ``bf16`` by autocast.
        max_norm: of the gradients, or 0.
        skips_nonfinite: whether a step whose gradients are not finite is left out.
        ema_decay: of averaged weights, or None.
        evaluates_average: whether the validation is that of averaged weights.
        schedule: ``step``, ``epoch`` or None.
        step_limit: the optimizer steps after which the run ends, or None.
        validation: samples of the validation set.
        shard_evaluation: whether it is divided over the virtual ranks.
        save_every: batches of a virtual rank from one checkpoint to the next; 0: at the end of an
            epoch alone.
        saves_in_background: whether checkpoints are written by a thread.
        sends_checkpoints: whether one rank reads them for all.
        saves_shards: whether each rank writes its part, where a strategy divides.
        blocks: whether FSDP2 gathers block by block.
        keeps_whole: whether FSDP2 keeps blocks whole until the backward pass.
    """

    samples: int = 24
    epochs: int = 1
    batch: int = 1
    factor: int = 1
    whole: int | None = None
    micro: int | None = None
    data: str = "list"
    shuffle: bool = False
    drop_last: bool = False
    noisy_data: bool = False
    counts_tokens: bool = False
    weighting: str = "samples"
    dropout: float = 0.0
    norm: str | None = None
    tied: str | None = None
    unused: bool = False
    frozen: bool = False
    thaws: bool = False
    recomputes: bool = False
    optimizer: str = "sgd"
    optimizers: int = 1
    own_fit_batch: bool = False
    precision: str = "fp32"
    max_norm: float = 0.0
    skips_nonfinite: bool = False
    ema_decay: float | None = None
    evaluates_average: bool = False
    schedule: str | None = None
    step_limit: int | None = None
    validation: int = 1
    shard_evaluation: bool = False
    save_every: int = 0
    saves_in_background: bool = False
    sends_checkpoints: bool = False
    saves_shards: bool = False
    blocks: bool = False
    keeps_whole: bool = False

    def __str__(self) -> str:
        """Return the call that makes it, with what is not the simplest."""
        values = ((one.name, getattr(self, one.name), one.default) for one in FIELDS)
        words = ", ".join(f"{name}={value!r}" for name, value, least in values if value != least)
        return f"Recipe({words})"

    @property
    def batches_of_a_step(self) -> int:
        """Batches of each virtual rank that make an optimizer step."""
        if self.whole is not None and self.micro is not None:
            return -(-self.whole // (self.micro * VIRTUAL_RANKS))
        return self.factor

    @property
    def is_stream(self) -> bool:
        return self.data in {"stream", "divided stream"}


FIELDS = dataclasses.fields(Recipe)


@dataclass(frozen=True)
class Way:
    """How a recipe is run: with a strategy, on a number of processes, and what it goes on with
    after a kill.

    Attributes:
        strategy: ``ddp``, ``zero1`` or ``fsdp``.
        world: number of processes.
        killed: the moment of the kill, as in :class:`tests.model.recipe.Moment`; or None.
        share: which of these moments, as a share of all that come.
        strategy_after: the strategy with which it goes on.
        world_after: number of processes on which it goes on.
    """

    strategy: str
    world: int
    killed: str | None = None
    share: float = 0.0
    strategy_after: str = "single"
    world_after: int = 1

    def __str__(self) -> str:
        """Return it in words."""
        begins = f"{self.strategy} on {self.world}"
        if self.killed is None:
            return begins
        ends = f"{self.strategy_after} on {self.world_after}"
        return f"{begins}, killed at {self.share:.0%} of each {self.killed}, then {ends}"


@dataclass(frozen=True)
class Moments:
    """The moment of a kill, by its number.

    Attributes:
        killed: its kind, or None.
        killed_at: its number, from 1.
    """

    killed: str | None = None
    killed_at: int = 1


def moment_of(way: Way, counts: dict[str, int]) -> Moments:
    """Return the moment of a way's kill, of the moments that came in one process.

    Args:
        way: of a run.
        counts: how often each moment came there.
    """
    if way.killed is None:
        return Moments()
    number = counts[way.killed]
    if way.killed == "batch":
        number //= way.world  # each process has its part of the shards
    return Moments(way.killed, min(1 + int(way.share * number), number))
