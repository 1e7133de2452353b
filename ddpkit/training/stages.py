"""Wires one stage of a run together: loader, loop, beat, bar, checkpoints, profiler.

The loops of :mod:`ddpkit.training.loop` know nothing of these; the Brain only says that a stage shall run.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from ddpkit.base.signals import Interrupts
from ddpkit.comm.agreement import require_agreement
from ddpkit.control.periodic_sync import Beat, Wishes
from ddpkit.control.rank_status import POSITION
from ddpkit.control.stopping import exit_code
from ddpkit.data.likeness import MOST_ITEMS, FirstItems, require_alike, sketch, warn_if_alike
from ddpkit.data.sharded_loader import first_samples
from ddpkit.data.streams import BatchShard, StreamLoader, guess_batch_size, is_sharded
from ddpkit.dataloader import LoopedLoader, plan_of, set_epoch
from ddpkit.distributed import (
    get_world_size,
    if_main_process,
    start_sum_over_ranks,
    sum_over_ranks,
)
from ddpkit.errors import RunStopped
from ddpkit.logger import get_logger
from ddpkit.metrics import LossMeter, begin_stage
from ddpkit.reporting.progress import COLOURS, ProgressBar
from ddpkit.train_logger import run_event
from ddpkit.training.feed import Feed
from ddpkit.training.gathering import Seen, is_divided
from ddpkit.training.loop import LoopHost, evaluate_epoch, train_epoch
from ddpkit.training.stream_feed import StreamFeed
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpkit.control.periodic_sync import BeatReport
    from ddpkit.run_opts import RunOptions
    from ddpkit.training.feed import Counts
    from ddpkit.training.strategy import Strategy

logger = get_logger(__name__)


class StageHost(LoopHost, Protocol):
    """What a stage asks of the Brain beyond what the loops ask.

    Ranks: as the stages.

    Example:
        >>> StageHost.__name__
        'StageHost'
    """

    run_opts: RunOptions
    avg_train_loss: float
    profiler: Any
    _interrupts: Interrupts
    _strategy: Strategy

    @property
    def _freezes(self) -> bool:
        """Whether the recipe says which optimizers step."""
        ...

    def _drop_frozen_gradients(self) -> None:
        """Drop the gradients of optimizers that do not step."""
        ...

    def _save_now(self) -> None:
        """Save in the middle of an epoch."""
        ...

    def _settle(self) -> None:
        """Note that the first steps have been made."""
        ...

    def _look_at(self, batch: Any) -> None:
        """Say what should be known of batches like this one, which was trained on, as far as it has not been said."""
        ...

    def _stop_cause(self) -> str:
        """Return what has asked this rank to stop, or nothing."""
        ...

    def _stop_now(self, cause: str, *, is_saved: bool) -> None:
        """Save, unless that was done at this very step, and raise :class:`~ddpkit.errors.RunStopped`."""
        ...

    def _save_intra_epoch(self, seconds_since_ckpt: float, steps_since_ckpt: int) -> bool:
        """Save in the middle of an epoch if it is time, and say whether it was."""
        ...

    def _begin_pass(self, loader: Any) -> tuple[int, Callable[[], object]]:
        """Put a loader where a checkpoint says; return how many batches to leave out, and what to call then."""
        ...

    def _end_pass(self) -> None:
        """Collect what a save after the epoch will need of every rank."""
        ...

    def _flush_window(self) -> None:
        """Step the optimizers on gradients that were accumulated and never used."""
        ...


def counts_of(loader: Any) -> Counts | None:
    """Return what knows the number of samples of a loader's batches, or None.

    Ranks: local.

    Example:
        >>> counts_of([1, 2]) is None
        True
    """
    if isinstance(loader, LoopedLoader):
        return loader if loader.has_counts else None
    return plan_of(loader)


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, or None for a stream, whose length nobody can vouch for.

    Ranks: local.

    Example:
        >>> length_of([1, 2]), length_of(iter([]))
        (2, None)
    """
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:
        return None


