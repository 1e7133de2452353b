"""Trains a golden case on this rank: fresh, killed, and resumed."""

from __future__ import annotations

import os

from torch.utils.data import Subset

import ddpkit
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from tests.golden.cases import CASES
from tests.golden.data import Table
from tests.golden.facts import every_loss, facts_of_result, facts_of_training

SEED = 17
OPTIONS = {"device": "cpu", "noprogressbar": True, "shard_evaluation": True, "ckpt_async": False}
OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def fresh(name):
    """Train a case from its start to its end."""
    return train(name)


def killed(name, folder, kill_at):
    """Train a case until so many optimizer steps, with checkpoints in a folder."""
    return train(name, folder, kill_at)


def resumed(name, folder):
    """Train a case to its end, from the newest checkpoint of a folder."""
    return train(name, folder)


def train(name, folder=None, kill_at=None):
    case = CASES[name]
    if case.alone and os.environ["WORLD_SIZE"] == "1":
        leave_the_launcher()
    ddpkit.seed_everything(SEED, verbose=False)
    brain, counter = make_brain(case, folder)
    brain.kill_at = kill_at
    try:
        result = brain.fit(
            counter,
            case.make_data(),
            Table(case.dtype),
            train_loader_kwargs=case.loader_kwargs(),
            valid_loader_kwargs={"batch_size": 5},
        )
    except KeyboardInterrupt:
        if kill_at is None:
            raise
        return facts_of_training(brain)
    found = facts_of_training(brain)
    if folder is None:
        found["every_loss"] = every_loss(brain)
    return found | use(brain, result, case)


def make_brain(case, folder):
    """Make the Brain of a case; with a folder, one that saves."""
    modules = case.make_modules()
    counter = EpochCounter(case.epochs)
    options = OPTIONS | case.options
    checkpointer = None
    if folder is not None:
        options |= {"ckpt_interval_steps": 3}
        checkpointer = Checkpointer(folder, modules | {"counter": counter})
    brain = case.recipe(modules, case.optimize, None, options, checkpointer, case.scheduler)
    return brain, counter


def use(brain, result, case):
    """Evaluate and predict with what was trained: with the best checkpoint, where there are any."""
    data = Subset(Table(case.dtype), range(5, 30))
    loader = {"batch_size": 4}
    test_loss = brain.evaluate(data, min_key="loss", test_loader_kwargs=loader)
    outputs = brain.predict(data, min_key="loss", loader_kwargs=loader)
    return facts_of_result(result, test_loss, outputs)


def leave_the_launcher():
    """Be a process that nobody has launched; the pool of ranks puts its environment back."""
    for name in (*OF_A_RANK, *(one for one in os.environ if one.startswith("TORCHELASTIC_"))):
        os.environ.pop(name, None)
