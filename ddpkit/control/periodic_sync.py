"""The sync of all ranks. About once a second they agree on what all must know; no step waits for
that.

Every ``k`` steps, with ``k`` itself agreed on at the previous sync, the ranks add up a few numbers
in one small all-reduce on a group of their own (gloo, on the CPU). All of them act on the same sums
at the same step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ddpkit.control.signals import CAUSES

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_SECONDS = 1.0
# times: the distance of syncs that an epoch may begin with, against that of the epoch before
MOST_SHORTER = 4


@dataclass(frozen=True)
class SyncReport:
    """What all ranks learnt at a sync; every number is the same on every rank.

    Attributes:
        step: the step of the sync, within the epoch.
        loss: weighted mean over all ranks since the epoch began; NaN before the first finite one.
        samples: samples seen by all ranks since the epoch began, with those whose loss was not
            finite.
        main_seconds: the main process's answer to how long ago it last saved an intra-epoch
            checkpoint.
        save_wanted: whether some rank has been asked for a checkpoint, by a signal.
        stop: the cause of a stop that some rank was asked for, one of :data:`CAUSES`; or empty.

    Ranks: local.

    Example:
        >>> SyncReport(step=4, loss=0.5, samples=32, main_seconds=1.0).loss
        0.5
    """

    step: int
    loss: float
    samples: int
    main_seconds: float
    save_wanted: bool = False
    stop: str = ""


class Requests(NamedTuple):
    """What a rank sends at a sync besides its losses.

    Attributes:
        main_seconds: seconds since the last intra-epoch checkpoint; only the main process's value
            counts.
        save: whether a checkpoint was requested on this rank.
        stop: the cause of a stop request, one of :data:`CAUSES`; empty: none.

    Ranks: local.

    Example:
        >>> Requests(save=True).stop
        ''
    """

    main_seconds: float = 0.0
    save: bool = False
    stop: str = ""


class PeriodicSync:
    """Decides at which steps the ranks sync, and syncs them.

    Args:
        add_up: sums a list of floats over the ranks, such as
            :func:`ddpkit.distributed.sum_over_ranks`.
        world_size: number of ranks.
        is_main: whether this is the main process.
        interval: seconds between syncs, about.

    Ranks: collective; every rank must ask at the same steps, and does, because ``due`` is agreed
    on.

    Example:
        >>> sync = PeriodicSync(add_up=list, world_size=1, is_main=True)
        >>> sync.start(step=0); sync.due
        1
        >>> sync(step=1, loss_sum=3.0, count=2, samples=2, requests=Requests()).loss
        1.5
    """

    def __init__(
        self,
        add_up: Callable[[list[float]], list[float]],
        world_size: int,
        *,
        is_main: bool,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self.add_up = add_up
        self.world_size = world_size
        self.is_main = is_main
        self.interval = interval
        self.due = 1
        self.steps_per_interval = 1  # as all ranks have found together at the last sync
        self._last_step = 0
        self._last_time = 0.0
        self._steps_apart = 1  # from the last sync to the next one
        self._known_steps_apart = 1  # as the epoch before ended with

    def start(self, step: int) -> None:
        """Begin an epoch, or go on with one, after ``step`` steps.

        The first step also waits for the loader, and a few come before the next sync. Only where
        they were quick are the syncs soon as far apart as in the epoch before.
        """
        self._last_step = step
        self._last_time = time.monotonic()
        self.due = step + 1
        self._known_steps_apart = self._steps_apart
        self._steps_apart = 1

    def leave_out(self, seconds: float) -> None:
        """Count no step for something else that has taken so long since the last sync.

        Args:
            seconds: that it has taken.
        """
        self._last_time += seconds

    def __call__(
        self,
        step: int,
        loss_sum: float,
        count: float,
        samples: int,
        requests: Requests,
    ) -> SyncReport:
        """Exchange these numbers with the other ranks and fix the step of the next sync.

        Args:
            step: the current step, equal on all ranks.
            loss_sum: this rank's sum of losses since the epoch began.
            count: number of samples (or tokens) that the sum is over.
            samples: this rank's number of samples since the epoch began.
            requests: of this rank, sent with the losses.

        Returns:
            What all ranks learnt.
        """
        now = time.monotonic()
        own_seconds_per_step = (now - self._last_time) / max(step - self._last_step, 1)
        # all but one add zero, so that the sum is what the main process says
        own_main_seconds = requests.main_seconds if self.is_main else 0.0
        own_stops = [float(cause == requests.stop) for cause in CAUSES]
        # Each is a sum over the ranks, of what stands at the same place in the list below.
        (
            total_loss,
            total_count,
            total_samples,
            total_seconds_per_step,
            main_seconds,
            ranks_that_save,
            *ranks_that_stop,
        ) = self.add_up(
            [
                loss_sum,
                count,
                samples,
                own_seconds_per_step,
                own_main_seconds,
                float(requests.save),
                *own_stops,
            ]
        )
        asked = zip(CAUSES, ranks_that_stop, strict=True)
        stop = next((cause for cause, ranks in asked if ranks), "")
        # interval / (total_seconds_per_step / world_size): the mean over the ranks counts, and so
        # this is the same number on each of them
        wanted_steps = int(self.interval * self.world_size / max(total_seconds_per_step, 1e-9))
        # one step tells little
        known_steps = 0 if self._steps_apart == 1 else self._known_steps_apart // MOST_SHORTER
        self._steps_apart = max(1, min(wanted_steps, max(2 * self._steps_apart, known_steps)))
        self.steps_per_interval = max(1, wanted_steps)
        self.due = step + self._steps_apart
        self._last_step = step
        self._last_time = time.monotonic()  # the exchange itself is no part of a step
        mean = total_loss / total_count if total_count else float("nan")
        return SyncReport(
            step,
            mean,
            int(total_samples),
            main_seconds=main_seconds,
            save_wanted=ranks_that_save > 0,
            stop=stop,
        )
