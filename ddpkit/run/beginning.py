"""How ``fit`` and ``evaluate`` begin: all ranks mean the same, and a person sees what is about to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddpkit.comm import agreement
from ddpkit.comm.consistency import recipe_facts, script_facts, software_facts
from ddpkit.comm.mailbox import call_path, outside_frame
from ddpkit.control.failure import failure_notice
from ddpkit.distributed import get_world_size, is_distributed_initialized
from ddpkit.errors import RankFailedError
from ddpkit.launch.launchers import find_launch
from ddpkit.logger import log_files, shown_path
from ddpkit.reporting.start_report import (
    Seat,
    StartReport,
    clipping_row,
    evaluation_row,
    loss_row,
    optimizer_row,
    place_rows,
    precision_row,
    records_row,
    start_row,
)
from ddpkit.run.loaders import Loaders
from ddpkit.train_logger import run_log
from ddpkit.training.stages import compare_first_samples, length_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpkit.training.batch_sizes import BatchSizes

AT_START = "the start of fit or evaluate"  # one name for both: ranks that call different ones must meet


class Beginning(Loaders):
    """The half of the Brain that compares the ranks, and reports what begins.

    Ranks: collective.

    Example:
        >>> issubclass(Beginning, Loaders)
        True
    """

    on_evaluate_start: Callable[..., None]
    training_ctx: Any
    evaluation_ctx: Any
    _seats: tuple[Seat, ...] = ()
    _report: StartReport | None = None
    _looked_in = 0  # the epoch in which a batch was looked at

    def _compare_ranks(self, call: str) -> None:
        """Compare code, options, model and the place in the script, before anything else is done together.

        Args:
            call: ``"fit"`` or ``"evaluate"``, which calls this.

        Raises:
            RankMismatchError: on every rank, naming what differs and on which rank.
        """
        self._taken_from = None
        seat = Seat.here(find_launch().node_rank, self.device)
        if get_world_size() == 1:
            self._seats = (seat,)
            return
        checkpointer = self.checkpointer
        with failure_notice():
            path = call_path(outside_frame(2))
            facts = {
                "call": f"{call} at {path}",
                **software_facts(),
                **script_facts(),
                **recipe_facts(type(self), self.param_file),
                "checkpointer": "none" if checkpointer is None else type(checkpointer).__name__,
                **agreement.option_facts(self.run_opts),
                **agreement.model_facts(self.modules),
            }
            try:
                self._seats = tuple(agreement.require_agreement(facts, about=seat, site=AT_START))
            except RankFailedError as error:  # a rank has not come here
                raise type(error)(f"{error}\n(rank {self.rank} called {call} at {path})") from error.__cause__

    def _compare_data(self, **loaders: Any) -> None:
        """Compare what the loaders give.

        Args:
            loaders: by stage; the ranks must have as many batches as each other in that of ``train``.

        Raises:
            RankMismatchError: on every rank, naming what differs and on which rank.
        """
        facts: dict[str, str] = {}
        for name, loader in loaders.items():
            facts |= agreement.data_facts(name, loader, length_of(loader), sharded=name == "train")
        agreement.require_agreement(facts)
        for name, loader in loaders.items():
            compare_first_samples(name, loader)

    def _report_training(self, sizes: BatchSizes, valid_set: Any) -> None:
        """Show what is about to be trained, as far as it has not been shown.

        Args:
            sizes: what the training loader and the options come to.
            valid_set: the loader of the validation, or None.
        """
        folder = getattr(self.checkpointer, "checkpoints_dir", None)
        found, start = self._taken_from, ""
        if self._fits == 1:
            found = found or getattr(self.checkpointer, "last_loaded", None)
        if self._fits == 1 or found is not None:
            start = start_row(found, folder, self.resume, self._place_in_words(), others=self._num_found)
        is_asked = self.global_batch_size is not None or self.lr_scaling != "none"  # someone has thought about it
        optimizers, log = self._known_optimizers(), run_log()
        first = {
            "batch": str(sizes),
            "per step": "" if is_asked or self.optimizer_step else sizes.advice(),
            "valid set": "" if valid_set is None else _in_words(valid_set),
            "optimizer": optimizer_row(optimizers),
            "schedule": "" if self._schedule is None else str(self._schedule),
            "clipping": clipping_row(self.max_grad_norm) if optimizers else "",
        }
        records = records_row([*log_files(), *([] if log is None else [log.path])])
        self._show("Training", first, {"records": records, "start": start})

    def _look_at(self, batch: Any) -> None:
        """On several ranks, say how a mean over tokens is returned, where samples differ in length and it may be one.

        Args:
            batch: that was trained on. One is looked at in every epoch, about a second after its beginning.
        """
        progress = self.progress
        if self._report is None or get_world_size() == 1 or self._looked_in == progress.epoch:
            return
        self._looked_in = progress.epoch
        if progress.result_at == progress.step and progress.result.__class__ is not tuple:
            self._report.announce("Training", {"loss": loss_row(batch)})

    def _report_evaluation(self, loader: Any) -> None:
        """Show what is about to be evaluated, as far as it has not been shown.

        Args:
            loader: of this rank.
        """
        found = self._taken_from
        if not self._fits:
            found = found or getattr(self.checkpointer, "last_loaded", None)
        if found is not None:
            weights = f"from {shown_path(found)}"
        else:
            weights = "as training has left them" if self._fits else "the initial ones: no checkpoint was loaded"
        if not type(self).on_evaluate_start.__module__.startswith("ddpkit."):
            weights += f"; {type(self).__name__}.on_evaluate_start may have changed them"
        self._show("Evaluation", {"test set": _in_words(loader)}, {"weights": weights})

    def _show(self, what: str, first: dict[str, str], last: dict[str, str]) -> None:
        if self.rank:
            return
        if self._report is None:
            self._report = StartReport()
        trains = what == "Training"
        backend = str(dist.get_backend()) if is_distributed_initialized() else None
        rows = {
            **place_rows(self._seats, find_launch(), backend),
            **first,
            "precision": precision_row(self.training_ctx, self.evaluation_ctx, self.scaler, trains=trains),
            "evaluation": evaluation_row(get_world_size(), divided=self.shard_evaluation),
            **last,
        }
        self._report.announce(what, rows)

    def _known_optimizers(self) -> dict[str, Any]:
        """Return all optimizers by name, also one that a recipe has made and put nowhere else."""
        single = getattr(self, "optimizer", None)
        return self.optimizers_dict or ({} if single is None else {"optimizer": single})

    def _place_in_words(self) -> str:
        done = f"{self.optimizer_step} optimizer step{'' if self.optimizer_step == 1 else 's'} done"
        if self._expected_epoch is None:
            return done
        if self.step:
            return f"{done}, goes on after batch {self.step} of epoch {self._expected_epoch}"
        return f"{done}, epoch {self._expected_epoch} comes next"


def _in_words(loader: Any) -> str:
    """Say how much a test set is."""
    length = length_of(loader)
    facts = agreement.data_facts("test", loader, length, sharded=False)
    samples, size = facts.get("test samples"), facts.get("test batch size")
    if length is None:
        return "a stream"
    words = f"{length} batch{'' if length == 1 else 'es'}" + ("" if size is None else f" of {size}") + " per process"
    if samples is None:
        return words
    return f"1 sample, {words}" if samples == "1" else f"{samples} samples, {words}"
