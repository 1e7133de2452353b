"""Train loggers: a line per epoch, TensorBoard, W&B; and several as one. The run's log,
``metrics.jsonl``.

All of it happens on the main process only. Calls from other ranks return at once, so ``log_stats``
may be called by all ranks or under ``if if_main_process():``.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import (
    kind_of,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
    require_writable,
    writing,
)
from ddpkit.distributed import if_main_process, main_process_only, run_on_main
from ddpkit.errors import ConfigError, MissingExtraError
from ddpkit.logger import get_logger
from ddpkit.reporting import (
    Current,
    ProgressSampleLogger,
    RunLog,
    Stats,
    append,
    move_logs_away,
    plain,
    plain_numbers,
    run_event,
    set_run_log,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "FileTrainLogger",
    "ProgressSampleLogger",
    "RunLog",
    "TensorboardLogger",
    "TrainLogger",
    "TrainLoggers",
    "WandBLogger",
    "run_event",
    "set_run_log",
]

logger = get_logger(__name__)


class TrainLogger:
    """The base of all train loggers. In a recipe, override :meth:`log_stats`, which may be called
    on every rank.

    What a recipe logs with ``self.log`` is added to the statistics by the loggers of this module,
    and for all that stand in a :class:`TrainLoggers`.

    Ranks: see :meth:`log_stats`.

    Example:
        >>> class Console(TrainLogger):
        ...     def log_stats(self, stats_meta, train_stats=None, *other_stats, verbose=False):
        ...         if if_main_process():
        ...             print(stats_meta, train_stats)
        >>> Console().log_stats({"epoch": 1}, {"loss": 0.5})
        {'epoch': 1} {'loss': 0.5}
    """

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
        self._report(stats_meta, stages, verbose)

    def _report(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        raise NotImplementedError(f"{type(self).__name__} must override log_stats")

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


class TrainLoggers(TrainLogger):
    """Several train loggers as one: each reports the same.

    A Brain makes one of a list under ``train_logger`` in its hparams, so that
    ``self.hparams.train_logger.log_stats`` reports to all of them.

    Args:
        loggers: each with a method ``log_stats``.

    Raises:
        ConfigError: an object is not a train logger.

    Ranks: as the loggers.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     both = TrainLoggers(
        ...         FileTrainLogger(f"{folder}/a.txt"),
        ...         FileTrainLogger(f"{folder}/b.txt", precision=3),
        ...     )
        ...     both.log_stats({"epoch": 1}, {"loss": 2.5}, verbose=False)
        ...     [Path(folder, name).read_text().split() for name in ("a.txt", "b.txt")]
        [['epoch:', '1', '-', 'train', 'loss:', '2.50'], ['epoch:', '1', '-', 'train', 'loss:',
        '2.500']]
    """

    def __init__(self, *loggers: Any) -> None:
        for one in loggers:
            if isinstance(one, type) or not callable(getattr(one, "log_stats", None)):
                raise ConfigError(
                    f"train_logger: {one!r} is not a train logger: it has no log_stats, or is a "
                    "class."
                )
        self.loggers = loggers

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loggers)

    def require_writable(self) -> None:
        """Refuse files that cannot be written, of every logger that has this method.

        Raises:
            ConfigError: a file or folder cannot be written.

        Ranks: the main process alone.
        """
        for one in self.loggers:
            if callable(getattr(one, "require_writable", None)):
                one.require_writable()

    def _report(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        stats: dict[str, Any] = {f"{name}_stats": one for name, one in stages.items()}
        for one in self.loggers:
            one.log_stats(
                meta,
                **stats,
                **({} if verbose is None else {"verbose": verbose}),
            )

    def begin_anew(self) -> None:
        """Call this method of every logger that has it.

        Raises:
            ConfigError: as the loggers.

        Ranks: the main process alone.
        """
        for one in self.loggers:
            if hasattr(one, "begin_anew"):
                one.begin_anew()

    def log_step(self, values: Mapping[str, float], step: int) -> None:
        """Report to every logger that has this method.

        Args:
            values: as in :meth:`TrainLogger.log_step`.
            step: likewise.

        Ranks: the main process alone.
        """
        for one in self.loggers:
            if hasattr(one, "log_step"):
                one.log_step(values, step)


def log_places(train_logger: Any) -> list[str]:
    """Return the files and folders that the events and the statistics of a run are written to.

    Args:
        train_logger: of the recipe, or None.

    Ranks: local; what the main process writes.

    Example:
        >>> log_places(FileTrainLogger("results/train_log.txt"))
        ['results/metrics.jsonl', 'results/train_log.txt']
    """
    if isinstance(train_logger, TrainLoggers):
        return list(dict.fromkeys(place for one in train_logger for place in log_places(one)))
    beside = getattr(train_logger, "run_log_beside", None)
    run_log = beside if Current.log is None else Current.log.path
    own = [getattr(train_logger, name, None) for name in ("save_file", "save_dir")]
    return [os.fspath(one) for one in (run_log, *own) if isinstance(one, (str, os.PathLike))]


def join_loggers(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters in which a list under ``train_logger`` is one :class:`TrainLoggers`.

    Args:
        hparams: as a recipe gives them; not changed.

    Raises:
        ConfigError: they are no mapping, or an object in the list is not a train logger.

    Ranks: local.

    Example:
        >>> len(
        ...     list(join_loggers({"train_logger": [TrainLogger(), TrainLogger()]})["train_logger"])
        ... )
        2
    """
    if not isinstance(hparams, Mapping):
        raise ConfigError(
            f"hparams is {kind_of(hparams)}, not a mapping: give what load_hparams returns."
        )
    found = hparams.get("train_logger")
    joined = {"train_logger": TrainLoggers(*found)} if isinstance(found, (list, tuple)) else {}
    return {**hparams, **joined}


