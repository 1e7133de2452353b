from ddpkit.reporting.profile_table import (
    Operation as Operation,
    ProfileSummary as ProfileSummary,
    summary_of as summary_of,
)
from ddpkit.reporting.run_start import (
    close_torn_line as close_torn_line,
    end_before as end_before,
    environment_facts as environment_facts,
    file_identity as file_identity,
    git_commit as git_commit,
    process_start as process_start,
)
from ddpkit.reporting.stage_report import (
    LoggedValues as LoggedValues,
    ProgressBar as ProgressBar,
    RunFacts as RunFacts,
)
from ddpkit.reporting.time_left import (
    Estimate as Estimate,
    TimeLeft as TimeLeft,
)
