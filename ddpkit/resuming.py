"""How a run goes on: with the same samples per optimizer step as before, at the same place in its data.

A checkpoint says how many processes there were, and what a step of theirs was made of. On as many processes nothing is
to be done. On another number the options that make a step of the same samples are worked out before any loader is made,
and the place in the epoch, which was counted in batches of one process, is counted anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpkit.dataloader import LoopedLoader, plan_of
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.options import BATCHES, GRADIENTS, OPTIONS
from ddpkit.plain_yaml import load_plain_yaml
from ddpkit.sampler import DealtBatchSampler
from ddpkit.streams import BatchShard

if TYPE_CHECKING:
    from pathlib import Path

    from ddpkit.batch_sizes import BatchSizes

BRAIN_FILE = "brain.ckpt"
#: Options that bear on the numbers of a run; those that follow from the number of processes are left out.
TELLING = tuple(
    option.name
    for option in OPTIONS
    if option.group in {BATCHES, GRADIENTS}
    and option.name not in {"grad_accumulation_factor", "global_batch_size", "micro_batch_size", "optimizer_step_limit"}
)


@dataclass(frozen=True)
class Pace:
    """What an optimizer step of a run is made of.

    Attributes:
        world_size: number of ranks; None in a checkpoint that does not tell.
        factor: batches of each process per optimizer step; None in a checkpoint that does not tell.
        per_step: samples of a full optimizer step over all ranks; None where it is not known, or where whole batches
            are dealt out, which nobody can divide.
        per_process: samples of a full batch of one process; None likewise.

    Ranks: local; equal on all ranks.

    Example:
        >>> Pace(world_size=4, factor=1, per_step=64, per_process=16).on(2)
        {'global_batch_size': 64, 'micro_batch_size': 16, 'grad_accumulation_factor': 1}
        >>> Pace(world_size=4, factor=1).on(2)
        {'grad_accumulation_factor': 2}
    """

    world_size: int | None
    factor: int | None
    per_step: int | None = None
    per_process: int | None = None

    @classmethod
    def of(cls, sizes: BatchSizes, loader: Any) -> Pace:
        """Return that of the present run.

        Args:
            sizes: what its training loader and options come to.
            loader: that loader.
        """
        inner = loader.loader if isinstance(loader, LoopedLoader) else loader
        if isinstance(plan_of(inner), DealtBatchSampler) or isinstance(inner, BatchShard):
            return cls(sizes.world_size, sizes.factor)  # whole batches are dealt out, whatever their sizes
        largest = None if sizes.per_process is None else sizes.per_process[1]
        return cls(sizes.world_size, sizes.factor, sizes.per_step, largest)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Pace:
        """Return that of the run that wrote a checkpoint.

        Args:
            state: of the Brain, as its file holds it.
        """
        world_size, factor, per_step, per_process = (
            _whole(state.get(key)) for key in ("world_size", "grad_accumulation_factor", "per_step", "per_process")
        )
        return cls(world_size, factor, per_step, per_process)

    def state_dict(self) -> dict[str, int | None]:
        """Return what :meth:`read` reads."""
        return {
            "world_size": self.world_size,
            "grad_accumulation_factor": self.factor,
            "per_step": self.per_step,
            "per_process": self.per_process,
        }

    def on(self, world_size: int, *, is_looped: bool = False) -> dict[str, int]:
        """Return the options that keep the samples of an optimizer step on another number of processes.

        On more processes a step is made of as many batches as before; on fewer of more batches, so that none is larger
        on a process than it was.

        Args:
            world_size: the number of ranks now.
            is_looped: nominal epochs count batches, so that there must be as many of them per step as before.

        Returns:
            Values by the name of the option; empty where nothing is to be changed.

        Raises:
            ConfigError: so many processes cannot take a step of the same batches.
        """
        if self.world_size is None or self.factor is None or self.world_size == world_size:
            return {}
        if self.per_step is not None:
            if is_looped or self.per_process is None or world_size > self.world_size:
                return {"global_batch_size": self.per_step, "grad_accumulation_factor": self.factor}
            return {
                "global_batch_size": self.per_step,
                "micro_batch_size": self.per_process,
                "grad_accumulation_factor": 1,
            }
        batches = self.factor * self.world_size
        if batches % world_size:
            raise ConfigError(
                f"this run was saved by {self.world_size} processes with {batches} batches per optimizer step, of "
                f"sizes that a sampler decides, and {world_size} processes cannot divide those evenly. Start a number "
                f"of processes that divides {batches}, or begin anew with --resume=never and another output folder."
            )
        return {"grad_accumulation_factor": batches // world_size}

    def place(self, before: Pace, step: int, samples: int) -> tuple[int, str | None]:
        """Say which batch of the epoch comes next.

        Args:
            before: how the run went that saved the place.
            step: batches of one process that it had done.
            samples: that all its ranks had seen.

        Returns:
            Batches of this process that are done, and what is to be said about it, or None.
        """
        changed = None not in {before.per_step, self.per_step} and before.per_step != self.per_step
        factor = self.factor or 1
        if changed and self.per_step and samples:
            steps = samples // self.per_step
            words = (
                f"The checkpoint was saved with {before.per_step} samples per optimizer step, and now there are "
                f"{self.per_step}: the epoch goes on after {steps * self.per_step} of the {samples} samples that were "
                "done, and the run will not be the one that was never stopped."
            )
            return steps * factor, words
        if before.factor in {None, factor}:
            return step, None
        return -(-step // (before.factor or 1)) * factor, None  # it stood at the end of a step


def read_brain_file(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint holds of the Brain; empty if it has no such file.

    Args:
        checkpoint: its directory.

    Raises:
        CheckpointError: the file cannot be read.

    Ranks: local.

    Example:
        >>> from pathlib import Path
        >>> read_brain_file(Path("nowhere"))
        {}
    """
    path = checkpoint / BRAIN_FILE
    try:
        state = load_plain_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return dict(state) if isinstance(state, Mapping) else {}


def changed_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which options that bear on the numbers of a run are not those that a checkpoint was made with.

    Args:
        before: from the checkpoint; what it does not tell is taken to be the same.
        now: of the run.

    Returns:
        One text per option.

    Ranks: local.

    Example:
        >>> changed_options({"precision": "bf16"}, {"precision": "fp32", "max_grad_norm": 5.0})
        ["precision='fp32', before 'bf16'"]
    """
    changed = [name for name in TELLING if name in before and name in now and before[name] != now[name]]
    return [f"{name}={now[name]!r}, before {before[name]!r}" for name in changed]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
