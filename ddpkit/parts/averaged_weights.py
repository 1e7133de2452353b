"""Averages of the weights that begin late, are taken now and then, or are plain means."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from ddpkit.ema import WeightAverage
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.parts.part import Part
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = get_logger(__name__)

MEAN = "mean"
MOVING = "ema"
KINDS = (MOVING, MEAN)

TWICE = (
    "AveragedWeights stands in parts, and ema_decay={!r} is given, too. A run keeps one average of "
    "the weights. Leave --ema_decay and --evaluate_ema out: the part has `decay` and `evaluate`."
)
NOT_THE_ONE = (
    "AveragedWeights: another average stands in Brain.ema, from a second part or from the recipe. "
    "A run keeps one. Leave the part out, or the other."
)
EACH_ITS_OWN = (
    "AveragedWeights does not work with {}, where each process has {} of its own: the averages "
    "would differ between processes. {}"
)
RENEWED_AT = "renewed_at"  # in a checkpoint
OTHER_SETTINGS = (
    "AveragedWeights goes on with %s. The run was saved with %s. What was averaged before stays in "
    "the average."
)
NOT_JOINED = (
    "AveragedWeights: renew_batch_statistics={} needs batch statistics of the joined batch of all "
    "processes, and with {} each has its own rows. Leave one of the two out."
)
NO_AVERAGE = (
    "AveragedWeights: no weights are averaged yet, and %s uses the weights themselves. The average "
    "begins %s."
)


class AveragedWeights(Part):
    """Keeps an average of the weights, and validates and tests with it: a moving average, or a
    plain mean (stochastic weight averaging).

    What is averaged, and what a checkpoint holds of it (``ema.ckpt``), is as with the option
    ``ema_decay``; ``Brain.ema`` is the average. Weights are taken after an optimizer step, of those
    that the run has made, or after the training of an epoch.

    Args:
        decay: of a moving average: weight of the average so far, in ``[0, 1)``.
        kind: ``"ema"``, a moving average; ``"mean"``, in which all that was taken weighs the same.
        start_step: optimizer step from which on weights are taken.
        start_epoch: epoch from which on they are.
        every_steps: they are taken at multiples of so many optimizer steps.
        at_epoch_end: they are taken after the training of each epoch instead.
        evaluate: validate, test and predict with the average, once there is one.
        renew_batch_statistics: so many batches of the training data are run, before a validation
            and at the end of an epoch's training, to compute the running statistics of BatchNorm
            layers anew for the averaged weights. 0: the statistics are averaged like weights.

    Attributes:
        weight_average: the :class:`~ddpkit.ema.WeightAverage`.

    Raises:
        ConfigError: an argument cannot be used.

    Ranks: all; each keeps the same average, without a message. To renew statistics is collective.

    State: the settings; the average is in ``ema.ckpt``.

    Source: P. Izmailov, D. Podoprikhin, T. Garipov, D. Vetrov, A. G. Wilson, "Averaging Weights
    Leads to Wider Optima and Better Generalization", UAI 2018, https://arxiv.org/abs/1803.05407.

    Example:
        >>> AveragedWeights(kind="mean", start_epoch=10, at_epoch_end=True).settings()["kind"]
        'mean'
    """

    def __init__(  # noqa: PLR0913 -- the settings of one feature
        self,
        decay: float = 0.999,
        kind: str = MOVING,
        start_step: int = 0,
        start_epoch: int = 0,
        every_steps: int = 1,
        *,
        at_epoch_end: bool = False,
        evaluate: bool = True,
        renew_batch_statistics: int = 0,
    ) -> None:
        if kind not in KINDS:
            raise ConfigError(
                f"AveragedWeights: kind={kind!r} must be 'ema', a moving average, or 'mean', in "
                "which all weights that are taken count the same."
            )
        self.decay = _decay(decay)
        self.kind = kind
        self.start_step = _whole("start_step", start_step, least=0)
        self.start_epoch = _whole("start_epoch", start_epoch, least=0)
        self.every_steps = _whole("every_steps", every_steps, least=1)
        self.at_epoch_end = at_epoch_end
        if at_epoch_end and every_steps != 1:
            raise ConfigError(
                f"AveragedWeights: every_steps={every_steps!r} and at_epoch_end=True contradict "
                "each other: weights are taken at optimizer steps, or once after each epoch. Leave "
                "one of them out."
            )
        self.renew_batch_statistics = _whole(
            "renew_batch_statistics", renew_batch_statistics, least=0
        )
        self.evaluate = evaluate
        self.weight_average: ScheduledAverage = ScheduledAverage(self)
        self._layers: list[nn.Module] = []  # whose statistics move in training
        self._renewed_at = 0  # updates in the average as they were renewed

    def settings(self) -> dict[str, Any]:
        """Return what decides which weights are averaged, and how."""
        chosen = {"decay": self.decay} if self.kind == MOVING else {}
        return {
            "kind": self.kind,
            **chosen,
            "start_step": self.start_step,
            "start_epoch": self.start_epoch,
            "every_steps": self.every_steps,
            "at_epoch_end": self.at_epoch_end,
            "renew_batch_statistics": self.renew_batch_statistics,
        }

    def check(self, brain: Any) -> None:
        """Refuse a second average, and averages that would differ between processes."""
        options = brain.run_opts
        if options.ema_decay is not None:
            raise ConfigError(TWICE.format(options.ema_decay))
        if brain.ema is not self.weight_average:
            raise ConfigError(NOT_THE_ONE)
        if options.ddp_comm_hook == "post_local_sgd":
            raise ConfigError(
                EACH_ITS_OWN.format("ddp_comm_hook=post_local_sgd", "weights", "Leave one out.")
            )
        if options.sync_batchnorm is False and (self.evaluate or self.renew_batch_statistics):
            raise ConfigError(
                EACH_ITS_OWN.format(
                    "sync_batchnorm=False", "batch statistics", "Leave --sync_batchnorm out."
                )
            )
        for name in (
            ("virtual_ranks", "data_parallel_backend") if self.renew_batch_statistics else ()
        ):
            if options[name]:
                raise ConfigError(NOT_JOINED.format(self.renew_batch_statistics, name))

    # ------------------------------------------------------------------ in a stage

    def wrap_batches(self, brain: Any, batches: Iterable[Any], stage: Stage) -> Iterable[Any]:
        """Note, where the training of an epoch begins, which statistics move in it."""
        if stage is Stage.TRAIN and self.renew_batch_statistics:
            from ddpkit.parts.batch_statistics import layers_with_statistics, require_batches

            require_batches(brain.progress.loader, self.renew_batch_statistics)
            self._layers = layers_with_statistics(brain.modules)
        return batches

    def on_stage_start(self, brain: Any, stage: Stage, epoch: int | None) -> None:
        """Renew statistics before a validation, if weights were averaged since the last time."""
        if stage is Stage.VALID:
            self._renew(brain)

    def on_stage_end(
        self,
        brain: Any,
        stage: Stage,
        stage_loss: float,
        epoch: int | None,
    ) -> None:
        """Take the weights of an epoch; renew statistics for a save of the recipe's hook."""
        if stage is not Stage.TRAIN:
            return
        if self.at_epoch_end and brain.progress.is_whole and self.weight_average.has_begun():
            self.weight_average.take()
        self._renew(brain)

    def _renew(self, brain: Any) -> None:
        average = self.weight_average
        if not self._layers or self._renewed_at == average.updates:
            return
        from ddpkit.parts.batch_statistics import renew_statistics

        with average.applied():
            renew_statistics(brain, self._layers, self.renew_batch_statistics)
            average.take_statistics()
        self._renewed_at = average.updates

    # ------------------------------------------------------------------ in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, and for which average statistics were renewed last."""
        return {**self.settings(), RENEWED_AT: self._renewed_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tell of settings that are others than in the run that was saved.

        Statistics are not renewed a second time for one average: the batches would be others.
        """
        self._renewed_at = state.get(RENEWED_AT, 0)
        state = {name: value for name, value in state.items() if name != RENEWED_AT}
        now = self.settings()
        changed = [name for name in now | state if now.get(name) != state.get(name)]
        if changed:
            logger.warning(OTHER_SETTINGS, _in_words(now, changed), _in_words(state, changed))


class ScheduledAverage(WeightAverage):
    """The average of an :class:`AveragedWeights`: takes the weights when the part says.

    Args:
        part: whose it is.

    Ranks: local.
    """

    def __init__(self, part: AveragedWeights) -> None:
        super().__init__(nn.ModuleDict(), part.decay)
        self._part = part
        self.is_evaluated = part.evaluate
        self.origin = "AveragedWeights"
        if part.kind == MEAN:
            self._lerp = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]

    @property
    def row(self) -> str:
        """What the block at the start says of it."""
        part = self._part
        words = f"decay {part.decay}" if part.kind == MOVING else "a plain mean"
        if part.at_epoch_end:
            words += ", taken after each epoch"
        elif part.every_steps > 1:
            words += f", taken every {part.every_steps} steps"
        if part.start_step or part.start_epoch:
            words += f", {self._beginning()}"
        if part.renew_batch_statistics:
            words += f", batch statistics renewed on {part.renew_batch_statistics} batches"
        return words

    def _beginning(self) -> str:
        part = self._part
        epoch = f"in epoch {part.start_epoch}" if part.start_epoch else ""
        step = f"at optimizer step {part.start_step}" if part.start_step else ""
        return " and ".join(filter(None, (epoch, step))) or "after the first epoch"

    def has_begun(self) -> bool:
        """Say whether weights are taken at this point of the run."""
        progress: Any = getattr(self._owner, "progress", None)
        return progress is None or (
            progress.optimizer_step >= self._part.start_step
            and progress.epoch >= self._part.start_epoch
        )

    def update(self) -> None:
        """Take the weights into the average, if it is time by the optimizer steps of the run."""
        part = self._part
        progress: Any = getattr(self._owner, "progress", None)
        is_due = progress is None or progress.optimizer_step % part.every_steps == 0
        if is_due and not part.at_epoch_end and self.has_begun():
            self.take()

    def take(self) -> None:
        """Take the weights into the average now."""
        super().update()

    @torch.no_grad()
    def take_statistics(self) -> None:
        """Take the running statistics of the modules in the place of averaged ones."""
        averages = self._followed[len(self._parameters) :]
        for average, statistic in zip(averages, self._statistics, strict=True):
            average.copy_(statistic.now())

    def evaluated(self, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """Return :meth:`applied` for a stage; before there is an average it changes nothing, and a
        warning says so.
        """
        if not self.updates:
            logger.warning_once(NO_AVERAGE, stage.name, self._beginning())
        return self.applied()


def _decay(decay: Any) -> float:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise ConfigError(
            f"AveragedWeights: decay={decay!r} must be at least 0 and less than 1, for example "
            "0.999."
        )
    return float(decay)


def _whole(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"AveragedWeights: {name}={value!r} must be a whole number >= {least}.")
    return value


def _in_words(settings: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}={settings.get(name)!r}" for name in names)
