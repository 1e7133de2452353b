"""A training with an output folder in a store: ``launched.py URL FOLDER KILL [--option ...]``.

With a number KILL the main process kills itself right after that request that changes the store. A
node has its own disk: ``FOLDER/disk<n>``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.mirror.campaign import RECIPE, Kill, train

if __name__ == "__main__":
    torch.set_num_threads(1)
    url, folder, number, *words = sys.argv[1:]
    node = os.environ.get("GROUP_RANK", "0")
    place = Path(folder, f"disk{node}")
    place.mkdir(exist_ok=True)
    (place.parent / "hparams.yaml").write_text(RECIPE)
    kill = None if number == "0" else Kill(int(number), is_before=False)
    train(url, place, kill, words)
