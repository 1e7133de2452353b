"""Decides which answer is wrong when ranks have computed the same thing and have different bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


PAIR = 2


@dataclass(frozen=True)
class Judgement:
    """What the answers of all ranks say.

    Attributes:
        wrong: ranks whose first answer is not that of the others.
        unsteady: ranks that have given two different answers.
        is_repeatable: whether those that are not wrong have given the same answer each time.

    Ranks: local; alike on every rank.
    """

    wrong: frozenset[int] = frozenset()
    unsteady: frozenset[int] = frozenset()
    is_repeatable: bool = True


def judged(answers: Mapping[int, Sequence[str]]) -> Judgement:
    """Say which ranks are wrong: those whose first answer is not that of more than half of all
    ranks. Of two, which have no majority, the one that does not give its own answer again.

    Args:
        answers: of each rank in the order in which it gave them, as digests.

    Ranks: local.

    Example:
        >>> judged({0: ["a"], 1: ["b", "a"], 2: ["a", "a"]}).wrong
        frozenset({1})
        >>> judged({0: ["a", "a"], 1: ["b", "a"]}).wrong
        frozenset({1})
        >>> judged({0: ["a", "a"], 1: ["b", "b"]})
        Judgement(wrong=frozenset(), unsteady=frozenset(), is_repeatable=True)
        >>> judged({0: ["a", "c"], 1: ["b", "d"]}).is_repeatable
        False
    """
    first = Counter(given[0] for given in answers.values())
    right, votes = first.most_common(1)[0]
    unsteady = frozenset(rank for rank, given in answers.items() if len(set(given)) > 1)
    wrong = frozenset[int]()
    if 2 * votes > len(answers):
        wrong = frozenset(rank for rank, given in answers.items() if given[0] != right)
    elif len(answers) == PAIR and len(unsteady) == 1:
        wrong = unsteady
    return Judgement(wrong, unsteady, is_repeatable=unsteady <= wrong)
