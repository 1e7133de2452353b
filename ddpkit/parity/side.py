"""One side of a parity check: a process that keeps the gradients of single optimizer steps, and trains nothing.

The same code runs in each of the several processes and in the one that they are compared with.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpkit import optim
from ddpkit.brain import run_of
from ddpkit.data.likeness import Sketch, sketch
from ddpkit.dataloader import LoopedLoader, SaveableDataLoader, plan_of
from ddpkit.distributed import get_world_size
from ddpkit.errors import ConfigError
from ddpkit.metrics import nothing_counts
from ddpkit.parity.noise import FunctionsWithoutNoise, layers_without_noise
from ddpkit.parity.report import Gradients
from ddpkit.sampler import DealtBatchSampler, PlannedBatchSampler
from ddpkit.syncbn import SyncBatchNorm, left_out
from ddpkit.training.feed import Counts, Feed
from ddpkit.types import Stage

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class Share:
    """The samples of one optimizer step: indices of each micro-batch, how many count, and what of the epoch is before.

    Ranks: local.
    """

    batches: list[list[Any]]
    counts: list[int]
    first: int  # micro-batches before
    done: int  # optimizer steps before

    # As one process weighs them; several ask their plan.
    def count(self, batch: int) -> int:
        """Return the number of samples of a batch."""
        return self.counts[batch - self.first]

    total = count

    def part(self, batch: int) -> float:
        """Return what a batch counts where all batches count the same."""
        return 1.0

    parts = part


class Side:
    """Works on single optimizer steps of a Brain; every one starts from the same weights.

    Args:
        brain: after ``on_fit_start``. It is good for nothing else inside of this context.
        loader: of its training set, which gives the samples.

    Attributes:
        optimizers: all of the Brain's, by name.
        done: optimizer steps that were made before.
        outside: names of the optimized parameters that are in no entry of ``modules``.
        has_counts: whether ``compute_objectives`` returned ``(loss_sum, count)``.
        moved: names of the buffers that training has changed, other than those of BatchNorm.
        norms: names of the BatchNorm layers that were used: whether their statistics are those of all processes.
        sketches: of the batches of the last step.

    Ranks: local.
    """

    def __init__(self, brain: Any, loader: Any) -> None:
        self.brain, self.loader = brain, _inner(loader)
        self.has_counts = False
        self.moved: dict[str, None] = {}
        self.norms: dict[str, bool] = {}
        self.sketches: list[Sketch] = []
        self._kept: list[Gradients] = []
        brain.scaler = torch.amp.GradScaler(enabled=False)
        single = getattr(brain, "optimizer", None)
        self.optimizers: dict[str, Any] = brain.optimizers_dict or ({} if single is None else {"optimizer": single})
        self.names, self.outside = self._names()
        brain.on_stage_start(Stage.TRAIN, 1)
        brain.modules.train()
        tensors = {**dict(brain.raw_modules.named_parameters()), **dict(brain.raw_modules.named_buffers())}
        self._values = {name: (tensor, tensor.detach().clone()) for name, tensor in tensors.items()}
        self.done = brain.progress.optimizer_step
        self._stand_ins = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Keep gradients where the optimizers would step."""
        stand_ins = {(self.brain, "optimizers_step"): self._step, (self.brain, "on_fit_batch_end"): _nothing}
        for one in self.optimizers.values():
            stand_ins[one, "step"] = functools.partial(self._keep, [one], 1.0)
        for (owner, name), stand_in in stand_ins.items():
            before = vars(owner).get(name)
            undo = (delattr, owner, name) if before is None else (setattr, owner, name, before)
            self._stand_ins.callback(*undo)
            setattr(owner, name, stand_in)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the Brain and its optimizers their own methods back."""
        self._stand_ins.close()

    def run(
        self, share: Share, *, factor: int, counts: Counts | None, seed: int = 0, calm: bool = True, still: bool = False
    ) -> list[Gradients]:
        """Return the gradients of one optimizer step, as the optimizers would use them but for clipping.

        Args:
            share: the samples.
            factor: micro-batches of a full optimizer step.
            counts: knows the number of samples of each; None: each counts the same.
            seed: of the random numbers.
            calm: switch dropout and other noise off.
            still: keep BatchNorm in evaluation mode.

        Returns:
            One entry for each call of ``optimizers_step`` or of an optimizer's own ``step``.

        Raises:
            ConfigError: ``fit_batch`` made no step.

        Ranks: collective.
        """
        brain, self._kept, self.sketches = self.brain, [], []
        progress, brain.grad_accumulation_factor = brain.progress, factor
        progress.restart()
        progress.epoch, progress.step, progress.optimizer_step = 1, share.first, self.done + share.done
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 -- the stream that recipes draw from
        torch.manual_seed(seed)
        feed = Feed(
            loader=batches_of(self.loader, share.batches),
            length=share.first + len(share.batches),
            counts=counts,
            factor=factor,
            world_size=get_world_size(),
            start=share.first,
            weighting=brain.run_opts.loss_weighting,
        )
        with self._unchanged(), self._quiet(calm=calm, still=still):
            for batch in feed.batches(progress.window):
                self.sketches.append(sketch(batch))
                progress.step += 1
                with contextlib.nullcontext() if progress.window.count else _repeated():
                    brain.fit_batch(batch)
            if run_of(brain).step.prepare_flush(brain):
                brain.optimizers_step()
            progress.window.stepped()
        if not self._kept:
            raise ConfigError(
                f"{type(brain).__name__}.fit_batch made no optimizer step in a window of {len(share.batches)} "
                "micro-batch(es), so there is no gradient to compare. Call self.optimizers_step() in it where "
                "self.should_step is true."
            )
        return self._kept

    def rows_of(self, batch: list[Any]) -> list[torch.Tensor]:
        """Return what ``compute_forward`` gives for a batch: the tensors that have one row per sample."""
        quiet = self._quiet(calm=True, still=True)
        with self._unchanged(), quiet, torch.no_grad(), self.brain.training_ctx:
            [loaded] = batches_of(self.loader, [batch])
            return list(_rows(self.brain.compute_forward(loaded, Stage.TRAIN), len(batch)))

    @contextlib.contextmanager
    def _quiet(self, *, calm: bool, still: bool) -> Iterator[None]:
        """Switch noise off, keep BatchNorm still, and note which of its layers are used."""
        layers = {
            name: layer for name, layer in self.brain.raw_modules.named_modules() if isinstance(layer, _BatchNorm)
        }
        modes = {layer: layer.training for layer in layers.values()}
        with contextlib.ExitStack() as stack:
            if calm:
                stack.enter_context(layers_without_noise(self.brain.modules))
                stack.enter_context(FunctionsWithoutNoise())
            for name, layer in layers.items():
                layer.training = layer.training and not still
                note = functools.partial(self._note_norm, name)
                stack.callback(layer.register_forward_pre_hook(note).remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                yield
            finally:
                for layer, mode in modes.items():
                    layer.training = mode

    def _note_norm(self, name: str, layer: nn.Module, _: Any) -> None:
        if layer.training:
            self.norms[f"{name} ({type(layer).__name__})"] = isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))

    def _names(self) -> tuple[dict[int, str], list[str]]:
        names: dict[int, str] = {}
        for name, parameter in self.brain.raw_modules.named_parameters():
            names.setdefault(id(parameter), name)
        outside = []
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                for number, parameter in enumerate(group["params"]):
                    if id(parameter) not in names:
                        names[id(parameter)] = f"parameter {number} of optimizer {name!r}"
                        outside.append(names[id(parameter)])
        return names, outside

    def _step(self) -> None:
        """Do what ``optimizers_step`` does, but for the step itself and what follows it."""
        brain = self.brain
        self.has_counts = self.has_counts or brain.progress.window.counted is not None
        step = run_of(brain).step
        multiplier, optimizers = step.take_multiplier(), step.participants(brain)
        step.strategy.finish_gradients()
        self._keep(optimizers, multiplier)
        optim.zero_gradients(optimizers, set_to_none=True)
        if brain.progress.window.closes:
            brain.progress.closed = brain.progress.step
        brain.progress.optimizer_step += 1

    def _keep(self, optimizers: Sequence[Any], multiplier: Any, *_: Any, **__: Any) -> None:
        parameters = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        self._kept.append(
            {
                self.names[id(one)]: None if one.grad is None else (one.grad.detach() * multiplier).cpu()
                for one in parameters
                if one.requires_grad
            }
        )

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Drop gradients, put weights and buffers back, and note which buffers have moved."""
        try:
            yield
        finally:
            optim.zero_gradients(list(self.optimizers.values()), set_to_none=True)
            for name, (tensor, value) in self._values.items():
                if not torch.equal(tensor, value):
                    if not isinstance(tensor, nn.Parameter) and not self._is_of_norm(name):
                        self.moved[name] = None
                    tensor.detach().copy_(value)

    def _is_of_norm(self, name: str) -> bool:
        return isinstance(self.brain.raw_modules.get_submodule(name.rpartition(".")[0]), _BatchNorm)


