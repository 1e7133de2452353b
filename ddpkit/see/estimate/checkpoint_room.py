"""What is said of the room for checkpoints, where the recipe's file says where they are."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from ddpkit.errors import ConfigError
from ddpkit.see.amounts import in_bytes
from ddpkit.see.checkpoint_place import place_of_checkpoints, room_in_words
from ddpkit.see.doctor.file_systems import nearest_folder
from ddpkit.see.doctor.recipe_plan import RecipePlan, plan_of

YAML = (".yaml", ".yml")


def checkpoint_room(words: Sequence[str], size: int) -> str:
    """Return a sentence on the size of a checkpoint, and on what is free for it.

    Args:
        words: script and arguments of the recipe.
        size: of a checkpoint, about, in bytes; 0: the recipe saves none.

    Returns:
        Empty where it saves none.

    Example:
        >>> checkpoint_room(["train.py"], 2_000_000)
        'A checkpoint takes about 2.0 MB.'
    """
    if not size:
        return ""
    plan = _plan(words)
    if not plan.output_folder:
        return f"A checkpoint takes about {in_bytes(size)}."
    place = place_of_checkpoints(plan.output_folder, plan.ckpt_local)
    free = shutil.disk_usage(nearest_folder(place.folder)).free
    return room_in_words(place, size, free)


def _plan(words: Sequence[str]) -> RecipePlan:
    may_be_file = len(words) > 1 and words[1].endswith(YAML)
    has_file = may_be_file and Path(words[1]).is_file()
    if has_file:
        # a file that the recipe reads in a way of its own says nothing here
        with contextlib.suppress(ConfigError):
            return plan_of(words)
    return RecipePlan()
