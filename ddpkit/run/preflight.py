"""Before ``fit`` and ``evaluate``: check that all ranks run the same, and show what is about to
run.

::

    Training with ddpkit 0.1.0:
      launcher   torchrun, 8 processes on 2 nodes (gpu07, gpu08)
      devices    8 x cuda (NVIDIA H200), backend nccl
      versions   Python 3.12, torch 2.13.0+cu130, numpy 2.3.1
      strategy   ddp: each process holds the whole model
      batch      8 processes x batch 4 x accumulation 1 = 32 samples per optimizer
                 step; 15 steps, 480 samples per epoch
      per step   32 samples; one process has 4:
                 --global_batch_size=4 trains as one process does
      epochs     40 in all, 600 optimizer steps
      valid set  90 samples, 11 to 12 per process in 12 batches of 1
      optimizer  AdamW, lr 0.002 (now 0.0004, schedule)
      schedule   OneCycleLR, after each of 600 optimizer steps
      clipping   gradient norm at most 5.0 (--max_grad_norm)
      batch norm over the rows of all processes (--sync_batchnorm=auto)
      precision  bf16, evaluation fp32
      average    of the weights, decay 0.999, used in evaluation
      evaluation every rank its part of a set:
                 count with ddpkit.metrics or Brain.gather
      logs       log.txt, metrics.jsonl and train_log.txt in results
      start      from results/save/CKPT+2026-11-21+04-20-12+00:
                 480 optimizer steps done, epoch 32 is over
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ddpkit import __version__
from ddpkit.base import host_name
from ddpkit.comm import (
    call_path,
    data_facts,
    model_facts,
    on_every_rank,
    optimizer_facts,
    option_facts,
    outside_frame,
    recipe_facts,
    require_agreement,
    software_facts,
)
from ddpkit.control import failure_notice
from ddpkit.distributed import (
    get_rank,
    get_world_size,
    if_main_process,
    is_distributed_initialized,
    run_on_main,
)
from ddpkit.errors import ConfigError, RankFailedError
from ddpkit.launch import find_launch
from ddpkit.logger import get_logger, shown_path
from ddpkit.run.output_checks import (
    checkpoint_bytes,
    folder_bytes,
    require_outputs,
    require_room,
)
from ddpkit.run.start_rows import (
    batch_row,
    epochs_row,
    evaluation_set_row,
    logs_row,
    mirror_row,
    optimizers_row,
    row_lines,
)
from ddpkit.train_logger import loggers_of
from ddpkit.training import compare_samples, length_of, selected_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ddpkit.launch import LaunchInfo
    from ddpkit.run.checkpoint_policy import CheckpointPolicy
    from ddpkit.run.evaluation_sets import EvaluationSets
    from ddpkit.training import BatchSizes, RunContext, RunLength, TrainStep

logger = get_logger(__name__)

T = TypeVar("T")

MOST_SHOWN = 4
_FORMATS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
# one name for both: ranks that call different ones must meet
AT_START = "the start of fit or evaluate"


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    Attributes:
        node: number of its node, as the launcher counts.
        host: name of the node.
        device: such as ``"cuda (NVIDIA H200)"``.

    Ranks: local.

    Example:
        >>> Place(0, "gpu07", "cuda (NVIDIA H200)").host
        'gpu07'
    """

    node: int
    host: str
    device: str

    @classmethod
    def here(cls, node: int, device: str) -> Place:
        """Return the place of this process.

        Args:
            node: number of its node.
            device: such as ``"cuda:1"``.
        """
        kind = str(device).partition(":")[0]
        if kind == "cuda":
            kind = f"cuda ({torch.cuda.get_device_name(device)})"
        elif kind == "cpu":
            threads = torch.get_num_threads()
            kind = f"cpu ({threads} thread{'' if threads == 1 else 's'})"
        return cls(node, host_name(), kind)


