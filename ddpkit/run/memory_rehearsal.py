"""A slice of a run for ``python -m ddpkit estimate``: a few steps are rehearsed on the first batch,
and each strategy says what a rank would take.

The steps are the recipe's own: its data, its ``fit_batch``, its optimizers. They are made in one
process, with a batch of the recipe's size and one of another, so that what grows with the batch is
known as a line. With each size there are three steps: one to warm up, one that begins without
gradients, and one that finds gradients, as in an accumulation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ddpkit.compat import bytes_held_by, is_compiled
from ddpkit.control import usage_errors
from ddpkit.errors import ConfigError
from ddpkit.optim import parameters_of
from ddpkit.options import RUN_OPTIONS
from ddpkit.run.memory_lines import line_through
from ddpkit.run.memory_peaks import COUNTED, peaks_on
from ddpkit.run.output_checks import checkpoint_bytes
from ddpkit.run.passes import Passes
from ddpkit.run.rehearsal_batches import RehearsalBatch, batches_to_rehearse, moves_early
from ddpkit.run.slice_epochs import end_slice, leave_out_stage_end
from ddpkit.run.step_plan import sizes_in_run
from ddpkit.strategies import (
    RehearsedRun,
    check_strategy,
    chosen_by_own_option,
    chosen_for,
    new_strategy,
    registered,
)
from ddpkit.training import FeedThrough, micro_batches

if TYPE_CHECKING:
    from ddpkit.launch import SlicePlan
    from ddpkit.run.slice_epochs import EpochTrainer
    from ddpkit.strategies import Strategy
    from ddpkit.training import RunContext, TrainStep, Window

OWN_FIT_BATCH = (
    "The recipe has its own fit_batch: it was measured as it is in one process. What it keeps "
    "from batch to batch, or does on several processes, is not known."
)
NO_STEP = (
    "No optimizer of torch has stepped: its states, and what it allocates in its step, are not "
    "known."
)
CHANGING = (
    "Batches change in size: the first one was measured, and a larger one takes more. Which "
    "micro-batch fits is not known."
)
FIRST_SAMPLES = (
    "Samples are the first ones of the training: where others are longer, these take more."
)
COMPILED = "Compiled modules were compiled for the batches of the rehearsal."
NOT_EVALUATED = (
    "Validation and test are not rehearsed: what they generate or collect comes on top of the "
    "weights."
)


def rehearse_memory(
    plan: SlicePlan,
    stages: EpochTrainer,
    brain: Any,
    loader: Any,
    epoch: int,
) -> NoReturn:
    """Make the steps, write what each strategy would take, and end the run.

    Args:
        plan: for how many processes.
        stages: train an epoch.
        brain: whose ``fit`` was called; its ``on_stage_end`` is replaced.
        loader: of the training set.
        epoch: the first one.

    Raises:
        RunStopped: with code 0, at the end.
        ConfigError: the device does not tell what it allocates.

    Ranks: one process.
    """
    with usage_errors():
        size = checkpoint_bytes(brain.checkpointer)
        rehearsal = MemoryRehearsal(plan, stages.context, stages.train_step, loader, size)
    leave_out_stage_end(brain)
    stages.passes = rehearsal
    stages.train(brain, loader, epoch, enable_bar=False)
    raise AssertionError("a rehearsal ends its run")


class MemoryRehearsal(Passes):
    """Makes the pass of a rehearsal: a few steps on the first batch.

    Args:
        plan: for how many processes.
        context: of the run.
        train_step: has the optimizers.
        loader: of the training set.
        checkpoint_bytes: that a checkpoint of the run takes, about; 0: it saves none.

    Ranks: one process.
    """

    def __init__(
        self,
        plan: SlicePlan,
        context: RunContext,
        train_step: TrainStep,
        loader: Any,
        checkpoint_bytes: int = 0,
    ) -> None:
        self._plan = plan
        self._context = context
        self._train_step = train_step
        self._loader = loader
        self._checkpoint_bytes = checkpoint_bytes
        self._sizes = sizes_in_run(loader, context)
        self._peaks = peaks_on(context.device, plan.scratch)
        self._gradients: dict[torch.Tensor, int] = {}  # the most bytes of each
        self._sparse: set[torch.Tensor] = set()  # those with gradients of some rows alone
        self._has_stepped = False

    def feed(
        self,
        feed: Any,
    ) -> FeedThrough:
        """Return a feed that yields the batches of the rehearsal.

        Args:
            feed: of the run.
        """
        return FeedThrough(feed, functools.partial(self._batches, feed))

    def _batches(
        self,
        feed: Any,
        window: Window,
    ) -> Iterator[Any]:
        """Yield each batch three times, and end the run."""
        samples = self._samples()
        batches = batches_to_rehearse(self._loader, feed.batches(window), samples)
        optimizers: list[Any] = list(self._train_step.named_optimizers().values())
        handles = [
            optimizer.register_step_pre_hook(self._before_step)
            for optimizer in optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
        ]
        measured = []
        for batch in batches:
            # states of optimizers are made here, kernels are chosen, modules are compiled
            yield self._prepared(batch, window)
            self._drop_gradients()
            self._peaks.begin()
            yield self._prepared(batch, window)
            fresh = self._peaks.end()
            # as a later micro-batch of a step finds them, or a bucket that has its memory
            for parameter in self._gradients:
                layout = torch.sparse_coo if parameter in self._sparse else torch.strided
                parameter.grad = torch.zeros_like(parameter, layout=layout)
            self._peaks.begin()
            yield self._prepared(batch, window)
            kept = self._peaks.end()
            self._drop_gradients()
            measured.append(
                self._with_batch(
                    batch,
                    fresh.passes,
                    kept.passes,
                    fresh.step,
                )
            )
        for handle in handles:
            handle.remove()
        self._end(measured)

    def _samples(self) -> int | None:
        """Return the samples of a full batch of this process; None where they change."""
        sizes = self._sizes.per_process
        return None if sizes is None else sizes[1]

    def _prepared(
        self,
        batch: RehearsalBatch,
        window: Window,
    ) -> Any:
        """Return a batch, which is a step of its own."""
        window.begin()
        # the plan of the run knows other batches: what these weigh in a loss is of no matter
        window.closes = True
        window.count = batch.samples or 1
        window.weight = float(window.count)
        window.loss_scale = window.correction = 1.0
        return batch.batch

    def _before_step(
        self,
        *_: Any,
    ) -> None:
        """Note what has a gradient, and that the passes are over."""
        for parameter in self._trained():
            gradient = parameter.grad
            if gradient is None:
                continue
            # that of a sparse one is larger with more samples
            known = self._gradients.get(parameter, 0)
            self._gradients[parameter] = max(known, bytes_held_by(gradient))
            if gradient.is_sparse:
                self._sparse.add(parameter)
        if not self._has_stepped:
            self._has_stepped = True
            return
        self._peaks.begin_optimizer()

    def _trained(self) -> list[torch.Tensor]:
        parameters = [
            *self._context.modules.parameters(),
            *parameters_of(self._train_step.named_optimizers().values()),
        ]
        return [one for one in dict.fromkeys(parameters) if one.requires_grad]

    def _drop_gradients(self) -> None:
        for parameter in self._trained():
            parameter.grad = None

    def _with_batch(
        self,
        batch: RehearsalBatch,
        fresh: float,
        kept: float,
        step: float | None,
    ) -> dict[str, Any]:
        """Return the figures of one size; those of a CPU lack the batch, which does not move
        there.
        """
        held = 0.0
        # on a GPU the recipe moves it inside of the step, where it is counted
        if torch.device(self._context.device).type not in COUNTED:
            held += batch.size
        if moves_early(self._loader):
            held += batch.size
        gradients = float(sum(self._gradients.values()))
        return {
            "samples": batch.samples,
            "fresh": fresh + held,
            "kept": kept + held,
            "step": held + max((step or 0.0) - gradients, 0.0),
        }

    # ------------------------------------------------------------------ the result

    def _end(
        self,
        measured: Sequence[Mapping[str, Any]],
    ) -> NoReturn:
        end_slice(self._plan, self._result(measured))

    def _result(
        self,
        measured: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        context = self._context
        device = torch.device(context.device)
        lines: dict[str, dict[str, float]] = {}
        for name in ("fresh", "kept", "step"):
            points = [(one["samples"], one[name]) for one in measured]
            lines[name] = line_through(points).as_dict()
        allocator: Any = getattr(torch, device.type, None)
        has_memory = device.type in COUNTED
        return {
            "device": context.device,
            "device_name": allocator.get_device_name(device) if has_memory else "cpu",
            "device_memory": allocator.mem_get_info(device)[1] if has_memory else None,
            "samples": self._samples(),
            "gradients": float(sum(self._gradients.values())),
            "checkpoint": self._checkpoint_bytes,
            "is_line": len(measured) > 1,
            "lines": lines,
            "options": {
                name: value
                for name, value in self._options().items()
                if name in RUN_OPTIONS and isinstance(value, (str, int, float, list))
            },
            **self._strategies(),
            "remarks": self._remarks(measured),
        }

    def _options(self) -> Any:
        """Return the options of the run that is estimated."""
        options = self._context.options.copy()
        for name, value in self._plan.assumed.items():
            options.update({name: RUN_OPTIONS[name].coerce(value, "in the plan")})
        return options

    def _strategies(self) -> dict[str, Any]:
        """Return what each strategy says of each number of processes."""
        rows: list[dict[str, Any]] = []
        unknown: list[str] = []
        options = self._options()
        given = options.strategy
        names: dict[str, Any] = {name: name for name in registered()}
        chosen_by = chosen_by_own_option(options)
        if not isinstance(given, str) or given not in (*names, "auto"):
            names[given if isinstance(given, str) else repr(given)] = given
        elif chosen_by and given in registered()[chosen_by].together:
            names[f"{chosen_by}+{given}"] = registered()[chosen_by].together[given]
        for name, value in names.items():
            found = [
                self._row(name, value, processes)
                for processes in self._plan.estimated_on
                if processes > 1 or new_strategy(value).runs_alone()
            ]
            # it may know on which numbers it cannot run, and nothing more
            if None in found:
                unknown.append(name)
            rows += [row for row in found if row is not None]
        return {"rows": rows, "unknown": unknown}

    def _row(
        self,
        name: str,
        value: Any,
        processes: int,
    ) -> dict[str, Any] | None:
        """Return what a strategy says of a number of processes; None: it does not know."""
        options = self._options()
        said = value if isinstance(value, str) else name
        is_chosen = said == chosen_for(options, processes)
        row: dict[str, Any] = {
            "strategy": name,
            "processes": processes,
            "is_chosen": is_chosen,
        }
        known = registered().get(name)
        chosen_by = "" if known is None else known.chosen_by
        # it takes no part in the recipe: its option is set for the answer alone
        is_set_here = bool(chosen_by) and not _is_chosen(options, chosen_by)
        if is_set_here:
            _choose(options, chosen_by, processes)
        strategy = new_strategy(value)
        has_own = self._context.recipe.has_own_fit_batch
        try:
            samples, factor = self._micro_batch(options, processes, strategy)
            run = RehearsedRun(
                modules=self._context.modules,
                optimizers=self._train_step.named_optimizers(),
                gradients=self._gradients,
                averages=self._averages(),
                options=options,
                processes=processes,
                micro_batches=factor,
                has_own_fit_batch=has_own,
            )
            memory = strategy.rank_memory(run)
        except ConfigError as error:
            return {**row, "impossible": str(error)}
        if memory is None:
            return None
        refused = ""
        try:
            if is_chosen:
                check_strategy(options, has_own_fit_batch=has_own)
            # what was not asked for lacks options beside the one that chooses it
            elif not is_set_here:
                strategy.check(options, has_own_fit_batch=has_own)
        except ConfigError as error:
            refused = str(error)
        return {
            **row,
            "samples": samples,
            "micro_batches": factor,
            "is_like_one_process": not chosen_by,
            "refused": refused,
            **dataclasses.asdict(memory),
        }

    def _averages(self) -> list[torch.Tensor]:
        weights = self._train_step.average.weights
        return [] if weights is None else weights.averages

    def _micro_batch(
        self,
        options: Any,
        processes: int,
        strategy: Strategy,
    ) -> tuple[int | None, int]:
        """Return the samples of a process's batch, and its batches in an optimizer step."""
        given = options.grad_accumulation_factor
        samples = self._samples()
        whole = options.global_batch_size
        if samples is None or whole is None:
            return samples, given
        ranks = strategy.data_ranks(options, processes)
        factor = micro_batches(given, options.micro_batch_size, whole, ranks)
        return -(-whole // (ranks * factor)), factor

    def _remarks(
        self,
        measured: Sequence[Mapping[str, Any]],
    ) -> list[str]:
        said = {
            OWN_FIT_BATCH: self._context.recipe.has_own_fit_batch,
            NO_STEP: not self._has_stepped,
            CHANGING: len(measured) == 1,
            FIRST_SAMPLES: len(measured) > 1,
            COMPILED: any(map(is_compiled, self._context.modules.modules())),
            NOT_EVALUATED: True,
        }
        return [words for words, is_so in said.items() if is_so]


def _is_chosen(
    options: Any,
    key: str,
) -> bool:
    name, _, value = key.partition("=")
    given = options[name]
    return str(given) == value if value else bool(given)


def _choose(
    options: Any,
    key: str,
    processes: int,
) -> None:
    """Choose a strategy by an option of its own: its value, or a number that fits the processes."""
    name, _, value = key.partition("=")
    row = RUN_OPTIONS[name]
    otherwise = processes if row.type is int else True
    options.update({name: value or otherwise})
