from ddpkit.step_times.verdicts.finder import (
    VerdictFinder as VerdictFinder,
)
from ddpkit.step_times.verdicts.order import (
    KINDS as KINDS,
)
from ddpkit.step_times.verdicts.verdict import (
    Verdict as Verdict,
)
