"""One process pretends to be several ranks for one optimizer step, and keeps the gradients instead of stepping.

Every pretended rank is a thread with a shallow copy of the Brain: its own attributes and loop position, the same
modules. The threads run one at a time, in rank order, from one meeting to the next. They meet where real ranks
communicate: at a BatchNorm that real ranks would synchronise, where what a window counts is added up, at
``loss.backward()`` and at an optimizer step. The last to arrive does the work for all:

- a BatchNorm normalises by the statistics of all ranks' rows, in one graph that all ranks share;
- the backward passes of all ranks are one, of the average of their losses: what DDP's average of the gradients is;
- an optimizer step is a copy of the gradients.

So the forward passes, the weights of the losses and the accumulation are those of the recipe's own ``fit_batch``.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from ddpkit.errors import ConfigError, DdpkitError, ParityError
from ddpkit.feed import Feed
from ddpkit.lockstep import AbandonedError, Lockstep, standing_in
from ddpkit.loop import Progress
from ddpkit.strategy import SingleDevice

Gradients = dict[str, Tensor | None]


@dataclass
class Share:
    """What one rank works on in a window, and what it weighs. It tells a feed the sizes of its batches.

    Attributes:
        batches: makes each micro-batch.
        counts: samples of each; 0 for one that is repeated to keep step.
        totals: samples of each over all ranks.
        own_parts: this rank's part of each, where every batch counts the same.
        all_parts: what all ranks' parts come to.
        is_weighed: whether the sizes count; otherwise every batch weighs the same.

    Ranks: local.

    Example:
        >>> Share([lambda: "batch"], [3], [5], [0.6], [1.0]).total(0)
        5
    """

    batches: list[Callable[[], Any]]
    counts: list[int]
    totals: list[int]
    own_parts: list[float]
    all_parts: list[float]
    is_weighed: bool = True

    def count(self, batch: int) -> int:
        """Return this rank's number of samples in a batch."""
        return self.counts[batch]

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch over all ranks."""
        return self.totals[batch]

    def part(self, batch: int) -> float:
        """Return this rank's part of a batch, where every batch counts the same."""
        return self.own_parts[batch]

    def parts(self, batch: int) -> float:
        """Return what all ranks' parts of a batch come to."""
        return self.all_parts[batch]

    def first(self) -> Share:
        """Return the first micro-batch alone."""
        return Share(
            self.batches[:1],
            self.counts[:1],
            self.totals[:1],
            self.own_parts[:1],
            self.all_parts[:1],
            self.is_weighed,
        )


@dataclass
class Outcome:
    """What a rehearsed window left behind.

    Attributes:
        steps: the gradients of every optimizer step, by parameter, multiplied by what the step would multiply them by.
        apart: if asked for, the gradient of every rank's own loss, of every backward pass.
        has_counts: whether ``compute_objectives`` returned sums with what they count.
        uses_backward: whether losses were passed to ``self.backward``.
        moved: names of the buffers, other than batch statistics, that have changed.
        has_drawn: whether one of the global random streams has moved.

    Ranks: local.

    Example:
        >>> Outcome().steps
        []
    """

    steps: list[Gradients] = field(default_factory=list)
    apart: list[list[Gradients]] = field(default_factory=list)
    has_counts: bool = False
    uses_backward: bool = False
    moved: list[str] = field(default_factory=list)
    has_drawn: bool = False


