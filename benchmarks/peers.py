"""What a training step costs in ddpkit and in other libraries, against the loop that one writes by
hand.

    make bench-peers                                              # all of them, one process and two
    python benchmarks/peers.py --peers ddpkit lightning --processes 1

Each library runs in an environment of its own, which shares the PyTorch of this one
(``build/peers``; made on first use). In it the loop by hand and the library's train in turns, in
one process, on the same model and the same batches, so that a machine that slows down slows both;
reported is the median over the turns of the ratio. What is timed is an epoch without its start and
end: from the first batch asked for to the last step. At the end the weights of both are compared.

All do the same: clip the gradients to a norm, and know the mean loss of the epoch. Which of them
also look whether the gradients are finite is in the table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

WIDTH = 64
CLASSES = 10
BATCH = 16
LR = 1e-3
MAX_NORM = 5.0
FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers"
PACKAGES = {
    "by hand": [],
    "ddpkit": [],
    "accelerate": ["accelerate"],
    "fabric": ["lightning"],
    "lightning": ["lightning"],
    "ignite": ["pytorch-ignite"],
    "speechbrain": [
        "speechbrain",
        "huggingface_hub",
        "sentencepiece",
        "soundfile",
        "cffi",
        "pycparser",
        "--no-deps",
    ],
}
STAND_IN = (
    '__version__ = "2.11.0"  # for torchaudio, whose builds need CUDA on some machines; nothing '
    "here uses it\n"
)


class Samples(torch.utils.data.Dataset[int]):
    """Numbers of samples; :meth:`collate` looks them up at once, so that loading costs little and
    hides nothing.
    """

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(size, WIDTH, generator=generator)
        self.targets = torch.randint(0, CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def make_sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_loader(samples: Samples, *, divided: bool) -> DataLoader[Any]:
    """Return a plain loader; divided over the processes where a library leaves that to its user."""
    size = world_size()
    rank = int(os.environ.get("RANK", "0"))
    sampler = (
        DistributedSampler(samples, size, rank, shuffle=False) if divided and size > 1 else None
    )
    return DataLoader(samples, BATCH, sampler=sampler, collate_fn=samples.collate)


class Clock:
    """Notes the time from the start to the end of an epoch's steps."""

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._started


Turn = Callable[[Clock], nn.Module]


def by_hand(samples: Samples) -> Turn:
    if world_size() > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    net = make_net()
    model = DistributedDataParallel(net) if world_size() > 1 else net
    parameters = list(net.parameters())
    loader = make_loader(samples, divided=True)
    optimizer = make_sgd(parameters)

    def turn(clock: Clock) -> nn.Module:
        model.train()
        total = torch.zeros((), dtype=torch.float64)
        clock.start()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            if torch.isfinite(norm).item():
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
        clock.stop()
        return net

    return turn


def ddpkit(samples: Samples) -> Turn:
    from ddpkit import Brain

    return _brain(
        Brain,
        samples,
        {"device": "cpu", "noprogressbar": True, "max_grad_norm": MAX_NORM},
    )


def speechbrain(samples: Samples) -> Turn:
    from speechbrain.core import Brain

    options: dict[str, Any] = {"device": "cpu", "noprogressbar": True, "max_grad_norm": MAX_NORM}
    if world_size() > 1:
        from speechbrain.utils.distributed import ddp_init_group

        options |= {
            "distributed_launch": True,
            "distributed_backend": "gloo",
            "find_unused_parameters": False,
        }
        ddp_init_group(options)
    return _brain(Brain, samples, options)


def _brain(base: Any, samples: Samples, options: dict[str, Any]) -> Turn:
    class Classifier(base):  # type: ignore[misc]
        def compute_forward(self, batch: Any, stage: Any) -> Any:
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            return nn.functional.cross_entropy(predictions, batch[1])

        def on_stage_start(self, stage: Any, epoch: Any = None) -> None:
            self.clock.start()

        def on_stage_end(self, stage: Any, stage_loss: float, epoch: Any = None) -> None:
            self.clock.stop()

    # "sorting" has SpeechBrain not shuffle on several processes
    net = make_net()
    epoch = 0
    brain = Classifier({"net": net}, make_sgd, hparams={"sorting": "ascending"}, run_opts=options)
    loading = {"batch_size": BATCH, "collate_fn": samples.collate}

    def turn(clock: Clock) -> nn.Module:
        nonlocal epoch
        epoch = epoch + 1
        brain.clock = clock
        brain.fit([epoch], samples, train_loader_kwargs=dict(loading))
        return net

    return turn


def accelerate(samples: Samples) -> Turn:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = make_net()
    model, optimizer, loader = accelerator.prepare(
        net,
        make_sgd(net.parameters()),
        make_loader(samples, divided=False),
    )

    def turn(clock: Clock) -> nn.Module:
        model.train()
        total = torch.zeros((), dtype=torch.float64)
        clock.start()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            if torch.isfinite(norm).item():
                optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        clock.stop()
        return net

    return turn


def fabric(samples: Samples) -> Turn:
    from lightning.fabric import Fabric

    kind = Fabric(
        accelerator="cpu",
        devices=world_size(),
        strategy="ddp" if world_size() > 1 else "auto",
    )
    kind.launch()
    net = make_net()
    model, optimizer = kind.setup(net, make_sgd(net.parameters()))
    loader = kind.setup_dataloaders(make_loader(samples, divided=False))

    def turn(clock: Clock) -> nn.Module:
        model.train()
        total = torch.zeros((), dtype=torch.float64)
        clock.start()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            kind.backward(loss)
            norm = kind.clip_gradients(
                model,
                optimizer,
                max_norm=MAX_NORM,
                error_if_nonfinite=False,
            )
            if torch.isfinite(norm).item():
                optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        clock.stop()
        return net

    return turn


