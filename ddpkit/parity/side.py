"""One side of a parity check: a process that keeps the gradients of single optimizer steps, and
trains nothing.

The same code runs in each of the several processes and in the one that they are compared with. The
noise of the model is switched off in both.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from ddpkit import optim
from ddpkit.base import gather_whole, is_sharded, kind_of, local_part, sharded_like
from ddpkit.data import PlannedBatchSampler, RankBatchSampler, inner_loader
from ddpkit.dataloader import SaveableDataLoader, plan_of
from ddpkit.distributed import get_world_size
from ddpkit.errors import ConfigError
from ddpkit.metrics import counted_by
from ddpkit.run import StageLoaders
from ddpkit.syncbn import SyncBatchNorm
from ddpkit.training import Feed, RunLength, counts_of, length_of
from ddpkit.types import Stage

if TYPE_CHECKING:
    from ddpkit.parity.recipe import CheckedBrain
    from ddpkit.run import Run


@dataclass
class Step:
    """The samples of one optimizer step, and their counts where one process works on them. Several
    ask their plan.

    Attributes:
        number: from 0.
        first: micro-batches of the epoch that come before.
        batches: indices into the dataset, of each micro-batch.
        counts: what each micro-batch counts.

    Ranks: local.
    """

    number: int
    first: int
    batches: list[list[Any]]
    counts: list[int]

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
        brain: it is good for nothing else afterwards, and neither are its optimizers.
        parts: that it holds, a :class:`~ddpkit.run.run.Run`.
        train_set: as for ``fit``.
        loader_kwargs: likewise; not changed.
        start: with the weights and the optimizer step to begin from, as
            :func:`ddpkit.parity.check.try_step` gives it; None where these are the Brain's own.

    Attributes:
        loader: of the training set.
        plan: says which samples are in its batches.
        num_batches: of an epoch, up to the end of the first pass over the data.
        counts: knows how many samples they have; None where each counts the same.
        joins: whether the batches of several processes can be joined into one: not where others
            make the batches.
        factor: micro-batches of a full optimizer step.
        optimizers: all of the Brain's.
        done: optimizer steps that were made before.
        moved: names of the buffers, and of tensors and numbers in plain attributes of modules, that
            training has changed; without BatchNorm's.
        norm_layers: all BatchNorm layers, by name.
        is_counted: whether the last step was of loss sums and their counts.

    Raises:
        ConfigError: the samples of a batch are not known.

    Ranks: local.
    """

    def __init__(
        self,
        brain: CheckedBrain,
        parts: Run,
        train_set: Any,
        loader_kwargs: Mapping[str, Any],
        start: Mapping[str, Any] | None = None,
    ) -> None:
        self.brain = brain
        self.parts = parts
        context = parts.context
        self.factor = context.accumulation.choose_factor(context.strategy.division())
        loaders = StageLoaders(parts.loaders, brain.make_dataloader)
        loader = loaders.of(train_set, Stage.TRAIN, loader_kwargs)
        self.loader: Any = inner_loader(loader)
        plan: Any = plan_of(self.loader)
        is_known = isinstance(plan, RankBatchSampler)
        if not is_known:
            raise ConfigError(
                "check_parity cannot join the batches of this training set, "
                f"{kind_of(self.loader)}: their samples are not known. Check parity with a "
                "map-style dataset (a list of a few of the samples will do)."
            )
        self.plan = plan
        self.counts = counts_of(loader)
        self.num_batches = min(len(plan), len(loader))
        self.joins = (
            isinstance(self.plan, PlannedBatchSampler) and self.loader.batch_sampler is not None
        )
        parts.length = length = RunLength.of(
            length_of(loader),
            self.factor,
            parts.epochs,
            brain.run_opts,
        )
        brain.steps_per_epoch = length.steps_per_epoch
        brain.total_steps = length.total_steps
        brain.on_fit_start()
        if start is not None:
            own = brain.raw_modules.state_dict()
            brain.raw_modules.load_state_dict(
                {name: sharded_like(value, own[name]) for name, value in start["modules"].items()}
            )
            brain.optimizer_step = start["optimizer_step"]
        brain.scaler = torch.amp.GradScaler(enabled=False)
        self.moved: dict[str, None] = {}
        self.is_counted = False
        self._kept: dict[str, Tensor] = {}
        self._names = {
            id(parameter): name for name, parameter in brain.raw_modules.named_parameters()
        }
        brain.on_stage_start(Stage.TRAIN, 1)
        brain.modules.train()
        self.norm_layers = {
            n: module
            for n, module in brain.raw_modules.named_modules()
            if isinstance(module, _BatchNorm)
        }
        self._state = list(_state(brain.raw_modules))
        self.done = brain.optimizer_step
        replaced: Any = brain
        replaced.optimizers_step = self._step
        # schedules and logs follow a step, and none is made
        replaced.on_fit_batch_end = lambda *_: None
        self.optimizers: list[Any] = list(parts.train_step.named_optimizers().values())
        for optimizer in self.optimizers:
            optimizer.step = functools.partial(self._keep, [optimizer], 1.0)

    def step(self, number: int) -> Step:
        """Return this process's samples of an optimizer step of the epoch.

        Args:
            number: of the step, from 0.
        """
        first = number * self.factor
        found = Step(number, first, [], [])
        for batch_number in range(first, min(first + self.factor, self.num_batches)):
            self.plan.skip = batch_number
            indices = next(iter(self.plan))
            found.batches.append(
                [index.item() if isinstance(index, np.generic) else index for index in indices]
            )
            found.counts.append(self.plan.count(batch_number))
        return found

    def load(self, batches: list[list[Any]]) -> Iterable[Any]:
        """Load batches of some samples, in this process, with the same random augmentation each
        time.
        """
        collate = self.loader.collate_fn
        if self.loader.batch_sampler is None:
            each = itertools.chain(*batches)
            return SaveableDataLoader(
                self.loader.dataset,
                batch_size=None,
                sampler=each,
                collate_fn=collate,
            )
        return SaveableDataLoader(self.loader.dataset, batch_sampler=batches, collate_fn=collate)

    def run(
        self,
        step: Step,
        factor: int,
        *,
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """Return the gradients of one optimizer step, as the optimizers would use them but for
        clipping.

        Args:
            step: the samples.
            factor: micro-batches of a full optimizer step.
            seed: of the random numbers that cannot be switched off.

        Returns:
            Gradients by parameter, on the CPU; also those of a second call of an optimizer, and
            more, under names of their own.

        Raises:
            ConfigError: ``fit_batch`` made no step.

        Ranks: collective.
        """
        brain = self.brain
        progress = self.brain.progress
        self._kept = {}
        self.parts.context.accumulation.hold(factor)
        progress.restart()
        progress.recover_updates(self.done + step.number)
        progress.go_to(1, step.first)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 -- the stream that recipes draw from
        torch.manual_seed(seed)
        feed = Feed(
            loader=self.load(step.batches),
            length=step.first + len(step.batches),
            counts=step if get_world_size() == 1 else self.counts,
            factor=factor,
            world_size=get_world_size(),
            start=step.first,
            weighting=brain.run_opts.loss_weighting,
        )
        self.parts.context.strategy.begin_pass(progress)
        eager = torch.compiler.set_stance("force_eager")
        logged = progress.logged.during(Stage.TRAIN, None)
        counted = counted_by(progress.window)
        with eager, without_noise(brain.modules), logged, counted:
            for batch in feed.batches(progress.window):
                progress.begin_batch()
                brain.fit_batch(batch)
            if self.parts.train_step.prepare_flush(brain):
                brain.optimizers_step()
            progress.window.stepped()
        self._put_back()
        if not self._kept:
            raise ConfigError(
                f"{type(brain).__name__}.fit_batch made no optimizer step with a gradient in a "
                f"window of {len(step.batches)} micro-batch(es). Call self.optimizers_step() "
                "where self.should_step is true."
            )
        return self._kept

    def own_norms(self) -> list[str]:
        """Return the names of the BatchNorm layers in training whose statistics are not over all
        rows of a step.
        """
        found = [item for item in self.norm_layers.items() if item[1].training]
        shared = (SyncBatchNorm, nn.SyncBatchNorm) if self.joins else ()
        return [
            f"{name} ({type(layer).__name__})"
            for name, layer in found
            if not isinstance(layer, shared)
        ]

    def _step(self) -> None:
        """Do what ``optimizers_step`` does, but for the step itself and what follows it."""
        train_step = self.parts.train_step
        brain = self.brain
        self.is_counted = brain.progress.window.counted is not None
        multiplier = train_step.close_window()
        optimizers = train_step.note_optimizers_to_step(brain)
        self.parts.context.strategy.finish_gradients(optimizers)
        self._keep(optimizers, multiplier)
        optim.zero_gradients(optimizers, set_to_none=True)
        brain.optimizer_step += 1

    def _keep(
        self,
        optimizers: Sequence[Any],
        multiplier: Any,
        *_: Any,
        **__: Any,
    ) -> None:
        for number, parameter in enumerate(optim.parameters_of(optimizers)):
            if parameter.grad is not None:
                name = self._names.get(id(parameter), f"parameter {number} of an optimizer")
                while name in self._kept:  # a second call of the optimizer
                    name += " again"
                gradient = parameter.grad.detach() * multiplier
                # Under fsdp all ranks gather it, in the order of the parameters.
                whole = gather_whole(gradient, keep=True) if is_sharded(gradient) else gradient
                self._kept[name] = (
                    torch.view_as_real(whole) if whole.is_complex() else whole
                ).cpu()

    def _put_back(self) -> None:
        """Drop gradients, put the state of the modules back, and note what of it has moved."""
        optim.zero_gradients(self.optimizers, set_to_none=True)
        for name, module, attribute, value, kept in self._state:
            has_changed = kept is not None and not torch.equal(local_part(value), kept)
            if has_changed or getattr(module, attribute, None) is not value:
                if not isinstance(value, nn.Parameter) and not isinstance(module, _BatchNorm):
                    self.moved[name] = None
                setattr(module, attribute, value)
            if has_changed:
                local_part(value).detach().copy_(kept)


def _state(modules: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any, Any]]:
    """Yield the parameters and buffers of modules, and tensors and numbers in plain attributes;
    with copies.
    """
    for prefix, module in modules.named_modules():
        registered = {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
        }
        for attribute, value in {**vars(module), **registered}.items():
            if isinstance(value, (int, float, Tensor)) and attribute != "training":
                is_dense = isinstance(value, Tensor) and value.layout is torch.strided
                kept: Any = local_part(value).detach().clone() if is_dense else None  # type: ignore[arg-type]
                yield f"{prefix}.{attribute}", module, attribute, value, kept


