"""The recipe of the table of faults: ``table_recipe.py FOLDER TRIAL [options]``.

The trial, as JSON, says what happens, where, on which rank and when:
:class:`tests.faults.table_trials.Trial`. What happens is noted in the folder, by every rank for
itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import ddpkit as sb
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter

BATCH = 4
PAUSE_SECONDS = 0.02
SAVING_SECONDS = 0.3  # of a save that a fault is meant for
STUCK_SECONDS = 1000

IS_RUN = Path(sys.argv[0]).name == Path(__file__).name  # else pytest looks for doctests in it
FOLDER, TRIAL = (
    (Path(sys.argv[1]), SimpleNamespace(**json.loads(sys.argv[2]))) if IS_RUN else (Path(), None)
)
RANK = int(os.environ.get("RANK", "0"))
LIVE = SimpleNamespace(epoch=0, count=0)


def note(kind, *facts):
    with (FOLDER / f"diary.{RANK}").open("a") as file:
        file.write(json.dumps([time.time(), os.getpid(), kind, *facts]) + "\n")


def reach(where, step, *, everywhere=False):
    """Let the fault happen if this is its place; it may happen several times in a row."""
    due = (LIVE.epoch, step) >= (TRIAL.epoch, TRIAL.step) and LIVE.count < TRIAL.times
    if where == TRIAL.where and due and (everywhere or TRIAL.rank == RANK):
        LIVE.count += 1
        note("fault", where, LIVE.epoch, step)
        return True
    return False


def happen():
    """Do what the trial says. What is sent from outside only needs a sign, and time."""
    kind = TRIAL.kind
    if kind == "raise":
        raise ValueError("boom from the fault")
    if kind == "oom":
        torch.empty(1 << 50)
    if kind in {"kill", "stop"}:
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if kind == "sleep" or (kind.startswith("SIG") and TRIAL.twice):
        time.sleep(STUCK_SECONDS)
    if kind == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if kind == "gil":
        while True:  # a signal ends a sleep
            ctypes.PyDLL(None).sleep(STUCK_SECONDS)  # which does not let go of Python


class Data(torch.utils.data.Dataset):
    """Numbers."""

    def __init__(self, size, places=()):
        self.size = size
        self.places = places
        self.read = 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read += 1
        where = "dataset" if torch.utils.data.get_worker_info() is None else "worker"
        if where in self.places and reach(where, 1 + self.read // BATCH):
            happen()
        return torch.tensor([index / self.size])


@sb.checkpoints.register_checkpoint_hooks(save_on_main_only=False)
class Own:
    """Something that every rank saves for itself."""

    @sb.checkpoints.mark_as_saver
    def _save(self, path):
        step = LIVE.brain.step
        note("save", LIVE.epoch, step)
        if reach("save", step):
            happen()
            time.sleep(SAVING_SECONDS)
        Path(f"{path}.{RANK}" if RANK else path).write_text("saved")

    @sb.checkpoints.mark_as_loader
    def _load(self, path, end_of_epoch):
        pass


class Descent(torch.optim.SGD):
    """SGD that may fail."""

    def step(self, *arguments):
        if reach("optimizer", LIVE.brain.step):
            happen()
        return super().step(*arguments)


class Faulty(sb.Brain):
    """Learns to double numbers, slowly."""

    def compute_forward(self, batch, stage):
        time.sleep(TRIAL.pause)
        note(stage.name, LIVE.epoch, self.step, self.optimizer_step)
        if reach("forward" if stage == sb.Stage.TRAIN else "valid", self.step):
            happen()
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        loss = torch.nn.functional.mse_loss(predictions, 2 * batch)
        if stage == sb.Stage.TRAIN and TRIAL.kind == "nan" and reach("loss", self.step):
            return loss * float("nan")
        if stage == sb.Stage.TRAIN and reach("backward", self.step):
            loss.register_hook(lambda _: happen())
        return loss

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if reach("hook", self.step):
            happen()
        if reach("together", self.step, everywhere=True):
            self.fail_together()

    def fail_together(self):
        began = time.time()
        try:
            sb.run_on_main(happen)
        except (ValueError, sb.MainProcessError) as error:
            note("raised", time.time() - began, type(error).__name__, str(error))
            if not TRIAL.caught:
                raise

    def on_stage_start(self, stage, epoch):
        LIVE.epoch = epoch or LIVE.epoch
        if stage == sb.Stage.TRAIN and reach("start", 10**6):
            happen()

    def on_stage_end(self, stage, stage_loss, epoch):
        if stage == sb.Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"epoch": epoch}, num_to_keep=2)


def make_brain():
    hparams = Path(__file__).with_name("control.yaml")
    _, run_opts, _ = sb.parse_arguments([str(hparams), *sys.argv[3:]])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Linear(1, 1)
    checkpointer = Checkpointer(FOLDER / "save", {"net": net, "own": Own()})
    counter = EpochCounter(TRIAL.epochs)
    checkpointer.add_recoverable("counter", counter)
    run_opts["noprogressbar"] = True
    LIVE.brain = Faulty(
        {"net": net},
        lambda parameters: Descent(parameters, lr=0.1),
        hparams={"output_folder": str(FOLDER)},
        run_opts=run_opts,
        checkpointer=checkpointer,
    )
    return LIVE.brain, counter


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    brain, counter = make_brain()
    note("started")
    if reach("before", 10**6):
        happen()
    train = Data(TRIAL.steps * BATCH * TRIAL.world_size, {"dataset", "worker"})
    loader = {"batch_size": BATCH, "num_workers": TRIAL.workers, "shuffle": True}
    valid = {"batch_size": BATCH}
    try:
        brain.fit(
            counter,
            train,
            Data(8 * BATCH),
            train_loader_kwargs=loader,
            valid_loader_kwargs=valid,
        )
    except BaseException as error:
        note("ended", type(error).__name__, str(error))
        raise
    torch.save(brain.modules.net.state_dict(), FOLDER / f"final-{RANK}.pt")
    note("finished", brain.optimizer_step)


if __name__ == "__main__":
    main()
