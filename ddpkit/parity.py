"""The rehearsal behind ``--check_parity W``: does a recipe train alike on W processes and on one?

One process pretends to be W ranks for a few optimizer steps, and compares the gradients with those of one process on
the joined batch. Where they differ, it looks for the cause by experiment:

- noise: two passes over the same samples with other random numbers. It is then switched off for the comparison;
- batch normalisation: whether the gradients agree once it stands still;
- the loss: the joined gradient is written as a combination of the ranks' own gradients. All weights 1: a sum. Weights
  that add up to 1, but are not the samples': a mean over something else, such as tokens;
- the model: whether the output for a sample depends on the other samples of its batch. What is left is the loss.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ddpkit.distributed import get_world_size
from ddpkit.errors import ConfigError, ParityError
from ddpkit.failure import failure_notice
from ddpkit.hooks import Hooks
from ddpkit.logger import get_logger
from ddpkit.noise import noisy_layers
from ddpkit.parity_causes import accumulation_cause, find_causes
from ddpkit.parity_report import ParityCause, ParityReport
from ddpkit.parity_sides import Sides
from ddpkit.parity_windows import ParityWindow, ParityWindows
from ddpkit.rehearsal import all_optimizers
from ddpkit.results import Results
from ddpkit.seed import RngState
from ddpkit.stages import length_of
from ddpkit.strategy import refuse_shared_parameters
from ddpkit.types import Stage

__all__ = ["ParityCause", "ParityReport", "Rehearsing", "check_parity", "require_one_process"]

logger = get_logger(__name__)


def require_one_process(world_size: int, *, data_parallel: bool) -> None:
    """Refuse a rehearsal where several processes or several GPUs are at work already.

    Args:
        world_size: number of ranks that shall be pretended.
        data_parallel: the option ``data_parallel_backend``.

    Raises:
        ConfigError: several processes, ``nn.DataParallel``, or less than two ranks.

    Ranks: local.

    Example:
        >>> require_one_process(4, data_parallel=False)
    """
    given = f"check_parity={world_size!r}"
    command = f"    python train.py hparams.yaml --check_parity={world_size}"
    if get_world_size() > 1:
        raise ConfigError(
            f"{given} rehearses on one process, and a launcher has started {get_world_size()}. Start one:\n{command}"
        )
    if data_parallel:
        raise ConfigError(
            f"{given} rehearses ranks with one device each, and data_parallel_backend=True uses several GPUs from one "
            f"process. Leave it out:\n{command}"
        )
    if world_size < 2:  # noqa: PLR2004 -- else there is nothing to compare
        raise ConfigError(f"{given}: pretend to be at least 2 ranks, for example check_parity=4.")


def check_parity(
    brain: Any, loaders: Sequence[Any], *, factor: int = 1, epoch: int = 1, windows: int = 3
) -> ParityReport:
    """Pretend to be several ranks for a few optimizer steps, and compare the gradients with one process.

    :meth:`Rehearsing.rehearse` makes the loaders and calls this.

    Args:
        brain: after ``on_fit_start``.
        loaders: the training loaders of all pretended ranks.
        factor: micro-batches per optimizer step.
        epoch: whose order of samples is followed.
        windows: optimizer steps to compare, at least 1: the first ones of the epoch, and its last.

    Returns:
        What was found.

    Raises:
        ConfigError: this training cannot be rehearsed.
        ParityError: the ranks would wait for each other for ever.

    Ranks: local; one process.

    State: none. Weights, buffers, gradients, modes, random states, optimizers and counters are as they were before.

    Example:
        >>> from ddpkit.brain import Brain
        >>> class Line(Brain):
        ...     def compute_forward(self, batch, stage):
        ...         return self.modules.net(batch)
        ...     def compute_objectives(self, predictions, batch, stage):
        ...         return predictions.square().sum()
        >>> line = Line({"net": torch.nn.Linear(1, 1)}, run_opts={"device": "cpu"})
        >>> line.rehearse(torch.randn(8, 1), world_size=2, train_loader_kwargs={"batch_size": 2}).kinds
        ('sum loss',)
    """
    refuse_shared_parameters(brain.modules)
    drawn = ParityWindows(loaders, factor, epoch)
    with _unchanged(brain), torch.compiler.set_stance("force_eager"):
        sides = Sides(brain, drawn)
        return _report(sides, drawn.draw(windows))


class Rehearsing(Results):
    """The half of the Brain that rehearses; :class:`~ddpkit.brain.Brain` makes loaders and sessions.

    Ranks: local; one process.

    Example:
        >>> issubclass(Rehearsing, Results)
        True
    """

    on_fit_start: Callable[[], None]
    _fit_session: Callable[[], AbstractContextManager[None]]

    def rehearse(
        self, train_set: Any, world_size: int, train_loader_kwargs: Mapping[str, Any] | None = None, windows: int = 3
    ) -> ParityReport:
        """Pretend to be several ranks for a few optimizer steps, and compare the gradients with one process.

        The option ``check_parity`` makes ``fit`` do this instead of training, and raise if parity does not hold.
        Everything up to ``on_fit_start`` is done as ``fit`` does it, so a checkpoint is recovered. Nothing is trained
        and nothing is saved.

        Args:
            train_set: as for ``fit``; no stream.
            world_size: number of ranks to pretend; ``batch_size`` counts for each.
            train_loader_kwargs: as for ``fit``; not changed.
            windows: optimizer steps to compare: the first ones of an epoch, and its last.

        Returns:
            Whether the gradients agree, by how much they differ, and why.

        Raises:
            ConfigError: this training, or this process, cannot rehearse.
            ParityError: the ranks would wait for each other for ever, or one fails where one process does not.
        """
        require_one_process(world_size, data_parallel=self.data_parallel_backend)
        with failure_notice(), self._fit_session():
            loaders = []
            for rank in range(world_size):
                one = self._pretend(rank, world_size)
                loaders.append(one._loader(copy.copy(train_set), Stage.TRAIN, train_loader_kwargs or {}))  # noqa: SLF001 -- a Brain, too
            self._take_length(length_of(loaders[0]), one.grad_accumulation_factor)
            self.on_fit_start()
            return check_parity(self, loaders, factor=one.grad_accumulation_factor, windows=windows)

    def _pretend(self, rank: int, world_size: int) -> Rehearsing:
        """Make a Brain that makes the training loader of another rank, and saves nothing."""
        one = copy.copy(self)
        one.checkpointer = None
        one.run_opts = self.run_opts.copy()
        one.grad_accumulation_factor = one._accumulate_over(world_size)  # noqa: SLF001 -- a Brain, too

        usual = one._sharding  # noqa: SLF001 -- as above
        vars(one)["_sharding"] = lambda stage: dataclasses.replace(usual(stage), rank=rank, world_size=world_size)
        return one

    def _rehearses(self, train_set: Any, loader_kwargs: Mapping[str, Any] | None = None) -> bool:
        """Rehearse if the option says so, and say whether it does.

        Args:
            train_set: as for ``fit``.
            loader_kwargs: of the training; None: there is nothing to train here.

        Raises:
            ParityError: parity does not hold. The message is the report.
        """
        world_size = self.check_parity
        if world_size is None:
            return False
        if loader_kwargs is None:
            logger.announce("check_parity=%d: nothing was trained, and nothing is evaluated.", world_size)
            return True
        report = self.rehearse(train_set, world_size, loader_kwargs)
        if not report.holds:
            raise ParityError(str(report))
        logger.announce("%s", report)
        return True


def _report(sides: Sides, windows: Sequence[ParityWindow]) -> ParityReport:
    own_fit_batch = type(sides.brain).fit_batch is not Hooks.fit_batch
    causes = []
    with contextlib.ExitStack() as stack:
        if _is_noisy(sides, windows):
            layers = noisy_layers(sides.brain.modules)
            for seed in (1, 2, 3):  # whether the ranks stay in step while their noise differs
                sides.as_ranks(windows[0], seed=seed)
            stack.enter_context(sides.without_noise())
            causes.append(_randomness(layers, is_left=sides.is_noisy(windows[0])))
        comparison = sides.comparison()
        equal = [sides.compare(window, comparison) for window in windows]
        failing = [window for window, is_equal in zip(windows, equal, strict=True) if not is_equal]
        passing = [window for window, is_equal in zip(windows, equal, strict=True) if is_equal]
        if sides.outside:
            causes.append(_outside(sides.outside))
        accumulation = accumulation_cause(sides, windows) if own_fit_batch else None
        if accumulation is not None:
            causes.append(accumulation)
        if failing and not any(cause.spoils for cause in causes):
            causes += find_causes(sides, failing, passing, own_fit_batch=own_fit_batch)
        notes = _notes(sides, windows[0])
    return ParityReport(
        world_size=len(sides.ranks.hosts),
        rows=comparison.rows(),
        causes=tuple(causes),
        windows=tuple(window.number for window in windows),
        num_windows=sides.windows.length,
        samples=windows[0].samples,
        notes=notes,
    )


def _is_noisy(sides: Sides, windows: Sequence[ParityWindow]) -> bool:
    """Say whether noise makes a difference, or may make the one that there is."""
    if sides.is_noisy(windows[0]):
        return True
    return sides.has_drawn and not all(sides.compare(window) for window in windows)


def _randomness(layers: Sequence[str], *, is_left: bool) -> ParityCause:
    where = ", ".join(layers[:5]) + (f" and {len(layers) - 5} more" if len(layers) > 5 else "")  # noqa: PLR2004 -- a line
    drawn = f"The training draws random numbers ({where or 'in compute_forward or compute_objectives'})"
    if not is_left:
        return ParityCause(
            "randomness",
            f"{drawn}: every rank has noise of its own, so no two runs on different numbers of processes are equal. "
            "That is no error. All below was compared with the noise switched off.",
            spoils=False,
        )
    return ParityCause(
        "randomness",
        f"{drawn}, and some of them could not be switched off: they do not come from torch's dropout and random "
        "functions, but from numpy, Python's random, torch.multinomial, a generator in the dataset or the like. So "
        "nothing can be said about the rest. Draw them with torch.rand or torch.randn, or rehearse without them.",
    )


def _outside(names: Sequence[str]) -> ParityCause:
    return ParityCause(
        "outside modules",
        f"An optimizer updates parameters that are in no entry of modules ({names[0]}; {len(names)} in all). DDP does "
        "not know them: their gradients would not be averaged, and the ranks would drift apart. Put what holds them "
        "into modules.",
    )


def _notes(sides: Sides, window: ParityWindow) -> tuple[str, ...]:
    """Say what real ranks will stumble over although the gradients agree."""
    if sides.brain.find_unused_parameters:
        return ()
    gradients: dict[str, bool] = {}
    for step in sides.as_ranks(window).steps:
        for name, gradient in step.items():
            gradients[name] = gradients.get(name, False) or gradient is not None
    used = {name.partition(".")[0] for name, has_one in gradients.items() if has_one}
    without = [name for name, has_one in gradients.items() if not has_one and name.partition(".")[0] in used]
    if not without:
        return ()
    note = (
        f"{without[0]} gets no gradient ({len(without)} such in all): DDP waits for it. Real ranks need "
        "--find_unused_parameters, or requires_grad_(False) on what is not trained."
    )
    return (note,)


@contextlib.contextmanager
def _unchanged(brain: Any) -> Iterator[None]:
    """Put everything back that a rehearsal may move."""
    modules, optimizers = brain.modules, all_optimizers(brain)
    parameters = list(modules.parameters())
    random_states = RngState.capture()
    modes = [(module, module.training) for module in modules.modules()]
    flags = [(one, one.requires_grad, one.grad) for one in parameters]
    values = [(one, one.detach().to("cpu", copy=True)) for one in (*parameters, *modules.buffers())]
    groups = [
        (group, copy.deepcopy({key: value for key, value in group.items() if key != "params"}))
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
    ]
    for one in parameters:
        one.grad = None
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for one, requires_grad, grad in flags:
            one.requires_grad_(requires_grad)
            one.grad = grad
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for group, before in groups:
            group.update(before)
        random_states.restore()
