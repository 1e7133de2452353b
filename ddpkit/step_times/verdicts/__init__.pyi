from ddpkit.step_times.verdicts.finder import (
    VerdictFinder as VerdictFinder,
)
from ddpkit.step_times.verdicts.no_verdict import (
    words_of_no_verdict as words_of_no_verdict,
)
from ddpkit.step_times.verdicts.order import (
    KINDS as KINDS,
)
from ddpkit.step_times.verdicts.verdict import (
    Verdict as Verdict,
)