def run_training(host: StageHost, loader: Any, epoch: int, *, enable_bar: bool) -> float:
    """Train on one epoch of a loader.

    Args:
        host: the Brain.
        loader: this rank's batches.
        epoch: from 1.
        enable_bar: show progress (main process only, whatever is given).

    Returns:
        The mean loss over all samples of all ranks.

    Ranks: collective.

    Example:
        >>> run_training.__name__
        'run_training'
    """
    progress, options = host.progress, host.run_opts
    length = length_of(loader)
    if length is not None:
        progress.step = min(progress.step, length)  # the last step of an epoch may be a shorter one than elsewhere
    left_out, ready = host._begin_pass(loader)
    set_epoch(loader, epoch)  # after that: what a stream remembers may be the epoch before
    _require_same_draw(loader)
    feed = _feed(host, loader, left_out, ready)
    progress.closed, progress.trained, progress.sums = progress.step, progress.meter, None
    _watch(host, Stage.TRAIN, loader)
    saves = _IntraEpochSaves(host)
    beat = Beat(sum_over_ranks, get_world_size(), is_main=if_main_process())
    started = time.monotonic()
    samples_before = int(sum_over_ranks([progress.meter.samples])[0])
    with _bar(Stage.TRAIN, epoch, feed.length, options, initial=progress.step, enable=enable_bar) as bar:

        def on_beat(report: BeatReport, batch: Any) -> None:
            host._settle()
            host._look_at(batch)
            host.avg_train_loss = report.loss
            bar.show(report.step, report.loss, report.samples - samples_before)
            saves.on_beat(report)

        limit = options.optimizer_step_limit
        train_epoch(
            host,
            feed,
            beat,
            on_beat,
            float("inf") if limit is None else limit,
            on_window=saves.on_window(),
            tell=saves.tell,
        )
        host._flush_window()
        progress.window.count = 1  # what comes next, an evaluation, repeats nothing to keep step
        host._end_pass()
        return _finish(host, Stage.TRAIN, epoch, time.monotonic() - started, bar)


def run_evaluation(host: StageHost, loader: Any, stage: Stage, epoch: int | None, *, enable_bar: bool) -> float:
    """Evaluate a loader.

    Args:
        host: the Brain.
        loader: this rank's batches: the whole set, or its part of it.
        stage: VALID or TEST.
        epoch: of the training, or None.
        enable_bar: show progress (main process only, whatever is given).

    Returns:
        The mean loss over all samples, one number for all ranks.

    Ranks: collective.

    Example:
        >>> run_evaluation.__name__
        'run_evaluation'
    """
    options = host.run_opts
    _require_same_draw(loader)
    host.progress.meter = LossMeter()
    _watch(host, stage, loader)
    started = time.monotonic()
    limit = options.debug_batches if options.debug else None
    length = length_of(loader)
    if length is not None and limit is not None:
        length = min(length, limit)
    with _bar(stage, epoch, length, options, enable=enable_bar) as bar:
        plan, beat = plan_of(loader), Beat(list, 1, is_main=True)
        bar.partial = plan is not None and plan.world_size > 1
        confer = StopsOfEvaluation(host)
        batches = compared(loader, stage)
        batches = batches if limit is None else _First(batches, limit)
        evaluate_epoch(host, batches, stage, bar, count=_counting(loader), beat=beat, confer=confer)
        confer.await_others()
        return _finish(host, stage, epoch, time.monotonic() - started, bar)


def _require_same_draw(loader: Any) -> None:
    """Make sure that a user's sampler, of which every rank takes its part, has drawn the same on all of them."""
    plan = plan_of(loader)
    if plan is not None and plan.world_size > 1:
        facts = plan.drawn_words()
        if facts:
            require_agreement(facts)


def _watch(host: StageHost, stage: Stage, loader: Any) -> None:
    """Note, for gathering and for the metrics, what a stage runs over, and whether that is divided over the ranks."""
    is_training = stage is Stage.TRAIN
    divided = get_world_size() > 1 and (is_training or is_divided(loader, unknown=host.run_opts.shard_evaluation))
    begin_stage(divided=divided)
    POSITION.stage_begins()
    host.progress.seen = Seen(stage, loader, divided, first=host.progress.step if is_training else 0)


def _feed(host: StageHost, loader: Any, left_out: int, ready: Callable[[], object]) -> Feed | StreamFeed:
    options, length = host.run_opts, length_of(loader)
    if length is None:
        return _stream_feed(host, loader, left_out, ready)
    if options.debug:
        length = min(length, options.debug_batches)
    batches = compared(loader, Stage.TRAIN)
    return Feed(
        loader=batches if host.profiler is None else _Profiled(batches, host.profiler, left_out),
        length=length,
        counts=counts_of(loader),
        factor=options.grad_accumulation_factor,
        weighting=options.loss_weighting,
        world_size=get_world_size(),
        start=host.progress.step,
        left_out=left_out,
        ready=ready,
    )


