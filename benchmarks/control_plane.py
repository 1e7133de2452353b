"""What the control plane costs: the sync, and the two threads that watch over a process.

    python benchmarks/control_plane.py                    # two processes through torchrun (gloo), about three minutes

The same training runs in turns with the control plane and without it, in one process on the same
model and the same batches, so that a machine that slows down slows both. Without it there is no
sync after a pass has begun, no thread is running, and no signal is heard. Besides the steps it
measures each part by itself: the processor time of the threads, one sync, what the loop does per
step for all of it, and how many collectives and store operations there are per second.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from ddpkit.brain import Brain, run_of
from ddpkit.comm.mailbox import get_runtime
from ddpkit.control import PeriodicSync, Watchdog
from ddpkit.control.heartbeat import Heartbeat
from ddpkit.control.periodic_sync import Requests
from ddpkit.distributed import get_world_size, if_main_process, sum_over_ranks
from ddpkit.run import evaluation_stops, stage_runner
from ddpkit.training import Progress, train_epoch
from ddpkit.types import Stage

WIDTH = 256
CLASSES = 10
LAYERS = 3
STUB_STEPS = 100_000
SETTLING_SECONDS = 1.2  # the first pulses come quicker than later ones


class OneBatch:
    """Collates to a ready-made batch, of which a step takes as long as it shall."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batch = (
            torch.randn(rows, WIDTH, generator=generator),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )

    def __call__(self, _samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch


class Classifier(Brain):
    """A small network."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions, batch[1])


class Never(PeriodicSync):
    """Confers once, when a pass begins, and never again."""

    def __call__(self, step: int, *arguments: Any) -> Any:
        report = super().__call__(step, *arguments)
        self.due = sys.maxsize
        return report


class Counted(PeriodicSync):
    """Notes when it confers."""

    times: ClassVar[list[float]] = []

    def __call__(self, *arguments: Any) -> Any:
        Counted.times.append(time.perf_counter())
        return super().__call__(*arguments)


class CountedStore:
    """Passes on to a store, and counts what it is asked."""

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def counted(*arguments: Any) -> Any:
            CountedStore.counts[name] += 1
            return method(*arguments)

        return counted


def new_watch() -> None:
    """Start the threads anew, past their first, quicker pulses."""
    runtime = get_runtime()
    runtime.watchdog.stop()
    runtime.watchdog = Watchdog(runtime.report, range(get_world_size()))
    runtime.watchdog.hang_warning = 30.0
    runtime.watchdog.hang_timeout = 1800.0
    runtime.watchdog.start()
    time.sleep(SETTLING_SECONDS)


def threads_cpu_seconds() -> float:
    """Return the processor time that the threads which watch have used."""
    ours = [
        thread
        for thread in threading.enumerate()
        if thread.name in {"ddpkit-heartbeat", "ddpkit-watch"}
    ]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in ours)


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Have no control plane."""
    get_runtime().watchdog.stop()
    stage_runner.PeriodicSync = evaluation_stops.PeriodicSync = Never
    try:
        yield
    finally:
        stage_runner.PeriodicSync = evaluation_stops.PeriodicSync = PeriodicSync
        new_watch()


class Trained:
    """A model, and a loader whose steps take about as long as is asked for."""

    def __init__(self, step_seconds: float, steps: int) -> None:
        hidden = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.brain = Classifier(
            {"net": nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))},
            lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
            run_opts={"device": "cpu", "noprogressbar": True},
        )
        self.steps = steps
        rows = 64
        for _ in range(3):
            self.loader = self._loader(rows, 60)
            if not run_of(self.brain).is_prepared:
                self.brain.fit([1], self.loader)
            rows = max(1, int(rows * step_seconds / self.seconds_per_step()))
            rows = int(sum_over_ranks([rows])[0] / get_world_size())
        self.loader = self._loader(rows, steps)

    def _loader(self, rows: int, steps: int) -> Any:
        number = steps * 2 * get_world_size()
        return self.brain.make_dataloader(
            range(number),
            Stage.TRAIN,
            batch_size=2,
            collate_fn=OneBatch(rows),
        )

    def seconds_per_step(self, *, attended: bool = True) -> float:
        """Train a pass, and return what a step took on the whole."""
        sum_over_ranks([0.0])
        with run_of(self.brain).stop.guarded("fit") if attended else contextlib.nullcontext():
            began = time.perf_counter()
            self.brain._fit_train(self.loader, 1, enable=False)
            return (time.perf_counter() - began) / self.loader.__len__()

    def collectives(self, *, attended: bool) -> int:
        """Return how many collectives there are in a pass."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.seconds_per_step(attended=attended)
        return sum(event.count for event in profile.key_averages() if event.key.startswith("gloo:"))


def in_turns(trained: Trained, turns: int) -> tuple[list[float], list[float], float]:
    """Return seconds per step with and without, in pairs, and the threads' processor time per
    second.
    """
    on = []
    off = []
    used = passed = 0.0
    for _ in range(turns):
        began = time.perf_counter()
        cpu = threads_cpu_seconds()
        on.append(trained.seconds_per_step())
        used = used + threads_cpu_seconds() - cpu
        passed = passed + time.perf_counter() - began
        with without():
            off.append(trained.seconds_per_step(attended=False))
    return on, off, used / passed


def one_beat(number: int = 300) -> float:
    """Return the median seconds of one sync."""
    sync = PeriodicSync(sum_over_ranks, get_world_size(), is_main=if_main_process())
    sync.start(0)
    times = []
    for step in range(number):
        time.sleep(0.002)
        began = time.perf_counter()
        sync(step + 1, 1.0, 1.0, 1, Requests())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Nothing:
    """A host and a feed that do nothing, so that what is left is the loop itself."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.loss = torch.zeros(())

    def fit_batch(self, batch: object) -> torch.Tensor:
        return self.loss

    def batches(self, window: Any) -> Iterator[object]:
        window.count = 1
        window.weight = 1.0
        window.closes = True
        for _ in range(STUB_STEPS):
            yield None