class Preflight:
    """Checks that code, options, model and data are the same on all ranks, and shows the start-up
    block.

    Args:
        context: of the run.
        train_step: has the optimizers and the schedule.
        policy: knows what was recovered.

    Attributes:
        launch: the launcher and the place of this process, as the environment said when the Brain
            was made.
        versions: of Python, torch, numpy and ddpkit.
        places: where each rank runs.
        report: what was shown; None on the other ranks, and before the first.

    Ranks: collective.
    """

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        policy: CheckpointPolicy,
    ) -> None:
        self.context = context
        self.train_step = train_step
        self.policy = policy
        self.launch = find_launch()
        self.versions = software_facts()
        self.places: list[Place] = []
        self.report: StartReport | None = None

    def compare_ranks(self, call: str, recipe: type) -> None:
        """Compare code, options, model and the place in the script, before anything else is done
        together.

        Args:
            call: ``"fit"`` or ``"evaluate"``, which calls this.
            recipe: the class of the Brain.

        Raises:
            RankMismatchError: on every rank, naming what differs and on which rank.
        """
        options = self.context.options
        checkpointer = self.policy.checkpointer
        self.policy.run_state.recovered = None
        here = Place.here(self.launch.node_rank, str(options.device))
        if get_world_size() == 1:
            self.places = [here]
            return
        with failure_notice():
            path = call_path(outside_frame(2))
            facts = {
                "call": f"{call} at {path}",
                **self.versions,
                **recipe_facts(recipe, options.param_file),
                "checkpointer": checkpointer_fact(checkpointer),
                "parts": ", ".join(part.name for part in self.context.parts.parts) or "none",
                **option_facts(options),
                **model_facts(self.context.modules),
            }
            try:
                self.places = list(require_agreement(facts, about=here, site=AT_START))
            except RankFailedError as error:  # a rank has not come here
                raise type(error)(
                    f"{error}\n(rank {get_rank()} called {call} at {path})"
                ) from error.__cause__

    def compare_data(self, **loaders: Any) -> None:
        """Compare the loaders of all ranks: lengths, which samples they select, and a few samples.

        Args:
            loaders: by stage; the ranks' ``train`` loaders must have equal numbers of batches.

        Raises:
            RankMismatchError: on every rank, naming what differs and on which rank.
        """
        if get_world_size() == 1:
            return
        facts: dict[str, str] = {}
        for name, loader in loaders.items():
            facts |= data_facts(name, loader, length_of(loader), sharded=name == "train")
            facts |= selected_facts(name, loader)
        require_agreement(facts)
        for name, loader in loaders.items():
            compare_samples(name, loader)

    def compare_optimizers(self) -> None:
        """Compare the classes and the settings of the optimizers of all ranks.

        Raises:
            RankMismatchError: on every rank, naming what differs and on which rank.
        """
        if get_world_size() > 1:
            require_agreement(optimizer_facts(self.train_step.optimizers or {}))

    def check_what_is_saved(self, hparams: Any) -> None:
        """Name what no checkpoint will hold; look whether outputs can be written, and whether
        checkpoints have room; open the loggers.

        Args:
            hparams: of the Brain, with its loggers.

        Raises:
            ConfigError: it cannot. On every rank.
        """

        def look() -> ConfigError | None:
            if not if_main_process():
                return None
            try:
                require_outputs(hparams)
                self._require_room()
                for train_logger in loggers_of(hparams):
                    train_logger.begin_fit(self.context.progress.optimizer_step)
            except ConfigError as error:
                return error
            return None

        self.policy.warn_unused_entries()
        error = run_on_main(look)
        if error is not None:
            raise error

    def _require_room(self) -> None:
        checkpointer = self.policy.checkpointer
        state = self.policy.run_state
        if checkpointer is None:
            return
        found = state.recovered
        start = state.start
        needed = 0 if found is None else folder_bytes(found)
        needed = needed or checkpoint_bytes(checkpointer)
        has_checkpoints = found is not None or bool(start is not None and start.num_found)
        warns = checkpointer.on_error == "warn"
        require_room(
            checkpointer.checkpoints_dir,
            needed,
            has_checkpoints=has_checkpoints,
            warns=warns,
        )

    @staticmethod
    def on_all_ranks(make: Callable[..., T], *inputs: Any) -> T:
        """Call a function on every rank; if it fails on one rank, raise on all.

        Args:
            make: makes it.
            inputs: for ``make``.
        """
        return make(*inputs) if get_world_size() == 1 else on_every_rank(lambda: make(*inputs))

    def report_training(
        self,
        sizes: BatchSizes,
        length: RunLength,
        batch_size: int | None,
        valid_set: EvaluationSets | None,
        contexts: tuple[Any, Any],
        parts: Mapping[str, str],
    ) -> None:
        """Show what is about to be trained, as far as it has not been shown.

        Args:
            sizes: computed from the training loader and the options.
            length: of this call of ``fit``.
            batch_size: that the recipe has given for the training; None: none.
            valid_set: the loaders of the validation, or None.
            contexts: of the forward pass in training and in evaluation; a recipe may have others
                than the options say.
            parts: the rows of the parts that were given to the Brain.
        """
        self.context.progress.resolve_pending()  # on_fit_start may have made steps
        options = self.context.options
        checkpointer = self.policy.checkpointer
        state = self.policy.run_state
        folder = getattr(checkpointer, "checkpoints_dir", None)
        found = state.recovered
        start = ""
        is_first = state.calls.number == 1
        if is_first:
            found = found or getattr(checkpointer, "last_loaded", None)
        if is_first or found is not None:
            position = self._position(state.expected_epoch)
            others = 0 if state.start is None else state.start.num_found
            start = start_row(found, folder, options.resume, position, others=others)
        # someone has thought about it
        global_batch_size = self.context.accumulation.global_batch_size
        is_asked = global_batch_size is not None or self.context.rate_factor.follows_batch
        # on the number of processes, whatever the size
        depends = self.context.strategy.overrides("after_window")
        optimizers = self.train_step.named_optimizers()
        strategy_rows = self.context.strategy.startup_rows(self.context.modules)
        first = {
            "strategy": strategy_rows["strategy"],
            "batch": batch_row(sizes, batch_size, global_batch_size),
            "per step": ""
            if is_asked or depends or self.context.progress.optimizer_step
            else sizes.advice(),
            "epochs": epochs_row(length, options.optimizer_step_limit),
            **({} if valid_set is None else valid_set.row("valid", evaluation_set_row)),
            "optimizer": optimizers_row(optimizers, state.begun_settings) or "none",
            "schedule": "" if self.train_step.schedule is None else str(self.train_step.schedule),
            "clipping": clipping_row(options.max_grad_norm) if optimizers else "",
            **{name: row for name, row in strategy_rows.items() if name != "strategy"},
            **parts,
        }
        last = {"start": start, "mirror": mirror_row(folder)}
        self._show("Training", first, last, contexts)

    def report_evaluation(
        self,
        sets: EvaluationSets,
        contexts: tuple[Any, Any],
        initial: str = "",
    ) -> None:
        """Show what is about to be evaluated, as far as it has not been shown.

        Args:
            sets: the loaders of this rank.
            contexts: as for :meth:`report_training`.
            initial: where the first weights have come from; empty: the modules' own.
        """
        state = self.policy.run_state
        found = state.recovered
        trained = state.calls.number > 0
        if not trained:
            found = found or getattr(self.policy.checkpointer, "last_loaded", None)
        if found is not None:
            weights = f"from {shown_path(found)}"
        else:
            weights = (
                "as training has left them"
                if trained
                else (initial or "the initial ones: no checkpoint was loaded")
            )
        self._show(
            "Evaluation",
            sets.row("test", evaluation_set_row),
            {"weights": weights},
            contexts,
        )

    def _show(
        self,
        what: str,
        first: dict[str, str],
        last: dict[str, str],
        contexts: tuple[Any, Any],
    ) -> None:
        if get_rank():
            return
        step = self.train_step
        options = self.context.options
        self.report = self.report or StartReport()
        backend = str(dist.get_backend()) if is_distributed_initialized() else None
        rows = {
            **place_rows(self.places, self.launch, backend, self.versions),
            **first,
            "precision": precision_row(
                *contexts,
                step.scaler,
                self.context.modules,
                trains=what == "Training",
            ),
            "average": step.average.row,
            "evaluation": evaluation_row(get_world_size(), divided=options.shard_evaluation),
            "logs": logs_row(self.context.progress.logged.train_logger),
            **last,
        }
        self.report.announce(what, rows)

    def _position(self, expected_epoch: int | None) -> str:
        progress = self.context.progress
        done = (
            f"{progress.optimizer_step} optimizer "
            f"step{'' if progress.optimizer_step == 1 else 's'} done"
        )
        if expected_epoch is None:
            return done
        if progress.step:
            return f"{done}, goes on after batch {progress.step} of epoch {expected_epoch}"
        return f"{done}, epoch {expected_epoch - 1} is over" if expected_epoch > 1 else done