def _stream_feed(host: StageHost, loader: Any, left_out: int, ready: Callable[[], object]) -> StreamFeed:
    """Feed from what has no known number of batches: the ranks tell each other what they have."""
    options, done = host.run_opts, host.progress.step
    if isinstance(loader, (StreamLoader, BatchShard)):
        loader.keep_step = True
    batches = compared(loader, Stage.TRAIN)
    batches = batches if host.profiler is None else _Profiled(batches, host.profiler, left_out)
    if options.debug:
        batches = _First(batches, max(options.debug_batches - done + left_out, 0))
    return StreamFeed(
        loader=batches,
        factor=options.grad_accumulation_factor,
        weighting=options.loss_weighting,
        whole_batches=getattr(loader, "batch_size", None) is None,
        world_size=get_world_size(),
        start=done,
        start_sum=start_sum_over_ranks,
        size_of=_size_of(loader),
        uneven=host._strategy.noting_use,
        left_out=left_out,
        ready=ready,
    )


def _size_of(loader: Any) -> Callable[[Any], int | None]:
    """Return what tells the number of samples of a batch that was just read; None of one that another rank has."""
    return loader.size_of if isinstance(loader, (StreamLoader, BatchShard)) else guess_batch_size


def _counting(loader: Any) -> Callable[[int, Any], int]:
    """Return what tells a batch's number of samples: the plan, or where there is none the loader or the batch."""
    counts = counts_of(loader)
    if counts is None:
        size_of = _size_of(loader)
        return lambda _, batch: size_of(batch) or 0
    return lambda number, _: counts.count(number)


def compare_first_samples(name: str, loader: Any) -> None:
    """Make sure that all ranks hold the same dataset, where each is given its part of it: by a sample or two.

    Args:
        name: such as ``"train"``.
        loader: of this rank, or None.

    Raises:
        RankMismatchError: they do not. On every rank.

    Ranks: collective.

    Example:
        >>> compare_first_samples("train", [1, 2])
    """
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    plan = plan_of(inner)
    if plan is None or plan.world_size == 1:
        return
    found = first_samples(inner)
    require_alike(
        None if found is None else FirstItems((), found[0]),
        lambda: first_samples(inner, MOST_ITEMS, 3),
        f"{name}: the ranks do not hold the same data, and each would be given one part in {plan.world_size} of what "
        f"it holds: {type(inner.dataset).__name__} is the same length everywhere, and its samples differ. Most of them "
        "would be lost in silence. Let every rank load all files, in the same order (sort a list of files). If they "
        "are drawn at random, seed the generator alike on every rank. If each rank shall keep files of its own, give "
        "a DataLoader of them with `loader.is_sharded = True`",
        f"the first samples of {name}",
        reads_more=True,
    )


def compared(loader: Any, stage: Stage) -> Iterable[Any]:
    """Return what yields a loader's batches, and compares what the ranks have read as soon as there is a first one.

    Args:
        loader: of this rank.
        stage: for the message.

    Returns:
        The loader itself, unless it is a stream or a loader of batches that every rank reads whole.

    Ranks: local; to take the first batch is then collective.

    Example:
        >>> compared([1, 2], Stage.TEST)
        [1, 2]
    """
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    if isinstance(inner, (StreamLoader, BatchShard)) and inner.is_dealt:
        return _Compared(loader, inner, stage)
    if get_world_size() > 1 and isinstance(inner, StreamLoader) and is_sharded(inner.whole):
        return _CalledDivided(loader, inner, stage)
    batches: Iterable[Any] = loader
    return batches


