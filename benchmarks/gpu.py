"""What a training step costs on a GPU, against a loop by hand in the same run: time, waits for the
GPU, memory.

    python benchmarks/gpu.py                     # one GPU, some minutes
    python benchmarks/gpu.py --processes 2       # two GPUs, DDP over NCCL
    python benchmarks/gpu.py --rows fp16 moved   # only rows with one of these words in their name
    python benchmarks/gpu.py --device cpu        # tiny, to see that it runs; times mean nothing there
    python benchmarks/gpu.py --device cpu --turns 15 --rows small   # of tiny models: what the host does in a step

Both loops train the same model on the same batches, in turns: forward, backward, clipping, finite
check, fused AdamW. `ratio` is the median of the turns' ratios of ddpkit to the loop by hand, with
its quartiles. `waits` is how often a step makes the host wait for the GPU
(`torch.cuda.set_sync_debug_mode`), counted as the difference of two passes of different length.
`peak` is what a pass allocates above what was there before. `bits` says whether both ended with the
same weights.

By hand, the norm is read in every step, but under fp16, where the fused optimizer skips on the GPU.
It does so in the rows `norm not read`, too. ddpkit chooses in its first steps whether it reads the
norm one step later or before the step, and `read` says which; in the rows `read later` and `read
first` it has no choice. Under fp16 it reads before the step. In the rows `moved ahead` ddpkit moves batches with
--prefetch_to_device, in the rows before them not; the loop by hand moves them when it uses them. In
the row `checkpoint` a step of the loop by hand is a copy of the state to the CPU, and ddpkit's the
stall of a save in the background. ddpkit times about 50 steps a second phase by phase, as by
default, and in two rows none (`--measure_steps=off`) and all. Some kernels of a GPU, as the
backward pass of attention, may give other bits each time, in both loops.
"""  # noqa: E501

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddpkit import optim
from ddpkit.brain import Brain, run_of
from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import ddp_init_group, get_world_size, if_main_process
from ddpkit.optim import making
from ddpkit.training.norm_reading import TRIED_STEPS, NormReading
from ddpkit.types import Stage

MAX_NORM = 5.0
SECONDS_A_TURN = 0.4
COUNTED = 32
WORDS_ONCE = "transformer, each word once"
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Sizes:
    """How large models and batches are, and how long they are looked at."""

    width: int = 256
    batch: int = 64
    model: int = 512
    layers: int = 8
    length: int = 256
    sequences: int = 16
    words: int = 8192
    features: int = 32768  # 8 MiB a batch, which takes a while to move
    turns: int = 7
    most_steps: int = 400


TINY = Sizes(
    width=8,
    batch=4,
    model=16,
    layers=1,
    length=4,
    sequences=2,
    words=16,
    features=100,
    turns=3,
    most_steps=4,
)