def share_of(loader: Any, number: int, factor: int) -> Share:
    """Return this process's samples of an optimizer step of the epoch.

    Args:
        loader: of this process.
        number: of the step, from 0.
        factor: micro-batches per step.

    Ranks: local.
    """
    plan: Any = plan_of(_inner(loader))
    first = number * factor
    batches, counts = [], []
    for place in range(first, min(first + factor, epoch_length(loader))):
        plan.skip = place
        indices = next(iter(plan))
        batches.append([index.item() if isinstance(index, np.generic) else index for index in indices])
        counts.append(plan.count(place))
    return Share(batches, counts, first, number)


def epoch_length(loader: Any) -> int:
    """Return the batches of an epoch whose samples are those of one pass over the data.

    Ranks: local.
    """
    plan: Any = plan_of(_inner(loader))
    return min(len(plan), len(loader))


def joins(loader: Any) -> bool:
    """Say whether the batches of several processes can be joined into one: not where others make the batches.

    Ranks: local.
    """
    inner = _inner(loader)
    return isinstance(plan_of(inner), PlannedBatchSampler) and inner.batch_sampler is not None


def require_samples(loader: Any) -> None:
    """Make sure that it is known which samples are in a batch.

    Raises:
        ConfigError: otherwise.

    Ranks: local.
    """
    inner = _inner(loader)
    if not isinstance(plan_of(inner), (PlannedBatchSampler, DealtBatchSampler)):
        raise ConfigError(
            f"check_parity cannot join the batches of this training set, a {type(inner).__name__} of "
            f"{type(getattr(inner, 'dataset', inner)).__name__}: nobody can say which samples make up the joined batch "
            "of a stream, of a loader that only yields batches, or of one that was divided before. Check parity with "
            "a map-style dataset (a list of a few of the samples will do), and let ddpkit divide it."
        )


def batches_of(loader: Any, batches: list[list[Any]]) -> Iterable[Any]:
    """Load batches of some samples, in this process, with the same random augmentation each time.

    Ranks: local.
    """
    if loader.batch_sampler is None:
        whole = [index for batch in batches for index in batch]
        return SaveableDataLoader(loader.dataset, batch_size=None, sampler=whole, collate_fn=loader.collate_fn)
    return SaveableDataLoader(loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn)


def _inner(loader: Any) -> Any:
    return loader.loader if isinstance(loader, LoopedLoader) else loader


@contextlib.contextmanager
def _repeated() -> Iterator[None]:
    """Work on a batch that counts nothing."""
    with nothing_counts(), left_out():
        yield


def _rows(value: Any, size: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.dim() and len(value) == size and value.is_floating_point():
            yield value.detach().double().cpu()
    elif isinstance(value, (Mapping, tuple, list)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _rows(one, size)


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for ``on_fit_batch_end``: schedules and logs follow a step, and none is made."""
