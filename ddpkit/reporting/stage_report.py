"""Reports of a stage: the progress bar, and means of the values that a recipe logs with
``self.log``.

The bar is the main process's only, on stderr, refreshed by time; without a terminal it is a log
line now and then. The only module that imports tqdm. Values are averaged over batches and over the
ranks, without a wait at any step.

A value stays on its device until the next sync of the ranks: about once a second for values logged
per step, and at the end of the stage for all. Ranks need not log the same names. A name is agreed
on once, after a rank has used it for the first time; after that its sums travel with the sums of
the loss.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ddpkit.distributed import exchange, if_main_process, sum_over_ranks
from ddpkit.errors import BatchError
from ddpkit.logger import get_logger
from ddpkit.reporting.bar_layout import BarFacts, fitting_format, left_in_words, wait_in_words
from ddpkit.reporting.run_log import Current, no_step, run_event
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Self

    from ddpkit.reporting.time_left import Estimate

logger = get_logger(__name__)

LINE_SECONDS = 30.0
_TRAIN = "train"
_VALID = "valid"
_PREDICTION = "prediction"


class _Kind(NamedTuple):
    """How a name is used; alike on all ranks."""

    is_sum: bool
    is_per_step: bool


class RunFacts(NamedTuple):
    """What a bar shows of the run, beyond its own stage.

    Attributes:
        rate: learning rate of the next step, in words; empty: not shown.
        left: time left of the whole run; None: not shown.
        data_wait: share of a step in which the loop waits for data, 0 to 1; it is shown where it is
            large.

    Ranks: local.
    """

    rate: str = ""
    left: Estimate | None = None
    data_wait: float = 0.0


def _nothing_known(_: int) -> RunFacts:
    return RunFacts()


class _Held(NamedTuple):
    """The sums of one name on this rank: of the stage, and since the last sync of the ranks."""

    kind: _Kind
    total: Any
    recent: Any


class LoggedValues:
    """The values that a recipe logs, stage by stage.

    Args:
        new_meter: makes what adds up the values of a name: :class:`ddpkit.metrics.LossMeter`, or
            what has its methods.
        add_up: adds up the totals of such meters over the ranks.

    Attributes:
        values: means of the last training, validation and test, by stage (``"train"``, ``"valid"``,
            ``"test"``) and name. Values of batches are equal on all ranks; values of
            ``on_stage_end`` are this rank's.
        train_logger: receives values logged per step; or None.

    Ranks: as its methods say.

    State: the sums of the training stage on this rank.

    Example:
        >>> from ddpkit.metrics import LossMeter
        >>> logged = LoggedValues(LossMeter)
        >>> with logged.during(Stage.VALID, epoch=1):
        ...     logged.add("accuracy", 3, 4)
        ...     logged.add("accuracy", 1, 4)
        ...     _ = logged.sync([], at_end=True)
        >>> logged.values
        {'valid': {'accuracy': 0.5}}
    """

    def __init__(
        self,
        new_meter: Callable[[], Any],
        add_up: Callable[[list[Any]], list[Any]] = sum_over_ranks,
    ) -> None:
        self.values: dict[str, dict[str, float]] = {}
        self.train_logger: Any = None
        self._new_meter = new_meter
        self._add_totals = add_up
        self._stage = ""
        self._is_over = False
        self._epoch: int | None = None
        self._set_name = ""
        self._of_other_sets: dict[str, float] = {}
        self._held: dict[str, dict[str, _Held]] = {}  # by stage and name, as are the next
        self._known: dict[str, dict[str, _Kind]] = {}
        self._per_step: dict[str, float] = {}
        self._fresh: list[tuple[int, Callable[..., None], Any, Any]] = []

    @contextlib.contextmanager
    def during(
        self,
        stage: Stage | None,
        epoch: int | None,
        optimizer_step: Callable[[], int | None] = no_step,
        set_name: str = "",
    ) -> Iterator[None]:
        """Return a context for a stage with its hooks.

        Args:
            stage: its values are reset; TRAIN also resets the validation's. None: a prediction,
                which logs nothing.
            epoch: or None.
            optimizer_step: returns the optimizer steps of the weights; loggers write at them.
            set_name: of the set that is evaluated; empty: it has none.

        Ranks: local.
        """
        before = self._stage, self._epoch, self._is_over, self._set_name
        self._set_name = set_name
        self._stage = stage.name.lower() if stage else _PREDICTION
        self._epoch = epoch
        self._is_over = False
        for name in {self._stage, _VALID} if stage is Stage.TRAIN else {self._stage}:
            self.values.pop(name, None)
        self._held[self._stage] = {}
        outer = Current.logged, Current.optimizer_step, Current.test_set
        Current.test_set = set_name if stage is Stage.TEST else ""
        Current.logged = self.reported
        Current.optimizer_step = optimizer_step
        try:
            yield
        finally:
            Current.logged, Current.optimizer_step, Current.test_set = outer
            self._stage, self._epoch, self._is_over, self._set_name = before

    def set_aside(self, loss: float) -> None:
        """Keep the values of a set that does not decide until the validation has come to the one
        that does.

        Args:
            loss: mean of the set.

        Ranks: local.
        """
        values = {"loss": loss, **self.values.pop(self._stage, {})}
        self._of_other_sets |= {f"{self._set_name}/{name}": value for name, value in values.items()}

    def take_other_sets(self) -> None:
        """Add the values of the other sets, each under the name of its set, to those of this one.

        Ranks: local.
        """
        if self._of_other_sets:
            own = self.values.get(self._stage, {})
            self.values[self._stage] = {**own, **self._of_other_sets, **own}
            self._of_other_sets = {}

    def reported(self) -> Mapping[str, Mapping[str, float]]:
        """Return the values for the statistics of the current stage; a validation includes its
        training's values.

        Ranks: local.
        """
        stages = (_TRAIN, _VALID) if self._stage == _VALID else (self._stage,)
        return {name: self.values[name] for name in stages if self.values.get(name)}

    def of_stage(self) -> dict[str, float]:
        """Return the means of the present stage, by name; empty before they are made.

        Ranks: local.
        """
        return dict(self.values.get(self._stage, {}))

    # ------------------------------------------------------------------ logging

    def add(
        self,
        name: str,
        value: Any,
        count: Any = None,
        weight: float = 1.0,
        *,
        per_step: bool = False,
        step: int = 0,
    ) -> None:
        """Add a value. Waits for the device in ``on_stage_end`` only.

        Args:
            name: of the value.
            value: a number or a tensor of one element: a mean, or a sum if there is a count.
            count: how many things the sum is over; or None.
            weight: of the mean where there is no count, such as the samples of the batch; 0:
                nothing is added.
            per_step: in training, write its mean about once a second as well.
            step: batches of the stage with this one.

        Raises:
            BatchError: the name, the value or the count cannot be used.

        Ranks: local.
        """
        if self._stage in {"", _PREDICTION}:
            if not self._stage:
                logger.warning_once(
                    "log(%r, ...) was called outside of a stage, and nothing is logged.",
                    name,
                )
            return
        kind = _Kind(count is not None, per_step)
        held = self._held[self._stage].get(name)
        if held is None or held.kind != kind or self._is_over:
            held = self._hold(name, kind)
        number = _number(name, "value", value)
        total = 0.0 if count is None else _number(name, "count", count)
        if self._is_over:
            self._set(name, number, total if kind.is_sum else 1.0)
            return
        meters = (held.total, held.recent) if per_step and self._stage == _TRAIN else (held.total,)
        for meter in meters if weight else ():
            append = (
                (meter.append_sum, number, total) if kind.is_sum else (meter.append, number, weight)
            )
            self._fresh.append((step, *append))
        if self._stage != _TRAIN:
            self._flush()

    def _flush(self, step: float = math.inf) -> None:
        """Add up what was logged up to a step; a checkpoint holds no more."""
        fresh = self._fresh
        self._fresh = [entry for entry in self._fresh if entry[0] > step]
        for at, append, number, count in fresh:
            if at <= step:
                append(number, count)

    def forget_after(self, step: int) -> None:
        """Leave out what was logged in batches after a step, which are done again under other
        numbers.

        Args:
            step: batches of the stage.

        Ranks: local.
        """
        self._fresh = [entry for entry in self._fresh if entry[0] <= step]
        self._flush()

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Return a context in which nothing that is logged counts, as where a batch of the training
        is computed once more.

        Ranks: local.
        """
        fresh = len(self._fresh)
        held = dict(self._held[self._stage])
        try:
            yield
        finally:
            del self._fresh[fresh:]
            self._held[self._stage] = held

    def _hold(self, name: str, kind: _Kind) -> _Held:
        """Return new sums for a name that this stage has not logged yet."""
        if type(name) is not str or not name:
            raise BatchError(f"log was given the name {name!r}: give a string that is not empty.")
        held = self._held[self._stage].get(name)
        before = self._known.get(self._stage, {}).get(name) if held is None else held.kind
        if before is not None and (before != kind or self._is_over):
            raise _two_ways(name, self._stage)
        new = _Held(kind, self._new_meter(), self._new_meter())
        if not self._is_over:
            self._held[self._stage][name] = new
        return new

    def _set(
        self,
        name: str,
        number: Any,
        count: Any,
    ) -> None:
        """Store a value of ``on_stage_end``, and write it to the run's log."""
        total = float(number)
        by = float(count)
        value = total / by if by else math.nan
        self.values.setdefault(self._stage, {})[name] = value
        run_event(
            "logged",
            stage=self._stage.upper(),
            epoch=self._epoch,
            values={name: value},
            **({"set": self._set_name} if self._set_name else {}),
        )

    # ------------------------------------------------------------------ adding up over the ranks

    def sync(
        self,
        numbers: list[float],
        *,
        at_end: bool = False,
    ) -> list[float]:
        """Add up the loop's numbers over the ranks, and with them what was logged per step since
        the last time.

        Args:
            numbers: as many on every rank.
            at_end: the stage is over: all that was logged in it is added up.

        Returns:
            The sums of ``numbers``.

        Raises:
            BatchError: two ranks use a name in different ways; on every rank.

        Ranks: collective.
        """
        self._flush()
        size = len(numbers)
        known = self._known.setdefault(self._stage, {})
        news = self._held[self._stage].keys() - known.keys()
        add_up = self._add_totals if at_end else sum_over_ranks
        sums = add_up([*numbers, float(len(news)), *self._own_sums(at_end=at_end)])
        found = sums[size + 1 :]
        if sums[size]:
            self._agree({name: self._held[self._stage][name].kind for name in news})
            own = self._own_sums(at_end=at_end)
            found = add_up(own) if own else []
        self._take(iter(found), at_end=at_end)
        self._is_over = at_end
        return sums[:size]

    def write_steps(self, step: int, optimizer_step: int) -> None:
        """Write what was logged per step since the last time, if anything was.

        Args:
            step: batches of the stage.
            optimizer_step: updates since the run began.

        Ranks: all; the main process writes.
        """
        values = self._per_step
        self._per_step = {}
        if values and if_main_process():
            run_event(
                "step",
                epoch=self._epoch,
                step=step,
                optimizer_step=optimizer_step,
                values=values,
            )
            if self.train_logger is not None:
                self.train_logger.log_step(values, optimizer_step)

    def _meters(self, *, at_end: bool) -> Iterator[tuple[str, bool, Any]]:
        """Yield what is added up, in the same order on every rank: name, whether it is per step,
        and this rank's.
        """
        for name, kind in self._known[self._stage].items():
            held = self._held[self._stage].get(name) or _Held(
                kind,
                self._new_meter(),
                self._new_meter(),
            )
            if at_end:
                yield name, False, held.total
            if kind.is_per_step and self._stage == _TRAIN:
                yield name, True, held.recent

    def _own_sums(self, *, at_end: bool) -> list[float]:
        meters = [meter for _, _, meter in self._meters(at_end=at_end)]
        return [
            number
            for meter in meters
            for number in (meter.totals() if at_end else map(float, meter.sums()))
        ]

    def _agree(self, news: dict[str, _Kind]) -> None:
        """Exchange the names that some rank has used for the first time."""
        merged: dict[str, _Kind] = {}
        for theirs in exchange(news, site=f"names logged in {self._stage}"):
            for name, kind in theirs.items():
                if merged.setdefault(name, _Kind(*kind)) != kind:
                    raise _two_ways(name, self._stage)
        self._known[self._stage] |= dict(sorted(merged.items()))

    def _take(
        self,
        found: Iterator[float],
        *,
        at_end: bool,
    ) -> None:
        """Store the sums of all ranks. The main process then holds a stage's sums, the others
        zeros.
        """
        for name, is_recent, meter in list(self._meters(at_end=at_end)):
            total = next(found)
            count = next(found)
            bad = int(next(found))
            mean = float(total / count) if count else math.nan
            if is_recent:
                meter.restore(0.0, 0.0)
                self._per_step |= {name: mean} if count else {}
                continue
            if bad:
                words = "%s: values of %r that are not finite are left out of its mean."
                logger.warning(words, self._stage.upper(), name)
            if count or bad:
                self.values.setdefault(self._stage, {})[name] = mean
            main = if_main_process()
            meter.restore(
                total if main else 0.0,
                count if main else 0.0,
                bad if main else 0,
            )

    # ------------------------------------------------------- a checkpoint in the middle of an epoch

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the sums of the training on this rank. Waits for the device.

        Args:
            step: batches of the epoch that will not be trained on again.

        Ranks: local.
        """
        self._flush(step)
        held = self._held.get(_TRAIN, {})
        return {
            name: {"kind": list(value.kind), "total": value.total.state_dict()}
            for name, value in held.items()
        }

    def load_state_dicts(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Go on with sums that :meth:`state_dict` has returned.

        Args:
            states: of the ranks that this one stands for.

        Ranks: local.
        """
        taken: dict[str, _Held] = {}
        self._held[_TRAIN] = taken
        for state in states:
            for name, saved in state.items():
                meter = self._new_meter()
                meter.load_state_dict(saved["total"])
                if name in taken:
                    total, count, bad = map(
                        sum,
                        zip(
                            taken[name].total.totals(),
                            meter.totals(),
                            strict=True,
                        ),
                    )
                    meter.restore(total, count, int(bad))
                taken[name] = _Held(
                    _Kind(*saved["kind"]),
                    meter,
                    self._new_meter(),
                )


