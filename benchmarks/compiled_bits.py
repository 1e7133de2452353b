"""Why a compiled transformer ends with other weights, on a GPU: two trainings, step by step.

    python -m benchmarks.compiled_bits
    python -m benchmarks.compiled_bits --device cpu   # tiny, to see that it runs

Each line trains twice from the same weights on the same batch, and says after which step weights
differ, and which are the first in the model. Two loops by hand that differ show that what torch
compiles does not repeat itself; ddpkit is to blame only where two loops by hand are equal.

- `as they are`: without a compiler. They were equal on 28 November 2026.
- `compiled`: without CUDA graphs. If these differ too, graphs are not the reason.
- `CUDA graphs`: the row that ended with other weights.
- `deterministic`: the same with `torch.use_deterministic_algorithms`. If these are equal, an
  operation without a fixed order is the reason.
- `each word once`: no row of the embedding is used twice. If these are equal, it is the embedding:
  what torch compiles of its backward pass adds up with atomic additions
  (`torch/_inductor/decomposition.py`, `embedding_dense_backward`), in an order that changes, and
  the kernel that it replaces sorts.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import TINY, WORDS_ONCE, Hand, Passes, Row, Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STEPS = 8
NAMED = 3  # parameters of a line
GRAPHS = "reduce-overhead"
#: Name of each case, what is trained, and whether kernels have to be deterministic.
CASES = (
    ("CUDA graphs", Row("", mode=GRAPHS), False),
    ("each word once", Row("", WORDS_ONCE, mode=GRAPHS), False),
    ("deterministic", Row("", mode=GRAPHS), True),
    ("compiled", Row("", mode="default"), False),
    ("as they are", Row(""), False),
)


class Training:
    """One of two trainings, which makes a step at a time."""

    def __init__(self, step: Callable[[], object], net: torch.nn.Module) -> None:
        self.step = step
        self.parameters = dict(net.named_parameters())


def by_hand(passes: Passes) -> Training:
    """Return the loop by hand of a benchmark's row."""
    return Training(lambda: passes.hand.train(passes.of_hand(1)), passes.hand.plain)


def by_hand_again(passes: Passes) -> Training:
    """Return another loop by hand, which has made as many steps."""
    hand = Hand(passes.row, passes.sizes, passes.brain.device)
    hand.train(passes.of_hand(1))
    return Training(lambda: hand.train(passes.of_hand(1)), hand.plain)


def by_ddpkit(passes: Passes) -> Training:
    """Return the training by ddpkit."""
    return Training(lambda: passes.run("brain", 1)(), passes.brain.raw_modules.net)  # noqa: PLW0108 -- a pass of its own each time


def differing(one: Training, other: Training) -> list[str]:
    """Return the names of the weights that differ, with the largest difference."""
    found = []
    for name, parameter in one.parameters.items():
        apart = (parameter - other.parameters[name]).abs().max().item()
        if apart or not torch.equal(parameter, other.parameters[name]):
            found.append(f"{name} ({apart:.1e})")
    return found


def compared(one: Training, other: Training) -> str:
    """Make steps in both; say after which they differ first, and in what."""
    for number in range(1, STEPS + 1):
        if number > 1:  # the first is made
            one.step()
            other.step()
        names = differing(one, other)
        if names:
            return f"OTHER after step {number}: {len(names)} weights, {', '.join(names[:NAMED])}"
    return f"same after {STEPS} steps"


def lines(cases: Iterable[Any], sizes: Sizes, device: str) -> Iterable[str]:
    """Yield a line for each pair of trainings of each case."""
    for name, row, is_deterministic in cases:
        torch.use_deterministic_algorithms(is_deterministic)
        passes = Passes(row, sizes, device)
        hand = by_hand(passes)
        again = by_hand_again(passes)
        yield f"{name:16}{'by hand, twice':22}{compared(hand, again)}"
        fresh = Passes(row, sizes, device)
        yield f"{name:16}{'by hand, by ddpkit':22}{compared(by_hand(fresh), by_ddpkit(fresh))}"
    torch.use_deterministic_algorithms(mode=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    # cuBLAS reads it when it is first used; it is what deterministic kernels of torch need
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    on_cpu = arguments.device == "cpu"
    sizes = TINY if on_cpu else replace(Sizes(), layers=2)
    # a compiler for CPUs need not be there, and shows nothing of a GPU
    cases = [case for case in CASES if case[1].mode is None] if on_cpu else CASES
    for line in lines(cases, sizes, arguments.device):
        print(line, flush=True)


if __name__ == "__main__":
    main()
