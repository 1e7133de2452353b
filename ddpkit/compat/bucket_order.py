"""What DDP keeps to itself: whether it waits for gradients, and the order in which it adds them up.

How a resumed run gets the order of the one before:

DDP puts gradients into buckets, and after the first backward pass puts them anew, in the order in which they became
ready. From three ranks on, the order in which a number is added up over the ranks depends on its place in the bucket,
so that the last bit of a gradient does. The run that was never stopped has had its first backward pass long ago. A
resumed one must not add up its first gradients in another order: so the order is saved, and shown to DDP before.

Source: ``Reducer::rebuild_buckets`` and ``Reducer::push_rebuilt_params`` in torch 2.13's ``reducer.cpp``. That the
order of this module is taken over is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def trained_in(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients DDP averages, as it numbers them.

    Ranks: local.

    Example:
        >>> [one.shape[0] for one in trained_in(torch.nn.Linear(2, 3))]
        [3, 3]
    """
    unique = dict.fromkeys(parameter for parameter in module.parameters() if parameter.requires_grad)
    return list(unique)


class GradientOrder:
    """Notes in which order the gradients of a module become ready in the first backward pass that averages them.

    Args:
        module: wrapped in DDP, which has made no backward pass yet.

    Attributes:
        order: numbers of the parameters; shorter than their number until that pass is over.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> layer = torch.nn.Linear(1, 1)
        >>> layer.require_backward_grad_sync = True
        >>> noted = GradientOrder(layer)
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> sorted(noted.order), noted.close()
        ([0, 1], True)
    """

    def __init__(self, module: Any) -> None:
        self.order: list[int] = []
        self._module = module
        parameters = trained_in(module)
        self._number = len(parameters)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._noting(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
        ]

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have come."""
        return len(self.order) == self._number

    def _noting(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:  # noqa: ARG001 -- torch gives it
            if self._module.require_backward_grad_sync and not self.is_complete:
                self.order.append(number)

        return note

    def close(self) -> bool:
        """Stop noting if all gradients have come; say whether they have.

        Ranks: local.
        """
        if self.is_complete:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        return self.is_complete


def show_order(module: Any, order: list[int]) -> bool:
    """Have DDP make its buckets in a given order, before its first real backward pass.

    A backward pass of nothing but zeros is made, in which the gradients become ready in that order.

    Args:
        module: as it was just wrapped in DDP.
        order: numbers of its parameters, as :attr:`GradientOrder.order` has them.

    Returns:
        Whether it was done; False if the order belongs to another module.

    Ranks: collective.

    State: gradients are dropped.

    Example:
        >>> show_order(torch.nn.Linear(1, 1), [7])
        False
    """
    parameters = trained_in(module)
    if sorted(order) != list(range(len(parameters))):
        return False
    if module.static_graph:  # its first backward pass only looks at what is used; the second makes the order
        module.reducer.prepare_for_forward()
        _go_backwards(module, parameters, order)
        module.reducer._delay_all_reduce()  # noqa: SLF001 -- what DDP calls at the end of that pass
        module._static_graph_delay_allreduce_enqueued = True  # noqa: SLF001 -- no other pass is the first
        module.reducer.prepare_for_forward()
    _go_backwards(module, parameters, order)
    for parameter in parameters:
        parameter.grad = None
    return True


def _go_backwards(module: Any, parameters: list[torch.nn.Parameter], order: list[int]) -> None:
    total = torch.zeros((), device=parameters[0].device)
    for number in reversed(order):  # what is added last is the first to go backwards
        total = total + (parameters[number].reshape(-1)[:1].float() * 0.0).sum()
    module.reducer.prepare_for_backward([])
    total.backward()  # type: ignore[no-untyped-call]


def waits_for_gradients(module: Any) -> bool:
    """Say whether DDP still waits for a gradient, so that those present are averages on no rank.

    DDP says so by itself in its next forward pass, after an optimizer step with such gradients: so it goes where it
    cannot be asked.

    Args:
        module: wrapped in DDP, after a backward pass that averages.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> waits_for_gradients(SimpleNamespace(reducer=SimpleNamespace(_check_reducer_finalized=lambda: None)))
        False
    """
    ask = getattr(getattr(module, "reducer", None), "_check_reducer_finalized", bool)
    try:
        ask()
    except RuntimeError:
        return True
    return False