# ------------------------------------------------------------------------------- the start-up block


def place_rows(
    places: Sequence[Place],
    info: LaunchInfo,
    backend: str | None,
    versions: Mapping[str, str],
) -> dict[str, str]:
    """Return the rows about the launcher, the devices and the versions.

    Args:
        places: of all ranks.
        info: what the launcher says of this process.
        backend: of the process group; None without one.
        versions: of Python, torch and numpy, by name.

    Returns:
        The rows ``launcher``, ``devices`` and ``versions``.

    Ranks: local.

    Example:
        >>> from ddpkit.launch.launchers import LaunchInfo
        >>> places = [
        ...     Place(0, "a", "cpu"),
        ...     Place(0, "a", "cpu"),
        ...     Place(1, "b", "cpu"),
        ...     Place(1, "b", "cpu"),
        ... ]
        >>> versions = {"Python": "3.12", "torch": "2.13.0", "numpy": "2.4.6"}
        >>> rows = place_rows(
        ...     places, LaunchInfo("torchrun", 0, 0, 4, 2, restart_count=1), "gloo", versions
        ... )
        >>> rows["launcher"]
        'torchrun (restart 1), 4 processes on 2 nodes (a, b)'
        >>> rows["devices"]
        '4 x cpu, backend gloo'
    """
    hosts = [host for _, host in dict.fromkeys((place.node, place.host) for place in places)]
    where = ", ".join(_shortened(hosts))
    where = where if len(hosts) == 1 else f"{len(hosts)} nodes ({where})"
    restarts = f" (restart {info.restart_count})" if info.restart_count else ""
    processes = "one process" if len(places) == 1 else f"{len(places)} processes"
    devices = Counter(place.device for place in places).items()
    words = " and ".join(
        kind if len(places) == 1 else f"{number} x {kind}" for kind, number in devices
    )
    return {
        "launcher": f"{info.launcher}{restarts}, {processes} on {where}",
        "devices": words + ("" if backend is None else f", backend {backend}"),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("Python", "torch", "numpy")),
    }


