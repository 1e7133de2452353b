"""One process on one device: nothing to wrap, nothing to average."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit import distributed
from ddpkit.errors import ConfigError
from ddpkit.strategies.base import Strategy
from ddpkit.strategies.rank_memory import whole_memory

if TYPE_CHECKING:
    from torch import nn

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun


class SingleDevice(Strategy):
    """One process, one device.

    Ranks: local.

    Example:
        >>> SingleDevice().name
        'one device'
    """

    name = "one device"

    def check(self, options: RunOptions, *, has_own_fit_batch: bool) -> None:
        """Refuse several processes, each of which would train a model of its own.

        Raises:
            ConfigError: a launcher has started several.
        """
        world_size = distributed.get_world_size()
        if world_size > 1:
            raise ConfigError(
                f"strategy='single' is for one process, and a launcher has started {world_size}, "
                "each of which would train a model of its own. Start one: python train.py "
                "hparams.yaml --strategy=single; or leave --strategy out."
            )

    def runs_alone(self) -> bool:
        """Say that there is work in one process."""
        return True

    def rank_memory(self, run: RehearsedRun) -> RankMemory:
        """Return the memory of the whole model.

        Raises:
            ConfigError: there are several processes.
        """
        if run.processes > 1:
            raise ConfigError("it is for one process")
        return whole_memory(run)

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return one row, and one on gradients where an option says how they are sent."""
        hook = self.options.ddp_comm_hook
        return {
            "strategy": "single: one process",
            "gradients": ""
            if hook is None
            else f"not sent by one process: ddp_comm_hook={hook} has no effect",
        }