class Transformer(nn.Module):
    """Predicts a class for every position."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.words, sizes.model)
        layer = nn.TransformerEncoderLayer(
            sizes.model,
            8,
            4 * sizes.model,
            0.0,
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.model, sizes.words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens))).flatten(0, 1)


def make_net(kind: str, sizes: Sizes) -> nn.Module:
    torch.manual_seed(0)
    if kind.startswith("transformer"):
        return Transformer(sizes)
    inputs, hidden = (
        (sizes.features, 8 * sizes.width) if kind == "large batches" else (sizes.width, sizes.width)
    )
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))


class OneBatch:
    """Collates to a ready-made batch, so that loading costs little and does not hide the loop."""

    def __init__(self, kind: str, sizes: Sizes) -> None:
        draw = torch.Generator().manual_seed(1)
        shape = sizes.sequences, sizes.length
        if kind == WORDS_ONCE:
            words = torch.randperm(sizes.words, generator=draw)[: shape[0] * shape[1]].view(shape)
            self.batch = [words, torch.randint(0, sizes.words, shape, generator=draw)]
        elif kind == "transformer":
            self.batch = [torch.randint(0, sizes.words, shape, generator=draw) for _ in range(2)]
        else:
            inputs = sizes.features if kind == "large batches" else sizes.width
            self.batch = [torch.randn(sizes.batch, inputs, generator=draw)]
            self.batch.append(torch.randint(0, 10, (sizes.batch,), generator=draw))

    def __call__(self, _samples: list[int]) -> list[torch.Tensor]:
        return self.batch


@dataclass
class Row:
    """One line of the table: what both loops do, and what only ddpkit does."""

    name: str
    kind: str = "transformer"
    precision: str = "bf16"
    workers: int = 0
    mode: str | None = None
    reads: bool = True
    read: str = "chosen"
    options: dict[str, Any] = field(default_factory=dict)


ROWS = [
    *[Row(f"small, {precision}", "small", precision) for precision in DTYPES],
    *[Row(f"transformer, {precision}", precision=precision) for precision in DTYPES],
    Row("small, norm not read", "small", reads=False),
    Row("transformer, norm not read", reads=False),
    Row("small, read later", "small", read="later"),
    Row("small, read first", "small", read="first"),
    Row("transformer, read later", read="later"),
    Row("transformer, read first", read="first"),
    Row("small, not timed", "small", options={"measure_steps": "off"}),
    Row("small, every step timed", "small", options={"measure_steps": "all"}),
    Row("large batches, 2 workers", "large batches", workers=2),
    Row(
        "large batches, moved ahead",
        "large batches",
        workers=2,
        options={"prefetch_to_device": True},
    ),
    Row("transformer, 2 workers", workers=2),
    Row("transformer, moved ahead", workers=2, options={"prefetch_to_device": True}),
    Row("small, reduce-overhead", "small", mode="reduce-overhead"),
    Row("transformer, reduce-overhead", mode="reduce-overhead"),
    Row("as before, read later", mode="reduce-overhead", read="later"),
    Row("as before, read first", mode="reduce-overhead", read="first"),
]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Hand:
    """The loop that one would write by hand, with the same safety."""

    def __init__(self, row: Row, sizes: Sizes, device: str) -> None:
        self.row = row
        self.device = torch.device(device)
        self.dtype = DTYPES[row.precision]
        self.net = make_net(row.kind, sizes).to(self.device)
        self.plain = self.net
        if row.mode is not None:
            self.net.compile(mode=row.mode)
        if get_world_size() > 1:
            own = None if self.device.type == "cpu" else [self.device.index]
            self.net = DistributedDataParallel(
                self.net,
                device_ids=own,
                gradient_as_bucket_view=True,
            )
        self.optimizer: Any = adamw(self.net.parameters())
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=row.precision == "fp16")

    def train(self, loader: Any) -> float:
        total = torch.zeros((), device=self.device)
        for batch in loader:
            inputs, targets = (one.to(self.device, non_blocking=True) for one in batch)
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
                loss = nn.functional.cross_entropy(self.net(inputs), targets.flatten())
            self.scaler.scale(loss).backward()
            total += loss.detach()
            self.step()
        return float(total)

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        if self.row.precision == "fp16":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not self.row.reads:
            self.optimizer.grad_scale, self.optimizer.found_inf = (
                None,
                norm.isfinite().logical_not().float(),
            )
            self.optimizer.step()
        elif norm.isfinite().item():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Model(Brain):
    """The same with ddpkit."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].to(self.device, non_blocking=True))

    def compute_objectives(self, predictions, batch, stage):
        targets = batch[1].to(self.device, non_blocking=True)
        return nn.functional.cross_entropy(predictions, targets.flatten())


class Fixed(NormReading):
    """Reads each norm in the same way, and tries nothing."""

    def __init__(self, *, is_later: bool) -> None:
        super().__init__()
        self.is_later = is_later

    def begin_step(self) -> bool:
        return self.is_later