class _JointBackward(TorchFunctionMode):
    """Hands every ``loss.backward()`` of the thread to a function; torch's own way to do that, per thread."""

    def __init__(self, backward: Callable[..., None]) -> None:
        super().__init__()
        self.backward = backward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward:
            return self.backward(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _PretendedStrategy(SingleDevice):
    """What a rank communicates through, other than its modules."""

    def __init__(self, meet: Callable[..., Any], size: int) -> None:
        self.meet, self.size = meet, size

    def start_average(self, count: Tensor | float, device: str) -> Callable[[], Tensor | float]:
        """Average a number over the pretended ranks."""
        average = self.meet("adding up counts", count, lambda counts: [sum(counts) / self.size] * self.size)
        return lambda: average


class _Buffers:
    """Gives every rank its own copies of all buffers, as real ranks have, and puts the originals back at the end."""

    def __init__(self, module: nn.Module, size: int) -> None:
        self.names: list[str] = []
        self.places: list[tuple[nn.Module, str]] = []
        for path, part in module.named_modules():
            for name, _ in part.named_buffers(recurse=False, remove_duplicate=False):
                self.names.append(f"{path}.{name}")
                self.places.append((part, name))
        self.originals = [getattr(part, name) for part, name in self.places]
        self.copies = [self._copies() for _ in range(size)]
        self.running: int | None = None

    def _copies(self) -> list[Tensor]:
        made: dict[int, Tensor] = {}  # a buffer that is in two places stays one
        return [made.setdefault(id(original), original.clone()) for original in self.originals]

    def switch_to(self, rank: int | None) -> None:
        """Let a rank find its own buffers; None: nobody, the originals."""
        if self.running is not None:
            self.copies[self.running] = [getattr(part, name) for part, name in self.places]
        self.running = rank
        self._place(self.originals if rank is None else self.copies[rank])

    def moved(self) -> list[str]:
        """Name those that rank 0 has changed, but for batch statistics."""
        return [
            name
            for name, (part, _), before, after in zip(
                self.names, self.places, self.originals, self.copies[0], strict=True
            )
            if not isinstance(part, _NormBase) and not (after is before or torch.equal(after, before))
        ]

    def _place(self, tensors: list[Tensor]) -> None:
        for (part, name), tensor in zip(self.places, tensors, strict=True):
            setattr(part, name, tensor)


class Rehearsal:
    """Runs one window of a Brain on pretended ranks.

    Args:
        hosts: a copy of the Brain per rank; they share their modules.
        synchronised: name -> BatchNorm that real ranks would synchronise.
        names: identity -> name, of the parameters.
        in_thread: makes a context that every pretended rank's thread is in.

    Ranks: local; one process.

    State: the gradients of all parameters are dropped. Parameters and buffers stay what they are.

    Example:
        >>> Rehearsal.__name__
        'Rehearsal'
    """

    def __init__(
        self,
        hosts: Sequence[Any],
        synchronised: Mapping[str, nn.Module],
        names: Mapping[int, str],
        in_thread: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.hosts = hosts
        self.synchronised = synchronised if len(hosts) > 1 else {}
        self.names = names
        self.in_thread = in_thread
        self.parameters: list[Any] = list(
            {
                id(one): one
                for host in hosts[:1]
                for one in (*host.modules.parameters(), *(p for _, p in _optimized(all_optimizers(host))))
            }.values()
        )
        self.weights = [one.detach().to("cpu", copy=True) for one in self.parameters]

    def run(self, shares: Sequence[Share], first: int, *, seed: int = 0, apart: bool = False) -> Outcome:
        """Work on one window.

        Args:
            shares: one per rank.
            first: micro-batches of the epoch before this window.
            seed: of the noise.
            apart: also keep the gradient of every rank's own loss.

        Returns:
            The gradients.

        Raises:
            ParityError: the ranks do not meet at the same places, or one of several raises something.
            ConfigError: something that cannot be rehearsed.
        """
        self._drop_gradients()
        run = _Run(self, shares, first, apart=apart)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 -- the stream that recipes draw from
        torch.manual_seed(seed)
        before = _streams(self.hosts[0].device)
        try:
            run.all_ranks()
            run.outcome.has_drawn = before != _streams(self.hosts[0].device)
        finally:
            run.buffers.switch_to(None)
            self._restore()
        run.outcome.moved = run.buffers.moved()
        if not run.outcome.steps:
            raise ConfigError(
                f"{type(self.hosts[0]).__name__}.fit_batch made no optimizer step in a window of "
                f"{len(shares[0].counts)} micro-batch(es), so there is no gradient to compare. Call "
                "self.optimizers_step() in it where should_step is set (self.progress.window.closes)."
            )
        return run.outcome

    def gradients(self) -> Gradients:
        """Return copies of the present gradients of all parameters, by name."""
        return {self.names[id(one)]: None if one.grad is None else one.grad.detach().clone() for one in self.parameters}

    def _drop_gradients(self) -> None:
        for one in self.parameters:
            one.grad = None

    @torch.no_grad()
    def _restore(self) -> None:
        """Drop the gradients, and undo what a recipe's ``fit_batch`` may have done to the weights itself."""
        self._drop_gradients()
        for one, weight in zip(self.parameters, self.weights, strict=True):
            one.copy_(weight)


class _Run:
    """One window on pretended ranks: what its threads share."""

    def __init__(self, rehearsal: Rehearsal, shares: Sequence[Share], first: int, *, apart: bool) -> None:
        self.rehearsal, self.shares, self.first, self.apart = rehearsal, shares, first, apart
        self.size = len(shares)
        self.outcome = Outcome()
        self.buffers = _Buffers(rehearsal.hosts[0].modules, self.size)
        self.lockstep = Lockstep(self.size, self.buffers.switch_to)
        self.here = threading.local()
        self.joint_backward_passes = 0

    def all_ranks(self) -> None:
        """Let every rank work on its share, each in a thread of its own."""
        optimizers = all_optimizers(self.rehearsal.hosts[0])
        with contextlib.ExitStack() as stack:
            for name, optimizer in optimizers.items():
                stack.enter_context(standing_in(optimizer, "step", self._stand_in_for(name, optimizer)))
            stack.enter_context(self._synchronised())
            with ThreadPoolExecutor(self.size) as threads:
                futures = [
                    threads.submit(contextvars.copy_context().run, self.one_rank, rank) for rank in range(self.size)
                ]
                try:
                    errors = [error for error in (future.exception() for future in futures) if error is not None]
                except BaseException:
                    self.lockstep.give_up()
                    raise
        for error in sorted(errors, key=lambda one: isinstance(one, AbandonedError)):
            if self.size > 1 and not isinstance(error, DdpkitError):
                raise ParityError(
                    f"parity does not hold: one of {self.size} pretended ranks fails where one process does not, with "
                    f"{type(error).__name__}: {error}"
                ) from error
            raise error

    def one_rank(self, rank: int) -> None:
        """Work on a rank's share, in this thread."""
        self.here.rank = rank
        host, share = self._host(rank), self.shares[rank]
        self.here.window = host.progress.window
        feed = Feed(
            loader=(make() for make in share.batches),
            length=len(share.batches),
            counts=share if share.is_weighed else None,
            factor=len(share.batches),
            weighting=host.run_opts.loss_weighting,
            world_size=self.size,
        )
        try:
            self.lockstep.wait(rank)
            with _same_device(host.device), self.rehearsal.in_thread(), _JointBackward(self._backward):
                for batch in feed.batches(host.progress.window):
                    host.progress.step += 1
                    host.fit_batch(batch)
                host._flush_window()
            self.meet("the end of the window", None, list)
            self.lockstep.pass_on(rank)
        except BaseException:
            self.lockstep.give_up()
            raise

    def meet(self, place: str, value: Any, join: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Meet the other ranks, as the rank of this thread."""
        if self.lockstep.is_joining:
            raise ConfigError(
                f"{place} runs again inside the backward pass, as activation checkpointing makes it: that cannot be "
                "rehearsed together with synchronised statistics. Switch checkpointing off for the rehearsal."
            )
        return self.lockstep.meet(self.here.rank, place, value, join)

    def _host(self, rank: int) -> Any:
        """Make the Brain of one rank for this window."""
        host = copy.copy(self.rehearsal.hosts[rank])
        host.rank = rank
        host.progress = Progress(
            epoch=host.progress.epoch, step=self.first, optimizer_step=host.progress.optimizer_step
        )
        host.run_opts = host.run_opts.copy()
        host._strategy = _PretendedStrategy(self.meet, self.size)
        host.scaler = torch.amp.GradScaler(enabled=False)
        host.optimizers_step = functools.partial(self._step, host)
        host.on_fit_batch_end = lambda *_, **__: None  # after the step: schedules, logs
        return host

    # ---------------------------------------------------------------- where the ranks meet

    def _backward(self, loss: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
        has_counts = self.here.window.counted is not None
        self.outcome.has_counts = self.outcome.has_counts or has_counts
        self.outcome.uses_backward = self.outcome.uses_backward or has_counts or self.here.window.has_means
        self.meet("loss.backward()", (loss, gradient, options), self._backward_of_all)

    def _backward_of_all(self, passes: list[tuple[Tensor, Tensor | None, dict[str, Any]]]) -> list[None]:
        """Do what all ranks' backward passes and DDP's average come to."""
        self.joint_backward_passes += 1
        losses = [loss for loss, _, _ in passes]
        seeds = [torch.ones_like(loss) if given is None else given for loss, given, _ in passes]
        options = {name: value for name, value in passes[0][2].items() if value is not None}
        if self.apart:
            self._backward_apart(losses, seeds)
        torch.autograd.backward(losses, [seed / self.size for seed in seeds], **options)
        return [None] * self.size

    def _backward_apart(self, losses: list[Tensor], seeds: list[Tensor]) -> None:
        """Keep the gradient of each rank's own loss; leave those that are accumulated as they were."""
        before = [one.grad for one in self.rehearsal.parameters]
        kept = []
        for loss, seed in zip(losses, seeds, strict=True):
            for one in self.rehearsal.parameters:
                one.grad = None
            torch.autograd.backward([loss], [seed], retain_graph=True)
            kept.append(self.rehearsal.gradients())
        self.outcome.apart.append(kept)
        for one, grad in zip(self.rehearsal.parameters, before, strict=True):
            one.grad = grad

    def _step(self, host: Any) -> None:
        """Stand in for ``optimizers_step``: keep the gradients, and drop them as a step does."""
        multiplier = host._multiplier()
        active = active_optimizers(host)
        self._keep(active, multiplier)
        host.progress.optimizer_step += 1

        def drop(_: list[Any]) -> list[None]:
            for one in [one for _, one in _optimized(active)] if active else self.rehearsal.parameters:
                one.grad = None
            return [None] * self.size

        self.meet("optimizers_step", None, drop)

    def _stand_in_for(self, name: str, optimizer: torch.optim.Optimizer) -> Callable[..., None]:
        """Make what stands in for an optimizer's own ``step``, where a recipe calls that itself."""

        def keep(*_: Any) -> None:
            self._keep({name: optimizer}, 1.0)
            self.meet(f"the step of optimizer {name!r}", None, list)

        return keep

    def _keep(self, optimizers: dict[str, torch.optim.Optimizer], multiplier: Tensor | float) -> None:
        """Copy the gradients; rank 0 comes first, so nothing that other ranks do to them can count twice."""
        if self.here.rank != 0:
            return
        found = {id(one) for _, one in _optimized(optimizers)}
        kept: Gradients = {}
        for one in self.rehearsal.parameters:
            if one.requires_grad and (id(one) in found or not optimizers):
                kept[self.rehearsal.names[id(one)]] = None if one.grad is None else one.grad.detach() * multiplier
        if not self.joint_backward_passes and any(grad is not None for grad in kept.values()):
            raise ConfigError(
                f"{type(self.rehearsal.hosts[0]).__name__}.fit_batch makes gradients without loss.backward() "
                "(torch.autograd.backward or .grad), which cannot be rehearsed. Call backward() of the loss."
            )
        self.outcome.steps.append(kept)

    @contextlib.contextmanager
    def _synchronised(self) -> Iterator[None]:
        """Let every BatchNorm that real ranks synchronise normalise over the rows of all pretended ranks."""
        layers = self.rehearsal.synchronised
        with contextlib.ExitStack() as stack:
            for name, layer in layers.items():
                stack.enter_context(
                    standing_in(layer, "forward", functools.partial(self._normalise, name, layer, layer.forward))
                )
            yield

    def _normalise(self, name: str, layer: Any, alone: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        if not layer.training:
            return alone(rows)
        output: Tensor = self.meet(
            f"BatchNorm {name!r}", (rows, self.here.window.count > 0), functools.partial(normalise_jointly, layer)
        )
        return output


def normalise_jointly(layer: _BatchNorm, parts: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
    """Normalise several ranks' rows by the statistics of all of them, in one graph.

    Args:
        layer: whose ``weight``, ``bias`` and ``eps`` are used; its running statistics stay as they are.
        parts: per rank, rows of shape ``(rows, C, ...)``, and whether they count in the statistics.

    Returns:
        The normalised rows of each rank, of the shape and dtype that came in.

    Ranks: local.

    Example:
        >>> rows = torch.randn(6, 3)
        >>> joint = normalise_jointly(nn.BatchNorm1d(3), [(rows[:2], True), (rows[2:], True)])
        >>> torch.allclose(torch.cat(joint), nn.BatchNorm1d(3)(rows), atol=1e-6)
        True
    """
    wide = [rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows for rows, _ in parts]
    spans = [0, *range(2, wide[0].dim())]
    shape = [1, -1, *([1] * (wide[0].dim() - 2))]
    counted = [rows for rows, (_, counts) in zip(wide, parts, strict=True) if counts]
    values = sum(rows.numel() // rows.shape[1] for rows in counted)
    mean = torch.stack([rows.sum(spans) for rows in counted]).sum(0) / values
    squares = torch.stack([(rows - mean.view(shape)).square().sum(spans) for rows in counted]).sum(0)
    scale = (squares / values + layer.eps).rsqrt()
    if layer.weight is not None:
        scale = scale * layer.weight
    outputs = [(rows - mean.view(shape)) * scale.view(shape) for rows in wide]
    if layer.bias is not None:
        outputs = [rows + layer.bias.view(shape) for rows in outputs]
    return [output.to(rows.dtype) for output, (rows, _) in zip(outputs, parts, strict=True)]


def all_optimizers(host: Any) -> dict[str, torch.optim.Optimizer]:
    """Return all optimizers of a Brain by name; none where it has not made any.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> all_optimizers(SimpleNamespace(optimizers_dict=None))
        {}
    """
    if host.optimizers_dict is not None:
        return dict(host.optimizers_dict)
    single = getattr(host, "optimizer", None)
    return {} if single is None else {"optimizer": single}


def active_optimizers(host: Any) -> dict[str, torch.optim.Optimizer]:
    """Return those that would step now.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> active_optimizers(SimpleNamespace(optimizers_dict=None))
        {}
    """
    if host.optimizers_dict is None:
        return all_optimizers(host)
    return dict(host.freeze_optimizers(host.optimizers_dict))


def _optimized(optimizers: dict[str, torch.optim.Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yield every parameter of some optimizers, with where it is."""
    for name, optimizer in optimizers.items():
        for place, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                yield f"optimizer {name!r}, group {place}, parameter {number}", parameter


def parameter_names(host: Any) -> tuple[dict[int, str], list[str]]:
    """Name every parameter of a Brain.

    Args:
        host: the Brain.

    Returns:
        Identity -> name; and the names of those that are optimized and stand in no module of it.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> net = nn.ModuleDict({"net": nn.Linear(1, 1)})
        >>> names, outside = parameter_names(SimpleNamespace(raw_modules=net, optimizers_dict=None))
        >>> list(names.values()), outside
        (['net.weight', 'net.bias'], [])
    """
    names: dict[int, str] = {}
    for name, parameter in host.raw_modules.named_parameters():
        names.setdefault(id(parameter), name)
    outside = []
    for place, parameter in _optimized(all_optimizers(host)):
        if id(parameter) not in names:
            names[id(parameter)] = place
            outside.append(place)
    return names, outside


def _streams(device: str) -> tuple[Any, ...]:
    """Return what is equal as long as nobody draws from a global random stream."""
    legacy: Any = np.random.get_state()  # noqa: NPY002 -- as above
    states = [torch.get_rng_state()]
    if device.startswith("cuda"):
        states.append(torch.cuda.get_rng_state(torch.device(device)))
    return (random.getstate(), legacy[1].tobytes(), legacy[2:], *(state.numpy().tobytes() for state in states))


@contextlib.contextmanager
def _same_device(device: str) -> Iterator[None]:
    """Give a new thread what is set per thread: the current CUDA device."""
    if device.startswith("cuda"):
        with torch.cuda.device(torch.device(device)):
            yield
    else:
        yield
