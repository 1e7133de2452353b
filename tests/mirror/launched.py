"""A training with an output folder in a store: ``launched.py URL FOLDER KILL [--option ...]``.

With a number KILL the main process kills itself right after that request that changes the store. A
node has its own disk, ``FOLDER/disk<n>``, with its home there, and sees no file of another's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from ddpkit.run import shared_folder
from tests.mirror.campaign import RECIPE, Kill, train


def hide_other_disks(own):
    """Have an attempt to open a file of another node's disk fail, as on another machine."""
    others = own.parent / "disk"

    def look(event, arguments):
        if event in {"open", "os.listdir", "os.scandir"} and isinstance(arguments[0], str):
            path = arguments[0]
            if path.startswith(str(others)) and not f"{path}/".startswith(f"{own}/"):
                raise FileNotFoundError(f"{path} is on another machine")

    sys.addaudithook(look)


if __name__ == "__main__":
    torch.set_num_threads(1)
    url, folder, number, *words = sys.argv[1:]
    node = os.environ.get("GROUP_RANK", "0")
    place = Path(folder, f"disk{node}")
    place.mkdir(exist_ok=True)
    own = place / "hparams.yaml"
    own.write_text(RECIPE)
    own.replace(place.parent / own.name)  # at once: other ranks read it
    hide_other_disks(place)
    shared_folder.this_place = lambda: (f"node{node}", "", "")
    os.environ["HOME"] = str(place)
    kill = None if number == "0" else Kill(int(number), is_before=False)
    train(url, place, kill, words)
