"""The interface of strategies: of the library's own, and of yours."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpkit.distributed import get_world_size
from ddpkit.strategies.names import OF_DDP
from ddpkit.strategies.option_refusals import refuse_with
from ddpkit.strategies.rare_questions import NO_CONTEXT, RareQuestions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun
    from ddpkit.training import Accumulation, Progress


SHARDS = "shards"  # of ckpt_layout


class WholeState(NamedTuple):
    """Placeholder that is saved instead of a sharded object: its full state."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return the full, unsharded state."""
        return self.state


def asks_for_shards(strategy: Strategy) -> bool:
    """Say whether the options of a strategy that can write shards ask for them, and the ranks share
    a folder.

    Args:
        strategy: bound to a run.

    Ranks: local; alike on all ranks.
    """
    is_asked = strategy.options.ckpt_layout == SHARDS and get_world_size() > 1
    return is_asked and not strategy.gathers_states


class Strategy(RareQuestions):
    """How several processes train one model: what is wrapped, what is averaged, and when.

    Subclass it, override what differs, and choose it: ``--strategy=my_package.averaging:Mine``, a
    name given to :func:`~ddpkit.strategies.names.register`, or an object, as
    ``run_opts={"strategy": Mine()}`` or in the YAML. Each method has an answer that fits processes
    of which none knows of the others.

    In the order of a run::

        Brain(...):    check, bind
        fit:           check, wrap, prepare_optimizers, startup_rows,
                       (a checkpoint is recovered), and for every epoch:
                         load_rank_state (after a resume), begin_pass, for every batch:
                           no_sync (but in the last batch of a step), backward_pass
                         for every optimizer step:
                           finish_gradients, clipping and the step, after_window
                         end_pass
        a save:        rank_state

    :class:`~ddpkit.strategies.rare_questions.RareQuestions` has what only strategies are asked that
    divide data, weights or states of optimizers.

    A strategy object is for one Brain. In one process that no launcher has started,
    :class:`~ddpkit.strategies.single.SingleDevice` takes its place.

    Attributes:
        name: in messages and in the run's log; by default that of the class.
        label: value of the option ``strategy`` in messages.
        options: of the run; known from :meth:`bind` on, as the next three.
        device: of this rank, such as ``"cuda:1"``.
        accumulation: how many batches make a step.
        has_own_fit_batch: whether the recipe has its own ``fit_batch``.
        steps_locally: whether the next optimizer step is made with this rank's own gradients. Their
            norm is then another on each rank.
        weights_differ: whether the ranks' weights differ until the next average. A checkpoint
            waits; one that cannot wait is refused.

    Ranks: each method says it.

    State: :meth:`rank_state`, if a class overrides it.

    Example:
        >>> class Alone(Strategy):
        ...     def startup_rows(self, modules):
        ...         return {"strategy": "each process for itself"}
        >>> Alone().name
        'Alone'
    """

    name: str = "Strategy"
    label: str = ""
    options: RunOptions
    device: str
    accumulation: Accumulation
    has_own_fit_batch: bool = False
    steps_locally = False
    weights_differ = False

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __repr__(self) -> str:
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def overrides(self, method: str) -> bool:
        """Say whether a method is another than the one that every strategy has.

        Args:
            method: its name.

        Ranks: local.

        Example:
            >>> Strategy().overrides("after_window")
            False
        """
        return getattr(type(self), method) is not getattr(Strategy, method)

    # ------------------------------------------------------------------ before the run

    def check(self, options: RunOptions, *, has_own_fit_batch: bool) -> None:
        """Refuse options that do not go with the strategy: called when the Brain is made, and when
        ``fit`` begins.

        Options of DDP are refused here. Call this one, too, in your own.

        Args:
            options: of the run.
            has_own_fit_batch: whether the recipe has its own ``fit_batch``.

        Raises:
            ConfigError: says what was given, why it cannot work and what to do
                (:func:`~ddpkit.strategies.option_refusals.refuse_with` writes the sentence).

        Ranks: all, with the same options; must not communicate.
        """
        refuse_with(f"strategy={self.label or self!r}", options, OF_DDP)

    def bind(
        self,
        options: RunOptions,
        accumulation: Accumulation,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Take what a strategy needs to know of the run: called once, when the Brain is made.

        Args:
            options: of the run, with the device of this rank.
            accumulation: how many batches make a step.
            has_own_fit_batch: whether the recipe has its own ``fit_batch``.

        Ranks: all; may communicate, the process group is there.

        State: the attributes that this class lists.
        """
        self.options = options
        self.device = str(options.device)
        self.accumulation = accumulation
        self.has_own_fit_batch = has_own_fit_batch

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Wrap the trainable entries, in place, and give every rank the same weights: called when
        ``fit`` begins, before the optimizers are made.

        Args:
            modules: of the recipe, on the device. An entry may be replaced by a module around it;
                checkpoints hold what is inside. Entries of an earlier call are wrapped already.

        Ranks: all; may communicate.
        """

    def prepare_optimizers(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        """Prepare optimizers, or refuse what the strategy cannot step: called when they are made,
        before a checkpoint is loaded into them.

        Args:
            modules: of the recipe.
            optimizers: by name.

        Ranks: all; may communicate.
        """

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows of the block that a run shows when it starts: what each process holds, and
        what is not computed as in one process.

        Args:
            modules: of the recipe.

        Returns:
            A row ``strategy``, and more by name; an empty one is not shown.

        Ranks: all; the main process shows them. Must not communicate.
        """
        return {"strategy": self.name}

    def rank_memory(self, run: RehearsedRun) -> RankMemory | None:
        """Return how much memory a rank would take, for ``--estimate``: called on an object that
        was given no run and is never bound.

        Args:
            run: whose steps were rehearsed in one process, and the number of processes to answer
                for.

        Returns:
            Bytes by what they are for; None: not known.
            :func:`~ddpkit.strategies.rank_memory.whole_memory` is the answer where each rank holds
            the whole model, and :func:`~ddpkit.strategies.rank_memory.divided_memory` where each
            holds a part.

        Raises:
            ConfigError: it cannot work on so many processes.

        Ranks: one process; no process group is there.
        """
        return None

    # ------------------------------------------------------------------ a pass over the data

    def begin_pass(self, progress: Progress) -> None:
        """Called before the first batch of each training pass, also of one that is resumed in its
        middle.

        Args:
            progress: tells where the training is, then and later: ``progress.optimizer_step``,
                ``progress.epoch``, ``progress.step``. Nothing of it may be changed.

        Ranks: all; may communicate.
        """

    def end_pass(self, modules: nn.ModuleDict) -> None:
        """Make equal on all ranks, at the end of a training pass, what the strategy has let differ:
        what follows evaluates and saves.

        Args:
            modules: of the recipe.

        Ranks: all; may communicate.
        """

    # ------------------------------------------------------------------ a step

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context around forward and backward pass in which gradients are added up on each
        rank, without being averaged: for all batches of a step but the last, and where a recipe
        calls ``self.no_sync()``.

        Ranks: all; must not communicate.
        """
        return NO_CONTEXT

    def backward_pass(
        self,
        modules: nn.Module,
        *,
        closes: bool,
        counts: bool,
    ) -> AbstractContextManager[None]:
        """Return a context around one backward pass.

        Args:
            modules: of the recipe.
            closes: whether the batch is the last one of its optimizer step.
            counts: whether this rank's gradients count; if not, they must become zero.

        Ranks: all, but only a rank whose loss depends on a parameter; in the last batch of a step
            it may communicate if :meth:`without_backward` does so, too.
        """
        return NO_CONTEXT

    def finish_gradients(self, optimizers: Collection[Any] = ()) -> None:
        """Called before clipping and before each optimizer step: from here on, gradients are what
        is stepped with.

        Args:
            optimizers: that step now.

        Ranks: all; may communicate.
        """

    def after_window(self, modules: nn.ModuleDict) -> None:
        """Called after each optimizer step, also one that was skipped, if a class overrides it.

        Args:
            modules: of the recipe.

        Ranks: all; may communicate.
        """

    # ------------------------------------------------------------------ in a checkpoint

    def rank_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the strategy on this rank: tensors, numbers, strings,
        and lists and dicts of such.

        Ranks: all, each its own; must not communicate.
        """
        return {}

    def load_rank_state(self, modules: nn.ModuleDict, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds of the strategy on this rank.

        Not called where it holds nothing: where the number of processes was another, or the
        strategy. Of another strategy's state a class may get what it does not know.

        Args:
            modules: of the recipe, wrapped; their weights are loaded.
            state: as :meth:`rank_state` has returned it.

        Ranks: all, each with its own state; must not communicate.
        """


@contextlib.contextmanager
def removing_hooks(handles: list[Any]) -> Iterator[None]:
    """Return a context at whose end hooks are removed.

    Args:
        handles: what registering them has returned.

    Example:
        >>> import torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> with removing_hooks([weight.register_hook(torch.zeros_like)]):
        ...     weight.sum().backward()
        >>> weight.grad
        tensor([0.])
    """
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
