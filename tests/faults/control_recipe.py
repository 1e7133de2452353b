"""A recipe that trains a little and meets with a fault: ``control_recipe.py OUTPUT [options]
[name=value ...]``.

``fault=KIND@WHERE``, ``rank=R`` and ``step=N`` say what happens, where, on which rank and at which
step.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

# DDP imports it in fit, which takes longer than --hang_timeout=8 on a loaded machine
import torch._dynamo

import ddpkit as sb
from ddpkit.checkpoints import Checkpointer
from ddpkit.control import signals
from ddpkit.epoch_loop import EpochCounter

ARGUMENTS = sys.argv[1:] if __name__ == "__main__" else ["."]
WORDS = dict(word.split("=", 1) for word in ARGUMENTS[1:] if not word.startswith("-"))
FOLDER = Path(ARGUMENTS[0])
FAULT, _, WHERE = WORDS.get("fault", "@").partition("@")
RANK = int(WORDS.get("rank", 0))
STEP = int(WORDS.get("step", 5))
SIZE = int(WORDS.get("size", 400))
PAUSE = float(WORDS.get("pause", 0.02))
WORKERS = int(WORDS.get("workers", 0))
CONTEXT = {"multiprocessing_context": WORDS["context"]} if "context" in WORDS else {}


def happen():
    """Do what was asked for, and note when."""
    if not (FOLDER / "fault").exists():
        (FOLDER / "fault").write_text(str(time.time()))
    if FAULT == "raise":
        raise ValueError("boom from the fault")
    if FAULT in {"kill", "stop"}:
        os.kill(os.getpid(), signal.SIGKILL if FAULT == "kill" else signal.SIGSTOP)
    if FAULT == "sleep":
        time.sleep(float(WORDS.get("seconds", 1000)))
    left = int(WORDS.get("seconds", 1000))
    while FAULT == "gil" and left:  # a signal ends a sleep
        left = ctypes.PyDLL(None).sleep(left)  # which keeps the interpreter lock
    if FAULT == "spin":
        while True:
            pass


def empty(size, dtype=float):
    """Return memory, but not for the bytes of a file that is sent."""
    if dtype is np.uint8 and here("load", 10**6):
        happen()
        raise MemoryError
    return np.zeros(size, dtype)


def here(where, step):
    """Say whether this is the place."""
    mine = int(os.environ.get("RANK", "0")) == RANK
    return mine and where == WHERE and step >= STEP


class Data(torch.utils.data.Dataset):
    """Numbers; item ``STEP * 8`` is read by the rank and the place that the fault is for."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        in_worker = torch.utils.data.get_worker_info() is not None
        self.read = getattr(self, "read", 0) + 1
        if here("worker" if in_worker else "dataset", self.read / 4):
            happen()
        return torch.tensor([index / SIZE])


class Stream(torch.utils.data.IterableDataset):
    """The same, of which nobody knows how many there are."""

    def __iter__(self):
        return (torch.tensor([index / SIZE]) for index in range(SIZE))


class Faulty(sb.Brain):
    """Learns to double numbers, slowly."""

    def compute_forward(self, batch, stage):
        time.sleep(PAUSE)
        self.note(stage)
        if here("forward" if stage == sb.Stage.TRAIN else "valid", self.step):
            happen()
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.mse_loss(predictions, 2 * batch)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if here("hook", self.step):
            happen()

    def on_fit_start(self):
        if here("fit", 10**6):
            happen()
        super().on_fit_start()

    def on_stage_start(self, stage, epoch):
        self.epoch = epoch
        if stage == sb.Stage.TRAIN and here("start", 10**6):
            happen()

    def on_stage_end(self, stage, stage_loss, epoch):
        if here("end", 10**6):
            happen()
        if stage == sb.Stage.VALID:
            sb.run_on_main(self.save)

    def save(self):
        if "main" in WHERE:
            happen()
        self.checkpointer.save_and_keep_only(meta={"epoch": self.epoch}, num_to_keep=2)

    def note(self, stage):
        line = [self.rank, os.getpid(), stage.name, self.step, self.optimizer_step, time.time()]
        with (FOLDER / f"steps-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    hparams = Path(__file__).with_name("control.yaml")
    sys.argv[1:] = [str(hparams), *(word for word in ARGUMENTS[1:] if word.startswith("-"))]
    _, run_opts, _ = sb.parse_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Linear(1, 1)
    checkpointer = Checkpointer(FOLDER / "save", {"net": net})
    counter = EpochCounter(int(WORDS.get("epochs", 3)))
    checkpointer.add_recoverable("counter", counter)
    run_opts["noprogressbar"] = True
    brain = Faulty(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        hparams={"output_folder": str(FOLDER)},
        run_opts=run_opts,
        checkpointer=checkpointer,
    )
    if here("before", 10**6):
        happen()
    if WHERE == "load":
        np.empty = empty
    loader = {"batch_size": 4, "num_workers": WORKERS, "shuffle": True, **CONTEXT}
    valid = Stream() if WORDS.get("stream") else Data()
    try:
        brain.fit(
            counter,
            Data(),
            valid,
            train_loader_kwargs=loader,
            valid_loader_kwargs={"batch_size": 4},
        )
    finally:
        after = float(WORDS.get("after", 0))  # what a script tidies up
        signals.FINAL_REPORT_SECONDS += 20 * after  # on a busy machine
        (FOLDER / f"left-{brain.rank}").touch()
        time.sleep(after)
    torch.save(net.state_dict(), FOLDER / f"final-{brain.rank}.pt")
    print(f"finished {brain.optimizer_step}", flush=True)


if __name__ == "__main__":
    main()
