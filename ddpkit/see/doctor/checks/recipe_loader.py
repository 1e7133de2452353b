"""Whether the loader of a recipe is as fast as its steps, and how many workers would do."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from ddpkit.launch import SlicePlan, cores
from ddpkit.logger import get_logger
from ddpkit.run import SliceResult
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.checkpoint_space import checkpoint_space
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.ranks import answering
from ddpkit.see.orderly_end import ended_in_order
from ddpkit.see.scale.cells import Cell
from ddpkit.see.scale.rounds import scratch_folder
from ddpkit.see.scale.slice_process import MeasuredCommand, SliceFailedError, run_slice
from ddpkit.step_times import DATA

logger = get_logger(__name__)

NAME = "loader of the recipe"
LOADER_SECONDS = 1.0  # for each number of workers
MOST_SECONDS = 30.0  # of the training
LONGEST_PERIOD = 5.0  # seconds in which the other ranks hear that it goes on
NEEDED = 1.1  # times what the step takes: a loader has worse moments
WAITS = 0.1  # of a step: more than this is waited for data
WAITS_LONG = 0.25
STILL_GROWS = 1.3
CHEAPER = (
    "Do less for each sample: prepare data once and store it, decode smaller files, move work to "
    "the GPU, read from a local disk."
)


@dataclass(frozen=True)
class LoaderSpeed:
    """What was measured of a recipe on one host.

    Attributes:
        rates: samples per second of all ranks of the host, by workers of each rank.
        own: the number of workers that the recipe has.
        needed: samples per second that the steps take if they never wait for data.
        waits: share of a step, 0 to 1, in which it waits for data.
        is_whole: whether other numbers of workers could be tried.

    Ranks: local.
    """

    rates: Mapping[int, float]
    own: int
    needed: float
    waits: float
    is_whole: bool = True

    def share(self, number: int) -> float:
        """Return the share of a step that waits for data, as the loader's own speed has it.

        Without workers a step does not go on while its batch is loaded.
        """
        rate = self.rates[number]
        return (
            self.needed / (self.needed + rate) if number == 0 else max(0.0, 1 - rate / self.needed)
        )

    @property
    def by_loader(self) -> float:
        """What of a step the loader is to blame for; on busy cores a step waits longer."""
        return min(self.waits, self.share(self.own))

    @property
    def enough(self) -> int | None:
        """The smallest number of workers with which the loader is fast enough, if there is one."""
        for number, rate in sorted(self.rates.items()):
            if self.share(number) < WAITS and rate >= NEEDED * self.needed:
                return number
        return None

    @property
    def still_grows(self) -> bool:
        """Whether the most workers are much faster than the next smaller number."""
        *_, before, last = (
            0.0,
            *(rate for _, rate in sorted(self.rates.items())),
        )
        return last > STILL_GROWS * before

    @property
    def best(self) -> int:
        """The number of workers with which the loader is fastest."""
        return max(self.rates, key=lambda number: self.rates[number])


def look(site: Site) -> Iterator[Finding]:
    """Run a slice of the recipe on each host: its loader alone, and a few steps.

    The other ranks hear every few seconds that it goes on: a recipe may take long to start.

    Ranks: collective.
    """
    if not site.run.recipe:
        return
    period = min(LONGEST_PERIOD, site.ranks.timeout / 4)
    is_left = threading.Event()
    with ended_in_order(), ThreadPoolExecutor(1) as pool:
        try:
            first = site.ranks.is_first_on_host
            work = pool.submit(_looked_at, site, is_left.is_set) if first else None
            is_over = False
            while not is_over:
                if work is not None:
                    wait([work], period)
                told = site.ranks.exchange("loader of the recipe", work is None or work.done())
                is_over = all(answering(told).values())
        finally:  # after a signal, or without the main process: the recipe itself may never end
            is_left.set()
    if work is not None:
        yield from work.result()


def _looked_at(site: Site, is_given_up: Callable[[], bool]) -> list[Finding]:
    run = site.run
    numbers = worker_numbers(cores(), run.processes_here, run.workers)
    with scratch_folder() as folder:
        plan = SlicePlan(
            str(folder),
            str(folder / "result.json"),
            max_seconds=MOST_SECONDS,
            loader_workers=numbers,
            loader_seconds=LOADER_SECONDS,
            options=_device(site),
        )
        try:
            cell = Cell("", run.processes_here)
            result = run_slice(MeasuredCommand(run.recipe), cell, plan, _tell, is_given_up)
        except SliceFailedError as error:
            return [_failed(error)]
    speed = speed_of(result)
    found = [_too_short() if speed is None else finding(speed, numbers)]
    if result.checkpoint_bytes:
        found.append(checkpoint_space(site, result.checkpoint_bytes))
    return found


def _tell(line: str) -> None:
    """Tell the user why it takes so long: the recipe may hang."""
    logger.announce("%s: %s", NAME, line.strip())


def _device(site: Site) -> dict[str, str]:
    return {"device": "cpu", "distributed_backend": "gloo"} if site.run.is_cpu_asked else {}


def worker_numbers(available: int, processes: int, asked: int | None) -> list[int]:
    """Return the numbers of workers to try: 0, 1, 2, 4, ... as long as each has a core.

    Args:
        available: cores of the host.
        processes: ranks on it.
        asked: a number that is tried in any case.

    Ranks: local.

    Example:
        >>> worker_numbers(16, 2, None), worker_numbers(2, 1, 6)
        ([0, 1, 2, 4, 8], [0, 1, 2, 6])
    """
    most = max(1, available // processes)
    numbers = {0, *(2**power for power in range(most.bit_length()) if 2**power <= most)}
    return sorted(numbers | ({asked} if asked is not None else set()))


def speed_of(result: SliceResult) -> LoaderSpeed | None:
    """Return what a slice says of the loader; None if its data was too short to measure.

    Args:
        result: of a slice with a plan for the loader.

    Ranks: local.
    """
    rates = {int(number): sum(each) for number, each in result.loader_rates.items()}
    if result.loader_workers not in rates:
        return None
    step = result.step
    data = result.phase(DATA)
    needed = result.samples_of_step / max(step - data, 1e-9)
    is_whole = len(rates) > 1
    return LoaderSpeed(rates, result.loader_workers, needed, data / step, is_whole)


def finding(speed: LoaderSpeed, numbers: Sequence[int]) -> Finding:
    """Say whether the loader is fast enough.

    Args:
        speed: as measured.
        numbers: of workers that were to be tried.

    Ranks: local.
    """
    own = speed.rates[speed.own]
    return Finding(
        NAME,
        _verdict(speed),
        f"{own:,.0f} samples/s with {_workers(speed.own)}; "
        f"{100 * speed.waits:.0f} % of a step waits for data",
        f"{NEEDED * speed.needed:,.0f} samples/s, and less than {100 * WAITS:.0f} % of a step",
        f"the steps of the recipe alone take {speed.needed:,.0f} samples/s, measured here",
        cost=f"steps take {1 / max(1 - speed.waits, 1e-9):.1f} times as long as they could",
        advice=_advice(speed, numbers),
        lines=_lines(speed),
        details={
            "samples_per_second": {str(number): rate for number, rate in speed.rates.items()},
            "workers": speed.own,
            "needed_samples_per_second": speed.needed,
            "data_share": speed.waits,
            "enough_workers": speed.enough,
        },
    )


def _verdict(speed: LoaderSpeed) -> str:
    if speed.by_loader >= WAITS_LONG:
        return PROBLEM
    return LOOK if speed.by_loader >= WAITS or speed.waits >= WAITS_LONG else OK


def _advice(speed: LoaderSpeed, numbers: Sequence[int]) -> str:
    if not speed.is_whole:
        return f"The recipe makes its batches itself: give its own loader num_workers. {CHEAPER}"
    if speed.by_loader < WAITS:
        return (
            "The loader alone is fast enough, and is not while the recipe trains. Are the cores or "
            "the disk busy with something else, or do copies to the device take long (pin_memory)?"
        )
    enough = speed.enough
    best = speed.best
    if enough is not None and enough != speed.own:
        return f"num_workers: {enough} would do, in the arguments of the loader."
    if best == speed.own:
        return f"Of {', '.join(map(str, numbers))} workers none is faster. {CHEAPER}"
    gain = speed.rates[best] / speed.rates[speed.own]
    words = f"num_workers: {best} is {gain:.1f} times as fast, and still too slow. "
    if best == max(speed.rates) and speed.still_grows:
        most = math.ceil(best * NEEDED * speed.needed / speed.rates[best])
        words += (
            "It still grows with the workers, as it does where they wait for files: "
            f"try more than cores, up to {most}. "
        )
    return words + CHEAPER


def _lines(speed: LoaderSpeed) -> tuple[str, ...]:
    rows = [f"{'workers':>8} {'samples/s':>12}"]
    for number, rate in sorted(speed.rates.items()):
        mark = "  the recipe's" if number == speed.own else ""
        rows.append(f"{number:>8} {rate:>12,.0f}{mark}")
    return tuple(rows)


def _workers(number: int) -> str:
    return f"{number} worker{'' if number == 1 else 's'}"


def _too_short() -> Finding:
    return Finding(
        NAME,
        LOOK,
        "not measured: the loader gives fewer than two batches",
        "an epoch of several batches",
        "the first batch waits for workers to start, and does not count",
        cost="a slow loader would not be seen",
        advice="Give the recipe more data for this once, or smaller batches.",
    )


def _failed(error: SliceFailedError) -> Finding:
    return Finding(
        NAME,
        PROBLEM,
        f"the recipe does not come to a step: {error}",
        "a few steps of the recipe",
        "a run of it that saves nothing",
        cost="the run itself will fail, too",
        advice="Start the recipe with --debug, and mend what it says.",
    )
