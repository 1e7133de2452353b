"""F4 under the real torchrun: a rank is killed again and again, and the run comes back by itself
each time.

Each run may restart exactly as often as a rank is killed in it, so one restart that does not come
back fails it.
"""

from __future__ import annotations

import json
import random
import textwrap

import pytest

from tests.cells import some_of
from tests.launching import Run, torchrun

KILLS = 5
RUNS = 4
EPOCHS = 3
STEPS = 16  # per epoch
LIMIT_SECONDS = 60.0

RECIPE = """
    import json, os, signal, sys, threading
    from pathlib import Path

    import torch

    import ddpkit as sb
    from ddpkit.checkpointing import storage
    from ddpkit.checkpoints import Checkpointer
    from ddpkit.epoch_loop import EpochCounter
    from ddpkit.types import Stage

    RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    PLAN = json.loads(Path(sys.argv[1]).read_text())
    PLACE, COUNT = "nowhere", 0
    if ATTEMPT < len(PLAN) and PLAN[ATTEMPT]["rank"] == RANK:
        PLACE, COUNT = PLAN[ATTEMPT]["place"], PLAN[ATTEMPT]["count"]


    def note(name, *words):
        with open(name, "a") as file:
            file.write(" ".join(map(str, words)) + "\\n")


    def reach(place):
        "Come to a place where this rank may have to die."
        global COUNT
        COUNT -= place == PLACE
        if place == PLACE and COUNT == 0:
            die(place)


    def die(place):
        note("kills", ATTEMPT, RANK, place)
        os.kill(os.getpid(), signal.SIGKILL)


    class Files(storage.FileOperations):
        "Of the main process, which writes."

        def write(self, path, *words):
            reach("save")
            super().write(path, *words)

        def rename(self, source, target):
            reach("save")
            super().rename(source, target)
            reach("save")


    class Waiting(Checkpointer):
        "On the other rank, which waits meanwhile."

        def save_and_keep_only(self, *words, **more):
            if RANK and PLACE == "save":
                threading.Timer(COUNT / 1000, die, ["save"]).start()
            super().save_and_keep_only(*words, **more)


    class Net(sb.Brain):
        def compute_forward(self, batch, stage):
            if stage is Stage.VALID:
                reach("valid")
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch[1]).square().mean()

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            reach("train")

        def on_stage_end(self, stage, loss, epoch=None):
            note(f"losses.{RANK}", stage.name, epoch, loss.hex())
            if stage is Stage.VALID:
                self.checkpointer.save_and_keep_only(meta={"loss": loss}, min_keys=["loss"])


    storage.FILES = Files()
    note(f"attempts.{RANK}", ATTEMPT)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    inputs = torch.randn(SIZE, 4, dtype=torch.float64)
    data = list(zip(inputs, inputs.sum(1, keepdim=True).sin()))
    counter = EpochCounter(EPOCHS)
    brain = Net(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        run_opts={"device": "cpu", "noprogressbar": True, "ckpt_interval_steps": 3},
        checkpointer=Waiting("checkpoints", {"net": net, "counter": counter}),
    )
    loading = {"batch_size": 2, "shuffle": True}
    brain.fit(counter, data, data[:24], train_loader_kwargs=loading, valid_loader_kwargs={"batch_size": 4})
    Path(f"report.{RANK}").write_text(json.dumps({
        "attempt": ATTEMPT, "epoch": counter.current, "steps": brain.optimizer_step,
        "weights": {name: [x.hex() for x in value.flatten().tolist()] for name, value in net.state_dict().items()},
        "finite": all(bool(value.isfinite().all()) for value in net.state_dict().values()),
    }))
"""  # noqa: E501


def plan_of(number):
    """Choose whom to kill in each attempt of a run, where, and at the how manieth time that it
    comes there.
    """
    chance = random.Random(number)
    places = ["train", "train", "train", "save", "valid"]
    chance.shuffle(places)
    # so few that the run is not over before the last kill
    most = {"train": 8, "save": 20, "valid": 3}
    return [
        {"rank": chance.randrange(2), "place": place, "count": chance.randint(1, most[place])}
        for place in places
    ]


def train(folder, plan):
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    sizes = f"EPOCHS, SIZE = {EPOCHS}, {STEPS * 4}\n"
    script.write_text(sizes + textwrap.dedent(RECIPE))
    (folder / "plan").write_text(json.dumps(plan))
    run = Run(torchrun(2, f"--max-restarts={len(plan)}", str(script), "plan"), folder, warm=True)
    return run.wait(LIMIT_SECONDS)


def reports(folder):
    return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(2)]


def last_losses(folder, rank):
    """Return each stage's loss as it was reported last: an epoch's end may be lived through
    twice.
    """
    lines = (folder / f"losses.{rank}").read_text().splitlines()
    return {tuple(line.split()[:2]): line.split()[2] for line in lines}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run = train(folder, [])
    assert run.code == 0, run.err
    return folder


@pytest.mark.parametrize("number", some_of(range(RUNS), range(2)))
def test_torchrun_comes_back_after_every_kill(tmp_path, uninterrupted, number):
    plan = plan_of(number)
    run = train(tmp_path, plan)
    assert run.code == 0, f"{plan}\n{run.err}"
    killed = [line.split() for line in (tmp_path / "kills").read_text().splitlines()]
    wanted = [[str(attempt), str(kill["rank"]), kill["place"]] for attempt, kill in enumerate(plan)]
    assert killed == wanted, f"every kill happens, each in its attempt:\n{run.err}"
    for rank in range(2):
        attempts = (tmp_path / f"attempts.{rank}").read_text().split()
        assert attempts == [str(attempt) for attempt in range(KILLS + 1)]
    first, second = reports(tmp_path)
    assert first == second
    assert first["finite"]
    assert (first["attempt"], first["epoch"], first["steps"]) == (KILLS, EPOCHS, EPOCHS * STEPS)
    assert first["weights"] == reports(uninterrupted)[0]["weights"], (
        "bit-identical to the run without kills"
    )
    for rank in range(2):
        assert last_losses(tmp_path, rank) == last_losses(uninterrupted, rank)
