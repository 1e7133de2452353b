"""A run never hangs: heartbeat, watchdog, failure report, signals, and the status of each rank."""
