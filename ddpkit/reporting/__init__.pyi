from ddpkit.reporting.stage_report import (
    LoggedValues as LoggedValues,
    ProgressBar as ProgressBar,
)
