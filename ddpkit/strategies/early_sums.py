"""Sums of virtual ranks that begin while the last backward pass of a step computes.

A gradient is taken as soon as autograd has written it into its parameter. It is copied into memory
that is kept from step to step, as DDP's buckets are: memory that is allocated in each step comes
from the system, which makes an optimizer's step up to twice as slow.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.compat import is_hooked_backward
from ddpkit.strategies.base import removing_hooks
from ddpkit.strategies.rare_questions import NO_CONTEXT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from ddpkit.comm import OrderedSum, TreeSum


class EarlySums:
    """Begins the sums of large gradients in the last backward pass of a step.

    Args:
        sums: over the ranks.
        parameters: by their place in these sums.

    Ranks: local.
    """

    def __init__(self, sums: OrderedSum, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        self._sums = sums
        self._parameters: dict[int, Any] = {
            place: parameters[place] for place in sums.large_places if place in parameters
        }
        self._kept: dict[int, torch.Tensor] = {}  # memory of sums, by place
        self._came_at_once: set[int] = set()  # in earlier passes of this process

    def backward_pass(
        self,
        modules: torch.nn.Module,
        tree: TreeSum,
        number: int,
    ) -> AbstractContextManager[None]:
        """Return a context for the last backward pass of a step.

        Args:
            modules: of the recipe. Where a function of the recipe is called in a backward pass,
                nothing begins: it could change a gradient that was sent.
            tree: the parts of the sums before the one of this pass.
            number: of that part.
        """
        if not self._parameters or is_hooked_backward(modules):
            return NO_CONTEXT
        return self._beginning(tree, number)

    @contextlib.contextmanager
    def _beginning(self, tree: TreeSum, number: int) -> Iterator[None]:
        may_begin = self._came_at_once.intersection(self._sums.early_places)
        times: Counter[int] = Counter()
        # this part is added to the one before it, which this process has, too
        before = tree.subtrees[-1].total if number % 2 and tree.subtrees else None

        @torch.no_grad()
        def take(place: int, parameter: torch.Tensor) -> None:
            times[place] += 1
            gradient = parameter.grad
            if place not in may_begin or times[place] > 1 or gradient is None:
                return
            # otherwise an error follows at the end
            if gradient.dtype == self._sums.like[place].dtype:
                parameter.grad = None
                is_read_only = before is not None and before[place] is not None
                own = gradient if is_read_only else self._copy(place, gradient)
                self._sums.give_early(tree, number, place, own)

        hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(take, place))
            for place, parameter in self._parameters.items()
            if parameter.requires_grad
        ]
        with removing_hooks(hooks):
            yield
        for place, number_of_parts in times.items():
            if number_of_parts == 1:
                self._came_at_once.add(place)
            else:
                self._came_at_once.discard(place)

    def _copy(self, place: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return a copy of a gradient in the memory that is kept for it."""
        if place not in self._kept:
            self._kept[place] = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        return self._kept[place].copy_(gradient)