class _CalledDivided:
    """The batches of a stream that says that it divides itself; before the first the ranks make sure that it does."""

    def __init__(self, loader: Iterable[Any], inner: StreamLoader, stage: Stage) -> None:
        self.loader, self.inner, self.stage = loader, inner, stage

    def __iter__(self) -> Iterator[Any]:
        return self._batches(iter(self.loader))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        first = list(itertools.islice(batches, 1))
        warn_if_alike(
            sketch(first[0]) if first else None,
            f"{self.stage.name}: {type(self.inner.whole).__name__} is said to divide itself over the ranks, and all "
            f"{get_world_size()} have read the same first batch: its items seem to come {get_world_size()} times. "
            "Let it divide itself (a pipeline of webdataset: nodesplitter=webdataset.split_by_node), or leave "
            "`is_sharded` out, and it is divided here.",
            f"the first batch of {self.stage.name}",
        )
        yield from first
        yield from batches


class _Compared:
    """The batches of a loader; before the first of them the ranks compare what they have read."""

    def __init__(self, loader: Iterable[Any], inner: StreamLoader | BatchShard, stage: Stage) -> None:
        self.loader, self.inner, self.stage = loader, inner, stage

    def __iter__(self) -> Iterator[Any]:
        return self._batches(iter(self.loader))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        first = list(itertools.islice(batches, 1))
        whole = self.inner.whole
        kind, items = ("loader", "batches") if isinstance(self.inner, BatchShard) else ("dataset", "items")
        require_alike(
            self.inner.first,
            self.inner.read_again,
            f"{self.stage.name}: the ranks do not read the same {items}, and each would keep one in "
            f"{get_world_size()}: {type(whole).__name__} is dealt out by counting, which is right only where all ranks "
            "read the same. Samples would be lost in silence. If it divides itself over the ranks, say so: set "
            f"`is_sharded = True` on the {kind}. If it is random, seed it: draw from Python's, numpy's or torch's "
            "global generator, which are seeded alike on all ranks while it is read. If it lists files, sort them",
            f"the first {items} of {self.stage.name}",
        )
        yield from first
        yield from batches


class _Profiled:
    """Tells the profiler after each batch that a step is over; not after those that are only read again."""

    def __init__(self, loader: Iterable[Any], profiler: Any, left_out: int) -> None:
        self.loader, self.profiler, self.left_out = loader, profiler, left_out

    def __iter__(self) -> Iterator[Any]:
        return self._steps(iter(self.loader))

    def _steps(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            yield batch
            if number >= self.left_out:
                self.profiler.step()


class _First:
    """The first batches of a loader."""

    def __init__(self, loader: Iterable[Any], number: int) -> None:
        self.loader, self.number = loader, number

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.loader, self.number)


def _bar(
    stage: Stage, epoch: int | None, length: int | None, options: RunOptions, *, initial: int = 0, enable: bool
) -> ProgressBar:
    label = stage.name.lower() if epoch is None else f"epoch {epoch} {stage.name.lower()}"
    colours = COLOURS | {key.upper(): value for key, value in dict(options.tqdm_barcolor or {}).items()}
    return ProgressBar(
        label,
        length,
        initial=initial,
        enable=enable and if_main_process(),
        colour=colours.get(stage.name) if options.tqdm_colored_bar else None,
    )


def _finish(host: StageHost, stage: Stage, epoch: int | None, seconds: float, bar: ProgressBar) -> float:
    """Agree on the mean loss, write it down, and return it."""
    meter, seen, copies = host.progress.meter, host.progress.seen, 1
    if seen is not None:
        seen.close(host.progress.step)
        copies = 1 if seen.divided else get_world_size()  # where every rank had every sample
    loss_sum, count, bad, samples = sum_over_ranks([float(number) for number in (*meter.sums(), meter.samples)])
    mean = loss_sum / count if count else float("nan")
    if stage is Stage.TRAIN:
        host.progress.sums = loss_sum, count, samples
    bad, samples = bad // copies, samples // copies
    bar.partial = False
    bar.show(host.progress.step, mean, int(samples))
    if stage is not Stage.TRAIN and not samples and not count:
        logger.warning("%s: there was nothing to evaluate: the mean loss is NaN.", stage.name)
    if bad:
        logger.warning(
            "%s: %d batches had a loss that is not finite; they are left out of the mean.", stage.name, int(bad)
        )
    facts = {}
    if stage is Stage.TRAIN:
        _tell_clipped(host, epoch)
        facts["clipped_share"] = host.progress.clipped_share
    run_event(
        "stage",
        stage=stage.name,
        epoch=epoch,
        loss=mean,
        samples=int(samples),
        optimizer_step=host.progress.optimizer_step,
        **facts,
        seconds=round(seconds, 3),
    )
    return mean


