"""Logs to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpkit.distributed import if_main_process, run_on_main
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.reporting import Stats, plain_numbers
from ddpkit.train_logger.batch_sender import LEFT_OUT
from ddpkit.train_logger.tracker import TrackerLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


logger = get_logger(__name__)


class WandBLogger(TrackerLogger):
    """Writes statistics to a run of Weights & Biases, or to a run object like it.

    The step is the optimizer step in a stage, and else ``stats_meta["epoch"]`` where there is one.
    W&B takes no step before its last. So a test of an earlier checkpoint stands at the last
    step, and steps that are done again after a restart are left out.

    Args:
        initializer: returns an object with ``log(stats, step=...)``; called at once, on the main
            process only, with all the other arguments. None: ``wandb.init``, called when ``fit``
            begins; a run that is started again goes on in the same run of W&B.
        args: for the initializer.
        kwargs: for the initializer or ``wandb.init``, such as ``project``.

    Attributes:
        run: what the initializer or ``wandb.init`` returned; None on the other ranks.
        run_id: of W&B's run; None before it is opened, and with an initializer.

    Raises:
        ConfigError: the initializer failed; its own exception is the cause. Raised on the main
            process.
        MainProcessError: the same, on the other ranks.
        MissingExtraError: there is no initializer, and W&B is not installed.

    Ranks: all, or the main process alone; only it writes.

    State: saves ``run_id``.

    Example:
        >>> class Run:
        ...     def log(self, stats, step=None):
        ...         print(step, stats)
        >>> WandBLogger(Run).log_stats({"epoch": 1}, {"loss": 0.5})
        1 {'train': {'loss': 0.5}, 'epoch': 1}
    """

    tracker = "W&B"
    package = "wandb"

    def __init__(
        self,
        initializer: Callable[..., Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.run: Any = None
        self._last = 0
        self._said: set[str] = set()  # names of values that were refused
        self._kwargs = kwargs
        if initializer is None:
            self.require_package()
            return

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
        self._is_open = True

    def open_run(self) -> str:
        """Begin a run, or go on in the run of the checkpoint."""
        import wandb

        resumed = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
        self.run = wandb.init(**{**resumed, **self._kwargs})
        self._last = int(self.run.step)
        return str(self.run.id)

    def values_of(self, meta: Stats, stages: Mapping[str, Stats]) -> dict[str, Any]:
        """Return values by stage, with pictures and tables as they are."""
        values: dict[str, Any] = plain_numbers({**stages, **meta})
        return values

    def write(self, values: Mapping[str, Any], step: int | None) -> None:
        """Hand values over to W&B's own process."""
        if step is None:
            self._send(values)
            return
        if step < self._last and "test" not in values:
            logger.warning_once(
                "W&B has this run up to step %d and takes no earlier step. Values up to it are not "
                "written again; metrics.jsonl, in the experiment's folder, has them.",
                self._last,
            )
            return
        self._last = max(self._last, step)
        self._send(values, step=self._last)

    def _send(self, values: Mapping[str, Any], **at: int) -> None:
        """Hand values over, without those that W&B refuses, which are named.

        Raises:
            Exception: it takes none of them.
        """
        given = _single_values(values)
        refused = self._refused(given, at)
        if refused and len(refused) == len(given):
            raise refused[0][1]
        for value, error in refused:
            name = "/".join(value.path)
            if name not in self._said:
                self._said.add(name)
                logger.warning(LEFT_OUT, self.tracker, name, type(error).__name__, error)

    def _refused(
        self,
        values: Sequence[_Value],
        at: Mapping[str, int],
    ) -> list[tuple[_Value, Exception]]:
        """Hand values over together; where that fails, by halves. Return those that fail alone."""
        try:
            self.run.log(_by_stage(values), **at)
        except Exception as error:
            if not values or isinstance(error, (ConnectionError, TimeoutError)):
                raise  # it is of no value
            if len(values) == 1:
                return [(values[0], error)]
            middle = len(values) // 2
            return self._refused(values[:middle], at) + self._refused(values[middle:], at)
        return []


class _Value(NamedTuple):
    """A value and its name, perhaps after that of its stage."""

    path: tuple[str, ...]
    value: Any


def _single_values(values: Mapping[str, Any]) -> list[_Value]:
    found = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found += [_Value((name, str(inner)), one) for inner, one in value.items()]
        else:
            found.append(_Value((name,), value))
    return found


def _by_stage(values: Iterable[_Value]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (*stage, name), value in values:
        (found.setdefault(stage[0], {}) if stage else found)[name] = value
    return found