def make_brain(row: Row, sizes: Sizes, device: str) -> Model:
    compiling = {} if row.mode is None else {"compile": True, "compile_mode": row.mode}
    options = {
        "device": device,
        "noprogressbar": True,
        "max_grad_norm": MAX_NORM,
        "precision": row.precision,
    }
    kinds = ("cuda", "cpu")
    with mock.patch.object(optim, "GPUS", kinds), mock.patch.object(making, "GPUS", kinds):
        brain = Model(
            {"net": make_net(row.kind, sizes)},
            adamw,
            run_opts={**options, **compiling, **row.options},
        )
    if row.read != "chosen":
        run_of(brain).train_step.norm_reading = Fixed(is_later=row.read == "later")
    return brain


class Passes:
    """Passes of any length of both loops over loaders of the same kind."""

    def __init__(self, row: Row, sizes: Sizes, device: str) -> None:
        self.row = row
        self.sizes = sizes
        self.device = device
        workers = {"num_workers": row.workers, "persistent_workers": row.workers > 0}
        self.given = {"batch_size": 1, "collate_fn": OneBatch(row.kind, sizes), **workers}
        self.brain = make_brain(row, sizes, device)
        self.hand = Hand(row, sizes, self.brain.device)
        self.epoch = itertools.count(2)
        self.brain.fit([1], range(get_world_size()), train_loader_kwargs=dict(self.given))
        self.hand.train(self.of_hand(1))

    def of_hand(self, steps: int) -> Any:
        return DataLoader(range(steps), pin_memory=self.device != "cpu", **self.given)

    def of_brain(self, steps: int) -> Any:
        return self.brain.make_dataloader(
            range(steps * get_world_size()),
            Stage.TRAIN,
            None,
            **self.given,
        )

    def run(self, who: str, steps: int) -> Callable[[], object]:
        if who == "hand":
            loader = self.of_hand(steps)
            return lambda: self.hand.train(loader)
        loader = self.of_brain(steps)
        return lambda: self.brain._fit_train(loader, next(self.epoch), enable=False)

    def settle(self) -> None:
        """Train until ddpkit has chosen when it reads the norm."""
        if self.row.read == "chosen" and self.row.precision != "fp16":
            self.run("brain", TRIED_STEPS)()

    @property
    def read(self) -> str:
        """When ddpkit reads the norm now."""
        is_later = run_of(self.brain).train_step.norm_reading.is_later
        return "later" if is_later and self.row.precision != "fp16" else "first"

    def are_the_same(self) -> bool:
        pairs = zip(
            self.brain.raw_modules.net.parameters(),
            self.hand.plain.parameters(),
            strict=True,
        )
        return all(torch.equal(one, other) for one, other in pairs)


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str) -> float:
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


@contextmanager
def counted_waits() -> Iterator[list[int]]:
    """Count how often the host is made to wait for the GPU."""
    found: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.append(sum("synchronizing CUDA operation" in str(one.message) for one in caught))


def waits_per_step(passes: Passes, who: str) -> float:
    counts = []
    for steps in (COUNTED, 2 * COUNTED):
        work = passes.run(who, steps)
        with counted_waits() as found:
            work()
        counts += found
    return (counts[1] - counts[0]) / COUNTED


def peak(work: Callable[[], object], device: str) -> str:
    """Make a pass; say how many MiB it allocates above what is there before it."""
    if device == "cpu":
        work()
        return "-"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"


def shown(times: list[tuple[float, float]], steps: int) -> str:
    """Say how long a step takes in each loop, and their ratio."""
    ratios = [own / by_hand for by_hand, own in times]
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    by_hand, own = (1e3 * statistics.median(one) / steps for one in zip(*times, strict=True))
    return f"{by_hand:10.3f}{own:10.3f}{f'{ratio:.3f} ({low:.3f} to {high:.3f})':>30}"


