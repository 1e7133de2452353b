"""What the script of a failing training calls."""

from __future__ import annotations

import os
import sys

import ddpkit
from tests.model import recipe
from tests.model.comparing import complaints_of
from tests.model.training import Training
from tests.rank_pool import RankPool


def run(training: Training, folder: str | None = None) -> None:
    """Do all of it on ranks of its own; or, started by a launcher, train as one of its ranks.

    Args:
        training: described.
        folder: of checkpoints, for a launcher's ranks. Remove it, or go on from what is in it.

    Raises:
        SystemExit: with what is not as it has to be.
    """
    if "RANK" in os.environ:
        if folder is None:
            sys.exit("Give a folder for the checkpoints after the name of the script.")
        ddpkit.ddp_init_group({"device": "cpu"})
        found = recipe.train(training, folder, training.strategy)
        print(found)
        return
    with RankPool() as ranks:
        said = complaints_of(training, ranks)
    print("\n".join(said) or "It is what the plain loop says.")
    sys.exit(bool(said))
