"""What a checkpoint holds of the run (``brain.ckpt``), and what a run starts from: which checkpoint, with which steps.

A resumed run has the same samples per optimizer step as before, and continues at the same position in its data.

A checkpoint stores the number of processes and the step plan. With another number of processes the options that keep
the samples per step are computed before any loader is made, and the position in the epoch is converted, because it
counts batches of one process.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ddpkit.checkpointing import Checkpoint, ckpt_recency, read_checkpoint
from ddpkit.compat import shuffle_digest
from ddpkit.data import DealtBatchSampler, PlannedBatchSampler, RankBatchSampler, StreamShard, layers
from ddpkit.dataloader import LoopedLoader, plan_of
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.errors import CheckpointError, CheckpointUsageError, ConfigError
from ddpkit.launch import find_launch
from ddpkit.logger import get_logger
from ddpkit.run_opts import BATCHES, GRADIENTS, OPTIONS
from ddpkit.training import EpochPhase

if TYPE_CHECKING:
    from ddpkit.checkpoints import Checkpointer
    from ddpkit.run.rank_state import RankState
    from ddpkit.training import BatchSizes, TrainStep

logger = get_logger(__name__)

BRAIN_FILE = "brain.ckpt"
DAMAGED = "The checkpoint is damaged; delete it or start with --resume=<an older one>."
NOMINAL = "nominal epoch"
NEWEST, NEVER = "auto", "never"  # what the option `resume` says, or else a path
EVALUATED = "only_evaluated"  # said by a checkpoint if the Brain that saved it had trained nothing
DEBUG = "debug"  # whether the run that saved a checkpoint had the option `debug`
REHEARSED = "%s was saved with --debug: its epochs had a few batches each, and count as whole ones."
_ALIKE = {"optimizer_step_limit", "activation_checkpointing", "auto_micro_batch"}
_OTHERS = {"virtual_ranks", "ddp_comm_hook", "local_sgd_start", "local_sgd_period", "sync_batchnorm", "ema_decay"}
#: Options that change a run's numbers, except options that follow from the number of processes.
TELLING = tuple(
    option.name
    for option in OPTIONS
    if (option.group in {BATCHES, GRADIENTS} or option.name in _OTHERS)
    and option.name not in {"grad_accumulation_factor", "global_batch_size", "micro_batch_size", *_ALIKE}
)

EARLIER = "The checkpoint is of the middle of call %s of fit, and this is call %d: its data position is not used."
LACKS = (
    "The checkpoint was made inside of fit_batch: the mean loss of this epoch will be without batch %s. What fit_batch "
    "did after that save is lost."
)
OTHER_SETTINGS = (
    "The optimizer %r has other settings than those with which the checkpoint's run began (%s), without effect: it "
    "goes on with the checkpoint's. To change one, set it in param_groups after on_fit_start, or give --resume=never. "
    "A schedule of the script may set rates all the same."
)
OTHER_OPTIMIZER = (
    "{0}: the optimizer {1!r} was of the class {2}, and is now of the class {3}, which has other settings and cannot "
    "go on with its state. Go on with {2}. Or begin anew from the weights alone: load them before fit by "
    "ddpkit.parameter_transfer.Pretrainer, and give --resume=never, or another experiment folder."
)


@dataclass(frozen=True)
class StepPlan:
    """The step plan: the processes, batches and samples of an optimizer step.

    Attributes:
        world_size: number of ranks; None if the checkpoint does not say.
        grad_accumulation_factor: batches of each process per optimizer step; None if the checkpoint does not say.
        per_step: samples of a full optimizer step over all ranks; None if unknown, or if the data yields whole
            batches, which cannot be divided.
        per_process: samples of a full batch of one process; None likewise.
        data: what the order of an epoch follows from (:func:`order_of`); None in a checkpoint that does not tell. Two
            that differ in nothing else are equal.

    A checkpoint holds them under these names.

    Ranks: local; equal on all ranks.

    Example:
        >>> StepPlan(world_size=4, grad_accumulation_factor=1, per_step=64, per_process=16).on(2)
        {'global_batch_size': 64, 'micro_batch_size': 16, 'grad_accumulation_factor': 1}
        >>> StepPlan(world_size=4, grad_accumulation_factor=1).on(2)
        {'grad_accumulation_factor': 2}
    """

    world_size: int | None
    grad_accumulation_factor: int | None
    per_step: int | None = None
    per_process: int | None = None
    data: Mapping[str, str | int] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, sizes: BatchSizes, loader: Any) -> StepPlan:
        """Return the step plan of the present run.

        Args:
            sizes: computed from its training loader and options.
            loader: the training loader.
        """
        inner, data = loader.loader if isinstance(loader, LoopedLoader) else loader, order_of(loader)
        if isinstance(plan_of(inner), DealtBatchSampler) or getattr(
            getattr(inner, "dataset", None), "of_batches", False
        ):
            return cls(sizes.world_size, sizes.factor, data=data)  # whole batches are dealt out, whatever their sizes
        largest = None if sizes.per_process is None else sizes.per_process[1]
        return cls(sizes.world_size, sizes.factor, sizes.per_step, largest, data)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> StepPlan:
        """Return the step plan of the run that wrote a checkpoint.

        Args:
            state: of the Brain, as its file holds it.
        """
        world_size, factor, per_step, per_process = (
            _whole(state.get(key)) for key in ("world_size", "grad_accumulation_factor", "per_step", "per_process")
        )
        data = state.get("data")
        return cls(world_size, factor, per_step, per_process, data if isinstance(data, Mapping) else None)

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
        if self.world_size is None or self.grad_accumulation_factor is None or self.world_size == world_size:
            return {}
        if self.per_step is not None:
            if is_looped or self.per_process is None or world_size > self.world_size:
                return {"global_batch_size": self.per_step, "grad_accumulation_factor": self.grad_accumulation_factor}
            return {
                "global_batch_size": self.per_step,
                "micro_batch_size": self.per_process,
                "grad_accumulation_factor": 1,
            }
        batches = self.grad_accumulation_factor * self.world_size
        if batches % world_size:
            raise ConfigError(
                f"this run was saved by {self.world_size} processes with {batches} batches of a sampler per optimizer "
                f"step, which {world_size} processes cannot divide: start a number of processes that divides {batches}."
            )
        return {"grad_accumulation_factor": batches // world_size}

    def place(self, before: StepPlan, step: int, samples: int) -> tuple[int, str | None]:
        """Say which batch of the epoch comes next.

        Args:
            before: the step plan of the run that saved the checkpoint.
            step: batches of one process that it had done.
            samples: that all its ranks had seen.

        Returns:
            Batches of this process that are done, and a warning about it, or None.
        """
        changed = None not in {before.per_step, self.per_step} and before.per_step != self.per_step
        factor = self.grad_accumulation_factor or 1
        if NOMINAL in (self.data or {}) and before.per_step and before.grad_accumulation_factor:
            # such an epoch counts batches, whatever is in them
            samples = step * before.per_step // before.grad_accumulation_factor
        if changed and self.per_step and samples:
            steps = samples // self.per_step
            return steps * factor, (
                f"The checkpoint has {before.per_step} samples per optimizer step, now there are {self.per_step}: the "
                f"epoch goes on after {steps * self.per_step} of the {samples} samples that were done."
            )
        if self._deals_others(before):
            return self._place_of_batches(before, step)
        if before.grad_accumulation_factor in {None, factor}:
            return step, None
        return -(-step // (before.grad_accumulation_factor or 1)) * factor, None  # it stood at the end of a step

    def _deals_others(self, before: StepPlan) -> bool:
        """Return whether whole batches are dealt out, and the number of them in a step has changed."""
        is_counted = self.per_step is None or before.per_step is None
        return is_counted and None not in {_dealt(self), _dealt(before)} and _dealt(self) != _dealt(before)

    def _place_of_batches(self, before: StepPlan, step: int) -> tuple[int, str]:
        """Go on at the same batch of the data, though it may be inside of a step: the first step is then a shorter one.

        On another number of ranks the batches of a round that is not whole are done again.
        """
        done = step * (before.world_size or 1)
        own, again = divmod(done, self.world_size or 1)
        repeated = f" ({again} of them are done again)" if again else ""
        return own, (
            f"The checkpoint has {_dealt(before)} batches per optimizer step, now there are {_dealt(self)}: the epoch "
            f"goes on after {done - again} of the {done} batches that were done{repeated}."
        )

    def changes(self, before: StepPlan) -> list[str]:
        """Name the differences between the samples of a step now and in the checkpoint.

        Args:
            before: the step plan of the run that saved the checkpoint.

        Returns:
            One text, or none.
        """
        if self._deals_others(before):
            return [f"{_dealt(self)} batches per optimizer step, before {_dealt(before)}"]
        if None in {before.per_step, self.per_step} or before.per_step == self.per_step:
            return []
        return [f"{self.per_step} samples per optimizer step, before {before.per_step}"]

    def other_data(self, before: StepPlan) -> str | None:
        """Say that the rest of an epoch will not be the rest of what was begun, because the data is another.

        Args:
            before: how the run went that stopped in the middle of an epoch.

        Returns:
            A sentence for the user; None where nothing has changed, or the checkpoint does not tell.
        """
        was, now = before.data or {}, self.data or {}
        changed = [f"{name} {now[name]}, before {was[name]}" for name in now if name in was and was[name] != now[name]]
        if not changed:
            return None
        return (
            f"The data has changed since the checkpoint was made inside of an epoch: {'; '.join(changed)}. "
            "Samples may come twice in this epoch, and others not at all."
        )


def _dealt(plan: StepPlan) -> int | None:
    """Return the batches of all ranks per optimizer step."""
    factor = plan.grad_accumulation_factor
    return None if plan.world_size is None or factor is None else plan.world_size * factor


def order_of(loader: Any) -> dict[str, str | int]:
    """Describe what the order of an epoch follows from, besides the seed.

    Args:
        loader: of this rank.

    Returns:
        Under ``order`` how the data is ordered, or the classes that order it; where they are known, the ``samples`` of
        the dataset, ``drop_last``, a digest of a stream's shuffle, and the batches of a ``nominal epoch``. Equal on all
        ranks, and on any number of them; nothing is drawn.

    Ranks: local.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> order_of(shard(range(5), Sharding(rank=1, world_size=2), batch_size=2, shuffle=True))
        {'order': 'shuffled', 'drop_last': False, 'samples': 5}
    """
    if isinstance(loader, LoopedLoader):
        return {**order_of(loader.loader), NOMINAL: int(loader.epoch_length)}
    plan, dataset = plan_of(loader), getattr(loader, "dataset", None)
    if isinstance(plan, PlannedBatchSampler) and isinstance(plan.source, int):
        order = "shuffled" if plan.shuffle else "as it stands"
        return {"order": order, "drop_last": bool(plan.drop_last), "samples": plan.source}
    if isinstance(plan, RankBatchSampler):
        samples = {"samples": len(dataset)} if isinstance(dataset, Sized) else {}
        return {"order": _names(layers(plan.source)), "drop_last": bool(plan.drop_last), **samples}
    if isinstance(dataset, StreamShard):
        own = {"shards (its own, processes x workers)": dataset.parts} if dataset.divides_itself else {}
        return {"order": f"of {type(dataset.whole).__name__}", **own, **_shuffle(dataset.whole)}
    return {"order": f"of {type(loader if dataset is None else dataset).__name__}", **_shuffle(loader)}


def _shuffle(data: Any) -> dict[str, str]:
    digest = shuffle_digest(data)
    return {"shuffle (give it a seed)": digest} if digest else {}


def _names(samplers: Iterable[Any]) -> str:
    return f"by {' of '.join(type(one).__name__ for one in samplers)}"


# ---------------------------------------------------------------------------------------- the file of the Brain


def read_brain_file(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's ``brain.ckpt``; empty without that file, or if no Brain saved it.

    Args:
        checkpoint: its directory.

    Raises:
        CheckpointError: the file cannot be read, or is damaged.

    Ranks: local.

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


def brain_file_or_nothing(checkpoint: Path) -> dict[str, Any]:
    """Return :func:`read_brain_file`, or nothing for an unreadable file; loading it raises the error.

    Args:
        checkpoint: its directory.

    Ranks: local.
    """
    with contextlib.suppress(CheckpointError):
        return read_brain_file(checkpoint)
    return {}


def changed_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the options that change a run's numbers and differ from the checkpoint's.

    Args:
        before: options in the checkpoint; missing options count as equal.
        now: of the run.

    Returns:
        One text per option.

    Ranks: local.

    Example:
        >>> changed_options({"precision": "bf16"}, {"precision": "fp32", "max_grad_norm": 5.0})
        ["precision='fp32', before 'bf16'"]
    """
    # A checkpoint of an earlier version does not have these.
    before = {"virtual_ranks": None, "ddp_comm_hook": None, "sync_batchnorm": None, **before}
    changed = [name for name in TELLING if name in before and name in now and before[name] != now[name]]
    if before["sync_batchnorm"] is not False and now.get("sync_batchnorm") is not False:  # auto is on
        changed = [name for name in changed if name != "sync_batchnorm"]
    return [f"{name}={now[name]!r}, before {before[name]!r}" for name in changed]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


