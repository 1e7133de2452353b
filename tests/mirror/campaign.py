"""Kills a whole training near its saves into a store, and starts it again on an empty disk, until
it has come to its end; compares it with the training that was not killed.

``python -m tests.mirror.campaign --kills 200 --store s3`` runs a real S3 server (moto's) beside it;
``--store file`` needs nothing, and ``--kinds`` names some of the kinds of trainings. A kill is
``kill -9``, by the training itself, right before or right after one of its requests that change the
store: so each request of a save is hit, and with the retention each of a deletion. A trial is
killed up to three times. What is printed is what has to be zero: resumes from what is not complete,
other weights, other rows.

Each attempt is a fork of a process that has imported torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer, whole_state_dict
from ddpkit.distributed import ddp_init_group
from ddpkit.epoch_loop import EpochCounter
from ddpkit.experiment import create_experiment_directory
from ddpkit.hparams import load_hparams
from ddpkit.object_store import Objects
from ddpkit.run_opts import parse_arguments
from ddpkit.train_logger import CSVTrainLogger, FileTrainLogger, TrainLoggers

CHANGES = ("write", "create", "send", "delete")
EPOCHS = 3
SAMPLES = 24
RECIPE = "output_folder: results\nsave_folder: !ref <output_folder>/save\n"
LIMIT_SECONDS = 300
PLACE = tempfile.gettempdir()


@dataclass(frozen=True)
class Kill:
    """Where an attempt ends.

    Attributes:
        number: of the request that changes the store.
        is_before: whether it is not made any more.
    """

    number: int
    is_before: bool


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )

    def forward(self, inputs):
        return self.layers(inputs)


class Recipe(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch[1]).square().mean()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage.name == "TRAIN":
            self.hparams.train_logger.log_stats({"epoch": epoch}, {"loss": stage_loss})
            self.checkpointer.save_and_keep_only(
                meta={"loss": float(stage_loss)}, num_to_keep=1, min_keys=["loss"]
            )


class Counting:
    """Counts the requests that change the store, and kills this process at one of them."""

    def __init__(self, kill):
        self.kill = kill
        self.seen = []
        for name in CHANGES:
            setattr(Objects, name, self._around(name, getattr(Objects, name)))

    def _around(self, name, plain):
        def request(objects, *args, **kwargs):
            target = args[-1] if name == "send" else args[0]
            self.seen.append(f"{name} {target.rpartition('/')[2]}")
            is_here = self.kill is not None and len(self.seen) == self.kill.number
            if is_here and self.kill.is_before:
                os.kill(os.getpid(), signal.SIGKILL)
            found = plain(objects, *args, **kwargs)
            if is_here:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return request


def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    return list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))


def train(url, place, kill, words):
    """One attempt of the training, in this process."""
    torch.manual_seed(7)
    os.environ["TMPDIR"] = str(place)
    tempfile.tempdir = None
    file = place.parent / "hparams.yaml"
    sys.argv = ["train.py", str(file), f"--output_folder={url}", "--device=cpu", *words]
    path, run_opts, overrides = parse_arguments()
    ddp_init_group(run_opts)
    is_main = os.environ.get("RANK", "0") == "0"
    counting = Counting(kill if is_main else None)
    hparams = load_hparams(path, overrides)
    create_experiment_directory(hparams["output_folder"], path, overrides, save_env_desc=False)
    folder = Path(hparams["output_folder"])
    hparams["train_logger"] = TrainLoggers(
        FileTrainLogger(folder / "train_log.txt"),
        CSVTrainLogger(folder / "rows.csv"),
    )
    net = Net()
    counter = EpochCounter(EPOCHS)
    checkpointer = Checkpointer(hparams["save_folder"], {"net": net, "counter": counter})
    brain = Recipe(
        {"net": net},
        lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=checkpointer,
    )
    sizes = {"global_batch_size": 4} if "RANK" in os.environ else {}
    for name, value in sizes.items():
        run_opts[name] = value
    loading = {"shuffle": True} if sizes else {"shuffle": True, "batch_size": 4}
    result = brain.fit(counter, data(), train_loader_kwargs=loading)
    note_load(checkpointer, place)
    whole = whole_state_dict(brain.modules.net)
    if is_main:
        weights = torch.cat([tensor.flatten() for tensor in whole.values()])
        found = {
            "weights": weights.numpy().tobytes().hex(),
            "steps": result.optimizer_steps,
            "requests": counting.seen,
            "log": (folder / "train_log.txt").read_text(),
            "rows": (folder / "rows.csv").read_text(),
        }
        (place.parent / "result.json").write_text(json.dumps(found))


def note_load(checkpointer, place):
    """Note where this node has read what it goes on from."""
    loaded = "" if checkpointer.last_loaded is None else str(checkpointer.last_loaded)
    rank = os.environ.get("RANK", "0")
    (place.parent / f"loaded{rank}.txt").write_text(loaded)


def attempt(url, place, kill, words, ranks):
    """Run one attempt in forks; return whether it was killed."""
    shutil.rmtree(place, ignore_errors=True)  # the disk of a fresh machine
    place.mkdir(parents=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    children = [fork(url, place, kill, words, rank, ranks, port) for rank in range(ranks)]
    codes = [wait_for(child) for child in children]
    if codes == [0] * ranks:
        return False
    if kill is not None and codes[0] == -signal.SIGKILL:
        return True
    raise RuntimeError(f"{kill} ended with {codes}:\n{(place.parent / 'output.txt').read_text()}")


def fork(url, place, kill, words, rank, ranks, port):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(place.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if ranks > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        train(url, place, kill, words)
        import atexit

        atexit._run_exitfuncs()  # the end of a process, without torch's
        code = 0
    except BaseException:  # noqa: BLE001 -- a fork must not go on with its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(child):
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it did not end"


@dataclass(frozen=True)
class Kind:
    words: tuple[str, ...] = ()
    ranks: int = 1
    loses_scratch: bool = False


@dataclass
class Found:
    """What has to be zero, but for the first two."""

    kills: int = 0
    resumes: int = 0
    other_weights: int = 0
    other_rows: int = 0
    damaged: int = 0
    failed: int = 0


class Campaign:
    """Trials of one kind, until so many kills have happened."""

    def __init__(self, kind, folder, seed):
        self.kind = kind
        self.folder = folder
        self.dice = random.Random(seed)
        self.words = (
            "--ckpt_interval_steps=4",
            *(word.format(scratch=folder / "scratch") for word in kind.words),
        )
        self.found = Found()
        self.places = Counter()
        (folder / "hparams.yaml").write_text(RECIPE)

    def run(self, bucket, kills):
        self.attempt(f"{bucket}/whole", None)
        self.whole = json.loads((self.folder / "result.json").read_text())
        for number in itertools.count():
            if self.found.kills >= kills:
                return
            self.trial(f"{bucket}/{number}")

    def attempt(self, url, kill):
        return attempt(url, self.folder / "disk", kill, self.words, self.kind.ranks)

    def trial(self, url):
        for name in ("result.json", "output.txt"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)
        done = []
        try:
            while len(done) < 3 and self.attempt(url, kill := self.kill()):
                done.append(kill)
                self.found.kills += 1
                if self.kind.loses_scratch and self.dice.random() < 0.5:
                    shutil.rmtree(self.folder / "scratch", ignore_errors=True)
            if len(done) == 3:
                self.attempt(url, None)
        except RuntimeError as error:
            self.found.failed += 1
            print(f"  FAILED {url} after {done}:\n{error}", flush=True)
            return
        self.compare(url, done)

    def kill(self):
        return Kill(self.dice.randint(1, len(self.whole["requests"])), self.dice.random() < 0.5)

    def compare(self, url, done):
        result = json.loads((self.folder / "result.json").read_text())
        output = (self.folder / "output.txt").read_text()
        for kill in done:
            self.places[self.whole["requests"][kill.number - 1].partition("+")[0]] += 1
        self.found.resumes += output.count("Loading a checkpoint from")
        self.found.damaged += output.count("is damaged")
        # a run that begins anew adds to the rows that are there, on a disk as in a store
        begun_anew = output.count("starting from scratch") > 1
        same = {name: result[name] == self.whole[name] for name in ("weights", "steps", "rows")}
        self.found.other_weights += not (same["weights"] and same["steps"])
        same["rows"] = same["rows"] or begun_anew
        self.found.other_rows += not same["rows"]
        print(f"  {url.rpartition('/')[2]}: {self.found}", flush=True)
        if not all(same.values()):
            print(f"  DIFFERENT {url} after {done}\n{result['rows']}\n{output}", flush=True)


KINDS = {
    "store": Kind(("--ckpt_async=False",)),
    "store, in the background": Kind(),
    "local first": Kind(("--ckpt_local={scratch}",)),
    "local first, disks that are lost": Kind(("--ckpt_local={scratch}",), loses_scratch=True),
    "two ranks": Kind(ranks=2),
    "shards of two ranks": Kind(("--strategy=fsdp",), ranks=2),
}


@contextlib.contextmanager
def scratch_folder():
    """A folder that no fork removes at its end, as it would a TemporaryDirectory."""
    path = Path(tempfile.mkdtemp(prefix="ddpkit-campaign-", dir=PLACE))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def bucket_of(store, folder):
    """Return the URL of an empty bucket."""
    if store == "file":
        yield f"file://{folder}/bucket"
        return
    from tests.s3_server import s3_server

    with s3_server() as server:
        os.environ.update(server.environment)
        yield server.folder()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("file", "s3"), default="file")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--json", type=Path, help="write there what was found, by kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.store == "s3":
        import s3fs  # noqa: F401 -- before the forks
    bad = 0
    report = {}
    with (
        scratch_folder() as store,
        bucket_of(options.store, store) as bucket,
    ):
        for number, name in enumerate(options.kinds):
            begun = time.monotonic()
            with scratch_folder() as folder:
                campaign = Campaign(KINDS[name], folder, options.seed)
                campaign.run(f"{bucket}/{number}", options.kills)
            found = campaign.found
            seconds = time.monotonic() - begun
            print(f"{name}: {found} in {seconds:.0f} s, at {dict(campaign.places)}", flush=True)
            report[name] = {**dataclasses.asdict(found), "places": campaign.places}
            bad += found.other_weights + found.other_rows + found.damaged + found.failed
    if options.json:
        options.json.write_text(json.dumps(report))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
