"""Makes a failing training smaller, and writes it down as a script that a person can run."""

from __future__ import annotations

import time

from tests.model.comparing import complaints_of
from tests.model.drawing import is_allowed, smaller_ones
from tests.model.training import Training

SECONDS = 240.0

SCRIPT = '''\
"""A training that does not come to what the plain loop says. Run it in the repository:

    PYTHONPATH=. python failing.py

All of it, or, with checkpoints in a folder, these ranks alone:

    PYTHONPATH=. torchrun --standalone --nproc_per_node={world} failing.py FOLDER
"""

import sys

from tests.model.by_hand import run
from tests.model.training import Training

TRAINING = {training}

if __name__ == "__main__":
    run(TRAINING, *sys.argv[1:])
'''


def smallest(training: Training, ranks, *, seconds: float = SECONDS) -> tuple[Training, list[str]]:
    """Return the simplest training found that fails as well, and what is said of it."""
    end = time.monotonic() + seconds
    said: list[str] = []
    goes_on = True
    while goes_on:
        goes_on = False
        for tried in smaller_ones(training):
            if time.monotonic() > end:
                return training, said or complaints_of(training, ranks)
            if is_allowed(tried) and (found := complaints_of(tried, ranks)):
                training, said = tried, found
                goes_on = True
                break
    return training, said or complaints_of(training, ranks)


def script_of(training: Training) -> str:
    return SCRIPT.format(training=training, world=training.world)


def report_of(training: Training, said: list[str], ranks) -> str:
    """Return what is told of a training that has failed: the smallest one like it, as a script."""
    least, why = smallest(training, ranks)
    words = [str(training), "is not what the plain loop says. The smallest like it:"]
    words += [f"  {one}" for one in why or ["(not each time:)", *said]]
    return "\n".join([*words, "", script_of(least)])
