"""Faults in what ranks tell each other, and in what ends a run that cannot go on."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

SUMS = "tests/comm/test_tree_sum.py"
MAILBOX = "tests/comm/test_mailbox.py"
GIVEN = "tests/ranks/test_given_group.py"
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
            "TensorRow.tensors",
            "padded[:size]",
            "padded[-size:]",
            SUMS,
        ),
        Fault(
            "pieces of two ranks are added in another order than that of the tree",
            "PieceSums.__init__",
            "one[3] << one[2]",
            "one[2]",
            SUMS,
        ),
        Fault(
            "the sum of a rank's chunk is not what it has added up last",
            "PiecesUnderWay._send_next_sum",
            "right.add_(left) if right is own else left.add_(right)",
            "left.add_(right)",
            SUMS,
        ),
        Fault(
            "all ranks that no launcher counts are on one node",
            "learn_node_size",
            "firsts.count(own)",
            "len(firsts)",
            "tests/ranks/test_main_only.py",
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
            "a process group of somebody else is not watched",
            "_is_watchable",
            "not isinstance(store, dist.HashStore)",
            "False",
            GIVEN,
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
            "ddpkit/comm/time_limits.py",
        ),
        Fault(
            "a failure of the main process is raised there alone",
            "raise_as_reader",
            "poster == 0",
            "poster == 1",
            "tests/comm/test_mailbox.py tests/ranks/test_main_only.py",
        ),
        Fault(
            "ranks with other facts are not refused",
            "require_agreement",
            "len({digest for digest, _ in values}) > 1",
            "False",
            "tests/comm/test_agreement.py tests/ranks/test_preflight.py",
        ),
        Fault(
            "a failure of work that all ranks do is told by the rank that has it alone",
            "on_every_rank",
            """
            if failures:
                raise RankFailedError(
                    f'the run cannot start, because it failed elsewhere: {failures}'
                )
            """,
            "pass",
            "tests/comm/test_agreement.py tests/ranks/test_failures_together.py",
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
            "handler in default or _is_launchers(handler)",
            "True",
            SIGNALS,
        ),
        Fault(
            "a child says an exception at each notice that it passes through",
            "_say_once",
            "SAID not in vars(error)",
            "True",
            FAILURE,
        ),
        Fault(
            "a forked rank leaves a signal to the launcher's handler",
            "SignalListener._listen",
            "handler in default or _is_launchers(handler)",
            "handler in default",
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
        Fault(
            "a rank does not end when another has failed",
            "Watchdog._check_failure",
            "now - self._failure_since > GRACE_SECONDS and (not EXIT_DELAY.is_held)",
            "False",
        ),
        Fault(
            "a process outlives the launcher that started it",
            "Watchdog.look",
            "self.parent is not None and os.getppid() != self.parent",
            "False",
        ),
        Fault(
            "a neighbour that was killed is not noticed",
            "Heartbeat._note_gone_neighbours",
            "known is not None and known.machine == self.machine and has_ended(known.pid, "
            "known.started)",
            "False",
        ),
        Fault(
            "a failure of an earlier call ends a later one",
            "Heartbeat.is_affected_by",
            "inside and (reason.is_final or reason.session == self.position.session)",
            "inside",
        ),
        Fault(
            "the ranks sync by their own clocks",
            "PeriodicSync.__call__",
            "int(self.interval * self.world_size / max(total_seconds_per_step, 1e-9))",
            "int(self.interval / max(own_seconds_per_step, 1e-9))",
            SIGNALS,
        ),
        Fault(
            "the reported mean loss is that of one rank",
            "PeriodicSync.__call__",
            "total_loss / total_count if total_count else float('nan')",
            "loss_sum / count if count else float('nan')",
            SIGNALS,
        ),
        Fault(
            "a save that one rank wants is made only if all want it",
            "PeriodicSync.__call__",
            "ranks_that_save > 0",
            "ranks_that_save >= self.world_size",
            SIGNALS,
        ),
        Fault(
            "a usage error ends with the code of success",
            "_end_plainly",
            "vars(error).get(PLAIN, USAGE_CODE)",
            "0",
            f"{FAILURE} tests/ranks/test_usage_errors.py",
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
            """
            if its_start != started or state not in DEAD_STATES:
                return its_start != started
            """,
            """
            if state not in DEAD_STATES:
                return False
            """,
            "tests/base/test_rank_process_probe.py tests/control/test_watchdog.py",
        ),
        Fault(
            "a position in validation is told as one in training",
            "stage_of",
            "str(batches.stage.name)",
            "'TRAIN'",
            "tests/base/test_rank_status.py tests/control/test_watchdog.py "
            "tests/control/test_failure.py",
        ),
    ],
)

FAULTS = [*BASE, *COMM, *CONTROL]
