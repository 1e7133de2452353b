from ddpkit.reporting.profile_table import (
    Operation as Operation,
    ProfileSummary as ProfileSummary,
    summary_of as summary_of,
)
from ddpkit.reporting.run_log import (
    Current as Current,
    RunLog as RunLog,
    Stats as Stats,
    append as append,
    has_run_log as has_run_log,
    move_logs_away as move_logs_away,
    plain as plain,
    plain_numbers as plain_numbers,
    run_event as run_event,
    set_run_log as set_run_log,
    tell_of_moved_logs as tell_of_moved_logs,
    warn_of_no_values as warn_of_no_values,
)
from ddpkit.reporting.run_start import (
    close_torn_line as close_torn_line,
    end_before as end_before,
    environment_facts as environment_facts,
    file_identity as file_identity,
    git_commit as git_commit,
    process_start as process_start,
    working_directory as working_directory,
)
from ddpkit.reporting.sample_logger import (
    ProgressSampleLogger as ProgressSampleLogger,
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
