"""A chain of SHA-256 over the steps of a run, with the option ``hash_every``.

Each record has digests of the weights, the optimizers' states, averaged weights, the scheduler's
state and the samples of a step, and one of these and of the record before. So who has the last
record of a run can tell that no earlier one was changed; and two runs with equal records have made
the same steps, whoever has run them, and where.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.data import inner_loader
from ddpkit.dataloader import plan_of
from ddpkit.distributed import if_main_process
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.parts.own import OwnPart
from ddpkit.parts.state_digests import StateDigests, by_module, combined
from ddpkit.reporting import has_run_log
from ddpkit.train_logger import run_event

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

    from ddpkit.training import RunContext

logger = get_logger(__name__)

RECOVERABLE = "part-HashChain"
#: Of a record. 1, which records of before do not say: without averaged weights and the scheduler.
CHAIN_VERSION = 2
STATES = ("weights", "optimizer", "average", "schedule")

BEGINS_LATE = (
    "hash_every: the run goes on at optimizer step %d, and its checkpoint has no chain of hashes. "
    "A new chain begins."
)
DOES_NOT_FIT = (
    "hash_every: %s are not those that the chain has for optimizer step %d. Something has changed "
    "the checkpoint, or changes what is recovered of it. The chain goes on; the records after it "
    "are of another training."
)
TOO_RARE = (
    "hash_every=%d is more than the %d optimizer steps up to the end of this fit, so that none of "
    "them has a record. A smaller N gives some."
)
NO_FOLDER = (
    "hash_every: the record of optimizer step %d is written nowhere, and so it goes with all later "
    "ones: this run has no folder. Call create_experiment_directory before the Brain is made. "
    "Checkpoints have the last link of the chain."
)
IN_WORDS = {
    "weights": "the weights",
    "optimizer": "the optimizers' states",
    "average": "the averaged weights",
    "schedule": "the scheduler's state",
}
TAKEN = (
    "hash_every keeps the chain in checkpoints as {!r}, and the checkpointer saves {} under this "
    "name. Give that another name."
)


class HashChain(OwnPart):
    """Records SHA-256 of weights, optimizers and samples after every so many optimizer steps.

    Args:
        context: of the run.
        every: optimizer steps from one record to the next.

    Ranks: all; tensors that are divided over the ranks are gathered, one at a time.

    State: the last link of the chain, in checkpoints.

    Example:
        >>> HashChain(None, 100).state_dict()
        {'step': 0, 'chain': '', 'weights': '', 'optimizer': '', 'average': '', 'schedule': ''}
    """

    def __init__(self, context: Any, every: int) -> None:
        self.context = context
        self.every = every
        self._optimizers: Mapping[str, Any] = {}
        self._gradients: dict[str, str] = {}
        self._has_told = False  # that there is no folder
        self._last: dict[str, Any] = {
            "step": 0,
            "chain": "",
            **dict.fromkeys(STATES, ""),
        }

    @classmethod
    def of_run(cls, context: RunContext) -> Self:
        """Make it of ``hash_every``."""
        return cls(context, context.options["hash_every"])

    # ------------------------------------------------------------------ in a checkpoint

    @contextlib.contextmanager
    def around_fit(self, brain: Any) -> Iterator[None]:
        """Have checkpoints hold the chain, also that of an earlier call of ``fit``."""
        checkpointer = brain.checkpointer
        if checkpointer is not None:
            before = checkpointer.recoverables.get(RECOVERABLE)
            if isinstance(before, HashChain):
                self.load_state_dict(before.state_dict())
            elif before is not None:
                raise ConfigError(TAKEN.format(RECOVERABLE, type(before).__name__))
            checkpointer.add_recoverable(RECOVERABLE, self, optional_load=True)
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return the last link of the chain."""
        return dict(self._last)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a chain."""
        self._last = dict(state)

    def on_fit_start(self, brain: Any) -> None:
        """Compare what was recovered with the chain, where the two are of the same step."""
        self._warn_if_too_rare(brain)
        step = brain.optimizer_step
        last = self._last
        if not last["step"]:
            if step:
                logger.warning(BEGINS_LATE, step)
            return
        if last["step"] != step:
            return
        found = self._states(self._digests(brain))
        if not if_main_process():
            return
        differ = []
        for name, values in found.items():
            # a chain of before has no averaged weights and no scheduler
            is_known = name in last and name not in self._moving_between_steps()
            if is_known and combined_if_any(values) != last[name]:
                differ.append(IN_WORDS[name])
        if differ:
            logger.warning(DOES_NOT_FIT, " and ".join(differ), step)

    def _warn_if_too_rare(self, brain: Any) -> None:
        """Warn of a training that is too short for a record."""
        total = brain.total_steps
        if total is None:
            return
        last = brain.optimizer_step + total  # or earlier, if the run goes on
        if last < self.every:
            logger.warning(TOO_RARE, self.every, last)

    def _moving_between_steps(self) -> set[str]:
        """Return which states may be others at a save than after the step before it."""
        step = self.train_step
        found = set()
        # it steps at the end of an epoch
        if step is not None and step.schedule is not None and step.schedule.every != "step":
            found.add("schedule")
        # its batch statistics may be renewed for an evaluation
        if step is not None and self.context.parts.weight_average() is not None:
            found.add("average")
        return found

    # ------------------------------------------------------------------ in a step

    def on_optimizers_made(self, brain: Any, optimizers: Mapping[str, Any]) -> None:
        """Note the optimizers, whose states are hashed."""
        self._optimizers = {}
        for name, optimizer in optimizers.items():
            if isinstance(optimizer, torch.optim.Optimizer):
                self._optimizers[name] = optimizer

    def on_gradients(self, brain: Any) -> None:
        """Hash the gradients of a step that gets a record."""
        made = brain.optimizer_step
        # a window in which an optimizer has stepped already is counted
        is_open = made % self.every == 0 and made != self._last["step"] and self._gradients
        if is_open or (made + 1) % self.every == 0:
            self._gradients |= self._digests(brain).gradients()

    def after_step(self, brain: Any) -> None:
        """Make a record after every so many steps."""
        if brain.optimizer_step % self.every == 0:
            self._record(brain)
        self._gradients = {}

    def _record(self, brain: Any) -> None:
        progress = self.context.progress
        digests = self._digests(brain)
        loss = self._loss(progress)
        states = self._states(digests)
        step = brain.optimizer_step
        if not if_main_process():
            self._last["step"] = step
            return
        self._warn_without_folder(step)
        samples = self._samples(progress)
        state_digests = {name: combined_if_any(values) for name, values in states.items()}
        link = {
            "version": CHAIN_VERSION,
            "step": step,
            "samples": None if samples is None else _digest_of_indices(samples),
            **state_digests,
        }
        previous: str = self._last["chain"]
        chain = chained(previous, link)
        run_event(
            "hash",
            **link,
            epoch=progress.epoch,
            loss=loss,
            gradients=combined(self._gradients),
            settings=combined(digests.settings()),
            modules={
                "gradients": by_module(self._gradients),
                "weights": by_module(states["weights"]),
                "optimizer": by_module(states["optimizer"]),
                "average": by_module(states["average"]),
            },
            labels=labels(str(self.context.device)),
            same_bits=self.context.strategy.has_same_bits(),
            previous=previous,
            chain=chain,
        )
        self._last = {
            "step": step,
            "chain": chain,
            **state_digests,
        }

    def _warn_without_folder(self, step: int) -> None:
        """Warn once of records that go nowhere."""
        if not has_run_log() and not self._has_told:
            logger.warning(NO_FOLDER, step)
            self._has_told = True

    def _states(self, digests: StateDigests) -> dict[str, dict[str, str]]:
        """Return the digests of all that a step changes, by name; in the order of ``STATES``."""
        step = self.train_step
        average = None if step is None else step.average.weights
        schedule = None if step is None else step.schedule
        return {
            "weights": digests.weights(),
            "optimizer": digests.states(),
            "average": {} if average is None else digests.of_state(average.state_dict(), "average"),
            # The scheduler's own state: how many steps are planned is no state of a step.
            "schedule": (
                {}
                if schedule is None
                else digests.of_state(schedule.scheduler.state_dict(), "schedule")
            ),
        }

    def _digests(self, brain: Any) -> StateDigests:
        return StateDigests(brain.raw_modules, self._optimizers, self.context.strategy)

    def _samples(self, progress: Any) -> Sequence[Any] | None:
        """Return the indices of the samples of the step, of all ranks; None where they are not
        known.
        """
        plan = plan_of(inner_loader(progress.loader))
        factor = self.context.accumulation.factor
        last = progress.step
        if plan is None or not last:
            return None
        window = (last - 1) // factor
        return plan.samples_of_all(window * factor, last)

    def _loss(self, progress: Any) -> float | None:
        """Return the mean loss of the epoch so far, over all ranks, with this step's."""
        meter = progress.meter.copy()
        if progress.result_of == progress.step and progress.step:  # not in the meter yet
            if isinstance(progress.result, tuple):
                meter.append_sum(*progress.result)
            else:
                meter.append(progress.result, progress.window.weight)
        loss_sum, count, _ = progress.add_totals(meter.totals())
        return float(loss_sum / count) if count else None