def lightning(samples: Samples) -> Turn:
    from lightning import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=BATCH)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_sgd(self.parameters())

        def on_train_epoch_start(self) -> None:
            self.clock.start()

        def on_train_epoch_end(self) -> None:
            self.clock.stop()

    module = Classifier()
    loader = make_loader(samples, divided=True)

    def turn(clock: Clock) -> nn.Module:
        module.clock = clock
        trainer = Trainer(
            accelerator="cpu",
            devices=world_size(),
            strategy="ddp" if world_size() > 1 else "auto",
            max_epochs=1,
            use_distributed_sampler=False,  # its own shuffles
            gradient_clip_val=MAX_NORM,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
        return module.net

    return turn


def ignite(samples: Samples) -> Turn:
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.metrics import Average

    if world_size() > 1:
        idist.initialize("gloo")
    net = make_net()
    model = idist.auto_model(net)
    optimizer = idist.auto_optim(make_sgd(net.parameters()))
    loader = make_loader(samples, divided=True)

    def step(_engine: Engine, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if torch.isfinite(norm).item():
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def turn(clock: Clock) -> nn.Module:
        model.train()
        trainer = Engine(step)
        Average().attach(trainer, "loss")
        trainer.add_event_handler(Events.EPOCH_STARTED, clock.start)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, clock.stop)
        trainer.run(loader, max_epochs=1)
        return net

    return turn


PEERS: dict[str, SimpleNamespace] = {
    "by hand": SimpleNamespace(make=by_hand, finite_check="yes"),
    "ddpkit": SimpleNamespace(make=ddpkit, finite_check="yes"),
    "accelerate": SimpleNamespace(make=accelerate, finite_check="by hand"),
    "fabric": SimpleNamespace(make=fabric, finite_check="by hand"),
    "lightning": SimpleNamespace(make=lightning, finite_check="no"),
    "ignite": SimpleNamespace(make=ignite, finite_check="by hand"),
    "speechbrain": SimpleNamespace(make=speechbrain, finite_check="yes"),
}


def compare(peer: str, turns: int, steps: int) -> dict[str, Any]:
    """Run a library's loop and the one by hand in turns, in this process."""
    warnings.simplefilter("ignore")
    samples = Samples(steps * BATCH * world_size())
    # first: a library may want to start the process group itself
    theirs = PEERS[peer].make(samples)
    hand = by_hand(samples)
    ratios = []
    microseconds = []
    clock = Clock()
    for number in range(turns + 1):
        own_net = hand(clock)
        own = clock.seconds
        net = theirs(clock)
        if number:  # the first turn warms up
            ratios.append(clock.seconds / own)
            microseconds.append(clock.seconds / steps * 1e6)
    apart = max(
        float((one.detach() - other.detach()).abs().max())
        for one, other in zip(own_net.parameters(), net.parameters(), strict=True)
    )
    return {
        "ratio": statistics.median(ratios),
        "microseconds": statistics.median(microseconds),
        "apart": apart,
    }


def environment(peer: str) -> Path:
    """Make an environment with a library in it, and PyTorch from this one; return its Python."""
    packages = PACKAGES[peer]
    if not packages:
        return Path(sys.executable)
    folder = FOLDER / packages[0]
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"Installing {packages[0]} into {folder}.", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        own = next(path for path in sys.path if path.endswith("site-packages"))
        inside = subprocess.run(
            [str(python), "-c", "import site; print(site.getsitepackages()[0])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        (Path(inside) / "shared.pth").write_text(own + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "-qq", *packages], check=True)
        if "--no-deps" in packages:
            (Path(inside) / "torchaudio.py").write_text(STAND_IN)
        (folder / "complete").touch()
    return python


def run_peer(peer: str, processes: int, turns: int, steps: int) -> dict[str, Any]:
    """Compare one library with the loop by hand, in a process (or several) of its environment."""
    python = str(environment(peer))
    with tempfile.TemporaryDirectory() as folder:
        worker = [__file__, "--worker", peer, "--turns", str(turns), "--steps", str(steps)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        result = subprocess.run(
            [
                python,
                *(torchrun if processes > 1 else []),
                *worker,
                "--result",
                f"{folder}/result.json",
            ],
            cwd=folder,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if result.returncode:
            raise SystemExit(f"{peer} on {processes} process(es) failed:\n{result.stdout[-4000:]}")
        return json.loads(Path(folder, "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        found = compare(args.worker, args.turns, args.steps)
        found["version"] = _version(args.worker)
        if os.environ.get("RANK", "0") == "0":
            Path(args.result).write_text(json.dumps(found))
        if dist.is_initialized():
            dist.barrier()  # or the threads of one rank may end while those of the other ask them
            dist.destroy_process_group()
        return
    print(
        "| library | version | processes | us per step | ratio to the loop by hand | weights "
        "apart | finite check |"
    )
    print("|---|---|---|---|---|---|---|")
    for processes in args.processes:
        for peer in args.peers:
            found = run_peer(peer, processes, args.turns, args.steps)
            print(
                f"| {peer} | {found['version']} | {processes} | {found['microseconds']:.0f} | "
                f"{found['ratio']:.2f} | {found['apart']:.1g} | {PEERS[peer].finite_check} |",
                flush=True,
            )


def _version(peer: str) -> str:
    from importlib.metadata import version

    return version((PACKAGES[peer] or ["ddpkit" if peer == "ddpkit" else "torch"])[0])


if __name__ == "__main__":
    main()