@contextlib.contextmanager
def without_noise(modules: nn.Module) -> Iterator[None]:
    """Let dropout do nothing, and torch's random functions return fixed values, in this thread.

    Uniform numbers are 0.5, normal ones 0, whole ones the lowest, coins fall on the likelier side,
    permutations change nothing. What draws from elsewhere (numpy, Python, a custom kernel) stays
    random.

    Args:
        modules: changed in place, and changed back.

    Ranks: local.

    Example:
        >>> with without_noise(nn.Identity()):
        ...     torch.randn(2), F.dropout(torch.ones(2)), torch.randperm(3)
        (tensor([0., 0.]), tensor([1., 1.]), tensor([0, 1, 2]))
    """
    with contextlib.ExitStack() as stack:
        for layer in modules.modules():
            if isinstance(layer, (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)):
                rate = "p" if isinstance(layer, _DropoutNd) else "dropout"
                stack.callback(setattr, layer, rate, getattr(layer, rate))
                setattr(layer, rate, 0.0)
        stack.enter_context(_FixedNumbers())
        yield


class _FixedNumbers(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        stand_in = _STAND_INS.get(func)
        call = func if stand_in is None else functools.partial(stand_in, func)
        return call(*args, **(kwargs or {}))


def _nothing(
    func: Any,
    input: Tensor,  # noqa: A002 -- torch's name
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    return input


def _filled(value: float) -> Callable[..., Tensor]:
    """Return what makes the tensor that a function would make, filled with one value."""

    def fill(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = func(*args, **kwargs)
        return made.detach().fill_(value)

    return fill


def _attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return func(
        **{
            **dict(zip(names, args, strict=False)),
            **kwargs,
            "dropout_p": 0.0,
        }
    )


def _lowest(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Stand in for ``randint`` and ``randint_like``, whose lower bound may be left out."""
    numbers = [argument for argument in args if isinstance(argument, int)]
    low = kwargs.get("low", numbers[0] if len(numbers) + ("high" in kwargs) > 1 else 0)
    return _filled(low)(func, *args, **kwargs)


def _in_order(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    made: Tensor = func(*args, **kwargs)
    return made.copy_(torch.arange(len(made)))


def _likelier(
    func: Any,
    input: Tensor,  # noqa: A002 -- torch's name
    p: Any = None,
    **kwargs: Any,
) -> Tensor:
    p = 0.5 if p is None and func is Tensor.bernoulli_ else p
    chances = input if p is None else torch.zeros_like(input) + p
    return input.copy_(chances.round()) if func is Tensor.bernoulli_ else chances.detach().round()


_STAND_INS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout),
        _nothing,
    ),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), _nothing),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.rand, torch.rand_like, Tensor.uniform_), _filled(0.5)),
    **dict.fromkeys((torch.randn, torch.randn_like, torch.normal, Tensor.normal_), _filled(0.0)),
    **dict.fromkeys((torch.randint, torch.randint_like), _lowest),
    torch.randperm: _in_order,
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_), _likelier),
}
