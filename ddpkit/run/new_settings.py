"""What a resumed run takes from the script and not from its checkpoint: ``--resume_with_new``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpkit.optim import Schedule
    from ddpkit.training import RunContext, TrainStep

#: Values of the option; the first two are names of settings, too.
LR = "lr"
WEIGHT_DECAY = "weight_decay"
SCHEDULE = "schedule"
OPTIMIZER = "optimizer"

HAS_SCHEDULE = (
    "resume_with_new=lr: a schedule sets the learning rates of the optimizer {!r}. Give "
    "--resume_with_new=schedule: the schedule is then taken as the script makes it, with its "
    "rates, and goes on at the step of the run. Rates that a recipe steps itself it has to set "
    "itself, after on_fit_start."
)
NO_SCHEDULE = (
    "resume_with_new=schedule: the Brain was given no scheduler_class, so there is no schedule to "
    "take from the script. Give lr for the rates."
)

Groups = list[dict[str, Any]]


class NewSettings:
    """Puts settings of the script in the place of a checkpoint's, when a run goes on from it.

    A value that the checkpoint's run has begun with, or has taken over since, is no new one: so a
    run that is killed later and started with the same options goes on exactly.

    Args:
        context: of the run.
        train_step: has the optimizers and the schedule.

    Attributes:
        is_starting: whether what is loaded now is what the training goes on from.
        row: what was taken, for the start-up block.

    Ranks: local; alike on every rank.
    """

    def __init__(self, context: RunContext, train_step: TrainStep) -> None:
        self.context = context
        self.train_step = train_step
        self.is_starting = False
        self.row = ""
        self._groups: dict[str, Groups] = {}  # of the script's optimizers, before any is loaded
        self._given: Mapping[str, Groups] = {}  # the same in plain values
        self._state: Mapping[str, Any] = {}  # of the checkpoint's run
        self._new: dict[str, list[set[str]]] = {}  # settings to take, by optimizer and group
        self._told: list[str] = []

    @property
    def asked(self) -> list[str]:
        """What the option says."""
        return list(self.context.options.resume_with_new or ())

    def begin(self, given: Mapping[str, Groups], state: Mapping[str, Any] | None) -> None:
        """Note the settings of the script, before a checkpoint is loaded.

        Args:
            given: settings of its optimizers in plain values, by name.
            state: run state of the checkpoint that the training goes on from; None: there is none.

        Raises:
            ConfigError: the option does not go with the optimizers of the script.
        """
        self._given = given
        optimizers = self.train_step.named_optimizers()
        self._groups = {name: _copied(optimizer) for name, optimizer in optimizers.items()}
        self._require_sense(optimizers)
        if state is not None:
            self._look_at(state)

    def _require_sense(self, optimizers: Mapping[str, Any]) -> None:
        asked = self.asked
        schedule = self.train_step.schedule
        if SCHEDULE in asked and schedule is None:
            raise ConfigError(NO_SCHEDULE)
        if LR not in asked or SCHEDULE in asked:
            return
        for name, optimizer in optimizers.items():
            if any("initial_lr" in group for group in getattr(optimizer, "param_groups", [])):
                raise ConfigError(HAS_SCHEDULE.format(name))

    def look_at(self, state: Mapping[str, Any]) -> None:
        """Find out what of the script is new to the run of a checkpoint that is being loaded.

        Args:
            state: its run state.
        """
        if self.is_starting:
            self._look_at(state)

    def _look_at(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._told = []
        self._new = {}
        schedule = self.train_step.schedule
        if schedule is not None:
            schedule.keeps_own = self._takes_schedule(schedule)

    def _is_new(self, what: str) -> bool:
        return what in self.asked and what not in (self._state.get("resume_with_new") or ())

    def _takes_optimizer(self, name: str) -> bool:
        """Say whether an optimizer of the script begins anew: once, or if it is another one."""
        before = (self._state.get("settings") or {}).get(name)
        is_other = before is not None and before != self._given.get(name)
        return OPTIMIZER in self.asked and (self._is_new(OPTIMIZER) or is_other)

    def _takes_schedule(self, schedule: Schedule) -> bool:
        """Say whether the schedule is the script's: again and again, as that makes no difference;
        but a schedule that follows the loss cannot be made up for.
        """
        if schedule.follows_loss:
            return self._is_new(SCHEDULE) or self._is_new(OPTIMIZER)
        return bool({SCHEDULE, OPTIMIZER} & set(self.asked))

    def passes_over(self, _: str, obj: Any) -> bool:
        """Say whether an object of the run stays as the script has made it.

        Args:
            obj: a recoverable.
        """
        if not self.is_starting:
            return False
        optimizers = self.train_step.named_optimizers()
        return any(
            obj is optimizer and self._takes_optimizer(name)
            for name, optimizer in optimizers.items()
        )

    def merged(self, name: str, before: Groups, given: Groups) -> Groups:
        """Return the settings with which the run goes on, for the checkpoints to come.

        Args:
            name: of the optimizer.
            before: with which the checkpoint's run began, or which it has taken since.
            given: of the script.
        """
        if not self.is_starting:
            return before
        if self._takes_optimizer(name):
            self._told.append(f"optimizer {name}, {given[0]['class']}" if given else name)
            return given
        asked = {key for key in (LR, WEIGHT_DECAY) if key in self.asked}
        taken = set(asked)
        schedule = self.train_step.schedule
        if schedule is not None and schedule.keeps_own:
            taken |= {LR, "initial_lr"}
        pairs = list(zip(before, given, strict=False))
        knows = bool((self._state.get("settings") or {}).get(name))
        self._new[name] = [
            {key for key in asked if key in new and (not knows or old.get(key) != new[key])}
            for old, new in pairs
        ]
        changed = [{key: new[key] for key in taken if key in new} for _, new in pairs]
        return [
            *(old | new for (old, _), new in zip(pairs, changed, strict=True)),
            *before[len(pairs) :],
        ]

    def apply(self, epochs: int) -> None:
        """Put the new settings in place, once the checkpoint is loaded.

        Args:
            epochs: that are over.

        Raises:
            ConfigError: the schedule of the script ends before the step of the run.
        """
        told = [*self._told, *self._take_schedule(epochs), *self._take_values()]
        self._new = {}
        self._told = []
        if self.asked and self._state:
            what = "; ".join(dict.fromkeys(told)) or "nothing differs"
            self.row = f"{what} (--resume_with_new={','.join(self.asked)})"
        self._state = {}

    def _take_values(self) -> Iterator[str]:
        optimizers = self.train_step.named_optimizers()
        for name, keys in self._new.items():
            own = self._groups.get(name, [])
            for group, script, new in zip(optimizers[name].param_groups, own, keys, strict=False):
                for key in sorted(new):
                    if float(group[key]) != float(script[key]):
                        yield f"{key} {float(group[key]):g} -> {float(script[key]):g}"
                    _set(group, key, script[key])

    def _take_schedule(self, epochs: int) -> Iterator[str]:
        schedule = self.train_step.schedule
        if schedule is None or not schedule.keeps_own:
            return
        schedule.keeps_own = False
        named = self.train_step.named_optimizers()
        name = next(name for name, one in named.items() if one is schedule.optimizer)
        optimizer = named[name]
        for group, script in zip(optimizer.param_groups, self._groups[name], strict=False):
            for key in _of_schedule(schedule, optimizer, script):
                _set(group, key, script[key])
        made = epochs if schedule.every == "epoch" else self.context.progress.optimizer_step
        count = schedule.go_on_as_made(made, self.context.progress.optimizer_step)
        yield f"schedule, at {schedule.every} {count}"


def _copied(optimizer: Any) -> Groups:
    """Copy the settings of an optimizer's groups."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in getattr(optimizer, "param_groups", [])
    ]


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one setting; a step may have been compiled with the very tensor that is there."""
    known = group.get(key)
    if isinstance(known, torch.Tensor):
        known.copy_(torch.as_tensor(value))
    else:
        group[key] = value.clone() if isinstance(value, torch.Tensor) else value


def _of_schedule(
    schedule: Schedule,
    optimizer: Any,
    group: Mapping[str, Any],
) -> Iterable[str]:
    """Return the settings of a group that a schedule sets, or has put there."""
    own = {LR, *(key for key in group if key not in optimizer.defaults)}
    schedulers = [schedule.scheduler, *getattr(schedule.scheduler, "_schedulers", ())]
    if any(getattr(scheduler, "cycle_momentum", False) for scheduler in schedulers):
        own |= {"momentum", "betas"}
    return sorted(own & group.keys())
