"""What a train logger is: it takes the statistics of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.reporting import Current, Stats, warn_of_no_values

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path


class TrainLogger:
    """The base of all train loggers. In a recipe, override :meth:`log_stats`, which may be called
    on every rank.

    What a recipe logs with ``self.log`` is added to the statistics by the loggers of ddpkit,
    and for all that stand in a :class:`TrainLoggers`.

    A logger that writes files sets the attributes, and overrides :meth:`require_writable`. One
    that has something to save in checkpoints has their hooks, and the Brain saves it.

    Attributes:
        save_file: the file it writes to; named at the start of a run.
        save_dir: the folder it writes to; likewise.
        needs_own_file: whether no other logger may write to ``save_file``.
        run_log_beside: where ``metrics.jsonl`` goes if the run has none elsewhere.

    Ranks: see :meth:`log_stats`.

    Example:
        >>> from ddpkit.distributed import if_main_process
        >>> class Console(TrainLogger):
        ...     def log_stats(self, stats_meta, train_stats=None, *other_stats, verbose=False):
        ...         if if_main_process():
        ...             print(stats_meta, train_stats)
        >>> Console().log_stats({"epoch": 1}, {"loss": 0.5})
        {'epoch': 1} {'loss': 0.5}
    """

    save_file: str | os.PathLike[str] | None = None
    save_dir: str | os.PathLike[str] | None = None
    needs_own_file: bool = False
    run_log_beside: Path | None = None

    def log_stats(
        self,
        stats_meta: Stats,
        train_stats: Stats | None = None,
        valid_stats: Stats | None = None,
        test_stats: Stats | None = None,
        verbose: bool | None = None,
    ) -> None:
        """Report the statistics of a stage or an epoch.

        Args:
            stats_meta: what they belong to, such as epoch and learning rate.
            train_stats: names and values (numbers, or tensors and arrays) of the training stage.
            valid_stats: likewise of the validation stage.
            test_stats: likewise of the test stage.
            verbose: also log them to the console; None: as the logger is used to.

        Raises:
            NotImplementedError: in this base class.
            ConfigError: a file cannot be written.

        Ranks: all, or the main process alone. Report on the main process only
        (``if_main_process``).
        """
        given = {"train": train_stats, "valid": valid_stats, "test": test_stats}
        warn_of_no_values(stats_meta, "stats_meta")
        for name, stats in given.items():
            warn_of_no_values(stats or {}, f"{name}_stats")
        logged = Current.logged()
        stages = dict[str, dict[str, Any]]()
        reported = self.__dict__.setdefault("_reported", {})
        for name, stats in given.items():
            # what was logged in this epoch is added once, and a value that is given wins
            own = logged.get(name, {})
            if stats is not None or (own and reported.get(name) is not own):
                # what is given comes first
                stages[name] = {
                    **(stats or {}),
                    **own,
                    **(stats or {}),
                }
                reported[name] = own
        if Current.test_set and "test" in stages:
            before = f"{Current.test_set}/"  # there already, where a list of loggers hands it on
            stages["test"] = {
                f"{before}{name.removeprefix(before)}": value
                for name, value in stages["test"].items()
            }
        self._report(stats_meta, stages, verbose)

    def _report(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        raise NotImplementedError(f"{type(self).__name__} must override log_stats")

    def require_writable(self) -> None:
        """Refuse what cannot be written, before the first epoch. Here: do nothing.

        Raises:
            ConfigError: a file or folder cannot be written, or a tracker does not answer.

        Ranks: the main process alone.
        """

    def begin_fit(self, optimizer_step: int) -> None:
        """Get ready for a call of ``fit``: the checkpoint is recovered, and training goes on. Here:
        do nothing.

        Args:
            optimizer_step: where it goes on; 0: it begins. What an earlier start has written of
                later steps is going to be written again.

        Raises:
            ConfigError: as :meth:`require_writable`.

        Ranks: the main process alone.
        """

    def begin_anew(self) -> None:
        """Move what an earlier run has written out of the way of a run that starts from scratch.
        Here: do nothing.

        The Brain calls it once, when ``fit`` begins with ``--resume=never``. A logger that this
        process has used already does nothing.

        Raises:
            ConfigError: a file cannot be moved.

        Ranks: the main process alone.
        """

    def log_step(self, values: Mapping[str, float], step: int) -> None:
        """Report what was logged with ``self.log(..., per_step=True)``, about once a second. Here:
        do nothing.

        Args:
            values: means over the last steps and all ranks, by name.
            step: optimizer steps since the run began.

        Ranks: the main process alone.
        """