def _tell_clipped(host: StageHost, epoch: int | None) -> None:
    """Say in how many steps of the epoch gradients were clipped; the first time also where logging is not set up."""
    progress = host.progress
    if progress.clipped:
        say = logger.info if progress.has_told_clipping else logger.announce
        progress.has_told_clipping = True
        say(
            "epoch %s: the gradients of %d of %d optimizer steps were clipped to norm %s (--max_grad_norm).",
            epoch,
            progress.clipped,
            progress.optimizer_step - progress.began_at,
            host.run_opts.max_grad_norm,
        )


class StopsOfEvaluation:
    """Has the ranks agree about once a second on whether to stop.

    They may have different numbers of batches, and of a stream nobody knows them. So a rank whose batches are used up
    goes on agreeing, at the steps that it does not make, until those of all are.

    Args:
        host: the Brain.
        add_up: adds up a few numbers over all ranks; None: in a collective.

    Ranks: collective, but for making one.

    Example:
        >>> from types import SimpleNamespace
        >>> host = SimpleNamespace(progress=SimpleNamespace(step=0), _stop_cause=lambda: "")
        >>> confer = StopsOfEvaluation(host)
        >>> confer(1); confer.await_others()
    """

    def __init__(self, host: StageHost, add_up: Callable[[list[float]], list[float]] | None = None) -> None:
        self.host = host
        self.beat = Beat(add_up or sum_over_ranks, get_world_size(), is_main=if_main_process())
        self.beat.start(host.progress.step)

    def __call__(self, step: int) -> None:
        """Stop at this step if any rank has been asked to."""
        if step >= self.beat.due:
            self._confer(step, has_more=True)

    def await_others(self) -> None:
        """Agree with those that still have batches."""
        while self._confer(self.beat.due, has_more=False):
            POSITION.moves += 1  # the others'

    def _confer(self, step: int, *, has_more: bool) -> int:
        """Return how many ranks have more batches; if none has, there is nothing to be stopped."""
        report = self.beat(step, 0.0, 0.0, int(has_more), Wishes(stop=self.host._stop_cause()))
        if report.stop and report.samples:
            raise RunStopped(exit_code(report.stop), report.stop)
        return report.samples


class _IntraEpochSaves:
    """Decides, alike on every rank, when to save in the middle of an epoch."""

    def __init__(self, host: StageHost) -> None:
        self.host = host
        self.last_time = time.monotonic()
        self.last_step = host.progress.step

    def tell(self) -> Wishes:
        """Return the seconds since the last save, and what this rank has been asked for."""
        host = self.host
        return Wishes(time.monotonic() - self.last_time, host._interrupts.save_wanted, host._stop_cause())

    def on_beat(self, report: BeatReport) -> None:
        """Stop or save if any rank has been asked to, or save if the main process's clock says so."""
        if report.stop and not self._is_pending():
            self.host._stop_now(report.stop, is_saved=self.last_step == self.host.progress.step)
        if report.save_wanted and not self._is_pending():
            self.host._interrupts.save_wanted = False
            self.host._save_now()
            self._start_anew()
        else:
            self._save_if_due(report.main_seconds, 0)

    def on_window(self) -> Callable[[], None] | None:
        """Return what is to be done after every optimizer step, if anything is."""
        by_steps = self.by_steps if self.host.run_opts.ckpt_interval_steps > 0 else None
        if not self.host._freezes:
            return by_steps
        return self._drop_and_save

    def _drop_and_save(self) -> None:
        self.host._drop_frozen_gradients()
        if self.host.run_opts.ckpt_interval_steps > 0:
            self.by_steps()

    def by_steps(self) -> None:
        """Save if enough steps have passed."""
        self._save_if_due(0.0, self.host.progress.step - self.last_step)

    def _save_if_due(self, seconds: float, steps: int) -> None:
        if not self._is_pending() and self.host._save_intra_epoch(seconds, steps):
            self._start_anew()

    def _is_pending(self) -> bool:
        """Say whether there are gradients that are not used yet: they are in no checkpoint."""
        progress = self.host.progress
        return progress.window.pending(progress.step) > 0

    def _start_anew(self) -> None:
        self.last_time, self.last_step = time.monotonic(), self.host.progress.step