def chained(previous: str, link: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record and of the chain before it.

    Args:
        previous: the chain of the record before; empty for the first.
        link: ``version``, ``step``, ``samples``, ``weights``, ``optimizer``, ``average`` and
            ``schedule`` of the record; one without a version has no more than the first five.

    Ranks: local.

    Example:
        >>> link = {"step": 1, "samples": None, "weights": "a", "optimizer": "b"}
        >>> chained("", link)[:8], chained("x", link)[:8]
        ('0293af6d', '915b047c')
    """
    words = [
        previous,
        link["step"],
        link["samples"],
        link["weights"],
        link["optimizer"],
    ]
    version = link.get("version", 1)
    if version > 1:
        words += [version, link["average"], link["schedule"]]
    text = json.dumps(words)
    return hashlib.sha256(text.encode()).hexdigest()


def combined_if_any(digests: Mapping[str, str]) -> str | None:
    """Return one digest of digests by name; None of none: the run has no such state.

    Ranks: local.

    Example:
        >>> combined_if_any({})
    """
    return combined(digests) if digests else None


def labels(device: str) -> dict[str, Any]:
    """Return what bits depend on besides the recipe: where two runs differ in it, equal bits cannot
    be expected.

    Args:
        device: of this rank.

    Ranks: local.

    Example:
        >>> labels("cpu")["torch"] == str(torch.__version__)
        True
    """
    kind = device.partition(":")[0]
    is_cuda = kind == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else kind,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if is_cuda else None,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def _digest_of_indices(indices: Sequence[Any]) -> str:
    plain = [_plain_index(index) for index in indices]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def _plain_index(index: Any) -> Any:
    try:
        return operator.index(index)
    except TypeError:  # a name
        return str(index)
