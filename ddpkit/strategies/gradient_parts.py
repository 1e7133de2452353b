"""Gradients of virtual ranks where each process holds a part of every parameter: what FSDP2 hands
over of each shard, added up in the order of the tree.

FSDP2 divides the gradients of a block as soon as they are computed, and has a reduce-scatter of
one's own take the place of its own (``FSDPModule.set_custom_reduce_scatter``). A turn is what all
``W`` processes work on at the same time: the shards from ``turn * W`` on, one on each. So each
process gets, of its part, the gradients of ``W`` shards that follow each other. It adds them up as
far as the tree does that, and the next turn goes on from there, as a binary counter does.

Source: FSDP2 makes the gradients of a block as views of the memory that the reduce-scatter has
filled, read in ``foreach_reduce`` of torch 2.13. Where they are others, that is an error here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ddpkit.base import local_part, reads_device, waiting
from ddpkit.comm import TreeSum, add_tensors, subtrees_of
from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    # gradients of all parameters; None where there is none
    Part = list[torch.Tensor | None]

PAST_THE_BRAIN = (
    "{}: a backward pass was made past the Brain. The gradients of all shards are added up in one "
    "order: call self.backward(loss) for each batch."
)
OTHER_MEMORY = (
    "{}: this version of torch ({}) does not hand the gradients of a block over in the memory that "
    "they were added up in. Use torch 2.13, or another strategy."
)


class GradientParts:
    """This process's part of all gradients of a step, and FSDP2's reduce-scatter.

    Args:
        world_size: number of processes.
        option: that needs it, in messages.

    Ranks: collective, while a backward pass runs; else local.
    """

    def __init__(
        self,
        world_size: int,
        option: str,
    ) -> None:
        self._world_size = world_size
        self._option = option
        self._is_open = False
        self._is_apart = False
        self._first = 0
        # by its address: the memory that a block's gradients are views of, and its subtrees
        self._received: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._tree = TreeSum(add_tensors)
        # of the turn, or of shards that have several batches in a step, by level and number
        self._turn: dict[tuple[int, int], Part] = {}
        self._shards: dict[int, Part] = {}
        # what the last pass has left in the gradients, where they stay apart
        self._left: Part = []

    def begin_pass(
        self,
        turn: int,
        *,
        is_apart: bool,
    ) -> None:
        """Have what comes be the gradients of a turn.

        Args:
            turn: its number in the step.
            is_apart: whether the gradients of a shard stay apart from those of the others, since
                more are added to them.
        """
        self._received.clear()
        self._is_open = True
        self._is_apart = is_apart
        self._first = turn * self._world_size

    # ------------------------------------------------------------------ FSDP2's reduce-scatter

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Return memory for gradients of a block, or for their sums."""
        return torch.empty(
            *size,
            dtype=dtype,
            device=device,
        )

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Exchange the gradients of a block, and add up those of this process's part as far as the
        tree does.

        Raises:
            ConfigError: a recipe has called ``loss.backward()``.
        """
        if not self._is_open:
            raise ConfigError(PAST_THE_BRAIN.format(self._option))
        received = torch.empty_like(input_tensor)
        with waiting():
            # bytes travel: not every backend knows every dtype
            dist.all_to_all_single(
                received.view(torch.uint8),
                input_tensor.view(torch.uint8),
                group=group,
            )
        rows = list(received.view(self._world_size, -1).unbind())
        if not self._is_apart:
            tree = TreeSum(torch.Tensor.add_)
            for number, row in enumerate(rows, self._first):
                tree.push(number, row)
            # copies: what came would stay as long as one of its rows
            rows = [subtree.total.clone() for subtree in tree.subtrees]
        # what FSDP2 makes the gradients of: where they lie tells which of the rows are theirs
        output_tensor.copy_(rows[0])
        self._received[output_tensor.untyped_storage().data_ptr()] = output_tensor, rows

    # ------------------------------------------------------------------ what came

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take in what a backward pass has left in the gradients of parameters.

        Raises:
            ConfigError: it is not in the memory that this object has filled.
        """
        self._is_open = False
        gradients = [parameter.grad for parameter in parameters]
        columns = [
            None if gradient is None else self._rows_of(local_part(gradient))
            for gradient in gradients
        ]
        for place, name in enumerate(self._subtrees()):
            part = [None if column is None else column[place] for column in columns]
            known = self._turn.get(name)
            self._turn[name] = part if known is None else add_tensors(known, part)
        self._received.clear()
        if self._is_apart:
            self._left = [None if column is None else column[0] for column in columns]

    @reads_device
    def are_changed(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Say whether gradients are others than those that the last pass has left, where they stay
        apart; the versions of divided tensors do not tell.
        """
        pairs = zip((parameter.grad for parameter in parameters), self._left, strict=True)
        return any(
            (now is None) != (left is None)
            or (now is not None and left is not None and not _same_bits(local_part(now), left))
            for now, left in pairs
        )

    def _subtrees(self) -> list[tuple[int, int]]:
        """Return level and number of what is there of a turn."""
        numbers = range(self._first, self._first + self._world_size)
        if self._is_apart:
            return [(0, number) for number in numbers]
        return subtrees_of(numbers)

    def _rows_of(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of each subtree that lie where a gradient does."""
        found = self._received.get(gradient.untyped_storage().data_ptr())
        if found is None or found[0].dtype != gradient.dtype:
            raise ConfigError(OTHER_MEMORY.format(self._option, torch.__version__))
        return [
            row.as_strided(
                gradient.shape,
                gradient.stride(),
                row.storage_offset() + gradient.storage_offset(),
            )
            for row in found[1]
        ]

    def end_turn(
        self,
        turn: int,
        parameters: int,
        *,
        is_whole: bool,
    ) -> None:
        """Add the gradients of a turn to those of the turns before.

        Args:
            turn: its number in the step.
            parameters: their number.
            is_whole: whether no more batches of its shards come in this step.
        """
        self._first = turn * self._world_size
        # a turn without a backward pass has its place in the tree, too
        given = self._turn or {name: [None] * parameters for name in self._subtrees()}
        self._turn = {}
        if is_whole:
            for (level, number), part in given.items():
                self._tree.push(number, part, level)
            return
        for (_, number), part in given.items():
            known = self._shards.get(number)
            self._shards[number] = part if known is None else add_tensors(known, part)

    def total(self) -> Part:
        """Return this process's part of the sums over all shards; None where none has a
        gradient.
        """
        # in the order of the shards, not in that of the turns
        for number in sorted(self._shards):
            self._tree.push(number, self._shards[number])
        found: Part = self._tree.total()
        self.begin_step()
        return found


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare as bytes: NaN is not equal to itself."""
    left = first.contiguous().view(-1)
    right = second.contiguous().view(-1)
    return torch.equal(
        left.view(torch.uint8),
        right.view(torch.uint8),
    )
