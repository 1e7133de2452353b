"""The same bits on any number of processes: a step is computed as by ``V`` virtual ranks, on
whichever process each of them is.

Every batch is cut into the same ``V`` shards. A process works on ``V / world_size`` of them, one
after another, each with noise that belongs to the shard; their gradients are not summed up in the
parameters, but taken away and added in the order of one tree (:mod:`ddpkit.comm.tree_sum`). So the
gradient of a step, and with it the weights, do not depend on the number of processes. DDP takes no
part in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ddpkit.base import local_part
from ddpkit.comm import OrderedSum, TreeSum, add_tensors, bytes_in_sums, get_runtime
from ddpkit.compat import is_recompile_limit
from ddpkit.data import Division
from ddpkit.device import use_deterministic_kernels, widest_float
from ddpkit.distributed import get_world_size
from ddpkit.errors import ConfigError
from ddpkit.seed import seed_streams
from ddpkit.strategies.base import Strategy
from ddpkit.strategies.batch_norm_layers import batch_norms
from ddpkit.strategies.early_sums import EarlySums
from ddpkit.strategies.entries import broadcast_from_main, refuse_wrapped
from ddpkit.strategies.names import OF_DDP
from ddpkit.strategies.option_refusals import refuse_with
from ddpkit.strategies.rank_memory import whole_memory
from ddpkit.strategies.rare_questions import NO_CONTEXT, bytes_of, wide_number
from ddpkit.syncbn import SyncBatchNorm
from ddpkit.training import FeedThrough, PassedThrough, StreamFeed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun
    from ddpkit.strategies.shard_witness import ShardWitness
    from ddpkit.training import Accumulation, Feed, Progress, Window

    # number of shards, count of the loss, what a witness found wrong, moves of buffers, gradients
    Part = list[torch.Tensor | None]

NOT_WITH = {
    "data_parallel_backend": "it divides each batch over GPUs",
    "check_parity": "it compares with a batch that is not divided",
    "precision=fp16": "the range of fp16 needs a scale (use bf16)",
    "sync_batchnorm": "each virtual rank has batch statistics of its own",
    # what is compiled may follow from the batch alone, not from what a process has seen before
    "compile_mode=max-autotune": "it chooses kernels by the times that a process has measured",
    "compile_mode=max-autotune-no-cudagraphs": (
        "it chooses kernels by the times that a process has measured"
    ),
    "compile_using_dynamic_shape_tracing": (
        "kernels for any size are made for those that a process sees first"
    ),
    **OF_DDP,
}

# of a part's entries
_WRONG = 2
_FIRST_BUFFER = 3

# what random numbers are for
_NOISE = 0x5AAD
_EVALUATION = 0xE7A1

MISUSED = (
    "virtual_ranks={}: fit_batch {}. The gradients of all shards are added up in one order: call "
    "self.backward(loss) for each batch, and self.optimizers_step() once, where self.should_step "
    "is true. Clip with --max_grad_norm, or in a hook of the optimizer (register_step_pre_hook)."
)
NOT_DETERMINISTIC = (
    "virtual_ranks={}: bits are the same only with deterministic kernels, and torch has none for "
    "an operation of this "
    'recipe: "{}". Compute the same by another operation, move this one to the CPU, or leave '
    "--virtual_ranks out."
)
TOO_MANY_SHAPES = (
    "virtual_ranks={}: torch has compiled a module for as many kinds of batches as it does "
    "(torch._dynamo.config.recompile_limit), and would go on without compiling it. Which batches "
    "these are depends on the number of processes, and so would the bits. Give it batches of fewer "
    "sizes, raise that limit, or do not compile it."
)
IN_PARTS = (
    "virtual_ranks={}: more was added to the gradient of a parameter of shape {} after its sum "
    "over the processes had begun. Two kinds of recipes do so: one that calls backward past the "
    "Brain, and one with a block that is used twice for the first time in this step, and computed "
    "again in the backward pass. Call self.backward(loss) once for each batch, and give "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)
INSIDE = "called optimizers_step() in the middle of a step, or twice in one"


class VirtualRanks(Strategy):
    """``V`` virtual ranks: every process computes the gradients of its shards, which are added up
    in one order.

    A buffer that is saved and changes in a forward pass, such as the statistics of a BatchNorm,
    starts from the same value in every shard; the mean of what the shards make of it is its next
    value, once per optimizer step.

    Args:
        device: of this rank; None: this and the next as the options say, in :meth:`bind`.
        number: ``V``, a multiple of the number of ranks.
        is_strict: whether a step that is not made through the Brain is an error, as where a recipe
            has its own ``fit_batch``.

    Attributes:
        shards: how many of them this process works on.
        witness: follows the work on each of them; or None.

    Ranks: collective.

    State: the process computes with one thread on a CPU, and with deterministic kernels elsewhere.

    Example:
        >>> VirtualRanks("cpu", 8).shards
        8
    """

    name = "virtual ranks"
    in_turns = False  # which shards a process works on
    unrepeatable = "whose batches are dealt out to the virtual ranks before a step"
    unauditable = ""
    witness: ShardWitness | None = None

    def __init__(
        self,
        device: str | None = None,
        number: int = 0,
        *,
        is_strict: bool = False,
    ) -> None:
        if device is not None:
            self._divide(
                device,
                number,
                is_strict=is_strict,
            )

    def runs_alone(self) -> bool:
        """Say that there is work in one process."""
        return True

    def is_distributed(self) -> bool:
        """Say that the ranks exchange nothing but the sums of a step."""
        return False

    def division(self) -> Division:
        """Say that each process works on as many shards as every other."""
        return self._division

    def has_same_bits(self) -> bool:
        """Say that no bit depends on the number of processes."""
        return True

    def explain(self, error: Exception) -> ConfigError | None:
        """Say what to do where torch has no deterministic kernel, or compiles no more."""
        # on another number of processes the same batch would still meet what is compiled
        if is_recompile_limit(error):
            return ConfigError(TOO_MANY_SHAPES.format(self.virtual_ranks))
        if "deterministic" in str(error):
            return ConfigError(NOT_DETERMINISTIC.format(self.virtual_ranks, error))
        return None

    def check(
        self,
        options: RunOptions,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Refuse another number of processes than a divisor, and what cannot be divided so.

        Raises:
            ConfigError: naming the options.
        """
        number: int = options["virtual_ranks"]
        world_size = get_world_size()
        if number % world_size:
            able = " or ".join(
                str(divisor) for divisor in range(1, number + 1) if not number % divisor
            )
            raise ConfigError(
                f"virtual_ranks={number} cannot be divided over {world_size} processes: it must be "
                f"a multiple of their number. Start {able} "
                f"process{'' if number == 1 else 'es'}, or give another "
                "--virtual_ranks, which is another training."
            )
        refuse_with(
            "virtual_ranks",
            options,
            NOT_WITH,
        )

    def bind(
        self,
        options: RunOptions,
        accumulation: Accumulation,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Take the device and the number."""
        super().bind(
            options,
            accumulation,
            has_own_fit_batch=has_own_fit_batch,
        )
        self._divide(
            self.device,
            options["virtual_ranks"],
            is_strict=has_own_fit_batch,
        )

    def _divide(
        self,
        device: str,
        number: int,
        *,
        is_strict: bool,
    ) -> None:
        self.device = device
        self._division = Division.of_ranks(number, in_turns=self.in_turns)
        self.shards = self._division.each
        self.virtual_ranks: int = number
        self._is_strict = is_strict
        self._parameters: list[nn.Parameter] = []
        self._buffers: dict[str, tuple[nn.Module, str]] = {}
        self._sum = OrderedSum([], number)
        self._early_sums = EarlySums(self._sum, {})
        self._like = list[torch.Tensor]()
        self._window: Window | None = None
        self._shard = 0
        self._adds_at_once = True
        self._dtype = widest_float(device)
        self._noted: list[Any] | None = None
        self._may_look = device.startswith("cpu")  # a GPU would be waited for
        if self._may_look:
            torch.set_num_threads(1)  # sums of several threads have other bits than those of one
        else:
            use_deterministic_kernels()
        self._begin_step()

    def _begin_step(self) -> None:
        self._tree = TreeSum(add_tensors)
        # of this process's shards, where each has several batches in a step
        self._parts: dict[int, Part] = {}
        self._before: dict[str, torch.Tensor] = {}  # values of buffers at the beginning of the step
        self._count: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._is_added = False

    # ------------------------------------------------------------------ as a strategy

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Give every rank the values of rank 0.

        Raises:
            ConfigError: an entry is wrapped, or sharded, already.
        """
        for name, module in modules.items():
            self._require_additive(name, module)
            refuse_wrapped(name, module, f"virtual_ranks={self.virtual_ranks}")
            if get_world_size() > 1:
                broadcast_from_main(module, self.device)
        self.begin_epoch(modules)

    def data_ranks(self, options: RunOptions, processes: int) -> int:
        """Return the number of virtual ranks."""
        number: int = options["virtual_ranks"]
        return number

    def rank_memory(self, run: RehearsedRun) -> RankMemory:
        """Return the memory of the whole model, with the gradients of earlier shards: sums of the
        tree, or those of each shard where a shard has several batches in a step.

        Raises:
            ConfigError: the virtual ranks cannot be divided over so many processes.
        """
        number = run.options["virtual_ranks"]
        if number % run.processes:
            raise ConfigError(f"{number} virtual ranks cannot be divided over them")
        whole = whole_memory(run)
        shards = number // run.processes
        kept = math.ceil(math.log2(shards)) if run.micro_batches == 1 else shards
        before = whole.buffers + kept * whole.gradients
        subtrees = shards.bit_count()  # the first is the gradients, and gets the sums
        # the last one's gradients go into memory that stays, or are added to those before
        keeps_last = run.processes > 1 and run.micro_batches == 1 and shards % 2 == 1
        sums = 0.0
        if run.processes > 1:
            sums = bytes_in_sums(
                run.gradients.values(),
                subtrees,
                run.processes,
                is_on_cpu=str(run.options["device"]).startswith("cpu"),
            )
        return dataclasses.replace(
            whole,
            exchange=before,
            # what comes of the others takes the place of gradients that were added to earlier ones
            after_backward=before + (sums if keeps_last else 0.0),
            in_step=whole.buffers + (subtrees - 1) * whole.gradients + sums,
            keeps_gradients=keeps_last,  # the others are taken away
        )

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows on the shards, and on batch statistics, which each shard takes from its own
        rows.
        """
        shards = (
            f"virtual ranks: {self.virtual_ranks}, {self.shards} on each process (--virtual_ranks)"
        )
        return {
            "strategy": shards,
            "batch norm": "each virtual rank by its own rows" if batch_norms(modules) else "",
        }

    def _require_additive(
        self,
        name: str,
        module: nn.Module,
    ) -> None:
        for part in module.modules():
            if (
                isinstance(part, (SyncBatchNorm, nn.SyncBatchNorm))
                or getattr(
                    part,
                    "sparse",
                    False,
                )
                is True
            ):
                raise ConfigError(
                    f"virtual_ranks={self.virtual_ranks}: modules[{name!r}] has a part, "
                    f"{type(part).__name__}, that shares statistics between processes, or has "
                    "sparse gradients. Use nn.BatchNorm; leave sparse out."
                )

    def _require_own_elements(self) -> None:
        for name in self._buffers:
            buffer = self._buffer(name)
            strides = buffer.stride() if buffer.layout is torch.strided else ()
            if any(n > 1 and not step for n, step in zip(buffer.shape, strides, strict=False)):
                raise ConfigError(
                    f"virtual_ranks={self.virtual_ranks}: the buffer {name!r} has several elements "
                    "at one place in memory, as expand makes it, so no value can be put back there "
                    "for the next virtual rank. Register buffer.clone(), or register it with "
                    "persistent=False if nothing changes it."
                )

    def begin_epoch(self, modules: nn.ModuleDict) -> None:
        """Take note of the parameters, also of frozen ones, and of the buffers."""
        self._parameters = list(modules.parameters())
        owners = dict(modules.named_modules())
        saved = modules.state_dict(keep_vars=True)
        names = [name for name, _ in modules.named_buffers() if name in saved]
        self._buffers = {
            name: (
                owners[name.rpartition(".")[0]],
                name.rpartition(".")[2],
            )
            for name in names
        }
        self._require_own_elements()
        wide = wide_number(0.0, self.device)
        moves = [
            wide.to(self._widened(buffer)).expand(buffer.shape)
            for buffer in map(self._buffer, names)
        ]
        # torch 2.8 has none
        dtypes = [
            getattr(
                parameter,
                "grad_dtype",
                None,
            )
            or parameter.dtype
            for parameter in self._parameters
        ]
        pairs = zip(
            self._parameters,
            dtypes,
            strict=True,
        )
        self._like = [
            local_part(parameter).new_zeros((), dtype=dtype).expand(local_part(parameter).shape)
            for parameter, dtype in pairs
        ]
        self._sum = OrderedSum(
            [wide, wide, wide, *moves, *self._summed_at_the_end(self._like)],
            self.virtual_ranks,
            in_turns=self.in_turns,
            epoch=next(get_runtime().epochs_of_sums) if get_world_size() > 1 else 0,
        )
        first = _FIRST_BUFFER + len(self._buffers)
        self._early_sums = EarlySums(self._sum, dict(enumerate(self._parameters, first)))
        self._begin_step()

    def _summed_at_the_end(self, gradients: list[Any]) -> list[Any]:
        """Return what of the gradients is added up over the processes at the end of a step."""
        return gradients

    def prepare_optimizers(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        """Refuse optimizers with parameters that are in no module.

        Raises:
            ConfigError: a parameter of an optimizer is in no module.
        """
        known = set(map(id, modules.parameters()))
        for name, optimizer in optimizers.items():
            given = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            ]
            if not known.issuperset(map(id, given)):
                raise ConfigError(
                    f"virtual_ranks={self.virtual_ranks}: the optimizer {name!r} has parameters "
                    "that are not in modules: their gradients would not be added up over the "
                    "processes. Put their module into modules."
                )

    def feed(
        self,
        feed: Feed | StreamFeed,
        progress: Progress,
        seed: int,
    ) -> FeedThrough:
        """Return the feed, which seeds the noise of each shard and takes its gradient away after
        it.

        Raises:
            ConfigError: ``loss_weighting=batches`` with a stream.
        """
        if not isinstance(feed, StreamFeed):
            feed.world_size = 1  # gradients are summed, not averaged
        elif feed.weighting == "batches":
            raise ConfigError(
                f"virtual_ranks={self.virtual_ranks}: loss_weighting=batches does not work with a "
                "stream. Leave --loss_weighting out."
            )
        else:
            block = 1 if feed.whole_batches else progress.loader.dataset.block_size
            feed.full_step_weight = float(block * feed.factor // self.shards)
        return FeedThrough(
            feed,
            functools.partial(
                self._shards_of,
                feed,
                progress,
                seed,
            ),
        )

    def _shards_of(
        self,
        feed: Feed | StreamFeed,
        progress: Progress,
        seed: int,
        window: Window,
    ) -> Iterator[Any]:
        """Yield the shards, each after seeding the random streams by (seed, step, shard); take
        their gradients.
        """
        self._noise_key = seed, _NOISE, progress.epoch, progress.began_at
        self._window, self._adds_at_once = window, feed.factor == self.shards
        for number, batch in enumerate(feed.batches(window), feed.start):
            self._shard = number % self.shards
            self._begin_shard()
            if self.witness is not None:
                self.witness.before_batch(batch, number)
            self._place = *self._noise_key, number // self.shards
            seed_streams(*self._place, self._division.mine[self._shard])
            yield batch
            timer = self.timer
            if timer is None or not timer.measures:
                self._end_shard(window)
            else:
                timer.begin_other()
                self._end_shard(window)
                timer.begin_reading()

    def evaluated(
        self,
        batches: Iterable[Any],
        seed: int,
        *place: int,
    ) -> Iterable[Any]:
        """Return the batches; the random streams are seeded by shard before each, and alike on all
        ranks at the end.
        """
        return PassedThrough(batches, functools.partial(self._seeded, (seed, _EVALUATION, *place)))

    def _seeded(
        self,
        noise_key: tuple[int, ...],
        batches: Iterator[Any],
    ) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            seed_streams(
                *noise_key,
                number // self.shards,
                self._division.mine[number % self.shards],
            )
            yield batch
        seed_streams(*noise_key)

    def backward_pass(
        self,
        modules: nn.Module,
        *,
        closes: bool,
        counts: bool,
    ) -> AbstractContextManager[None]:
        """Refuse a backward pass after the gradients of the step were added up."""
        if self._is_added:
            raise ConfigError(MISUSED.format(self.virtual_ranks, INSIDE))
        if self._is_strict:
            return self._noting_gradients()
        # a witness looks at a shard before anything of it is added up
        if closes and counts and self._adds_at_once and self.witness is None:
            number = self._division.mine[self._shard]
            return self._early_sums.backward_pass(modules, self._tree, number)
        return NO_CONTEXT

    @contextlib.contextmanager
    def _noting_gradients(self) -> Iterator[None]:
        yield
        self._noted = self._versions()

    def _versions(self) -> list[Any]:
        """Return what tells whether a recipe has changed gradients."""
        gradients = (parameter.grad for parameter in self._parameters)
        return [
            None
            if gradient is None
            else (
                id(gradient),
                getattr(
                    gradient,
                    "_version",
                    0,
                ),
            )
            for gradient in gradients
        ]

    def start_average(
        self,
        count: torch.Tensor | float,
        device: str,
    ) -> Callable[[], torch.Tensor]:
        """Take the count of the shard that closes a step; return what adds up the step, and gives
        its count.
        """
        self._count = wide_number(count, device)

        def total() -> torch.Tensor:
            self.finish_gradients()
            return cast("torch.Tensor", self._total)

        return total

    @torch.no_grad()
    def finish_gradients(self, optimizers: Collection[Any] = ()) -> None:
        """Add up the gradients of all shards, once the last of a step is computed.

        Raises:
            ConfigError: it is not computed yet; or not by ``self.backward``.
        """
        window = self._window
        if window is None or self._is_added:
            return
        if not window.closes:
            raise ConfigError(MISUSED.format(self.virtual_ranks, INSIDE))
        self._take_shard(window)
        for shard, part in self._parts.items():
            self._tree.push(self._division.mine[shard], part)
        if self.witness is not None and self.witness.before_sums():
            self._tree.subtrees[-1].total[_WRONG] = wide_number(1.0, self.device)
        number, self._total, wrong, *sums = self._sum.over_ranks(self._tree)
        if self.witness is not None:
            self.witness.after_sums(is_wrong=wrong is not None)
        self._give_gradients(sums[len(self._buffers) :])
        for (name, before), move in zip(
            self._before.items(),
            sums,
            strict=False,
        ):
            after = before
            if move is not None and number is not None:
                after = (
                    (before.to(move.dtype) + move / number)
                    .to(before.dtype)
                    .where(move != 0, before)
                )
            self._buffer(name).copy_(after)
        self._tree = TreeSum(add_tensors)
        self._parts = {}
        self._is_added = True
        seed_streams(*self._place)  # alike on all ranks: an optimizer, or a hook after it, may draw

    def _give_gradients(self, sums: list[Any]) -> None:
        for parameter, gradient in zip(
            self._parameters,
            sums,
            strict=True,
        ):
            parameter.grad = gradient

    def leave_step_out(self) -> None:
        """Average the buffers, which move without a step, too, before anything reads them; drop the
        gradients of the last shard.
        """
        window = self._window
        if window is not None and window.closes and not self._is_added:
            self.finish_gradients()
            for parameter in self._parameters:
                parameter.grad = None

    def sent_bytes(self, parameters: Iterable[torch.Tensor]) -> float:
        """Return the bytes of all gradients."""
        return bytes_of(parameters)

    # ------------------------------------------------------------------ one shard

    def _begin_shard(self) -> None:
        """Give the buffers the values that they had at the beginning of the step."""
        if self._is_added:
            self._begin_step()
        if not self._before:
            self._before = {name: self._buffer(name).clone() for name in self._buffers}
        for name, before in self._before.items():
            self._buffer(name).copy_(before)

    @torch.no_grad()
    def _end_shard(self, window: Window) -> None:
        """Take a shard's gradient away; after the last one of a step, look whether they were added
        up.

        Raises:
            ConfigError: the step was made past the Brain.
        """
        if not window.closes:
            self._take_shard(window)
        elif not self._is_added:
            if self._is_strict:
                reason = "called optimizer.step() past the Brain, or left a step out"
                raise ConfigError(MISUSED.format(self.virtual_ranks, reason))
            self.leave_step_out()  # a recipe's own optimizers_step was not called

    def _take_shard(self, window: Window) -> None:
        self._require_unchanged()
        gradients = self.take_gradients()
        if any(gradient is not None for gradient in gradients) and not (
            window.is_weighed or window.counted is not None
        ):
            raise ConfigError(
                MISUSED.format(self.virtual_ranks, "called loss.backward() past the Brain")
            )
        self._check_dtypes(gradients)
        self._require_all_of_early(gradients)
        count = self._count
        self._count = None
        if window.counted is not None and not window.closes:
            count = wide_number(window.counted, self.device)
            window.counted = 0.0
        if self.witness is not None:
            self.witness.after_batch(gradients, count)
        pairs = [(self._buffer(name), before) for name, before in self._before.items()]
        moves = [
            None if self._may_look and torch.equal(*pair) else self._move(*pair) for pair in pairs
        ]
        part: Part = [
            wide_number(1.0, self.device),
            count,
            None,
            *moves,
            *_apart(self._summed_at_the_end(gradients)),
        ]
        if not window.count:
            part = [None] * len(part)  # of a sample that is repeated to keep step
        if self._adds_at_once:
            self._tree.push(self._division.mine[self._shard], part)
        else:
            known = self._parts.get(self._shard)
            self._parts[self._shard] = part if known is None else add_tensors(known, part)

    # ------------------------------------------------------------------ a batch once more

    def shard_of(self, number: int, rank: int) -> int:
        """Return the number, over all processes, of the shard that a batch is of.

        Args:
            number: of the process's batches in the epoch, from 0.
            rank: of the process.
        """
        division = dataclasses.replace(self._division, rank=rank)
        return division.mine[number % self.shards]

    def begin_again(self, number: int, rank: int) -> None:
        """Give random streams and buffers what they had before a batch of this step, of any
        process.

        Args:
            number: of the process's batches in the epoch, from 0.
            rank: of the process.
        """
        for name, before in self._before.items():
            self._buffer(name).copy_(before)
        seed_streams(*self._noise_key, number // self.shards, self.shard_of(number, rank))

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Take the gradients of all parameters away, and return them in the parameters' order."""
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def followed_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers whose moves are averaged over the shards, by name."""
        return {name: self._buffer(name) for name in self._buffers}

    def buffers_before(self) -> dict[str, torch.Tensor]:
        """Return the values of these buffers at the beginning of the step."""
        return dict(self._before)

    def _require_unchanged(self) -> None:
        if self._noted is not None and self._noted != self._versions():
            raise ConfigError(
                MISUSED.format(self.virtual_ranks, "changed gradients before optimizers_step()")
            )
        self._noted = None

    def _require_all_of_early(self, gradients: list[torch.Tensor | None]) -> None:
        """Refuse a further part of a gradient whose sum has begun in the backward pass."""
        for place, gradient in enumerate(gradients, _FIRST_BUFFER + len(self._buffers)):
            if gradient is not None and self._sum.has_early(place):
                raise ConfigError(IN_PARTS.format(self.virtual_ranks, tuple(gradient.shape)))

    def _check_dtypes(self, gradients: list[torch.Tensor | None]) -> None:
        for gradient, like in zip(
            gradients,
            self._like,
            strict=True,
        ):
            if gradient is not None and gradient.dtype != like.dtype:
                raise ConfigError(
                    f"virtual_ranks={self.virtual_ranks}: a gradient is {gradient.dtype}, and "
                    f"{like.dtype} was expected. Set grad_dtype, and the dtype of a parameter, "
                    "before fit: the ranks agree on it once."
                )

    # ------------------------------------------------------------------ buffers

    def _buffer(self, name: str) -> torch.Tensor:
        owner, attribute = self._buffers[name]
        found: torch.Tensor = getattr(owner, attribute)
        return found

    def _move(
        self,
        now: torch.Tensor,
        before: torch.Tensor,
    ) -> torch.Tensor:
        wide = self._widened(now)
        # inf - inf is NaN, as in a mask
        return (now.to(wide) - before.to(wide)).where(now != before, 0.0)

    def _widened(self, buffer: torch.Tensor) -> torch.dtype:
        return torch.promote_types(buffer.dtype, self._dtype)


def _apart(gradients: list[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Yield gradients that are written into: contiguous, and each alone in its memory.

    Autograd may give two parameters gradients in the same memory, such as those of
    ``a.view(-1) + b.view(-1)``.
    """
    known = set()
    for gradient in gradients:
        if gradient is None:
            yield None
            continue
        memory = gradient.untyped_storage()
        is_shared = memory.data_ptr() in known or memory.nbytes() != gradient.nbytes
        known.add(memory.data_ptr())
        yield (
            gradient.clone(memory_format=torch.contiguous_format)
            if is_shared
            else gradient.contiguous()
        )
