"""The watch of a process: it tells the others that it lives, learns of their failures, and ends what would hang.

Two threads, and the store that the launcher hosts. One talks to the store, about once a second, and may be kept waiting
there by a network that is cut. The other never waits for anything: it looks at the clock, at the process that started
this one, at its neighbours on the same machine, and at what the first thread has learnt. No collective is used, because
after a failure none can be trusted to end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from typing import TYPE_CHECKING

from ddpkit.errors import RankFailedError
from ddpkit.failure import (
    LastWords,
    Reason,
    has_failed,
    record_for_launcher,
    set_reason_finder,
)
from ddpkit.interrupts import asked_twice
from ddpkit.liveness import has_ended, this_place
from ddpkit.loader_workers import kill_workers
from ddpkit.logger import get_logger
from ddpkit.roll_call import POSITION, Position, Whereabouts, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed import Store

logger = get_logger(__name__)

PULSE_SECONDS = 1.0  # between two talks with the store
FIRST_BEATS = 8  # that are quicker: so that the ranks soon know each other
LOOK_SECONDS = 0.25  # between two looks at the clock
SILENT_SECONDS = 4.0  # without a pulse
GRACE_SECONDS = 1.5  # for the main thread to end by itself, once another rank has failed
EXIT_SECONDS = 3.5  # for a process to end by itself, once it has failed
HOLD_SECONDS = 25.0  # for what is brought to safety; launchers kill after 30
REASON_SECONDS = 3.0  # for the reason of a lost connection to become known
JOIN_SECONDS = 2.0


class Hold:
    """Whether something is being brought to safety, for which the end of the process has to wait.

    Ranks: local.

    Example:
        >>> with HOLD.held():
        ...     HOLD.is_held
        True
    """

    def __init__(self) -> None:
        self._since: float | None = None

    @property
    def is_held(self) -> bool:
        """Say whether the end has to wait: not for ever."""
        return self._since is not None and time.monotonic() - self._since < HOLD_SECONDS

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Return a context that the watch does not cut short."""
        before, self._since = self._since, self._since or time.monotonic()
        try:
            yield
        finally:
            self._since = before


HOLD = Hold()


