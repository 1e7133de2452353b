"""The kinds of verdicts, in the order in which they are looked for and said."""

from __future__ import annotations

from ddpkit.step_times.verdicts.communication import Communication
from ddpkit.step_times.verdicts.host_bound import HostBound
from ddpkit.step_times.verdicts.late_rank import LateRank
from ddpkit.step_times.verdicts.memory_growth import MemoryGrowth
from ddpkit.step_times.verdicts.slow_data import SlowData
from ddpkit.step_times.verdicts.throttling import Throttling
from ddpkit.step_times.verdicts.uneven_batches import UnevenBatches

#: What looks for each kind of verdict.
FINDERS = (
    LateRank(),
    UnevenBatches(),
    SlowData(),
    Communication(),
    HostBound(),
    Throttling(),
    MemoryGrowth(),
)

#: The names of the kinds, in the same order.
KINDS: tuple[str, ...] = tuple(finder.kind for finder in FINDERS)
