"""What the tests of sharded saves share: a run of which each rank holds some rows, without FSDP."""

from __future__ import annotations

import torch
from torch import nn

from ddpkit.checkpointing.shard_states import ShardedState
from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import get_rank, get_world_size

ROWS = 7  # uneven on 2 ranks and 3
WIDTH = 5


class ShardedRun:
    """A model whose rows are divided over the ranks, and a part that is not; every value is the
    step that :meth:`stamp` was given last.
    """

    def __init__(self):
        self.model = nn.Linear(WIDTH, ROWS)
        self.plain = nn.BatchNorm1d(3)
        self.stamp(-1)

    def stamp(self, step):
        with torch.no_grad():
            for module in (self.model, self.plain):
                for tensor in module.state_dict().values():
                    tensor.fill_(step)

    def step(self):
        """Return the one step that all values hold; anything else is a torn state."""
        states = [module.state_dict() for module in (self.model, self.plain)]
        values = {
            value
            for state in states
            for tensor in state.values()
            for value in tensor.flatten().tolist()
        }
        if len(values) != 1:
            raise AssertionError(f"torn: the values are of the steps {sorted(values)}")
        return int(values.pop())

    def divided_states(self, _):
        """Take the model apart, as a strategy does."""
        state = self.model.state_dict()
        size = -(-ROWS // get_world_size())
        first = min(get_rank() * size, ROWS)
        skeleton = {name: value.to("meta") for name, value in state.items()}
        rows = {name: value[first : first + size] for name, value in state.items()}
        return {"model": ShardedState(skeleton, rows, dict.fromkeys(rows, first))}

    def checkpointer(self, folder, mode="sync"):
        checkpointer = Checkpointer(folder, {"model": self.model, "plain": self.plain})
        checkpointer.divided_states = self.divided_states
        checkpointer.asynchronous = mode == "async"
        return checkpointer


def save(run, checkpointer, step, num_to_keep=2):
    """Save a step so that it is the newest; on return it is acknowledged."""
    run.stamp(step)
    checkpointer.save_and_keep_only(
        meta={"unixtime": 1000.0 + step, "step": step},
        num_to_keep=num_to_keep,
    )
    checkpointer.wait()


def steps_of(folder):
    """Load every checkpoint of a folder in one process; return their steps, best first."""
    run = ShardedRun()
    checkpointer = run.checkpointer(folder)
    steps = []
    for found in checkpointer.find_checkpoints():
        checkpointer.load_checkpoint(found)
        if found.meta["step"] != run.step():
            raise AssertionError(f"{found.path} holds the step {run.step()}")
        steps.append(run.step())
    return steps
