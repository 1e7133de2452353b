from ddpkit.control.failure import (
    failure_notice as failure_notice,
    is_shown_without_traceback as is_shown_without_traceback,
    note_end_of_child as note_end_of_child,
    show_without_traceback as show_without_traceback,
    usage_errors as usage_errors,
    watch_uncaught as watch_uncaught,
)
from ddpkit.control.loader_workers import (
    at_exit as at_exit,
    kill_workers as kill_workers,
    start_loading as start_loading,
)
from ddpkit.control.periodic_sync import (
    CAUSES as CAUSES,
    TIME_LIMIT as TIME_LIMIT,
    PeriodicSync as PeriodicSync,
    Requests as Requests,
    SyncReport as SyncReport,
    require_stop_signals as require_stop_signals,
)
from ddpkit.control.watchdog import (
    EXIT_DELAY as EXIT_DELAY,
    Watchdog as Watchdog,
)
