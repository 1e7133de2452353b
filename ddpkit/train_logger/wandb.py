"""Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.distributed import if_main_process, run_on_main
from ddpkit.errors import ConfigError
from ddpkit.reporting import Stats, plain_numbers
from ddpkit.train_logger.main_logger import MainTrainLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class WandBLogger(MainTrainLogger):
    """Writes statistics through a run object, such as a run of Weights & Biases.

    The step is ``stats_meta["epoch"]`` where there is one.

    Args:
        initializer: called on the main process only, with all the other arguments; returns an
            object with ``log(stats, step=...)``. In YAML: ``initializer: !name:wandb.init``.
        args: for the initializer.
        kwargs: for the initializer.

    Attributes:
        run: what the initializer returned; None on the other ranks.

    Raises:
        ConfigError: the initializer failed; its own exception is the cause. Raised on the main
            process.
        MainProcessError: the same, on the other ranks.

    Ranks: all, or the main process alone; only it writes.

    Example:
        >>> class Run:
        ...     def log(self, stats, step=None):
        ...         print(step, stats)
        >>> WandBLogger(Run).log_stats({"epoch": 1}, {"loss": 0.5})
        1 {'train': {'loss': 0.5}, 'epoch': 1}
    """

    def __init__(
        self,
        initializer: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.run: Any = None

        def start() -> None:
            if not if_main_process():  # without a process group every rank comes here
                return
            try:
                self.run = initializer(*args, **kwargs)
            except Exception as error:
                raise ConfigError(
                    f"WandBLogger: initializer={initializer!r} failed with "
                    f"{type(error).__name__}: {error}. Its own error stands above."
                ) from error

        run_on_main(start)

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        stats = plain_numbers({**stages, **meta})
        self.run.log(stats, **({"step": stats["epoch"]} if "epoch" in stats else {}))