def _two_ways(name: str, stage: str) -> BatchError:
    return BatchError(
        f"log({name!r}, ...) was called in two ways in {stage.upper()}: with and without count or "
        "per_step, for batches and in on_stage_end, or not alike on two ranks. Give the two "
        "different names."
    )


def _number(name: str, what: str, value: Any) -> Tensor | float:
    """Return one number; of a tensor a copy, because it is read later."""
    if isinstance(value, Tensor) and _is_number(value):
        return value.detach().clone()
    if isinstance(value, Real) and (what == "value" or 0 <= float(value) < math.inf):
        return float(value)
    shown = f"{value!r:.60}"
    if isinstance(value, Tensor):
        shown = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        if value.is_meta:
            shown = f"{shown} on the meta device, which has no values"
        elif value.layout is not torch.strided:
            shown = f"{shown}, {value.layout}"
    raise BatchError(
        f"log({name!r}, ...) was given as its {what} {shown}: give one number, or a tensor of one "
        f"element{'' if what == 'value' else ', which is >= 0'}. Of several values give their "
        "mean, or their sum and count=."
    )


def _is_number(value: Tensor) -> bool:
    """Say whether a tensor holds one number that can be read and added up."""
    is_readable = value.layout is torch.strided and not value.is_meta
    return is_readable and value.numel() == 1 and not value.dtype.is_complex


