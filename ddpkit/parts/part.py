"""A feature of a run as one object: what it hears, what it may change, what is saved of it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from ddpkit.training import BatchSizes
    from ddpkit.types import FitResult, Stage


class Part:
    """A feature of a run in a class of its own: subclass it, and override the events that it needs.

    Parts are given to the Brain, ``Brain(..., parts=[...])``, or stand in the YAML::

        parts:
          - !new:ddpkit.parts.EarlyStopping
            patience: 3

    In the order of a run::

        fit:       check, around_fit, on_sizes_known, (the checkpoint is recovered),
                   on_optimizers_made, on_fit_start, and for every epoch:
                     on_stage_start(TRAIN), wrap_batches(TRAIN), for every optimizer step:
                       on_gradients, the step, after_step, on_step_counted,
                       is_validation_due
                     about once a second: on_sync
                     on_stage_end(TRAIN)
                     is_validation_due; where it is:
                       on_stage_start(VALID), wrap_batches(VALID), on_stage_end(VALID)
                   on_fit_end, (the context of around_fit is left)
        evaluate:  check, on_stage_start(TEST), wrap_batches(TEST), on_stage_end(TEST)
        predict:   check, wrap_batches(TEST)

    Each event comes on every rank, at the same place of the run. So a part may communicate in each,
    but for those that say otherwise. What a part changes must be the same on every rank.

    Parts hear an event in the order in which they were given. At the start of a stage they come
    after the recipe's own hook. At its end they come before it: a checkpoint that the recipe saves
    in ``on_stage_end`` then holds what the parts know of this stage.

    An event that no part overrides costs nothing. An exception in a part ends the run as one in the
    recipe does; what is said of it names the part and the event.

    Attributes:
        name: of the part in messages and checkpoints, by default that of the class. Two parts of
            one class need two names.
        needs: classes of parts of which one must have been given before this one.
        weight_average: an average of the weights that the part keeps, which the run updates, saves
            and evaluates: a :class:`~ddpkit.ema.WeightAverage`; or None.

    Ranks: all; every rank makes the same parts.

    State: what :meth:`state_dict` returns is saved in each checkpoint, if a class overrides it.

    Example:
        >>> class Steps(Part):
        ...     made = 0
        ...     def after_step(self, brain):
        ...         self.made += 1
        >>> steps = Steps()
        >>> steps.name, steps.made
        ('Steps', 0)
    """

    name: str = ""
    needs: ClassVar[tuple[type[Part], ...]] = ()
    weight_average: Any = None

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    # ------------------------------------------------------------------ before the run

    def check(self, brain: Any) -> None:
        """Refuse what cannot work with this run: called when ``fit``, ``evaluate`` or ``predict``
        begins.

        Args:
            brain: of the recipe; its optimizers are not made yet, and no checkpoint is recovered.

        Raises:
            ConfigError: says what was given, why it cannot work and what to do.

        Ranks: all; must not communicate.
        """

    def around_fit(self, brain: Any) -> AbstractContextManager[Any]:
        """Return a context in which a call of ``fit`` runs. It is entered before a checkpoint is
        recovered, and left whatever ends the call. An exception goes through it, and cannot be
        ended by it.

        Args:
            brain: of the recipe; its optimizers are not made yet.

        Ranks: all; to enter and to leave it must not communicate, since a rank may leave alone.
        """
        return contextlib.nullcontext()

    def start_rows(self, brain: Any) -> Mapping[str, str]:
        """Return rows for the block that a run shows when it starts: a word or two, and a sentence.

        Args:
            brain: of the recipe, ready to train.

        Ranks: all; the main process shows them. Must not communicate.
        """
        return {}

    def on_sizes_known(self, brain: Any, sizes: BatchSizes) -> None:
        """Called when the loaders are made: it is known how many samples a step has, and how many
        steps the training is going to make. No optimizer is made yet in the first call of ``fit``.

        Args:
            brain: of the recipe; ``brain.steps_per_epoch`` and ``brain.total_steps`` are set.
            sizes: ``sizes.per_step`` has the samples of an optimizer step of all ranks, None where
                that is not known.

        Ranks: all; may communicate.
        """

    def on_optimizers_made(self, brain: Any, optimizers: Mapping[str, Any]) -> None:
        """Called when a call of ``fit`` has its optimizers and the checkpoint is recovered; and
        again, before the training of an epoch, if the recipe has put others in their place.

        Args:
            brain: of the recipe.
            optimizers: by name; those too that are attributes of the Brain and that ``fit`` does
                not step.

        Ranks: all; may communicate.
        """

    def on_fit_start(self, brain: Any) -> None:
        """Called when the optimizers are made and the checkpoint is recovered, before the first
        epoch.

        Args:
            brain: of the recipe.

        Ranks: all; may communicate.
        """

    # ------------------------------------------------------------------ in a stage

    def on_stage_start(self, brain: Any, stage: Stage, epoch: int | None) -> None:
        """Called before a stage, after the recipe's ``on_stage_start``. An epoch that is resumed in
        its middle begins again with it.

        Args:
            brain: of the recipe; its modules are in the mode of the stage.
            stage: TRAIN, VALID or TEST.
            epoch: from 1; None where no training runs.

        Ranks: all; may communicate.
        """

    def wrap_batches(self, brain: Any, batches: Iterable[Any], stage: Stage) -> Iterable[Any]:
        """Return what yields the batches of a stage in the place of ``batches``.

        There must be as many, each of as many samples: where a batch stands in its accumulation
        window is planned before.

        Args:
            brain: of the recipe.
            batches: of this rank, as the loader yields them.
            stage: TRAIN, VALID or TEST.

        Ranks: all; must not communicate, since ranks read ahead as they like.
        """
        return batches

    def on_gradients(self, brain: Any) -> None:
        """Called before each optimizer step, with gradients as the step is going to use them.

        They are averaged over the ranks, divided by the count of ``(loss_sum, count)`` and by the
        scale of fp16, and not yet clipped by ``max_grad_norm``. A part may change them in place, on
        every rank alike. They may hold what is not finite: then the step is skipped afterwards.

        Args:
            brain: of the recipe; its gradients are in its modules' parameters.

        Ranks: all; may communicate. Under ``strategy=fsdp`` a rank has its part of each gradient.
        """

    def after_step(self, brain: Any) -> None:
        """Called when an accumulation window is over in which the optimizers have stepped; not if
        the step was skipped.

        On a GPU the host waits for each step where a part hears this: it is known only then whether
        it was skipped.

        Args:
            brain: of the recipe; ``brain.optimizer_step`` counts this step.

        Ranks: all; may communicate.
        """

    def on_step_counted(self, brain: Any) -> None:
        """Called when an optimizer step is counted: it is known that it was made, and not skipped.

        On a GPU that may be a batch later, as the host does not wait for the step. Where the step
        has to be over and the next one not begun, use :meth:`after_step`.

        Args:
            brain: of the recipe; ``brain.optimizer_step`` counts this step.

        Ranks: all, for the same steps; must not communicate, and changes nothing that is trained.
        """

    def is_validation_due(self, brain: Any, moment: str) -> int | None:
        """Say whether ``fit`` validates now: asked between two optimizer steps, and when the
        training of an epoch is over.

        Without a part that has a say, ``fit`` validates at the end of each epoch. Where several
        have one, the largest validation is made.

        A validation between two steps leaves the training as it was: its position, modes of
        modules, random streams, logged values and metrics. ``on_stage_start`` and ``on_stage_end``
        come with ``Stage.VALID`` as ever. At the last step of an epoch the validation waits for the
        end of the epoch. Where the ranks' weights differ, as with ``ddp_comm_hook=post_local_sgd``,
        this is asked after their next average.

        Args:
            brain: of the recipe; ``brain.progress.validated_at`` is the optimizer step of the last
                validation, -1 before the first.
            moment: ``"start"`` before the first step of a run, ``"step"`` after an optimizer step,
                ``"epoch"`` after the training of an epoch.

        Returns:
            True: validate. A number: on so many batches of each set and process. False: do not.
            None: no say.

        Ranks: all, at the same step; the answers must be the same, so decide by what is the same on
        all, such as ``brain.optimizer_step``. A "no" costs no message: where one rank alone says
        "no", the others find it a few seconds later, as it trains on. Must not communicate.
        """
        return None

    def on_sync(self, brain: Any) -> None:
        """Called about once a second in training, between two optimizer steps; before the save, if
        one is due.

        Args:
            brain: of the recipe; ``brain.avg_train_loss`` is of this moment.

        Ranks: all, at the same step; may communicate.
        """

    def on_stage_end(
        self,
        brain: Any,
        stage: Stage,
        stage_loss: float,
        epoch: int | None,
    ) -> None:
        """Called after a stage, before the recipe's ``on_stage_end``.

        Args:
            brain: of the recipe; ``brain.logged`` has the means of what it has logged.
            stage: TRAIN, VALID or TEST.
            stage_loss: the mean over the samples of all ranks.
            epoch: from 1; None where no training runs.

        Ranks: all; may communicate.
        """

    def on_out_of_memory(self, error: BaseException) -> None:
        """Called when a step has found no memory: after it is logged what takes the memory, and
        while the tensors of the step are still there. Then the exception goes on.

        It also comes from an evaluation outside of ``fit``, without :meth:`around_fit`.

        Args:
            error: says that there is no memory left.

        Ranks: those alone that ran out of memory; must not communicate.
        """

    def on_fit_end(self, brain: Any, result: FitResult) -> None:
        """Called when a call of ``fit`` has trained and ends; not if an exception ends it.

        Args:
            brain: of the recipe.
            result: what ``fit`` returns.

        Ranks: all; may communicate.
        """

    # ------------------------------------------------------------------ in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the part: tensors, numbers, strings, and lists and
        dicts of such.

        Ranks: the main process; must not communicate.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint holds of the part.

        Args:
            state: as :meth:`state_dict` has returned it. A checkpoint of a run without the part has
                none, and this is not called.

        Ranks: all, with the same state; must not communicate.
        """