def look_at_the_beat(*, looking: bool) -> float:
    """Return microseconds per turn of a loop that looks whether a sync is due, or does nothing."""
    progress = Progress()
    sync = SimpleNamespace(due=sys.maxsize)
    began = time.perf_counter()
    if looking:
        for _ in range(STUB_STEPS):
            if progress.step >= sync.due:
                raise AssertionError
    else:
        for _ in range(STUB_STEPS):
            pass
    return (time.perf_counter() - began) / STUB_STEPS * 1e6


def loop_alone() -> dict[str, float]:
    """Return microseconds per step: of the loop with a sync every second, with none, and of the
    look at the sync.
    """

    def run(kind: type[PeriodicSync]) -> float:
        nothing = Nothing()
        began = time.perf_counter()
        train_epoch(nothing, nothing, kind(list, 1, is_main=True), lambda *_: None, float("inf"))
        return (time.perf_counter() - began) / STUB_STEPS * 1e6

    kinds: dict[str, Callable[[], float]] = {
        "with": lambda: run(PeriodicSync),
        "without": lambda: run(Never),
        "looking": lambda: look_at_the_beat(looking=True),
        "passing": lambda: look_at_the_beat(looking=False),
    }
    least = dict.fromkeys(kinds, float("inf"))
    for _ in range(15):
        for name, measured in kinds.items():
            least[name] = min(least[name], measured())
    return {**least, "look": least["looking"] - least["passing"]}


def how_often(trained: Trained) -> list[tuple[str, str]]:
    """Count beats, other collectives, and what the store is asked."""
    own = Heartbeat._own_connection
    Heartbeat._own_connection = lambda beat: CountedStore(own(beat))
    new_watch()
    stage_runner.PeriodicSync = evaluation_stops.PeriodicSync = Counted
    CountedStore.counts.clear()
    began = time.perf_counter()
    trained.seconds_per_step()
    seconds = time.perf_counter() - began
    Heartbeat._own_connection = own
    counts = dict(CountedStore.counts)
    beats = [moment - Counted.times[0] for moment in Counted.times]
    Counted.times.clear()
    later = sum(moment > 1 for moment in beats) / max(seconds - 1, 1e-9)
    with_beats = trained.collectives(attended=True)
    conferred = len(Counted.times)
    with without():
        others = trained.collectives(attended=False) - 1  # the one sync
    asked = ", ".join(f"{name} {number / seconds:.1f}" for name, number in sorted(counts.items()))
    return [
        (
            "beats in the first second of a pass, whose distance doubles",
            f"{sum(moment <= 1 for moment in beats)}",
        ),
        ("beats per second from then on", f"{later:.2f}"),
        (
            "collectives of a pass that are neither beats nor there without",
            f"{with_beats - conferred - others}",
        ),
        (
            "what a rank asks the store per second",
            (f"{sum(counts.values()) / seconds:.1f} ({asked})"),
        ),
    ]


def measure(turns: int, steps: int, milliseconds: float) -> None:
    trained = Trained(milliseconds / 1e3, steps)
    new_watch()
    trained.seconds_per_step()
    on, off, share = in_turns(trained, turns)
    sync = one_beat()
    alone = loop_alone()
    often = how_often(trained)
    if not if_main_process():
        return
    step = statistics.median(off)
    pairs = [one / other for one, other in zip(on, off, strict=True)]

    def line(name: str, *values: str) -> None:
        print(f"  {name:66}{'  '.join(f'{value:>9}' for value in values)}")

    print(
        f"{turns} turns of {steps} steps on {get_world_size()} processes, ms per step: minimum "
        "and median"
    )
    line("with the control plane", f"{min(on) * 1e3:.3f}", f"{statistics.median(on) * 1e3:.3f}")
    line("without", f"{min(off) * 1e3:.3f}", f"{step * 1e3:.3f}")
    line(
        "above, %",
        f"{(min(on) / min(off) - 1) * 100:.2f}",
        f"{(statistics.median(on) / step - 1) * 100:.2f}",
    )
    line("above, %: median of the pairs", "", f"{(statistics.median(pairs) - 1) * 100:.2f}")
    print("its parts, each by itself")
    line("threads: us of processor time per second", f"{share * 1e6:.0f}")
    line("a sync: us", f"{sync * 1e6:.0f}")
    line("threads and one sync a second: % of the time", f"{(share + sync) * 100:.3f}")
    line("the loop, on a model that does nothing: us per step", f"{alone['with']:.2f}")
    line("the same without the sync: us per step", f"{alone['without']:.2f}")
    line("of that, the look whether a sync is due: us per step", f"{alone['look']:.3f}")
    print("how often")
    for name, value in often:
        line(name, value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20, help="how often each kind runs")
    parser.add_argument("--steps", type=int, default=600, help="steps of each run")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="length of a step, about")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={arguments.processes}",
            *sys.argv,
        ]
        raise SystemExit(
            subprocess.call([sys.executable, *command], env={**os.environ, "OMP_NUM_THREADS": "1"})
        )
    torch.set_num_threads(1)
    measure(arguments.turns, arguments.steps, arguments.milliseconds)


if __name__ == "__main__":
    main()
