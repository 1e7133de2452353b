from ddpkit.control.exit_delay import EXIT_DELAY as EXIT_DELAY
from ddpkit.control.exit_hooks import at_exit as at_exit
from ddpkit.control.failure import (
    failure_notice as failure_notice,
    is_shown_without_traceback as is_shown_without_traceback,
    show_without_traceback as show_without_traceback,
    usage_errors as usage_errors,
    watch_uncaught as watch_uncaught,
)
from ddpkit.control.loader_workers import (
    kill_workers as kill_workers,
    start_loading as start_loading,
)
from ddpkit.control.periodic_sync import (
    PeriodicSync as PeriodicSync,
    Requests as Requests,
    SyncReport as SyncReport,
)
from ddpkit.control.signals import (
    CAUSES as CAUSES,
    FINAL_REPORT_SECONDS as FINAL_REPORT_SECONDS,
    REPEAT_SECONDS as REPEAT_SECONDS,
    TIME_LIMIT as TIME_LIMIT,
    SignalListener as SignalListener,
    signal_named as signal_named,
)
from ddpkit.control.watchdog import Watchdog as Watchdog