# ---------------------------------------------------------------------------------------- the start


@dataclass(frozen=True, eq=False)
class Start:
    """What a call of ``fit`` starts from.

    Attributes:
        resume: for the checkpointer: ``"auto"``, ``"never"``, the path of a checkpoint, or one that is whole.
        num_found: number of checkpoints that were in the folder.
        step_plan: step plan of that checkpoint; None without a checkpoint, or if it does not say.
        state: run state of that checkpoint until it is recovered; None: it could not be read.

    Ranks: local; the main process makes it, all ranks use it.

    Example:
        >>> Start("never").step_plan is None
        True
    """

    resume: str | Checkpoint
    num_found: int = 0
    step_plan: StepPlan | None = None
    state: Mapping[str, Any] | None = None


#: Run states by the directory of their checkpoint and its time: another checkpoint may come to have the same name.
States = dict[tuple[Path, float], dict[str, Any]]


def choose_start(
    checkpointer: Checkpointer,
    resume: str,
    *,
    is_first: bool = True,
    known: States | None = None,
    is_debug: bool = False,
) -> Start:
    """Decide what a call of ``fit`` starts from.

    When the launcher itself has restarted the run, it goes on with the newest checkpoint of this launch, whatever the
    option says. A folder holds the checkpoints of one run: with ``"never"`` or a path, those that do not belong to
    this run are moved into a subfolder.

    Args:
        checkpointer: its folder is looked into.
        resume: the option: ``"auto"``, ``"never"`` or the path of a checkpoint.
        is_first: whether it is the first call of this process. For a recipe that recovers something in every call, a
            later one starts from the newest checkpoint, whatever the option says.
        known: run states that were read before; what is read now is added, so that no file is read twice.
        is_debug: whether the run has the option ``debug``. Another run does not go on from what a run with ``debug``
            has saved, whose epochs had a few batches: it moves such checkpoints into a subfolder, too.

    Raises:
        CheckpointError: the folder cannot be read, or holds nothing that is whole; or the path is not a checkpoint.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> from ddpkit.checkpoints import Checkpointer
        >>> choose_start(Checkpointer(tempfile.mkdtemp()), "auto").resume
        'auto'
    """
    found = checkpointer.list_checkpoints()
    states = _states_of(found, {} if known is None else known)
    if is_first and resume == NEWEST and not is_debug:
        found = _without_rehearsals(checkpointer, found, states)
    trained = [one for one in found if states[one.path].get(EVALUATED) is not True]
    own, chosen = trained or found, None  # where only evaluations have saved, theirs
    if not is_first:
        return Start(str(max(own, key=ckpt_recency).path) if own else resume)
    if resume != NEWEST:
        own = _of_this_launch(own, states)
    if own:
        chosen = checkpointer.find_checkpoint(ckpt_predicate=lambda one: one in own)
        _say_why(chosen, found, states, resume)
    elif resume != NEWEST:
        chosen = None if resume == NEVER else checkpointer.named(resume)
        checkpointer.set_aside(chosen)
    if chosen is None:
        return Start(resume, len(found))
    state = states[chosen.path] if chosen.path in states else brain_file_or_nothing(chosen.path)
    if not is_debug and state.get(DEBUG) is True:
        logger.warning(REHEARSED, chosen.path)
    asked = state.get("asked")  # the step plan as the options gave it, before a change for another number of processes
    return Start(chosen, len(found), StepPlan.read(asked if isinstance(asked, Mapping) else state), state or None)


