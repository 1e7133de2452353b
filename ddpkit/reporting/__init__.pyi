from ddpkit.reporting.stage_report import (
    LoggedValues as LoggedValues,
    ProgressBar as ProgressBar,
    RunFacts as RunFacts,
)
from ddpkit.reporting.time_left import (
    Estimate as Estimate,
    TimeLeft as TimeLeft,
)
