"""The pulse of a process: about once a second it tells the other ranks where it is, and learns how they are.

What shows the others that a rank lives is one short text in the store, and nothing that may fail comes before it.
Whatever else is read and made of what is read is an errand. One that fails by an error of its own, and not because the
store has gone, is spoken of once, and tried again less and less often: a fault of this package in one rank must not
make the others take it for dead, nor end a run that is sound.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpkit.base.process_probe import has_ended, state_and_start, this_place
from ddpkit.control.failure import LastWords, Reason
from ddpkit.control.rank_status import POSITION, Position, Whereabouts, host_name
from ddpkit.logger import get_logger
from ddpkit.types import Stage

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from torch.distributed import Store

logger = get_logger(__name__)
_told: set[tuple[str, str]] = set()

PULSE_SECONDS = 1.0  # between two talks with the store
FIRST_BEATS = 8  # that are quicker: so that the ranks soon know each other
SILENT_SECONDS = 4.0  # without a pulse
SURVEY_SECONDS = 2.2  # in which every rank that lives tells at least once
MOST_NAMED = 16  # of the ranks of a machine that is gone
MOST_RESTS = 8  # pulses between two attempts at an errand that fails
GONE = "DistNetworkError"  # of torch.distributed: no answer will come any more


def pulse_key(rank: int) -> str:
    """Return the key under which a rank tells where it is.

    Ranks: local.

    Example:
        >>> pulse_key(3)
        'ddpkit/pulse/3'
    """
    return f"ddpkit/pulse/{rank}"


def own_connection(store: Store) -> Store:
    """Return a connection of one's own to a store: whoever waits on the shared one keeps all others waiting.

    Args:
        store: as the process group has it.

    Returns:
        A clone, or where this torch cannot clone the store itself.

    Ranks: local.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore(); store.set("a", "1"); own_connection(store).get("a")
        b'1'
    """
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


def tell_once(rank: int, what: str, error: Exception) -> None:
    """Log an error of the watch itself, once: it is no reason to end anything.

    Args:
        rank: this process.
        what: it cannot do.
        error: why.

    Ranks: local.

    Example:
        >>> tell_once(0, "do what it shall", ValueError("boom"))
    """
    kind = type(error).__name__
    if (what, kind) not in _told:  # not the text, which may have a number in it
        _told.add((what, kind))
        text = "The watch of rank %d cannot %s, which ends nothing and is tried again: %s: %s"
        logger.warning(text, rank, what, kind, error, main_process_only=False)


class Pulses:
    """What the ranks tell of themselves, and which of them have fallen silent.

    Ranks: local.

    Example:
        >>> pulses = Pulses()
        >>> pulses.take(Whereabouts(rank=1, beats=5), now=10.0); pulses.take(Whereabouts(rank=1, beats=5), now=16.0)
        >>> pulses.silent(now=16.0)
        {1: 6.0}
    """

    def __init__(self) -> None:
        self.latest: dict[int, Whereabouts] = {}
        self._changed: dict[int, float] = {}

    def take(self, one: Whereabouts, now: float) -> None:
        """Note what a rank has told."""
        known = self.latest.get(one.rank)
        if known is None or known.beats != one.beats:
            self._changed[one.rank] = now
        self.latest[one.rank] = one

    def silent(self, now: float) -> dict[int, float]:
        """Return the seconds for which ranks have told nothing new, of those that should have."""
        gaps = {rank: now - changed for rank, changed in list(self._changed.items())}
        return {rank: gap for rank, gap in gaps.items() if gap > SILENT_SECONDS}


class Errand:
    """Something that is done after a pulse.

    Args:
        work: does it.

    Ranks: local.

    Example:
        >>> Errand(print).failed(beat=5).is_due(6)
        False
    """

    def __init__(self, work: Callable[[Store], None]) -> None:
        self.work = work
        self._next = self._rests = 0

    def is_due(self, beat: int) -> bool:
        """Say whether it is to be tried after this pulse."""
        return beat >= self._next

    def failed(self, beat: int) -> Errand:
        """Note that it has failed after a pulse: it rests for twice as many as the last time."""
        self._rests = min(2 * self._rests or 1, MOST_RESTS)
        self._next = beat + 1 + self._rests
        return self

    def worked(self) -> None:
        """Note that it has not."""
        self._rests = 0


class Pulse:
    """Tells the other ranks where this one is, and learns who has failed, or disappeared, or fallen silent.

    Args:
        words: what the ranks tell each other when they end.
        neighbours: the ranks on this machine.
        still_for: tells for how many seconds this rank has been where it is.
        is_in_trouble: tells whether that is long.
        position: where this process is.

    Attributes:
        pulses: what is known of the ranks.
        neighbours: the other ranks whose processes can be looked for.
        keeper: the first rank, as it was when the ranks met; None: unknown.
        failure: which rank has failed, as far as it concerns this one.
        is_said: whether that is told on this machine without this rank's help.
        store_lost: why the store cannot be asked any more; None: it can.
        answered: when it last answered, on the monotonic clock.

    Ranks: local; it talks to the others through the store.

    Example:
        >>> import threading
        >>> from torch.distributed import HashStore
        >>> store, over = HashStore(), threading.Event()
        >>> pulse = Pulse(LastWords(store, rank=0, world_size=1), [])
        >>> pulse.beat(store); Whereabouts.read(store.get("ddpkit/pulse/0")).beats
        1
    """

    def __init__(
        self,
        words: LastWords,
        neighbours: Iterable[int],
        still_for: Callable[[], float] = float,
        is_in_trouble: Callable[[], bool] = bool,
        *,
        position: Position = POSITION,
    ) -> None:
        self.words = words
        self.rank, self.world_size = words.rank, words.world_size
        self._near = frozenset(neighbours)
        self.neighbours = [rank for rank in sorted(self._near) if rank != self.rank]
        self.still_for, self.is_in_trouble, self.position = still_for, is_in_trouble, position
        self.pulses = Pulses()
        self.keeper: Whereabouts | None = None
        self.failure: Reason | None = None
        self.is_said = False
        self.store_lost: str | None = None
        self.answered = time.monotonic()
        self.beats = 0
        pid = os.getpid()
        self._here = Whereabouts(self.rank, host_name(), pid, started=state_and_start(pid)[1])
        self._machine = ""
        self._errands = [Errand(self._meet), Errand(self._learn), Errand(self._call_the_roll)]

    def beat_until(self, over: threading.Event, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Beat until an event is set, or the store has gone.

        Args:
            over: ends it.
            is_wanted: asked before each pulse whether there shall be one.
        """
        pause = 0.0
        store: Store | None = None
        while not over.wait(pause):
            pause = PULSE_SECONDS if self.beats >= FIRST_BEATS else PULSE_SECONDS / FIRST_BEATS
            try:
                if is_wanted():
                    store = own_connection(self.words.store) if store is None else store
                    self.beat(store)
                self.answered = time.monotonic()
            except RuntimeError as error:  # torch.distributed.DistError derives from it
                if not over.is_set():
                    self.store_lost = (str(error).splitlines() or [""])[0][:200]
                return
            except Exception as error:  # noqa: BLE001 -- not the store's fault: the next pulse may be better
                tell_once(self.rank, "beat", error)
                self.answered = time.monotonic()

    def beat(self, store: Store) -> None:
        """Tell where this rank is, and run the errands.

        Args:
            store: a connection of this thread's own.

        Raises:
            RuntimeError: the store does not answer.
        """
        self.beats += 1
        store.set(pulse_key(self.rank), self._told())
        for errand in self._errands:
            if not errand.is_due(self.beats):
                store.check([pulse_key(self.rank)])  # as good a sign that the store is there
                continue
            try:
                errand.work(store)
                errand.worked()
            except Exception as error:
                if type(error).__name__ == GONE:
                    raise
                store.check([pulse_key(self.rank)])  # raises if, after all, the store was it
                errand.failed(self.beats)
                tell_once(self.rank, errand.work.__name__.strip("_").replace("_", " "), error)

    def first_rank(self) -> Whereabouts | None:
        """Return what is known of the first rank, which keeps the store where no launcher does."""
        return self.pulses.latest.get(0) or self.keeper

    def leads(self) -> bool:
        """Say whether this is the first rank that still tells where it is."""
        silent = self.pulses.silent(time.monotonic())
        return all(rank in silent for rank in range(self.rank))

    def concerns(self, reason: Reason) -> bool:
        """Say whether this process can not go on after another one's failure."""
        inside = self.position.progress is not None
        return inside and (reason.is_final or reason.session == self.position.session)

    def gone(self, one: Whereabouts, how: str) -> Reason:
        """Describe that a rank has disappeared.

        Args:
            one: what it has told last.
            how: is known of it, such as ``"was killed"``.
        """
        here = self.position.whereabouts(self.rank, 0.0, look=False)
        text = f"disappeared{_place_of(one, here)}: it {how.rstrip('.')}."
        return Reason(one.rank, text, one.host, one.pid, session=one.session, is_final=True)

    def _told(self) -> str:
        try:
            seconds = self.still_for()
            is_away = self.position.has_no_limit() and seconds >= SILENT_SECONDS
            here = self.position.whereabouts(self.rank, seconds, look=is_away or self.is_in_trouble())
            here.beats = self.beats
            text = here.to_json()
        except Exception as error:  # noqa: BLE001 -- that it lives matters more than where it is
            tell_once(self.rank, "say where it is", error)
            here = replace(self._here, beats=self.beats)
            text = here.to_json()
        self._here = here
        self.pulses.take(here, time.monotonic())
        return text

    # ------------------------------------------------------------------ errands

    def _meet(self, store: Store) -> None:
        """Read the pulses of the neighbours; whom this process cannot see by its number is none."""
        if not self._machine:
            self._machine = "/".join(this_place())
            store.set(f"{pulse_key(self.rank)}/machine", self._machine)
        self._read([rank for rank in self.neighbours if rank in self.pulses.latest], store)
        for rank in [rank for rank in self.neighbours if rank not in self.pulses.latest]:
            known = f"{pulse_key(rank)}/machine"
            if not store.check([known, pulse_key(rank)]):
                continue
            if store.get(known).decode() == self._machine:
                self._read([rank], store)
            else:
                self.neighbours.remove(rank)

    def _learn(self, store: Store) -> None:
        """Learn whether a rank has failed, or a neighbour has disappeared; and who shall say so on this machine."""
        if self.failure is not None and self.failure.is_final:
            return
        words = LastWords(store, self.rank, self.world_size)
        if self.position.progress is None and self.position.has_returned():
            words.note_gone(self.rank)
        reason = words.first_failure()
        if words.store_is_lost:
            store.check([pulse_key(self.rank)])  # raises
        missed = self._missed(words)
        reason = reason or missed
        if reason is None or not self.concerns(reason):
            return
        if reason != self.failure:
            is_near = self.pulses.latest.get(reason.rank) is not None and reason.rank in self._near
            says_it_itself = reason.is_final and bool(reason.trace) and is_near
            told = f"{self._machine}/{reason.session}/{reason.is_final}"
            self.is_said = says_it_itself or not words.claim_telling(told)
            self.failure = reason

    def _missed(self, words: LastWords) -> Reason | None:
        """Look for the neighbours' processes; tell of one that is gone, and return what was told first."""
        reason: Reason | None = None
        for rank in list(self.neighbours):
            known = self.pulses.latest.get(rank)
            if known is None or not has_ended(known.pid, known.started):
                continue
            if not words.has_left(rank):
                reason = words.first_failure()
                if reason is not None:  # that is what to blame, here too
                    words.note_gone(rank)
                elif not words.has_left(rank):  # it may have done both meanwhile
                    words.tell_gone(self.gone(known, "was killed, or has crashed (out of memory? a signal?)"))
                    reason = words.first_failure()
            self.neighbours.remove(rank)
        return reason

    def _call_the_roll(self, store: Store) -> None:
        """If this rank has made no step for long, read where all are; only the first rank that still tells does so."""
        if not self.is_in_trouble():
            return
        for rank in range(self.rank):
            self._read_if_there(store, rank)
            if rank not in self.pulses.silent(time.monotonic()):
                return
        for rank in range(self.rank + 1, self.world_size):
            self._read_if_there(store, rank)

    def _read_if_there(self, store: Store, rank: int) -> None:
        if store.check([pulse_key(rank)]):
            self._read([rank], store)

    def _read(self, ranks: list[int], store: Store) -> None:
        keys = [pulse_key(rank) for rank in ranks]
        can_at_once = getattr(store, "has_extended_api", bool)
        texts = store.multi_get(keys) if len(keys) > 1 and can_at_once() else [store.get(key) for key in keys]
        for text in texts:
            self.pulses.take(Whereabouts.read(text), time.monotonic())