def _without_rehearsals(
    checkpointer: Checkpointer, found: list[Checkpoint], states: Mapping[Path, Mapping[str, Any]]
) -> list[Checkpoint]:
    """Move checkpoints of runs with the option ``debug`` away, and return the others."""
    rehearsals = [one for one in found if states[one.path].get(DEBUG) is True]
    if rehearsals:
        words = "%d checkpoint(s) in %s were saved with --debug: this run does not go on from them."
        logger.warning(words, len(rehearsals), checkpointer.checkpoints_dir)
        checkpointer.set_these_aside(rehearsals)
    return [one for one in found if one not in rehearsals]


def _states_of(found: Iterable[Checkpoint], known: States) -> dict[Path, dict[str, Any]]:
    keys = [(one.path, ckpt_recency(one)) for one in found]
    known.update({key: brain_file_or_nothing(key[0]) for key in keys if key not in known})
    return {key[0]: known[key] for key in keys}


def _of_this_launch(found: list[Checkpoint], states: Mapping[Path, Any]) -> list[Checkpoint]:
    """Return the checkpoints of the launch that has restarted this run; none, where it has not been restarted."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    if not find_launch().restart_count or launch in {None, "none"}:
        return []
    return [one for one in found if states[one.path].get("launch") == launch]


def _say_why(chosen: Checkpoint | None, found: list[Checkpoint], states: Mapping[Path, Any], resume: str) -> None:
    newest = max(found, key=ckpt_recency)
    if chosen is not None and resume != NEWEST:
        logger.info("The launcher has restarted this run: it goes on from %s.", chosen.path)
    elif chosen is not None and chosen != newest and states[newest.path].get(EVALUATED) is True:
        words = "%s was saved by a process that only evaluated: the training goes on from %s."
        logger.info(words, newest.path, chosen.path)


# ---------------------------------------------------------------------------------------- what should be known


def modules_not_saved(modules: Mapping[str, nn.Module] | nn.ModuleDict, recoverables: Mapping[str, Any]) -> list[str]:
    """Name the modules with trained parameters that no recoverable holds: after a restart they would be untrained.

    Args:
        modules: by name.
        recoverables: of a checkpointer: modules, or objects with modules among their attributes.

    Returns:
        Names.

    Ranks: local.

    Example:
        >>> net, head = nn.Linear(1, 1), nn.Linear(2, 1)
        >>> modules_not_saved({"net": net, "head": head}, {"net": net})
        ['head']
    """
    saved = [one for one in parts_of(recoverables) if isinstance(one, nn.Module)]
    held = {id(parameter) for module in saved for parameter in module.parameters()}
    return [
        name
        for name, module in modules.items()
        if any(one.requires_grad and id(one) not in held for one in module.parameters())
    ]


def optimizers_not_saved(optimizers: Mapping[str, Any] | None, recoverables: Mapping[str, Any]) -> list[str]:
    """Name the optimizers that no recoverable holds: a restart would lose their moments.

    Args:
        optimizers: by name, or None.
        recoverables: of a checkpointer; one may have the optimizer among its attributes.

    Returns:
        Names.

    Ranks: local.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> optimizers_not_saved({"opt_class": sgd}, {"net": nn.Linear(1, 1)})
        ['opt_class']
    """
    held = set(map(id, parts_of(recoverables)))
    return [name for name, optimizer in (optimizers or {}).items() if id(optimizer) not in held]


def parts_of(recoverables: Mapping[str, Any]) -> Iterator[Any]:
    """Yield recoverables, their attributes, and the items of attributes that are containers.

    Args:
        recoverables: of a checkpointer.

    Ranks: local.

    Example:
        >>> list(parts_of({"net": 1}))
        [1]
    """
    for one in recoverables.values():
        yield one
        for value in getattr(one, "__dict__", {}).values():
            inner = list(value.values()) if isinstance(value, dict) else value
            yield from inner if isinstance(inner, (list, tuple)) else (inner,)


# ------------------------------------------------------------------ calls of fit, settings of optimizers


class FitCalls:
    """Which call of ``fit`` in the script this is, and which calls are over.

    A script that was stopped in its second call is started again: the first call must return at once, and the second
    goes on.

    Attributes:
        number: calls so far, this one included.
        finished: optimizer steps after each finished call, by its number.
        later: a checkpoint of a later call, and its run state; else None.
        later_ends_epoch: whether that checkpoint was made at the end of an epoch.

    Ranks: local; equal on all ranks.

    Example:
        >>> calls = FitCalls()
        >>> calls.number = 1
        >>> calls.accept(Path("CKPT+a"), {"fit": 2, "finished": [12]}), calls.later[1]["fit"]
        (False, 2)
    """

    def __init__(self) -> None:
        self.number = 0
        self.finished: dict[int, int] = {}
        self.later: tuple[Path, Mapping[str, Any]] | None = None
        self.later_ends_epoch = True

    def accept(self, path: Path, state: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint was made in this call; keep a checkpoint of a later call in :attr:`later`.

        Args:
            path: its directory.
            state: its run state.
        """
        number = state.get("fit", self.number)
        self.later = (path, state) if 0 < self.number < number else None
        return self.number in {0, number}