def checkpointer_fact(checkpointer: Any) -> str:
    """Return what of a checkpointer has to be the same on all ranks, in words.

    Args:
        checkpointer: of this rank, or None.

    Ranks: local.

    Example:
        >>> checkpointer_fact(None)
        'none'
    """
    if checkpointer is None:
        return "none"
    names = ", ".join(sorted(checkpointer.trained_only))
    return type(checkpointer).__name__ + (f", trained_only {names}" if names else "")


def precision_row(
    training: Any,
    evaluation: Any,
    scaler: Any,
    modules: torch.nn.Module,
    *,
    trains: bool,
) -> str:
    """Return the number formats of training and evaluation, in words.

    Args:
        training: the context of the forward pass in training, with its ``dtype``.
        evaluation: likewise.
        scaler: of the gradients.
        modules: whose own dtype is the format where no other is asked for.
        trains: whether there is training.

    Ranks: local.

    Example:
        >>> from ddpkit.precision import Precision
        >>> numbers = Precision("bf16", "fp32", "cpu")
        >>> net = torch.nn.Linear(1, 1)
        >>> precision_row(
        ...     numbers.training_ctx, numbers.evaluation_ctx, numbers.scaler, net, trains=True
        ... )
        'bf16, evaluation fp32'
    """
    own = {parameter.dtype for parameter in modules.parameters() if parameter.is_floating_point()}
    single = own.pop() if len(own) == 1 else torch.float32
    evaluated = _format(evaluation, single)
    if not trains:
        return evaluated
    trained = _format(training, single) + (" with scaled gradients" if scaler.is_enabled() else "")
    return trained if trained == evaluated else f"{trained}, evaluation {evaluated}"


