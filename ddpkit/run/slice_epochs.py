"""The epochs of a slice of a run, for a command such as ``scale``, and the end of the slice."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ddpkit.base import replacing
from ddpkit.distributed import run_on_main
from ddpkit.errors import RunStopped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.launch import SlicePlan
    from ddpkit.run.passes import Passes
    from ddpkit.training import RunContext, TrainStep


class EpochTrainer(Protocol):
    """What trains the epochs of a slice: a :class:`~ddpkit.run.stage_runner.StageRunner`.

    Ranks: as the loops.
    """

    context: RunContext
    train_step: TrainStep
    passes: Passes

    def train(
        self,
        brain: Any,
        loader: Any,
        epoch: int,
        *,
        enable_bar: bool,
    ) -> None:
        """Train one epoch."""


def leave_out_stage_end(brain: Any) -> None:
    """Replace the recipe's ``on_stage_end``, which a slice does not call."""
    brain.on_stage_end = _do_nothing


def train_until_end(
    stages: EpochTrainer,
    brain: Any,
    loader: Any,
    epoch: int,
) -> NoReturn:
    """Train epoch after epoch, without the recipe's ``on_stage_end``, until a step ends the slice.

    Args:
        stages: train an epoch.
        brain: whose ``fit`` was called.
        loader: of the training set.
        epoch: the first one.

    Raises:
        RunStopped: by :func:`end_slice`.

    Ranks: collective.
    """
    leave_out_stage_end(brain)
    for number in itertools.count(epoch):
        stages.train(brain, loader, number, enable_bar=False)
    raise AssertionError("epochs have no end")


def end_slice(
    plan: SlicePlan,
    result: Mapping[str, Any],
) -> NoReturn:
    """Write the result of a slice, and end the run.

    Args:
        plan: says where.
        result: of the main process, for JSON.

    Raises:
        RunStopped: with code 0, always.

    Ranks: collective; the main process writes.
    """
    run_on_main(_write, args=(Path(plan.result), result))
    raise RunStopped(0, "slice")


def _write(
    path: Path,
    result: Mapping[str, Any],
) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")


def _do_nothing(
    *_: Any,
    **__: Any,
) -> None:
    """Stand in for a hook that a slice does not call."""