class ProgressBar:
    """Shows how far a stage has come; told so about once a second, never once a step.

    Args:
        label: such as ``"epoch 3 train"``.
        total: steps of the stage; None when unknown.
        initial: steps done already.
        enable: False shows nothing at all.
        colour: tqdm's name of a colour, or None.
        of_run: called with the steps done whenever something is shown, about once a second; it must
            not wait for a GPU.

    Attributes:
        partial: the numbers told so far are of this process's part only: the loss is not shown.

    Ranks: main only; make it with ``enable=False`` on the others.

    Example:
        >>> with ProgressBar("epoch 1 train", total=10, enable=False) as bar:
        ...     bar.show(5, loss=0.5, samples=40)
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        *,
        initial: int = 0,
        enable: bool = True,
        colour: str | None = None,
        of_run: Callable[[int], RunFacts] = _nothing_known,
    ) -> None:
        self.label = label
        self.total = total
        self.initial = initial
        self.enable = enable
        self._of_run = of_run
        self.partial = False
        self._started = self._last_line = time.monotonic()
        self._colour = colour
        self._bar: tqdm[Any] | None = None
        if enable and sys.stderr is not None and sys.stderr.isatty():
            self._bar = self._open()
            self._draw(initial, BarFacts())

    def _open(self) -> tqdm[Any]:
        bar = tqdm(
            total=self.total,
            initial=self.initial,
            desc=self.label,
            colour=self._colour,
            dynamic_ncols=True,
            file=sys.stderr,
            delay=math.inf,  # until it is known what fits
        )
        bar.delay = 0.0
        return bar

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which another bar is shown; its time does not count for this one."""
        began = time.monotonic()
        bar = self._bar
        if bar is not None:
            bar.leave = False
            bar.close()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._started += seconds
            if bar is not None:
                self._bar = self._open()
                self._bar.start_t = bar.start_t + seconds
                self._draw(int(bar.n), BarFacts())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def show(
        self,
        step: int,
        loss: float | None = None,
        samples: float = 0.0,
    ) -> None:
        """Show the state of the stage.

        Args:
            step: steps done.
            loss: mean over all ranks so far; None leaves it out.
            samples: samples seen since the bar began, over all ranks.
        """
        if not self.enable:
            return
        now = time.monotonic()
        if self._bar is None and now - self._last_line < LINE_SECONDS:
            return
        run = self._of_run(step)
        speed = samples / max(now - self._started, 1e-9)
        is_known = loss is not None and not self.partial
        facts = BarFacts(
            loss=f"{loss:.4g}" if is_known else "",
            rate=run.rate,
            speed=tqdm.format_sizeof(speed),
            left=left_in_words(run.left),
            data_wait=wait_in_words(run.data_wait),
        )
        if self._bar is not None:
            self._draw(step, facts)
        else:
            self._last_line = now
            logger.info("%s", self._line(step, facts, now))

    def _draw(self, step: int, facts: BarFacts) -> None:
        bar = self._bar
        if bar is not None:
            bar.n = step
            bar.bar_format = fitting_format(facts, bar.format_dict)
            bar.refresh()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(
        self,
        step: int,
        facts: BarFacts,
        now: float,
    ) -> str:
        parts = [f"{self.label}: batch {step}" + (f"/{self.total}" if self.total else "")]
        parts += [f"loss {facts.loss}"] if facts.loss else []
        parts += [f"lr {facts.rate}"] if facts.rate else []
        parts.append(f"{facts.speed} samples/s")
        parts += [facts.data_wait] if facts.data_wait else []
        done = step - self.initial
        if self.total and done > 0:
            left = (now - self._started) / done * (self.total - step)
            parts.append(f"{tqdm.format_interval(left)} left")
        return ", ".join([*parts, facts.left] if facts.left else parts)
