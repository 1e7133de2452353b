"""The library's own parts: which option asks for which part, and in which order they run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ddpkit.launch import find_slice
from ddpkit.options import RUN_OPTIONS
from ddpkit.parts.part import Part

if TYPE_CHECKING:
    from typing_extensions import Self

    from ddpkit.training import RunContext, TrainStep

#: Options, and the part that each of them asks for where it is not its default: module and class.
#:
#: The parts hear each event in this order, after those that were given to the Brain. Their contexts
#: around ``fit`` are inside of those. A part is loaded if it is asked for.
ORDER = (
    (("lr_scaling",), "ddpkit.parts.learning_rate_scaling", "LearningRateScaling"),
    (("profile_training",), "ddpkit.parts.profiling", "Profiling"),
    (
        ("memory_snapshot_on_oom", "profile_training"),
        "ddpkit.parts.memory_snapshots",
        "MemorySnapshots",
    ),
    (("audit_every",), "ddpkit.parts.rank_audit", "RankAudit"),
    # after what else may change weights
    (("hash_every",), "ddpkit.parts.hash_chain", "HashChain"),
    # last: what the others leave behind after a step is garbage, too
    (("gc_interval",), "ddpkit.parts.garbage_collection", "GarbageCollection"),
)


class OwnPart(Part):
    """A part of the library that an option asks for. It has no row of its own, and registers
    with the checkpointer what is saved of it.

    Attributes:
        train_step: makes the steps of the run, and has its averaged weights and its scheduler; None
            outside of a run.

    Ranks: all; every rank has the same options.
    """

    train_step: TrainStep | None = None

    @classmethod
    def of_run(cls, context: RunContext) -> Self:
        """Make it for a call of ``fit``.

        Args:
            context: of the run; its options are as they are when the call begins.
        """
        raise NotImplementedError


def own_parts(context: RunContext, train_step: TrainStep | None = None) -> list[Part]:
    """Return the parts that the options of a run ask for, in their order; in a replay the one that
    ends it comes last.

    Args:
        context: of the run.
        train_step: of the run.

    Ranks: local; alike on every rank.

    Example:
        >>> from types import SimpleNamespace
        >>> from ddpkit.run_opts import RunOptions
        >>> own_parts(SimpleNamespace(options=RunOptions()))
        []
        >>> context = SimpleNamespace(options=RunOptions(gc_interval=100))
        >>> [part.name for part in own_parts(context)]
        ['GarbageCollection']
    """
    found: list[Part] = []
    for options, module, name in ORDER:
        if any(context.options[option] != RUN_OPTIONS[option].default for option in options):
            kind: type[OwnPart] = getattr(importlib.import_module(module), name)
            part = kind.of_run(context)
            part.train_step = train_step
            found.append(part)
    plan = find_slice()
    if plan is not None and plan.replayed_to:
        from ddpkit.parts.replay_end import ReplayEnd  # nothing else needs it

        found.append(ReplayEnd(plan))
    return found