class _MainTrainLogger(TrainLogger):
    """The base of the loggers in this module, which override ``_log``: called on the main process
    alone.

    What it is given also goes to the run's log, and what was logged with ``self.log`` is in it.
    """

    run_log_beside: Path | None = None  # where no run log is set

    @main_process_only(hand_over=False)
    def _report(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self._log(meta, stages, verbose)
        log = Current.log or (self.run_log_beside and RunLog(self.run_log_beside))
        if log:
            log.write_stats(plain({"meta": meta, **stages}))

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        raise NotImplementedError


class FileTrainLogger(_MainTrainLogger):
    """Writes one line per call to a text file: ``epoch: 1 - train loss: 2.31 - valid loss:
    9.10e-01``.

    The same statistics go to the run's log, at full precision (``metrics.jsonl`` beside
    ``save_file`` where no run log is set).

    The line is also logged to the console, unless ``log_stats`` is called with ``verbose=False``.

    Args:
        save_file: the text file; it is appended to. A run with ``--resume=never`` moves an earlier
            one away.
        precision: digits after the point. Floats between 1 and 100 are written plainly, others with
            an exponent.

    Ranks: all, or the main process alone; only it writes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train_logger = FileTrainLogger(f"{folder}/train_log.txt")
        ...     train_logger.log_stats({"epoch": 1, "lr": 0.1}, {"loss": 2.31}, verbose=False)
        ...     Path(train_logger.save_file).read_text().strip()
        'epoch: 1, lr: 1.00e-01 - train loss: 2.31'
    """

    def __init__(self, save_file: str | os.PathLike[str], precision: int = 2) -> None:
        self.save_file = os.fspath(save_file)
        self.precision = precision
        self.run_log_beside = Path(save_file).with_name("metrics.jsonl")
        self._has_written = False

    def begin_anew(self) -> None:
        """Move the text file, and ``metrics.jsonl`` beside it where no run log is set, to
        ``earlier-<time>``.

        Raises:
            ConfigError: as :meth:`TrainLogger.begin_anew`.

        Ranks: the main process alone.
        """
        if not self._has_written:
            beside = [] if Current.log or self.run_log_beside is None else [self.run_log_beside]
            move_logs_away([Path(self.save_file), *beside])

    def require_writable(self) -> None:
        """Refuse a file that cannot be written, before the first epoch.

        Raises:
            ConfigError: :attr:`save_file` cannot be written.

        Ranks: the main process alone.
        """
        require_writable(f"save_file={self.save_file!r}", self.save_file)

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self._has_written = True
        parts = [
            self._line(meta),
            *(self._line(stats, f"{name} ") for name, stats in stages.items()),
        ]
        line = " - ".join(parts)
        path = Path(self.save_file)
        with writing(f"save_file={self.save_file!r}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            append(path, line + "\n")
        if verbose is not False:
            logger.info("%s", line)

    def _line(self, stats: Stats, stage: str = "") -> str:
        return ", ".join(
            f"{stage}{name}: {self._text(plain(value))}" for name, value in stats.items()
        )

    def _text(self, value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        kind = "f" if 1.0 < value < 100.0 else "e"  # noqa: PLR2004 -- the recipe contract fixes the format
        return f"{value:.{self.precision}{kind}}"


@register_checkpoint_hooks
class TensorboardLogger(_MainTrainLogger):
    """Writes statistics for TensorBoard. Needs ``pip install tensorboard``.

    Every value is written under ``<name>/<stage>``, every element of a list as a step of its own.

    Args:
        save_dir: folder of the event files; it is made at the first write.

    Attributes:
        global_step: how often each value has been written; it is what TensorBoard shows on the x
            axis.

    Raises:
        MissingExtraError: TensorBoard is not installed.

    Ranks: all, or the main process alone; only it writes.

    State: saves ``global_step`` as JSON, so that curves go on after a restart where they ended.
    Give the logger to the checkpointer for that.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tensorboard = TensorboardLogger(folder)
        ...     tensorboard.log_stats({"epoch": 1}, {"loss": [0.5, 0.4]})
        ...     tensorboard.close()
        ...     tensorboard.global_step["train"]
        {'loss': 2}
    """

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingExtraError(
                "TensorboardLogger needs tensorboard, which is not installed. "
                "Run `pip install tensorboard`, or leave the logger out of the recipe."
            )
        self.save_dir = os.fspath(save_dir)
        self.global_step: dict[str, Any] = {"train": {}, "valid": {}, "test": {}, "meta": 0}

    def begin_anew(self) -> None:
        """Move event files to ``earlier-<time>`` in their folder, where TensorBoard shows them as
        another run.

        Raises:
            ConfigError: as :meth:`TrainLogger.begin_anew`.

        Ranks: the main process alone.
        """
        if "writer" not in self.__dict__:
            move_logs_away(Path(self.save_dir).glob("events.out.tfevents.*"))

    @functools.cached_property
    def writer(self) -> SummaryWriter | None:
        """The TensorBoard writer: made at first use on the main process, None on the others.

        Ranks: local.
        """
        if not if_main_process():
            return None
        from torch.utils.tensorboard import SummaryWriter

        with writing(f"save_dir={self.save_dir!r}"):
            return SummaryWriter(self.save_dir)

    def require_writable(self) -> None:
        """Refuse a folder that cannot be written, before the first epoch.

        Raises:
            ConfigError: :attr:`save_dir` cannot be written.

        Ranks: the main process alone.
        """
        require_writable(f"save_dir={self.save_dir!r}", self.save_dir)

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self.global_step["meta"] += 1
        for name, value in meta.items():
            self._write(name, plain(value), self.global_step["meta"])
        for stage, stats in stages.items():
            steps = self.global_step[stage]
            for name, values in stats.items():
                found = plain(values)
                for value in found if isinstance(found, list) else [found]:
                    steps[name] = steps.get(name, 0) + 1
                    self._write(f"{name}/{stage}", value, steps[name])
        if self.writer is not None:
            self.writer.flush()

    def log_step(self, values: Mapping[str, float], step: int) -> None:
        """Write values under ``<name>/train_step``; arguments as in :meth:`TrainLogger.log_step`.

        Ranks: the main process alone.
        """
        for name, value in values.items():
            self._write(f"{name}/train_step", value, step)

    @main_process_only(hand_over=False)
    def log_audio(
        self,
        name: str,
        value: torch.Tensor,
        sample_rate: int,
    ) -> None:
        """Write a sound.

        Args:
            name: its tag.
            value: samples between -1 and 1, shape ``(num_samples,)`` or ``(1, num_samples)``.
            sample_rate: samples per second.

        Ranks: all, or the main process alone; only it writes.
        """
        self._add(
            "audio",
            name,
            value,
            self.global_step["meta"],
            sample_rate=sample_rate,
        )

    @main_process_only(hand_over=False)
    def log_figure(self, name: str, value: Any) -> None:
        """Write a picture.

        Args:
            name: its tag.
            value: a matplotlib figure, or a tensor of grey values between 0 and 1, shape
                ``(height, width)``.

        Ranks: all, or the main process alone; only it writes.
        """
        step = self.global_step["meta"]
        if isinstance(value, torch.Tensor):
            self._add(
                "image",
                name,
                value.detach(),
                step,
                dataformats="HW",
            )
        else:
            self._add("figure", name, value, step)

    def close(self) -> None:
        """Write out what is still in memory, and close the event file.

        Ranks: local.
        """
        writer = self.__dict__.pop("writer", None)
        if writer is not None:
            writer.close()

    def _write(
        self,
        tag: str,
        value: Any,
        step: int,
    ) -> None:
        if isinstance(value, bool | int | float):
            self._add("scalar", tag, value, step)
        else:
            self._add("text", tag, str(value), step)

    def _add(
        self,
        kind: str,
        tag: str,
        value: Any,
        step: int,
        **options: Any,
    ) -> None:
        getattr(self.writer, f"add_{kind}")(tag, value, global_step=step, **options)

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps(self.global_step), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        self.global_step = {
            "meta": int(saved["meta"]),
            **{s: dict(saved[s]) for s in ("train", "valid", "test")},
        }


class WandBLogger(_MainTrainLogger):
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
