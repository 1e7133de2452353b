from ddpkit.control.failure import (
    PLAIN as PLAIN,
)
from ddpkit.control.failure import (
    failure_notice as failure_notice,
)
from ddpkit.control.failure import (
    note_end_of_child as note_end_of_child,
)
from ddpkit.control.failure import (
    record_for_launcher as record_for_launcher,
)
from ddpkit.control.failure import (
    tell_plainly as tell_plainly,
)
from ddpkit.control.failure import (
    told_plainly as told_plainly,
)
from ddpkit.control.failure import (
    usage_errors as usage_errors,
)
from ddpkit.control.failure import (
    watch_uncaught as watch_uncaught,
)
from ddpkit.control.failure_report import (
    HERE as HERE,
)
from ddpkit.control.failure_report import (
    FailureReport as FailureReport,
)
from ddpkit.control.failure_report import (
    Reason as Reason,
)
from ddpkit.control.failure_report import (
    explained as explained,
)
from ddpkit.control.failure_report import (
    is_second_hand as is_second_hand,
)
from ddpkit.control.loader_workers import (
    at_exit as at_exit,
)
from ddpkit.control.loader_workers import (
    kill_workers as kill_workers,
)
from ddpkit.control.loader_workers import (
    start_loading as start_loading,
)
from ddpkit.control.loader_workers import (
    watch_loader_workers as watch_loader_workers,
)
from ddpkit.control.periodic_sync import (
    Beat as Beat,
)
from ddpkit.control.periodic_sync import (
    BeatReport as BeatReport,
)
from ddpkit.control.periodic_sync import (
    Requests as Requests,
)
from ddpkit.control.periodic_sync import (
    terminating_later as terminating_later,
)
from ddpkit.control.rank_status import (
    POSITION as POSITION,
)
from ddpkit.control.rank_status import (
    host_name as host_name,
)
from ddpkit.control.rank_status import (
    is_library as is_library,
)
from ddpkit.control.rank_status import (
    stage_of as stage_of,
)
from ddpkit.control.stopping import (
    MARKER as MARKER,
)
from ddpkit.control.stopping import (
    TIME_LIMIT as TIME_LIMIT,
)
from ddpkit.control.stopping import (
    exit_code as exit_code,
)
from ddpkit.control.stopping import (
    parse_duration as parse_duration,
)
from ddpkit.control.stopping import (
    remove_marker as remove_marker,
)
from ddpkit.control.stopping import (
    require_stop_signals as require_stop_signals,
)
from ddpkit.control.stopping import (
    seconds_since_start as seconds_since_start,
)
from ddpkit.control.stopping import (
    write_marker as write_marker,
)
from ddpkit.control.watchdog import (
    Watch as Watch,
)
