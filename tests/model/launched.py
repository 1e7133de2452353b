"""A drawn training as a script of a launcher, whose ranks a signal ends at a moment.

``launched.py "Training(...)" FOLDER RESULTS STRATEGY DYING``: ``DYING`` names the ranks that die.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import ddpkit
from tests.model.recipe import train
from tests.model.training import Training


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(described: str, folder: str, results: str, strategy: str, dying: str = "") -> None:
    training = eval(described, {"Training": Training})
    rank = os.environ["RANK"]
    ddpkit.ddp_init_group({"device": "cpu"})
    found = train(training, folder, strategy, die if rank in dying.split() else None)
    torch.save(found, Path(results, f"rank{rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