def evaluation_row(world_size: int, *, divided: bool) -> str:
    """Return which part of a set each rank evaluates, in words; nothing for one process.

    Args:
        world_size: number of ranks.
        divided: the option ``shard_evaluation``.

    Ranks: local.

    Example:
        >>> evaluation_row(1, divided=True)
        ''
    """
    if world_size == 1:
        return ""
    if divided:
        return "every rank its part of a set: count with ddpkit.metrics or Brain.gather"
    return "every rank the whole set; --shard_evaluation divides it"


def clipping_row(max_norm: float | None) -> str:
    """Return the norm to which gradients are clipped, in words.

    Args:
        max_norm: the option ``max_grad_norm``; None or <= 0: not at all.

    Ranks: local.

    Example:
        >>> clipping_row(5.0)
        'gradient norm at most 5.0 (--max_grad_norm)'
    """
    if max_norm is None or max_norm <= 0:
        return f"none, as max_grad_norm={max_norm} says"
    return f"gradient norm at most {max_norm} (--max_grad_norm)"


def start_row(
    found: Path | None,
    folder: Any,
    resume: str,
    position: str,
    *,
    others: int = 0,
) -> str:
    """Return what training starts from, in words.

    Args:
        found: the checkpoint to resume from, or None.
        folder: the checkpoint folder; None without a checkpointer.
        resume: the option.
        position: of the run in that checkpoint, in words.
        others: number of checkpoints in the folder that were not loaded.

    Ranks: local.

    Example:
        >>> start_row(None, "results/save", "auto", "")
        'from scratch: there is no checkpoint in results/save'
    """
    if found is not None:
        return f"from {shown_path(found)}: {position}"
    if folder is None:
        return "from scratch, and no checkpointer to save with"
    folder = shown_path(folder)
    if resume == "never" or others:
        return f"from scratch: no checkpoint in {folder} was loaded (--resume={resume})"
    return f"from scratch: there is no checkpoint in {folder}"


class StartReport:
    """Prints a block of rows on the main process, each row once as long as it stays the same.

    Attributes:
        said: rows that have been printed.

    Ranks: local; speaks on the main process.

    Example:
        >>> report = StartReport()
        >>> report.announce("Training", {"precision": "fp32", "evaluation": ""})
        >>> report.said
        {'precision': 'fp32'}
    """

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def announce(self, what: str, rows: Mapping[str, str]) -> None:
        """Print the rows that are new or have changed.

        Args:
            what: name of the work, such as ``"Training"``.
            rows: by name; an empty one is left out.
        """
        fresh = {
            name: value for name, value in rows.items() if value and self.said.get(name) != value
        }
        self.said |= fresh
        if fresh:
            lines = [line for name, value in fresh.items() for line in row_lines(name, value)]
            logger.announce("%s", "\n".join([f"{what} with ddpkit {__version__}:", *lines]))


def _shortened(words: list[str]) -> list[str]:
    left = len(words) - MOST_SHOWN
    return words if left <= 0 else [*words[:MOST_SHOWN], f"and {left} more"]


def _format(context: Any, single: torch.dtype) -> str:
    dtype: Any = getattr(context, "dtype", "unknown")  # a recipe may have set a context of its own
    dtype = single if dtype is torch.float32 else dtype  # in which nothing is cast
    return _FORMATS.get(dtype, str(dtype).removeprefix("torch."))
