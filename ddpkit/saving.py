"""How the Brain is saved and recovered: the loop's position, and checkpoints in the middle of an epoch."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from ddpkit.checkpoint_hooks import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.distributed import get_world_size, run_on_main, sum_over_ranks
from ddpkit.hooks import Hooks
from ddpkit.plain_yaml import dump_plain_yaml, load_plain_yaml

INTRA_EPOCH_KEY = "brain_intra_epoch_ckpt"


@register_checkpoint_hooks
class Saving(Hooks):
    """The recoverable half of the Brain: what a checkpoint holds of it, and when one is made by itself.

    Attributes:
        avg_train_loss: mean training loss of the epoch so far, over all ranks, about a second old.

    State: ``brain.ckpt`` is YAML with ``step``, ``avg_train_loss``, ``optimizer_step`` and the running sums of the
    epoch's loss. A checkpoint of the end of an epoch gives back ``optimizer_step`` alone; outside of ``fit`` nothing.

    Ranks: collective.

    Example:
        >>> issubclass(Saving, Hooks)
        True
    """

    avg_train_loss: float
    _fitting: bool
    _saved_sums: list[float] | None = None

    def register_with(self, checkpointer: Any) -> None:
        """Give the checkpointer what the loop needs to continue; when debugging, a temporary folder as well."""
        if self.debug and not self.debug_persistently and hasattr(checkpointer, "checkpoints_dir"):
            folder = run_on_main(tempfile.mkdtemp, kwargs={"prefix": "ddpkit-debug-"}) or ""
            checkpointer.checkpoints_dir = Path(folder)
            if self.rank == 0:
                weakref.finalize(checkpointer, shutil.rmtree, folder, ignore_errors=True)
        checkpointer.add_recoverable("brain", self)
        if self.scaler.is_enabled():
            checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)

    def _should_save_intra_epoch_ckpt(self, seconds_since_ckpt: float, steps_since_ckpt: int) -> bool:
        """Decide from numbers that all ranks agree on whether to save in the middle of an epoch."""
        minutes, steps = self.ckpt_interval_minutes, self.ckpt_interval_steps
        return 0 < minutes * 60 <= seconds_since_ckpt or 0 < steps <= steps_since_ckpt

    def save_intra_epoch(self, seconds_since_ckpt: float, steps_since_ckpt: int) -> bool:
        """Save in the middle of an epoch if it is time, and say whether it was."""
        due = self._should_save_intra_epoch_ckpt(seconds_since_ckpt, steps_since_ckpt)
        if due:
            self._save_intra_epoch_ckpt()
        return due

    def _save_intra_epoch_ckpt(self) -> None:
        """Save in the middle of an epoch; only the newest such checkpoint is kept."""
        if self.checkpointer is None:
            return
        self._saved_sums = sum_over_ranks(self._own_sums())
        self.checkpointer.save_and_keep_only(
            end_of_epoch=False,
            num_to_keep=1,
            ckpt_predicate=lambda checkpoint: INTRA_EPOCH_KEY in checkpoint.meta,
            meta={INTRA_EPOCH_KEY: True},
        )
        self._saved_sums = None

    @mark_as_saver
    def _save(self, path: Path) -> None:
        # In a save that a recipe makes, perhaps on the main process alone, its own share stands for all; in an
        # evaluation the sums are not those of the training.
        ranks = get_world_size() if self.modules.training else 0
        loss_sum, loss_count, samples = self._saved_sums or [one * ranks for one in self._own_sums()]
        state = {
            "step": self.step,
            "avg_train_loss": float(self.avg_train_loss),
            "optimizer_step": self.optimizer_step,
            "grad_accumulation_factor": self.grad_accumulation_factor,
            "loss_sum": loss_sum,
            "loss_count": loss_count,
            "samples": int(samples),
        }
        Path(path).write_text(dump_plain_yaml(state), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: Path, end_of_epoch: bool) -> None:
        if not self._fitting:
            return
        state = load_plain_yaml(Path(path).read_text(encoding="utf-8"))
        self.optimizer_step = state.get("optimizer_step", state["step"])
        if end_of_epoch:
            return
        self.step = state["step"]
        if self.global_batch_size is not None:  # other processes may take a step in another number of batches
            before = state.get("grad_accumulation_factor", self.grad_accumulation_factor)
            self.step = self.step // before * self.grad_accumulation_factor
        self.avg_train_loss = state["avg_train_loss"]
        if self.rank == 0:
            count = state.get("loss_count", self.step)
            loss_sum = state.get("loss_sum", self.avg_train_loss * count)
            self.progress.meter.restore(loss_sum, count, samples=state.get("samples", 0))

    def _own_sums(self) -> list[float]:
        """Return this rank's sum of losses, what it counts, and the samples seen."""
        meter = self.progress.meter
        return [*meter.sums()[:2], meter.samples]
