"""The file ``brain.ckpt`` of a checkpoint: its name, how it is read, and the keys that others than
``RunState`` know.

No module of torch is loaded here, so that a command or a report can read these names, too. All keys
are listed in ``docs/reference/checkpoint-files.md``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpkit.checkpointing import OWN_META
from ddpkit.errors import CheckpointError

BRAIN_FILE = "brain.ckpt"
DAMAGED = "The checkpoint is damaged; delete it or start with --resume=<an older one>."
EVALUATED = "only_evaluated"  # said by a checkpoint if the Brain that saved it had trained nothing
DEBUG = "debug"  # whether the run that saved a checkpoint had the option `debug`

# `RunState.save` writes these three before the first long key, and `beginning` relies on that.
STEP = "step"
EPOCH = "epoch"
OPTIMIZER_STEP = "optimizer_step"
FIRST_LONG_KEY = "data"

INTRA_EPOCH_KEY = "brain_intra_epoch_ckpt"  # in CKPT.yaml: saved in the middle of an epoch
#: What of ``CKPT.yaml`` is no metric of the recipe.
NO_METRICS = OWN_META | {INTRA_EPOCH_KEY, EPOCH}


def read_brain_file(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's ``brain.ckpt``; empty without that file, or if no Brain
    saved it.

    Args:
        checkpoint: its directory.

    Raises:
        CheckpointError: the file cannot be read, or is damaged.

    Example:
        >>> read_brain_file(Path("nowhere"))
        {}
    """
    from ddpkit.base import load_plain_yaml

    path = checkpoint / BRAIN_FILE
    try:
        state = load_plain_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}. {DAMAGED}") from error
    return dict(state) if isinstance(state, Mapping) else {}


def beginning(text: str) -> str:
    r"""Return the beginning of a ``brain.ckpt``, which says how far the run had come.

    What follows may be long: a line for each parameter that was frozen.

    Args:
        text: of the file.

    Ranks: local.

    Example:
        >>> beginning("step: 3\nepoch: 2\noptimizer_step: 7\ndata: {order: shuffled}\n")
        'step: 3\nepoch: 2\noptimizer_step: 7'
    """
    return text.partition(f"\n{FIRST_LONG_KEY}:")[0]


def brain_file_or_nothing(checkpoint: Path) -> dict[str, Any]:
    """Return :func:`read_brain_file`, or nothing for an unreadable file; loading it raises the
    error.

    Args:
        checkpoint: its directory.
    """
    with contextlib.suppress(CheckpointError):
        return read_brain_file(checkpoint)
    return {}