def optimizer_settings(optimizers: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the class and the settings of every parameter group, in plain values.

    With a schedule they have ``initial_lr``, the rate that the script has given: a schedule may have changed ``lr``.

    Args:
        optimizers: by name.

    Ranks: local.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> [(one["class"], one["lr"], one["momentum"]) for one in optimizer_settings({"sgd": sgd})["sgd"]]
        [('SGD', 0.5, 0)]
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for name, one in optimizers.items():
        known = [*getattr(one, "defaults", {"lr"}), "initial_lr"]
        kind = {"class": type(one).__name__}
        groups = [{key: group[key] for key in known if key in group} for group in getattr(one, "param_groups", [])]
        text = json.dumps([kind | group for group in groups], default=lambda value: getattr(value, "tolist", str)())
        found[name] = json.loads(text)
    return found


def changed_settings(checkpoint: Path, name: str, before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """List the settings of an optimizer that differ from the checkpoint's.

    Args:
        checkpoint: its directory.
        name: of the optimizer.
        before: settings of its groups in the checkpoint; missing ones count as equal.
        now: settings of the script.

    Raises:
        CheckpointError: it is an optimizer of another class, with other settings or another kind of weight decay.

    Ranks: local.

    Example:
        >>> changed_settings(Path("CKPT+a"), "sgd", [{"lr": 0.1}], [{"class": "SGD", "lr": 0.2}])
        ['lr 0.1 -> 0.2']
    """
    pairs = list(zip(before, now, strict=False))
    for old, new in pairs:
        kinds = [(one.keys() - {"initial_lr"}, one.get("decoupled_weight_decay")) for one in (old, new)]
        if old.get("class") not in {None, new["class"]} and kinds[0] != kinds[1]:
            raise CheckpointUsageError(OTHER_OPTIMIZER.format(checkpoint, name, old["class"], new["class"]))
    keys = [(key, old, new) for old, new in pairs for key in new if key in old and key not in _left_out(old, new)]
    return list(dict.fromkeys(f"{key} {old[key]} -> {new[key]}" for key, old, new in keys if old[key] != new[key]))


def _left_out(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Return the settings that are not compared: with a schedule on both sides, what it has made of the rate."""
    has_schedule = "initial_lr" in old and "initial_lr" in new
    return {"class", "fused", "lr"} if has_schedule else {"class", "fused"}


# ------------------------------------------------------------------------ the run's part of a checkpoint


class PassedOn(NamedTuple):
    """What a checkpoint said of the run, for a save before the training goes on.

    Attributes:
        state: its entries.
        end_of_epoch: whether it was of the end of an epoch.

    Ranks: local.

    Example:
        >>> PassedOn({"fit": 2}, end_of_epoch=False).end_of_epoch
        False
    """

    state: Mapping[str, Any]
    end_of_epoch: bool


class RunState:
    """The run's part of a checkpoint, ``brain.ckpt``.

    It is YAML with ``step``, ``avg_train_loss``, ``optimizer_step``, the running sums of the epoch's loss, what an
    optimizer step is made of, and the options that bear on the numbers. A checkpoint of the end of an epoch gives back
    ``optimizer_step``; outside of ``fit`` nothing is given back.

    Args:
        train_step: has the options, the progress, the modules, the optimizers, and the divisor of sums.
        rank_state: of this rank.

    Attributes:
        calls: of ``fit``.
        start: what the run started from; None before ``fit``.
        states: run states of checkpoints that this process has read; the main process alone.
        step_plan: what an optimizer step is made of.
        asked_plan: the step plan in the options, if another number of processes had to change it.
        steps_per_epoch: optimizer steps of an epoch; None where that is not known.
        steps_ahead: by how many steps the run is ahead of one that has always had the present batches.
        recovered: the checkpoint that was recovered in this call of ``fit`` or ``evaluate``.
        is_recovered_here: whether that checkpoint was made in this call of ``fit``.
        expected_epoch: the epoch after a resume from the recovered checkpoint.
        loss_sums: sums over all ranks of losses, weights and samples, for the next save; None: use this rank's.
        lacks: the batch whose loss is missing in the next save; or None.

    Ranks: local; every rank recovers, the main process saves.
    """

    def __init__(self, train_step: TrainStep, rank_state: RankState) -> None:
        self.train_step, self.rank_state = train_step, rank_state
        self.options, self.progress, self.modules = train_step.options, train_step.progress, train_step.modules
        self.calls = FitCalls()
        self.start: Start | None = None
        self.states: States = {}
        self.step_plan = StepPlan(None, None)
        self.asked_plan: StepPlan | None = None
        self.steps_per_epoch: int | None = None
        self.steps_ahead = 0
        self.recovered: Path | None = None
        self.is_recovered_here = True
        self.expected_epoch: int | None = None
        self.loss_sums: list[Any] | None = None
        self.lacks: int | None = None
        self._settings: dict[str, Any] | None = None  # with which the training of each optimizer has begun
        self._script_settings: dict[str, list[dict[str, Any]]] | None = None
        self._flags: list[tuple[str, nn.Parameter, bool]] = []  # whether each parameter was trained as training began
        self._saved_flags: Any = None  # of the checkpoint that was recovered, until they are restored
        self._evaluated_state: Mapping[str, Any] | None = None  # of the checkpoint that was recovered outside of fit
        self._later_end = True  # whether the checkpoint of a later call was of the end of an epoch
        self._evaluated_end = True  # and whether that was of the end of an epoch
        self._evaluated_at = (0, 0)  # calls of fit and optimizer steps before that
        self._fitted_epoch: Any = None  # of the checkpoint that was recovered in fit

    # ------------------------------------------------------------------ saving

    def save(self, path: Path) -> None:
        """Write the file.

        Args:
            path: of the file.
        """
        progress, divisor = self.progress, self.train_step.sum_divisor
        loss_sum, loss_count, samples = self.loss_sums or self._loss_sums_by_itself()
        shards = self.train_step.strategy.shards
        factor = self.options["grad_accumulation_factor"] // shards  # a recipe may have changed it since fit began
        state = {
            "step": progress.step // shards,
            "epoch": progress.epoch,
            "avg_train_loss": float(progress.avg_train_loss),
            "optimizer_step": progress.optimizer_step,
            "epoch_began_at": progress.began_at,
            "nonfinite": progress.nonfinite,
            "clipped": progress.clipped,
            **({} if divisor is None else {"sum_divisor": divisor}),
            "loss_sum": str(loss_sum) if isinstance(loss_sum, Fraction) else loss_sum,
            "loss_count": str(loss_count) if isinstance(loss_count, Fraction) else loss_count,
            "samples": int(samples),
            **vars(replace(self.step_plan, grad_accumulation_factor=factor)),
            "asked": vars(self.asked_plan or self.step_plan),
            "steps_per_epoch": self.steps_per_epoch,
            "steps_ahead": self.steps_ahead,
            "fit": self.calls.number,
            "finished": [self.calls.finished.get(number) for number in range(1, self.calls.number)],
            "lacks": self.lacks,
            "seed": self.rank_state.base_seed,
            "settings": self._settings,
            "trained": {name: one.requires_grad for name, one, begun in self._flags if one.requires_grad is not begun},
            "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
            "options": {name: self.options[name] for name in TELLING},
            "whole": progress.is_whole,
            "stages_done": progress.has_done_stages,
            DEBUG: bool(self.options.debug),
            **({} if (passed_on := self.passed_on) is None else passed_on.state),
        }
        from ddpkit.base import dump_plain_yaml  # loads yaml: not for a Brain alone

        path.write_text(dump_plain_yaml(state), encoding="utf-8")

    def _loss_sums_by_itself(self) -> Sequence[Any]:
        """Return the sums for a save that a recipe makes, perhaps on the main process alone."""
        if not self.modules.training:
            return 0.0, 0.0, 0  # the meter holds losses of an evaluation
        if self.progress.step and self.progress.train_sums is not None:
            return self.progress.train_sums  # the epoch's training is over
        return [one * get_world_size() for one in self.rank_state.own_sums()]  # its own share stands for all

    @property
    def passed_on(self) -> PassedOn | None:
        """What a save holds that comes before any training: what the recovered checkpoint says of the run."""
        later = self.calls.later
        if later is not None:  # this call of fit is done; the next one goes on from there
            return PassedOn(later[1], self._later_end)
        trains = self.progress.is_fitting or (self.train_step.optimizers and not self.calls.number)  # in an own loop
        if trains or self._evaluated_at != (self.calls.number, self.progress.optimizer_step):
            return None
        return PassedOn({**(self._evaluated_state or {}), EVALUATED: True}, self._evaluated_end)

    def place_of_weights(self) -> tuple[Any, int]:
        """Return the epoch and the number of optimizer steps of the weights that the modules have now.

        They are those of the checkpoint that was recovered last outside of ``fit``, or of the last training. The epoch
        is None where nothing was trained, or the checkpoint does not say it.
        """
        progress, state = self.progress, self._evaluated_state
        is_loaded = self._evaluated_at == (self.calls.number, progress.optimizer_step) and not progress.is_fitting
        if is_loaded and state is not None:
            return state.get("epoch") or None, state.get("optimizer_step", progress.optimizer_step)
        return progress.epoch or self._fitted_epoch, progress.optimizer_step

    # ------------------------------------------------------------------ recovering

    def find_again(self, path: Path) -> tuple[Checkpoint, Mapping[str, Any] | None]:
        """Return a checkpoint that was recovered before, with its run state if it is still the same one.

        Args:
            path: its directory.

        Raises:
            CheckpointError: it cannot be read any more.

        Ranks: main only.
        """
        found = read_checkpoint(path)
        return found, self.states.get((path, ckpt_recency(found)))

    def load(self, path: Path, *, end_of_epoch: bool) -> None:
        """Go on from the file; outside of ``fit`` only remember it.

        Args:
            path: of the file.
            end_of_epoch: whether the checkpoint was made there.

        Raises:
            CheckpointError: it cannot be read, or is damaged.
        """
        folder = self.recovered = path.parent
        if not self.progress.is_fitting:
            found, at = brain_file_or_nothing(folder), (self.calls.number, self.progress.optimizer_step)
            self._evaluated_state, self._evaluated_at = (found if "step" in found else None), at
            self._evaluated_end = end_of_epoch
            return
        start = self.start
        is_start = start is not None and isinstance(start.resume, Checkpoint) and start.resume.path == folder
        known = start.state if start is not None and is_start else None  # it was read for the choice
        state = read_brain_file(folder) if known is None else known
        if "step" not in state:
            raise CheckpointError(f"{path} does not say how far the run had come: it has no 'step'. {DAMAGED}")
        self.progress.look()
        self.progress.optimizer_step = state.get("optimizer_step", state["step"])
        self._fitted_epoch = state.get("epoch")
        other_settings = self._take_settings(folder, state)
        self.train_step.sum_divisor = state.get("sum_divisor")
        self.is_recovered_here = self.calls.accept(folder, state)
        self.calls.later_ends_epoch = end_of_epoch
        if not self.is_recovered_here:
            self._later_end = end_of_epoch
            if self.calls.later is None and not end_of_epoch:
                logger.warning(EARLIER, state["fit"], self.calls.number)
            return
        for name, changes in other_settings.items():
            logger.warning(OTHER_SETTINGS, name, ", ".join(changes))
        self.rank_state.adopt_seed(state.get("seed"))
        self._warn_of_changes(state)
        self._saved_flags = state.get("trained")
        if isinstance(state.get("epoch"), int):
            self.expected_epoch = state["epoch"] + int(end_of_epoch)
        if not end_of_epoch:
            self._go_on_inside_epoch(state)

    def _go_on_inside_epoch(self, state: Mapping[str, Any]) -> None:
        progress = self.progress
        if state.get("lacks") is not None:
            logger.warning(LACKS, state["lacks"])
        samples = state.get("samples", 0)
        before = StepPlan.read(state)
        batches, told = self.step_plan.place(before, state["step"], samples)
        progress.step = batches * self.train_step.strategy.shards
        for one in filter(None, (told, self.step_plan.other_data(before) if state["step"] else None)):
            logger.warning("%s", one)
        if "loss_sum" not in state and progress.step:
            logger.warning(
                "This checkpoint was made by SpeechBrain in the middle of an epoch: %d batches are left out now, but "
                "in ddpkit's order. To avoid it, go on from the end of an epoch.", progress.step,
            )  # fmt: skip
        progress.began_at = state.get("epoch_began_at", progress.optimizer_step)
        progress.nonfinite = state.get("nonfinite", 0)
        progress.clipped = state.get("clipped", 0)
        progress.avg_train_loss = state["avg_train_loss"]
        count = Fraction(state.get("loss_count", progress.step))
        loss_sum = Fraction(state.get("loss_sum", progress.avg_train_loss * float(count)))
        exact = isinstance(state.get("loss_sum"), str)
        if progress.phase is EpochPhase.OUTSIDE:
            progress.is_whole = bool(state.get("whole"))
            progress.is_validated = bool(state.get("stages_done"))
            progress.recover_inside((loss_sum, count, samples) if exact else (float(loss_sum), float(count), samples))
        if not get_rank():
            progress.meter.restore(loss_sum, count, samples=samples)

    def _warn_of_changes(self, state: Mapping[str, Any]) -> None:
        options, own_seed = state.get("options"), self.rank_state.base_seed
        changes = changed_options(options, self.options) if isinstance(options, Mapping) else []
        changes += self.step_plan.changes(StepPlan.read(state))
        seed = state.get("seed")
        if None not in {seed, own_seed} and seed != own_seed:
            changes.append(f"seed {own_seed}, before {seed}")
        if changes:
            words = "The run goes on with other options than its checkpoint's, and will not be the same: %s."
            logger.warning(words, "; ".join(changes))

    def check_epoch(self, epoch: int) -> None:
        """Warn where the epoch counter does not go on with the epoch of the checkpoint."""
        expected, self.expected_epoch = self.expected_epoch, None
        if expected is not None and epoch == expected + 1 and self.progress.is_whole:
            self.progress.forget_position()  # saved between two epochs: the next one begins
        elif expected not in {None, epoch}:
            words = "The checkpoint goes on with epoch %d, the epoch counter with %d: make the counter a recoverable."
            logger.warning(words, expected, epoch)

    # ------------------------------------------------------------------ settings of optimizers, frozen parameters

    @property
    def begun_settings(self) -> dict[str, list[dict[str, Any]]]:
        """Settings with which the training of each optimizer has begun, by name; what is missing is not known."""
        return self._settings or {}

    def note_script_settings(self, saved: Mapping[str, Any]) -> None:
        """Note the settings of optimizers that the script has made, before a checkpoint's are loaded.

        Args:
            saved: the optimizers that checkpoints hold, by name.
        """
        self._settings = self._script_settings = optimizer_settings(saved)

    def _take_settings(self, path: Path, state: Mapping[str, Any]) -> dict[str, list[str]]:
        """Note the settings that the optimizers go on with; return which of the script's have no effect.

        Raises:
            CheckpointError: an optimizer of the script cannot go on with the state of the checkpoint's.
        """
        given = self._script_settings
        if given is None:
            given = optimizer_settings(self.train_step.named_optimizers())
        before = state.get("settings") or {}  # of an earlier version nothing is known
        self._settings = {name: before.get(name, settings) for name, settings in given.items()}
        changes = {name: changed_settings(path, name, self._settings[name], given[name]) for name in given}
        return {name: told for name, told in changes.items() if told}

    def restore_trained_flags(self, modules: nn.ModuleDict) -> None:
        """Freeze and set free the parameters as they were when the checkpoint was saved.

        Hooks of earlier epochs do not run again, and may have done that. The first call notes how they begin.

        Args:
            modules: without any wrapper.
        """
        self._flags = self._flags or [(name, one, one.requires_grad) for name, one in modules.named_parameters()]
        saved, self._saved_flags = self._saved_flags, None
        count = 0
        for name, one, begun in self._flags if isinstance(saved, Mapping) else ():
            wanted = bool(saved.get(name, begun if self.calls.number > 1 else one.requires_grad))
            count += wanted is not one.requires_grad
            one.requires_grad_(wanted)
        if count:
            logger.info("%d parameter(s) are frozen, or trained, as they were when the checkpoint was saved.", count)
