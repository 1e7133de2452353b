from ddpkit.reporting.profile_table import (
    largest_operations as largest_operations,
    line_of_ranges as line_of_ranges,
    ranges_of as ranges_of,
    table_of_operations as table_of_operations,
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
