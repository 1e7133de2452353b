"""A slice of a run for ``python -m ddpkit scale``: a few optimizer steps are measured in ``fit``,
then the run ends.

The training is the recipe's own: its data, its ``fit_batch``, its options. What follows an epoch
(``on_stage_end``, validation, checkpoints) is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ddpkit.base import host_name
from ddpkit.control import usage_errors
from ddpkit.distributed import exchange, get_world_size, run_on_main
from ddpkit.errors import ConfigError
from ddpkit.launch import SlicePlan, cores, find_launch
from ddpkit.options import OPTIONS
from ddpkit.run.loader_rates import loader_rates, own_workers
from ddpkit.run.output_checks import checkpoint_bytes
from ddpkit.run.slice_epochs import end_slice, train_until_end
from ddpkit.run.slice_result import SliceResult, named_way, percentiles
from ddpkit.run.step_plan import sizes_in_run
from ddpkit.step_times import EXCHANGE, PHASES, CoreWaits

if TYPE_CHECKING:
    from ddpkit.run.slice_epochs import EpochTrainer
    from ddpkit.training import RunContext, TrainStep

#: Options that are told with the result where they are not the default.
TOLD_OPTIONS = tuple(sorted(option.name for option in OPTIONS if option.sets_speed))
NOTHING_MEASURED = (
    "no step can be measured on {} process(es): an epoch has one optimizer step, and the first "
    "one is left out, as it waits for the loader to start. Measure with more data, or with a "
    "smaller batch."
)
MOST_STEPS = 4  # times the wanted steps, at most: in short epochs not every step is measured
WHOLE_SLICE = 3  # of the longest time that a slice may take, warming up gets so small a part


def measure_slice(
    plan: SlicePlan,
    stages: EpochTrainer,
    brain: Any,
    loader: Any,
    epoch: int,
) -> NoReturn:
    """Train until enough steps are measured, write the result, and end the run.

    Args:
        plan: what to measure.
        stages: train an epoch.
        brain: whose ``fit`` was called; its ``fit_batch`` and ``on_stage_end`` are replaced.
        loader: of the training set.
        epoch: the first one.

    Raises:
        RunStopped: with code 0, at the end.
        ConfigError: no step of an epoch can be measured.

    Ranks: collective.
    """
    rates = _loader_rates(loader, plan)
    facts = {
        **facts_of_run(stages.context, loader),
        "checkpoint_bytes": checkpoint_bytes(brain.checkpointer),
        "loader_rates": rates,
    }
    clock = SliceClock(plan, stages.train_step, facts)
    train_batch = brain.fit_batch
    window = stages.context.progress.window

    def fit_batch(batch: Any) -> Any:
        result = train_batch(batch)
        if window.closes:
            clock.after_window()
        return result

    brain.fit_batch = fit_batch
    train_until_end(stages, brain, loader, epoch)


def _loader_rates(loader: Any, plan: SlicePlan) -> dict[str, list[float]]:
    """Measure the loader alone on all ranks at the same time, where the plan says so."""
    if not plan.loader_workers:
        return {}
    own = loader_rates(loader, plan.loader_workers, plan.loader_seconds)
    ranks = exchange(own, site="loader rates")
    common = set.intersection(*map(set, ranks))
    return {str(number): [rates[number] for rates in ranks] for number in sorted(common)}


class SliceClock:
    """Decides, alike on all ranks, when to measure and when to end; keeps what was measured.

    The ranks agree rarely: after 1, 2, 4, ... steps of warming up, and at the end.

    Args:
        plan: what to measure.
        train_step: has the timer.
        facts: of the run, that the result tells.

    Ranks: collective, but for making one.
    """

    def __init__(
        self,
        plan: SlicePlan,
        train_step: TrainStep,
        facts: dict[str, Any],
    ) -> None:
        self._plan = plan
        self._facts = facts
        self._timer: Any = train_step.timer
        self._steps = 0
        self._due = 1
        self._wanted = self._last = 0
        self._is_measuring = False
        self._began = self._checked_at = time.monotonic()
        self._checked_steps = 0
        self._core_waits = CoreWaits()
        self._kept = _keep_taken(self._timer)

    def after_window(self) -> None:
        """Count an optimizer step.

        Raises:
            RunStopped: enough is measured, and the result is written.
        """
        self._steps += 1
        if self._steps < self._due:
            return
        if self._is_measuring:
            self._timer.taken()
            self._go_on_or_end()
        else:
            self._warm_up()

    def _warm_up(self) -> None:
        """Begin to measure if the main process finds that the training is in its stride."""
        steps = run_on_main(self._steps_to_measure) or 0
        if not steps:
            self._due *= 2
            return
        self._is_measuring = True
        self._wanted = steps
        self._last = self._steps + MOST_STEPS * steps
        self._due = self._steps + steps
        self._timer.taken()
        self._kept.clear()
        self._core_waits = CoreWaits()

    def _steps_to_measure(self) -> int:
        """Return how many steps are to be measured from now on; 0: the training is still warming
        up.
        """
        plan = self._plan
        now = time.monotonic()
        passed = now - self._began
        step = (now - self._checked_at) / max(self._steps - self._checked_steps, 1)
        self._checked_at = now
        self._checked_steps = self._steps
        is_warm = self._steps >= plan.warmup_windows and passed >= plan.warmup_seconds
        if not is_warm and passed < plan.max_seconds / WHOLE_SLICE:
            return 0
        wanted = max(plan.min_windows, math.ceil(plan.seconds / step))
        possible = int(max(plan.max_seconds - passed, 0.0) / step)
        return max(1, min(wanted, possible))

    def _go_on_or_end(self) -> None:
        """Go on where steps have not been measured: the first one of each epoch waits for the
        loader to start.

        The ranks have measured the same steps, and so decide alike.
        """
        missing = self._wanted - len(self._kept)
        if missing > 0 and self._steps < self._last:
            self._due = min(self._steps + missing, self._last)
            return
        if not self._kept:
            with usage_errors():
                raise ConfigError(NOTHING_MEASURED.format(get_world_size()))
        self._end()

    def _end(self) -> NoReturn:
        own = {
            "windows": [(dict(window.seconds), float(window.samples)) for window in self._kept],
            "host": host_name(),
            "core_wait": self._core_waits.share(),
        }
        ranks = exchange(own, site="slice")
        end_slice(self._plan, result_of(ranks, self._facts).as_dict())


def _keep_taken(timer: Any) -> list[Any]:
    """Return a list that gets all steps that anybody takes from a timer."""
    kept: list[Any] = []
    take = timer.taken

    def taken() -> list[Any]:
        found: list[Any] = take()
        kept.extend(found)
        return found

    timer.taken = taken
    return kept


def result_of(
    ranks: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
) -> SliceResult:
    """Return what a slice has measured.

    Args:
        ranks: of each rank ``"windows"`` (seconds by phase, and samples, of each step), ``"host"``
            and ``"core_wait"``. The steps are the same ones on all ranks.
        facts: further fields of the result.

    Ranks: local.
    """
    steps = min(len(rank["windows"]) for rank in ranks)
    windows = [rank["windows"][:steps] for rank in ranks]
    times = [[seconds for seconds, _ in own] for own in windows]
    whole = [sum(seconds.values()) for seconds in times[0]]
    waits = [[seconds.get(EXCHANGE, 0.0) for seconds in own] for own in times]
    least = [min(of_step) for of_step in zip(*waits, strict=True)]
    return SliceResult(
        **facts,
        hosts=list(dict.fromkeys(rank["host"] for rank in ranks)),
        core_waits=[rank["core_wait"] for rank in ranks],
        steps=steps,
        seconds=sum(whole),
        step_seconds=percentiles(whole),
        samples=[sum(samples for _, samples in own) / steps for own in windows],
        phases=[_means(own) for own in times],
        transfer_seconds=sum(least) / steps,
        last=[
            sum(wait == smallest for wait, smallest in zip(own, least, strict=True)) / steps
            for own in waits
        ],
    )


def _means(windows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each phase."""
    return {
        phase: sum(seconds.get(phase, 0.0) for seconds in windows) / len(windows)
        for phase in PHASES
    }


def facts_of_run(context: RunContext, loader: Any) -> dict[str, Any]:
    """Return what the result tells of the run that was measured.

    Args:
        context: of the run.
        loader: of the training set.

    Ranks: local.
    """
    options = context.options
    info = find_launch()
    world_size = get_world_size()
    in_use = context.accumulation.in_use()
    sizes = sizes_in_run(loader, context)
    way = named_way(options, world_size)
    device = torch.device(str(options.device)).type
    return {
        "way": way,
        "size": torch.cuda.device_count() if way == "dp" else world_size,
        "world_size": world_size,
        "nodes": -(-world_size // max(info.local_world_size, 1)),
        "device": device,
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "loader_workers": own_workers(loader),
        "exchanged_bytes": context.strategy.exchanged_bytes(context.modules),
        "samples_per_step": sizes.per_step,
        "can_fix_step": sizes.alone is not None or in_use["global_batch_size"] is not None,
        "global_batch_size": in_use["global_batch_size"],
        "micro_batches": sizes.factor,
        "options": options.changed(in_use, among=TOLD_OPTIONS),
    }
