"""How the ranks agree on whether to stop an evaluation or a prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.base import POSITION
from ddpkit.control import PeriodicSync, Requests
from ddpkit.distributed import exchange, get_world_size, if_main_process, sum_over_ranks
from ddpkit.errors import RunStopped
from ddpkit.run.stop_control import exit_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpkit.training import Progress


class StopsOfEvaluation:
    """Has the ranks agree about once a second on whether to stop an evaluation.

    The ranks may have different numbers of batches, and the length of a stream is unknown. So a
    rank without further batches keeps taking part until every rank has finished.

    Args:
        progress: has the step of this rank.
        cause: returns the cause of a stop request on this rank, or nothing.
        add_up: adds up a few numbers over all ranks; None: in a collective.

    Ranks: collective, but for making one.
    """

    def __init__(
        self,
        progress: Progress,
        cause: Callable[[], str],
        add_up: Callable[[list[float]], list[float]] | None = None,
    ) -> None:
        self._cause = cause
        self.sync = PeriodicSync(
            add_up or sum_over_ranks,
            get_world_size(),
            is_main=if_main_process(),
        )
        self.sync.start(progress.step)

    def __call__(self, step: int) -> None:
        """Stop at this step if any rank has been asked to."""
        if step >= self.sync.due:
            self._sync_ranks(step, has_more=True)

    def await_others(self) -> None:
        """Take part in the agreements of ranks that still have batches."""
        while self._sync_ranks(self.sync.due, has_more=False):
            POSITION.moves_seen += 1  # no hang: the others move

    def _sync_ranks(self, step: int, *, has_more: bool) -> int:
        """Return how many ranks have more batches; if none has, there is nothing to be stopped."""
        report = self.sync(
            step,
            0.0,
            0.0,
            int(has_more),
            Requests(stop=self._cause()),
        )
        if report.stop and report.samples:
            raise RunStopped(exit_code(report.stop), report.stop)
        return report.samples


def added_over_store(values: list[float]) -> list[float]:
    """Add up a few numbers over all ranks through the store: unlike a collective, it ends when a
    rank fails.

    Ranks: collective.
    """
    return [sum(numbers) for numbers in zip(*exchange(values, site="predict"), strict=True)]
