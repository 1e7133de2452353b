"""Before ``fit`` and ``evaluate``: check that all ranks run the same, and show what is about to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddpkit.comm import (
    call_path,
    data_facts,
    model_facts,
    option_facts,
    outside_frame,
    recipe_facts,
    require_agreement,
    software_facts,
)
from ddpkit.control import failure_notice
from ddpkit.distributed import get_rank, get_world_size, is_distributed_initialized
from ddpkit.errors import RankFailedError
from ddpkit.launch import find_launch
from ddpkit.logger import log_files, shown_path
from ddpkit.reporting import (
    Place,
    StartReport,
    clipping_row,
    evaluation_row,
    loss_row,
    memory_row,
    optimizer_row,
    place_rows,
    precision_row,
    records_row,
    start_row,
    strategy_row,
)
from ddpkit.train_logger import run_log
from ddpkit.training import compare_first_samples, length_of

if TYPE_CHECKING:
    from ddpkit.run.checkpoint_policy import CheckpointPolicy
    from ddpkit.training import BatchSizes, TrainStep

AT_START = "the start of fit or evaluate"  # one name for both: ranks that call different ones must meet


class Preflight:
    """Checks that code, options, model and data are the same on all ranks, and shows the start-up block.

    Args:
        train_step: has the options, the progress, the optimizers and the schedule.
        policy: knows what was recovered.

    Attributes:
        launch: the launcher and the place of this process, as the environment said when the Brain was made.
        versions: of Python, torch, numpy and ddpkit.
        places: where each rank runs.
        report: what was shown; None on the other ranks, and before the first.

    Ranks: collective.
    """

    def __init__(self, train_step: TrainStep, policy: CheckpointPolicy) -> None:
        self.train_step, self.policy = train_step, policy
        self.options, self.progress = train_step.options, train_step.progress
        self.launch, self.versions = find_launch(), software_facts()
        self.places: list[Place] = []
        self.report: StartReport | None = None
        self._last_epoch_looked_at = 0

    def compare_ranks(self, call: str, brain: Any) -> None:
        """Compare code, options, model and the place in the script, before anything else is done together.

        Args:
            call: ``"fit"`` or ``"evaluate"``, which calls this.
            brain: its class and its model are compared.

        Raises:
            RankMismatchError: on every rank, naming what differs and on which rank.
        """
        options, checkpointer = self.options, self.policy.checkpointer
        self.policy.run_state.recovered = None
        place = Place.here(self.launch.node_rank, str(options.device))
        if get_world_size() == 1:
            self.places = [place]
            return
        with failure_notice():
            path = call_path(outside_frame(2))
            facts = {
                "call": f"{call} at {path}",
                **self.versions,
                **recipe_facts(type(brain), options.param_file),
                "checkpointer": "none" if checkpointer is None else type(checkpointer).__name__,
                **option_facts(options),
                **model_facts(brain.modules),
            }
            try:
                self.places = list(require_agreement(facts, about=place, site=AT_START))
            except RankFailedError as error:  # a rank has not come here
                raise type(error)(f"{error}\n(rank {get_rank()} called {call} at {path})") from error.__cause__

    def compare_data(self, **loaders: Any) -> None:
        """Compare the loaders of all ranks: lengths, and the first samples.

        Args:
            loaders: by stage; the ranks' ``train`` loaders must have equal numbers of batches.

        Raises:
            RankMismatchError: on every rank, naming what differs and on which rank.
        """
        facts: dict[str, str] = {}
        for name, loader in loaders.items():
            facts |= data_facts(name, loader, length_of(loader), sharded=name == "train")
        require_agreement(facts)
        for name, loader in loaders.items():
            compare_first_samples(name, loader)

    def report_training(self, sizes: BatchSizes, valid_set: Any, contexts: tuple[Any, Any]) -> None:
        """Show what is about to be trained, as far as it has not been shown.

        Args:
            sizes: computed from the training loader and the options.
            valid_set: the loader of the validation, or None.
            contexts: of the forward pass in training and in evaluation; a recipe may have others than the options say.
        """
        options, checkpointer, state = self.options, self.policy.checkpointer, self.policy.run_state
        folder = getattr(checkpointer, "checkpoints_dir", None)
        found, start, is_first = state.recovered, "", state.calls.number == 1
        if is_first:
            found = found or getattr(checkpointer, "last_loaded", None)
        if is_first or found is not None:
            place, others = self._position(state.expected_epoch), 0 if state.start is None else state.start.num_found
            start = start_row(found, folder, options.resume, place, others=others)
        is_asked = options.global_batch_size is not None or options.lr_scaling != "none"  # someone has thought about it
        depends = self.train_step.strategy.averages_weights  # on the number of processes, whatever the size
        optimizers, log = self.train_step.named_optimizers(), run_log()
        files = [*log_files(), *([] if log is None else [log.path])]
        told = self.train_step.strategy.start_rows(self.train_step.modules)
        first = {
            "strategy": strategy_row(told["strategy"], options.strategy),
            "batch": str(sizes),
            "memory": memory_row(sizes.per_process) if options.auto_micro_batch else "",
            "per step": "" if is_asked or depends or self.progress.optimizer_step else sizes.advice(),
            "valid set": "" if valid_set is None else _size_in_words(valid_set),
            "optimizer": optimizer_row(optimizers) or "none",
            "schedule": "" if self.train_step.schedule is None else str(self.train_step.schedule),
            "clipping": clipping_row(options.max_grad_norm) if optimizers else "",
            **{name: row for name, row in told.items() if name != "strategy"},
        }
        self._show("Training", first, {"records": records_row(files), "start": start}, contexts)

    def advise_on_loss(self, batch: Any) -> None:
        """On several ranks, say how a mean over tokens is returned, where samples differ in length and it may be one.

        Args:
            batch: that was trained on. One is looked at in every epoch, about a second after its beginning.
        """
        progress = self.progress
        if self.report is None or get_world_size() == 1 or self._last_epoch_looked_at == progress.epoch:
            return
        self._last_epoch_looked_at = progress.epoch
        if progress.result_at == progress.step and progress.result.__class__ is not tuple:
            self.report.announce("Training", {"loss": loss_row(batch)})

    def report_evaluation(self, loader: Any, own_hook: str | None, contexts: tuple[Any, Any]) -> None:
        """Show what is about to be evaluated, as far as it has not been shown.

        Args:
            loader: of this rank.
            own_hook: name of the recipe's class, if it overrides ``on_evaluate_start``.
            contexts: as for :meth:`report_training`.
        """
        state = self.policy.run_state
        found, trained = state.recovered, state.calls.number > 0
        if not trained:
            found = found or getattr(self.policy.checkpointer, "last_loaded", None)
        if found is not None:
            weights = f"from {shown_path(found)}"
        else:
            weights = "as training has left them" if trained else "the initial ones: no checkpoint was loaded"
        if own_hook is not None:
            weights += f"; {own_hook}.on_evaluate_start may have changed them"
        self._show("Evaluation", {"test set": _size_in_words(loader)}, {"weights": weights}, contexts)

    def _show(self, what: str, first: dict[str, str], last: dict[str, str], contexts: tuple[Any, Any]) -> None:
        if get_rank():
            return
        step, options = self.train_step, self.options
        use = "" if options.evaluate_ema else "not "
        self.report = self.report or StartReport()
        backend = str(dist.get_backend()) if is_distributed_initialized() else None
        rows = {
            **place_rows(self.places, self.launch, backend, self.versions),
            **first,
            "precision": precision_row(*contexts, step.scaler, step.modules, trains=what == "Training"),
            "average": "" if step.ema is None else f"of the weights, decay {step.ema.decay}, {use}used in evaluation",
            "evaluation": evaluation_row(get_world_size(), divided=options.shard_evaluation),
            **last,
        }
        self.report.announce(what, rows)

    def _position(self, expected_epoch: int | None) -> str:
        progress = self.progress
        done = f"{progress.optimizer_step} optimizer step{'' if progress.optimizer_step == 1 else 's'} done"
        if expected_epoch is None:
            return done
        if progress.step:
            return f"{done}, goes on after batch {progress.step} of epoch {expected_epoch}"
        return f"{done}, epoch {expected_epoch - 1} is over" if expected_epoch > 1 else done


def _size_in_words(loader: Any) -> str:
    """Say how much a test set is."""
    length = length_of(loader)
    if length is None:
        return "a stream"
    facts = data_facts("test", loader, length, sharded=False)
    samples, size = facts.get("test samples"), facts.get("test batch size")
    words = f"{length} batch{'' if length == 1 else 'es'}" + ("" if size is None else f" of {size}") + " per process"
    return words if samples is None else f"{samples} sample{'' if samples == '1' else 's'}, {words}"
