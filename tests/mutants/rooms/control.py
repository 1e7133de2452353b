"""Faults in what ranks tell each other, and in what ends a run that cannot go on."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

SUMS = "tests/comm/test_tree_sum.py"
MAILBOX = "tests/comm/test_mailbox.py"
GROUP = "tests/comm/test_process_group.py tests/comm/test_process_group_rendezvous.py"
AGREEMENT = "tests/comm/test_agreement.py tests/comm/test_agreement_facts.py"
WATCHDOG = "tests/control/test_watchdog.py"
SIGNALS = "tests/control/test_signals.py tests/control/test_signals_periodic_sync.py"
FAILURE = "tests/control/test_failure.py tests/control/test_failure_order.py"

COMM = in_room(
    "comm",
    MAILBOX,
    [
        Fault(
            "a gradient that one rank alone has is lost in the ordered sum",
            "add_tensors",
            "first if second is None else second",
            "first",
            SUMS,
        ),
        Fault(
            "a number of a bucket's padding comes into the sum",
            "_Bucket.tensors",
            "padded[:size]",
            "padded[-size:]",
            SUMS,
        ),
        Fault(
            "main-only values are never deleted from the store",
            "Mailbox.read",
            "self.store.delete_key(name)",
            "pass",
        ),
        Fault(
            "of a large main-only value the last piece is missing",
            "Mailbox.read",
            "range(pieces)",
            "range(max(1, pieces - 1))",
        ),
        Fault(
            "a rank that waits long for others does not warn",
            "await_late",
            "_tell(call, waited)",
            "pass",
            "tests/comm/test_late_ranks.py",
        ),
        Fault(
            "each waiting rank warns of those that are late",
            "_tell",
            "any((status.waits for status in known if status.rank < report.rank))",
            "False",
            "tests/comm/test_late_ranks.py",
        ),
        Fault(
            "addresses in the text of options are compared",
            "_shown",
            "re.sub(' at 0x[0-9a-fA-F]+', '', repr(value))",
            "repr(value)",
            AGREEMENT,
        ),
        Fault(
            "the order of parameters is not compared",
            "model_facts",
            "_digest(dict.fromkeys(facts, ''))",
            "''",
            AGREEMENT,
        ),
        Fault(
            "a restarted run takes the keys of the attempt before",
            "join_attempt",
            "os.urandom(8).hex()",
            "'attempt'",
            GROUP,
        ),
        Fault(
            "two processes with one rank are not refused",
            "_take_rank_slot",
            "holder != _me()",
            "False",
            GROUP,
        ),
        Fault(
            "a hang limit that is longer than that of collectives comes too late",
            "longest_wait",
            "max(seconds, hang_timeout + AFTER_WATCH_SECONDS)",
            "seconds",
            GROUP,
        ),
    ],
)

CONTROL = in_room(
    "control",
    WATCHDOG,
    [
        Fault(
            "--hang_timeout is ignored",
            "Watchdog._check_clock",
            "0 < self.hang_timeout <= still",
            "False",
            WATCHDOG,
        ),
        Fault(
            "--hang_warning is ignored",
            "Watchdog._check_clock",
            "0 < self.hang_warning <= still and still >= self._next_warning",
            "False",
        ),
        Fault(
            "each rank warns of a hang",
            "Heartbeat.is_lowest_alive",
            "all((rank in silent for rank in range(self.rank)))",
            "True",
        ),
        Fault(
            "a step does not set the clock of the watchdog back",
            "Watchdog._notice_steps",
            "mark != self._mark or self.position.has_no_limit()",
            "self.position.has_no_limit()",
        ),
        Fault(
            "main-only work is ended by the hang limit",
            "Watchdog._notice_steps",
            "mark != self._mark or self.position.has_no_limit()",
            "mark != self._mark",
        ),
        Fault(
            "a process that was suspended is taken for one that hangs",
            "Watchdog._notice_steps",
            "gap > SILENT_SECONDS",
            "False",
        ),
        Fault(
            "a failure of another rank ends this one without time to report",
            "Watchdog._check_failure",
            "now - self._failure_since > GRACE_SECONDS and (not EXIT_DELAY.is_held)",
            "not EXIT_DELAY.is_held",
        ),
        Fault(
            "a second SIGTERM does not end the process",
            "_is_second",
            "now - _Listeners.asked_at > REPEAT_SECONDS",
            "False",
            SIGNALS,
        ),
        Fault(
            "signal handlers are not put back after a run",
            "_put_back",
            "signal.signal(number, handler)",
            "pass",
            SIGNALS,
        ),
        Fault(
            "a handler of the recipe's own is replaced",
            "SignalListener._listen",
            "signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler, _end_soon}",
            "True",
            SIGNALS,
        ),
        Fault(
            "the sync stops for the last of the causes",
            "PeriodicSync.__call__",
            "zip(CAUSES, ranks_that_stop, strict=True)",
            "zip(CAUSES[::-1], ranks_that_stop[::-1], strict=True)",
            SIGNALS,
        ),
        Fault(
            "a worker of a loader dies of SIGTERM before its rank",
            "_start_worker",
            "signal.signal(ignored, lambda *_: None)",
            "pass",
            "tests/control/test_signals_loader_workers.py",
        ),
        Fault(
            "a failure is not told to the other ranks",
            "_tell",
            "None if PROCESS.report.tell(reason) else PROCESS.report.first_failure()",
            "None",
            FAILURE,
        ),
        Fault(
            "a limit of collectives is told for ranks that do wait",
            "_words",
            "[other for other in others if not other.waits]",
            "others",
            "tests/control/test_time_outs.py",
        ),
    ],
)

BASE = in_room(
    "base",
    "tests/base/test_rank_status.py",
    [
        Fault(
            "the rank under Slurm is that of the batch script",
            "in_slurm_step",
            "step.isdecimal() and int(step) < _FIRST_SPECIAL_SLURM_STEP",
            "step.isdecimal()",
            "tests/base/test_rank_status.py tests/launch/test_launchers.py",
        ),
        Fault(
            "in the table of a hang a rank that waits is among the guilty",
            "table",
            "status.waits",
            "False",
            "tests/base/test_rank_status.py tests/control/test_watchdog.py",
        ),
        Fault(
            "a process whose number another has taken counts as alive",
            "has_ended",
            "its_start != started or state not in DEAD_STATES",
            "state not in DEAD_STATES",
            "tests/base/test_rank_process_probe.py tests/control/test_watchdog.py",
        ),
    ],
)

FAULTS = [*BASE, *COMM, *CONTROL]