def steps_of_a_turn(passes: Passes) -> int:
    """Choose the steps of a turn: the same on all ranks."""
    work = passes.run("hand", 4)
    work()
    taken = torch.tensor(seconds(work, passes.device) / 4)
    if get_world_size() > 1:
        taken = taken.to(passes.brain.device)
        torch.distributed.broadcast(taken, 0)
    passes.run("brain", 8)()  # as many as the loop by hand has made
    return max(min(int(SECONDS_A_TURN / taken.item()), passes.sizes.most_steps), 2)


def measure(row: Row, sizes: Sizes, device: str) -> str:
    passes = Passes(row, sizes, device)
    steps = steps_of_a_turn(passes)
    bits = "same" if passes.are_the_same() else "OTHER"
    passes.settle()
    waits = [
        "-" if device == "cpu" else f"{waits_per_step(passes, who):.2f}"
        for who in ("hand", "brain")
    ]
    works = [passes.run(who, steps) for who in ("hand", "brain")]
    peaks = [peak(work, device) for work in works]
    times = [(seconds(works[0], device), seconds(works[1], device)) for _ in range(sizes.turns)]
    figures = f"{waits[0]:>9}{waits[1]:>7}{peaks[0]:>9}{peaks[1]:>8}{bits:>7}"
    return f"{shown(times, steps)}{passes.read:>7}{figures}"


def measure_checkpoint(sizes: Sizes, device: str) -> str:
    """Of the model and its optimizer's state, after a step."""
    row = Row("checkpoint")
    passes = Passes(row, sizes, device)
    net = passes.hand.plain
    optimizer = passes.hand.optimizer
    tensors = [*net.state_dict().values()]
    tensors += [one for state in optimizer.state.values() for one in state.values()]
    times = []
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(folder, {"net": net, "optimizer": optimizer})
        checkpointer.asynchronous = True
        for number in range(sizes.turns + 1):
            by_hand = seconds(lambda: [one.cpu() for one in tensors], device)
            own = seconds(
                lambda: checkpointer.save_and_keep_only(name=str(number), num_to_keep=1),  # noqa: B023
                device,
            )
            checkpointer.wait()
            times.append((by_hand, own))
    return f"{shown(times[1:], 1)}   first save {1e3 * times[0][1]:.1f} ms"


def report(rows: list[Row], sizes: Sizes, device: str, *, checkpoint: bool) -> None:
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    tell = print if if_main_process() else (lambda *_, **__: None)
    tell(f"{name}, torch {torch.__version__}, {get_world_size()} process(es); ms per step")
    head = f"{'':32}{'by hand':>10}{'ddpkit':>10}{'ratio (quartiles)':>30}"
    tell(f"{head}{'read':>7}{'waits':>9}{'own':>7}{'peak MiB':>9}{'own':>8}{'bits':>7}", flush=True)
    for row in rows:
        problem = (
            "not on a CPU" if device == "cpu" and (row.mode or row.precision == "fp16") else None
        )
        tell(f"{row.name:32}{problem or measure(row, sizes, device)}", flush=True)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    if checkpoint and get_world_size() == 1:
        tell(f"{'checkpoint':32}{measure_checkpoint(sizes, device)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, default=1, help="a GPU each")
    parser.add_argument("--turns", type=int, help="how often each row is measured")
    parser.add_argument("--rows", nargs="*", default=[""], help="words of the names of rows")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.processes:
        raise SystemExit(
            f"benchmarks/gpu.py needs {arguments.processes} GPU(s), found "
            f"{torch.cuda.device_count()}: --device cpu shows that it runs."
        )
    if arguments.processes > 1 and "RANK" not in os.environ:
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
    device = arguments.device
    if "RANK" in os.environ:
        ddp_init_group({"device": device})
    rows = [row for row in ROWS if any(word in row.name for word in arguments.rows)]
    checkpoint = any(word in "checkpoint" for word in arguments.rows)
    sizes = TINY if device == "cpu" else Sizes()
    if arguments.turns is not None:
        sizes = replace(sizes, turns=arguments.turns, most_steps=Sizes.most_steps)
    report(rows, sizes, device, checkpoint=checkpoint)


if __name__ == "__main__":
    main()