class Watch:
    """Watches over this process and those it works with, from when its group is made until it says goodbye.

    Args:
        words: what the ranks tell each other when they end.
        neighbours: the ranks on this machine.
        parent: process number of the launcher that this process shall not outlive; None: of no one.
        position: where this process is.

    Attributes:
        hang_warning: seconds without a step after which it is said where the ranks are; 0: never.
        hang_timeout: seconds without a step after which the process ends; 0: never.

    Ranks: local; it talks to the others through the store.

    Example:
        >>> from torch.distributed import HashStore
        >>> watch = Watch(LastWords(HashStore(), rank=0, world_size=1), range(1))
        >>> watch.start(); watch.stop()
    """

    def __init__(
        self,
        words: LastWords,
        neighbours: Iterable[int],
        parent: int | None = None,
        *,
        position: Position = POSITION,
    ) -> None:
        self.words = words
        self.rank, self.world_size = words.rank, words.world_size
        self._near = frozenset(neighbours)
        self.neighbours = [rank for rank in self._near if rank != self.rank]
        self.parent, self.position = parent, position
        self.hang_warning = self.hang_timeout = 0.0
        self.pulses = Pulses()
        self._store_lost: str | None = None
        self._answered = self._moved = time.monotonic()
        self._mark = position.mark()
        self._failure: Reason | None = None
        self._failure_since = self._failing_since = 0.0
        self._is_said = False
        self._next_warning = 0.0
        self._beats = 0
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to watch."""
        set_reason_finder(self.await_reason)
        for work, name in ((self._talk, "ddpkit-pulse"), (self._look, "ddpkit-watch")):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End the watch; the store may go afterwards."""
        set_reason_finder(None)
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)

    @property
    def still_for(self) -> float:
        """Seconds since this rank's last step, of those that count."""
        return time.monotonic() - self._moved

    def await_reason(self) -> Reason | None:
        """Wait a little for it to become known which rank has failed or disappeared."""
        end = time.monotonic() + REASON_SECONDS
        while time.monotonic() < end:
            reason = self._failure or self.words.first_failure()
            if reason is not None:
                return reason
            if self._store_lost is not None:
                return self._lost_store_reason()
            time.sleep(0.05)
        silent = self.pulses.silent(time.monotonic())
        for rank in sorted(silent):
            if rank != self.rank:
                return self._gone(self.pulses.latest[rank], f"has told nothing for {silent[rank]:.0f} s")
        return None

    # ------------------------------------------------------------------ the thread that looks

    def _look(self) -> None:
        looks = (self._notice_steps, self._mind_launcher, self._mind_failure, self._mind_store, self._mind_clock)
        while not self._over.wait(LOOK_SECONDS):
            _obey_signals()
            try:
                for look in looks:
                    look()
            except Exception as error:  # noqa: BLE001 -- who watches must go on
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        logger.warning_once("The watch of rank %d: %s: %s", self.rank, type(error).__name__, error)

    def _notice_steps(self) -> None:
        mark = self.position.mark()
        if mark != self._mark or self.position.excused or self.position.progress is None:
            self._mark, self._moved = mark, time.monotonic()
            self._next_warning = self.hang_warning

    def _is_in_trouble(self) -> bool:
        return 0 < self.hang_warning / 2 <= self.still_for

    def _mind_launcher(self) -> None:
        if self.parent is not None and os.getppid() != self.parent:
            self._end(f"the launcher (pid {self.parent}) that started rank {self.rank} is gone: the process ends.")

    def _gone(self, one: Whereabouts, how: str) -> Reason:
        here = self.position.whereabouts(self.rank, 0.0, look=False)
        told = here.place() or one.place()  # all ranks are at the same step, and this one knows its own to the moment
        place = f" {told}" if told else ""
        return Reason(one.rank, f"disappeared{place}: it {how}.", one.host, one.pid, session=one.session, is_final=True)

    def _mind_failure(self) -> None:
        now = time.monotonic()
        if has_failed() and self.position.progress is None:
            self._failing_since = self._failing_since or now
            if now - self._failing_since > EXIT_SECONDS and not HOLD.is_held:
                self._end(None)
            return
        reason = self._failure
        if reason is None or not self._concerns(reason):
            self._failure, self._failure_since = None, 0.0
            return
        if not reason.is_final and not self.position.is_waiting():
            self._failure_since = 0.0  # all ranks may be about to raise, and to catch, the same
            return
        self._failure_since = self._failure_since or now
        if now - self._failure_since > GRACE_SECONDS and not HOLD.is_held:
            said = f"rank {self.rank} ends: {reason.summary()}"
            self._end(said if self._is_said else f"{said}\n{reason.trace}".rstrip())

    def _mind_store(self) -> None:
        if self._store_lost is not None and self.position.progress is not None and not has_failed():
            self._failure = self._failure or self._lost_store_reason()
            return
        silent = time.monotonic() - self._answered
        if self.position.progress is not None and 0 < self.hang_timeout < silent and not self.position.excused:
            self._end(
                f"rank {self.rank}: no answer for {silent:.0f} s from the store on {os.environ.get('MASTER_ADDR')}, "
                "the machine of the first rank: it is silent, or the network to it is cut."
            )

    def _lost_store_reason(self) -> Reason:
        known = self.pulses.latest.get(0)
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        text = f"the store on {address} is gone with the process that held it ({self._store_lost})."
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Reason(0, f"lost its launcher: {text}", is_final=True)
        known = known or Whereabouts(0)  # it was gone before it could say where it is
        return self._gone(known, text.replace("the store", "was lost with the store", 1))

    def _mind_clock(self) -> None:
        still = self.still_for
        if self.position.progress is None or self._failure is not None or has_failed():
            return
        if 0 < self.hang_timeout <= still:
            self._end_hang(still)
        elif 0 < self.hang_warning <= still and still >= self._next_warning:
            self._next_warning = 2 * max(self._next_warning, self.hang_warning)
            if self._leads():
                logger.warning("%s", self._roll(still), main_process_only=False)

    def _roll(self, still: float) -> str:
        silent = {rank: gap for rank, gap in self.pulses.silent(time.monotonic()).items() if rank != self.rank}
        end = f" After {self.hang_timeout:.0f} s the run ends (--hang_timeout)." if self.hang_timeout else ""
        lines = table(sorted(self.pulses.latest.values(), key=lambda one: one.rank), silent)
        return f"No step for {still:.0f} s.{end} Where the ranks are:\n{lines}"

    def _end_hang(self, still: float) -> None:
        text = f"rank {self.rank} has made no step for {still:.0f} s (--hang_timeout={self.hang_timeout:.0f})."
        if self._leads():
            text = f"{text} {self._roll(still)}"
        os.write(2, f"\nrank {self.rank}: where all threads are:\n".encode())
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._end(text)

    def _end(self, text: str | None) -> None:
        """End the process, whatever its main thread is doing."""
        if text is not None:
            record_for_launcher(RankFailedError(text))
            with contextlib.suppress(OSError):
                os.write(2, f"\n[ddpkit] {text}\n".encode())
        kill_workers()
        os._exit(1)


def _obey_signals() -> None:
    """End the process if it was asked to twice, and its main thread is where it cannot hear that."""
    number = asked_twice()
    if number:
        kill_workers()
        os._exit(128 + number)