def _place_of(one: Whereabouts, here: Whereabouts) -> str:
    """Return where a rank was that is gone, with a space before it.

    In training all ranks are at the same step, and this one knows its own to the moment. In an evaluation each has its
    own, and what the other has told is up to a second old.
    """
    place = here.place() or one.place()
    if here.doing:
        place = one.place()  # what comes before the first stage takes each rank as long as it takes
    elif here.stage not in {"", Stage.TRAIN.name}:
        knows = (one.stage, one.epoch) == (here.stage, here.epoch)
        place = f"{one.place()} or later" if knows else place.partition(" at step")[0]
    return f" {place}" if place else ""


class Survey:
    """Finds the ranks that tell no more, where a connection is lost and nobody has said why: a machine may be gone.

    All pulses are read twice. Only the first rank that asks does so, and tells the others.

    Args:
        pulse: of this process.

    Ranks: local; asks the store.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> store.set(pulse_key(1), Whereabouts(rank=1, host="node2", pid=7, beats=5).to_json())
        >>> survey = Survey(Pulse(LastWords(store, rank=0, world_size=2), []))
        >>> survey.take(now=time.monotonic() + SURVEY_SECONDS)
        >>> LastWords(store, rank=0, world_size=2).first_failure().summary()
        'rank 1 (node2, pid 7) disappeared: it has told nothing for 2 s: it was killed, or its machine is gone, ...'
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse, self._words = pulse, pulse.words
        self._before: dict[int, Whereabouts] = {}
        self._ends = time.monotonic() + SURVEY_SECONDS
        with contextlib.suppress(RuntimeError):  # the store is lost, which is found elsewhere
            if self._words.claim_telling(f"survey/{pulse.position.sessions}"):
                self._before = self._read()

    def take(self, now: float) -> None:
        """Tell of the ranks that have told nothing since the beginning, when enough time has passed; once."""
        if not self._before or now < self._ends:
            return
        before, self._before = self._before, {}
        with contextlib.suppress(RuntimeError):
            later = self._read()
            silent = [one for rank, one in before.items() if rank in later and later[rank].beats == one.beats]
            if silent:
                self._words.tell_gone(self._pulse.gone(silent[0], self._how(silent)))

    def _read(self) -> dict[int, Whereabouts]:
        words, found = self._words, dict[int, Whereabouts]()
        for rank in range(words.world_size):
            if rank != words.rank and words.store.check([pulse_key(rank)]) and not words.has_left(rank):
                found[rank] = Whereabouts.read(words.store.get(pulse_key(rank)))
        return found

    @staticmethod
    def _how(silent: list[Whereabouts]) -> str:
        others = ", ".join(one.name() for one in silent[1:MOST_NAMED])
        more = f" and {len(silent) - MOST_NAMED} more" if len(silent) > MOST_NAMED else ""
        likewise = f". So have {others}{more}" if others else ""
        return (
            f"has told nothing for {SURVEY_SECONDS:.0f} s: it was killed, or its machine is gone, or the network to it "
            f"is cut{likewise}"
        )


class Absence:
    """Finds that a rank that this one waits for tells nothing any more: it may be where nobody sees its process.

    A process that lives tells about once a second, whatever its main thread is doing, unless that keeps Python's
    interpreter lock; one on this machine is looked at before it is taken for gone. Only time in which the store answers
    counts: neither that of a network that is cut, nor that in which this process itself was stopped.

    Args:
        pulse: of this process.
        rank: the one that it waits for.
        limit: tells for how many seconds a rank may be silent; 0: for ever.

    Ranks: local; asks the store.

    Example:
        >>> from torch.distributed import HashStore
        >>> pulse = Pulse(LastWords(HashStore(), rank=0, world_size=2), [])
        >>> absence = Absence(pulse, 1, lambda: 6.0)
        >>> for second in range(8):
        ...     absence.look(now=float(second))
        >>> pulse.words.first_failure().summary()
        'rank 1 disappeared: it has told nothing for 6 s (--hang_timeout=6): it was killed or stopped, or its ...'
    """

    def __init__(self, pulse: Pulse, rank: int, limit: Callable[[], float]) -> None:
        self._pulse, self._rank, self._limit = pulse, rank, limit
        self._known = pulse.pulses.latest.get(rank) or Whereabouts(rank)
        self._looked: float | None = None
        self._silent = 0.0

    def look(self, now: float) -> None:
        """Look, once a second at most, whether the rank has told anything; tell that it is gone if that is too long.

        Raises:
            RuntimeError: the store does not answer.
        """
        since = PULSE_SECONDS if self._looked is None else now - self._looked
        if since < PULSE_SECONDS:
            return
        store, key, is_first = self._pulse.words.store, pulse_key(self._rank), self._looked is None
        latest = Whereabouts.read(store.get(key)) if store.check([key]) else self._known
        self._looked = now
        self._silent = (
            0.0 if is_first or latest.beats != self._known.beats else self._silent + min(since, SILENT_SECONDS)
        )
        self._known = latest
        limit = self._limit()
        if 0 < limit <= self._silent and not self._is_at_work():
            self._pulse.words.tell_gone(self._pulse.gone(latest, self._how(limit)))

    def _is_at_work(self) -> bool:
        """Say whether the process is on this machine, and neither gone nor stopped."""
        pulse = self._pulse
        if self._rank not in pulse.neighbours or self._rank not in pulse.pulses.latest:  # there, but not met yet
            return False
        state, started = state_and_start(self._known.pid)
        return started == self._known.started and state in {"R", "S", "D"}

    def _how(self, limit: float) -> str:
        return (
            f"has told nothing for {self._silent:.0f} s (--hang_timeout={limit:.0f}): it was killed or stopped, or its "
            "machine is gone, or the network to it is cut, or a call of its code keeps the interpreter lock"
        )
