"""The run's log, ``metrics.jsonl``, and the train loggers: a line per epoch, TensorBoard, W&B; and several as one.

All of it happens on the main process only. Calls from other ranks return at once, so ``log_stats`` may be
called by all ranks or under ``if if_main_process():``.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddpkit.base import (
    kind_of,
    map_values,
    mark_as_loader,
    mark_as_saver,
    move_to_earlier,
    register_checkpoint_hooks,
    replacing,
    require_writable,
    writing,
)
from ddpkit.distributed import if_main_process, main_process_only, run_on_main
from ddpkit.errors import ConfigError, MissingExtraError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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

Stats = Mapping[str, Any]


# ----------------------------------------------------------------------------------------- the run's log


class RunLog:
    """A file with one JSON object per line: what happened in a run, for programs to read.

    Each line has ``event``, ``time`` (seconds since 1970) and the fields that were given. Floats keep their
    full precision; not-a-number and infinities are the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``, which ``float()`` and JavaScript's ``Number()`` understand. Tensors and arrays become
    numbers (one element) or nested lists, other objects their text. The reference lists what ddpkit writes.

    Args:
        path: the file; it is appended to. Its folder is made at the first write.

    Ranks: local; only the main process writes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RunLog(f"{folder}/metrics.jsonl")
        ...     log.write("epoch", number=1, loss=torch.tensor(0.5))
        ...     json.loads(log.path.read_text())["loss"]
        0.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._last_stats = ""

    def write(self, event: str, **fields: Any) -> None:
        """Append one line, in one piece.

        Args:
            event: what happened, such as ``"stats"``.
            fields: numbers, strings, tensors, arrays, paths, and lists and dicts of them.

        Raises:
            ConfigError: the file cannot be written.

        Ranks: all, or the main process alone; the others do nothing.
        """
        if not if_main_process():
            return
        record = {"event": event, "time": time.time(), **fields}
        named = json.loads(json.dumps(plain(record)), parse_constant=str)  # NaN and Infinity, no JSON
        line = json.dumps(named, ensure_ascii=False) + "\n"
        with writing(f"the run's log {str(self.path)!r}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, line)

    def write_stats(self, stats: Mapping[str, Any]) -> None:
        """Write a "stats" event, once also when several loggers are given the same statistics.

        Args:
            stats: plain values by stage.

        Ranks: as :meth:`write`.
        """
        if repr(stats) != self._last_stats:
            self.write("stats", **stats)
            self._last_stats = repr(stats)


class Current:
    """The log of the present run, and what its Brain has logged in the current stage: by stage and name.

    Ranks: local.
    """

    log: RunLog | None = None
    logged: Callable[[], Mapping[str, Stats]] = dict


def set_run_log(path: str | os.PathLike[str] | None) -> RunLog | None:
    """Set the file that the events of this run are written to.

    Args:
        path: the file, usually ``metrics.jsonl`` in the experiment's folder; ``None`` for nowhere.

    Returns:
        The log, or None.

    Ranks: local; call it on every rank.

    Example:
        >>> set_run_log(None) is None
        True
    """
    Current.log = None if path is None else RunLog(path)
    return Current.log


def run_event(event: str, **fields: Any) -> None:
    """Write an event to the run's log; does nothing where no log is set.

    Args:
        event: what happened.
        fields: as in :meth:`RunLog.write`.

    Raises:
        ConfigError: the file cannot be written.

    Ranks: all, or the main process alone; the others do nothing.

    Example:
        >>> run_event("checkpoint", path="CKPT+1")  # no log is set
    """
    if Current.log is not None:
        Current.log.write(event, **fields)


def plain(value: Any) -> Any:
    """Turn a value into None, booleans, numbers, strings, lists, and dicts with string keys.

    Ranks: local.
    """
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.item() if value.size == 1 else value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return next((kind(value) for kind in (int, float, str) if isinstance(value, kind)), str(value))


def plain_numbers(value: Any) -> Any:
    """Turn tensors and arrays into numbers and leave everything else (pictures, tables) as it is.

    Ranks: local.
    """
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    return plain(value) if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def move_logs_away(files: Iterable[Path]) -> None:
    """Move logs of an earlier run to ``earlier-<time>`` in their folder, and name that folder.

    Raises:
        ConfigError: a file cannot be moved.

    Ranks: main only.
    """
    known = list(files)
    with writing("the folder of an earlier run's logs"):
        folder = move_to_earlier(known)
    if folder is not None:
        logger.announce("--resume=never: logs of an earlier run were moved to %s.", folder)


def append(path: Path, line: str) -> None:
    """Append a line to a file, in one piece.

    Ranks: local.
    """
    data = line.encode()
    with path.open("ab", buffering=len(data) + 1) as file:  # all of it goes out at once
        file.write(data)


# ----------------------------------------------------------------------------------------- train loggers


class TrainLogger:
    """The base of all train loggers. In a recipe, override :meth:`log_stats`, which may be called on every rank.

    What a recipe logs with ``self.log`` is added to the statistics by the loggers of this module, and for all that
    stand in a :class:`TrainLoggers`.

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

        Ranks: all, or the main process alone. Report on the main process only (``if_main_process``).
        """
        given = {"train": train_stats, "valid": valid_stats, "test": test_stats}
        logged, stages = Current.logged(), dict[str, dict[str, Any]]()
        reported = self.__dict__.setdefault("_reported", {})
        for name, stats in given.items():
            own = logged.get(name, {})  # what was logged in this epoch is added once, and a value that is given wins
            if stats is not None or (own and reported.get(name) is not own):
                stages[name] = {**(stats or {}), **own, **(stats or {})}  # what is given comes first
                reported[name] = own
        self._report(stats_meta, stages, verbose)

    def _report(self, meta: Stats, stages: Mapping[str, Stats], verbose: bool | None) -> None:
        raise NotImplementedError(f"{type(self).__name__} must override log_stats")

    def begin_anew(self) -> None:
        """Move what an earlier run has written out of the way of a run that starts from scratch. Here: do nothing.

        The Brain calls it once, when ``fit`` begins with ``--resume=never``. A logger that this process has used
        already does nothing.

        Raises:
            ConfigError: a file cannot be moved.

        Ranks: the main process alone.
        """

    def log_step(self, values: Mapping[str, float], step: int) -> None:
        """Report what was logged with ``self.log(..., per_step=True)``, about once a second. Here: do nothing.

        Args:
            values: means over the last steps and all ranks, by name.
            step: optimizer steps since the run began.

        Ranks: the main process alone.
        """


class TrainLoggers(TrainLogger):
    """Several train loggers as one: each reports the same.

    A Brain makes one of a list under ``train_logger`` in its hparams, so that ``self.hparams.train_logger.log_stats``
    reports to all of them.

    Args:
        loggers: each with a method ``log_stats``.

    Raises:
        ConfigError: an object is not a train logger.

    Ranks: as the loggers.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     both = TrainLoggers(FileTrainLogger(f"{folder}/a.txt"), FileTrainLogger(f"{folder}/b.txt", precision=3))
        ...     both.log_stats({"epoch": 1}, {"loss": 2.5}, verbose=False)
        ...     [Path(folder, name).read_text().split() for name in ("a.txt", "b.txt")]
        [['epoch:', '1', '-', 'train', 'loss:', '2.50'], ['epoch:', '1', '-', 'train', 'loss:', '2.500']]
    """

    def __init__(self, *loggers: Any) -> None:
        for one in loggers:
            if isinstance(one, type) or not callable(getattr(one, "log_stats", None)):
                raise ConfigError(f"train_logger: {one!r} is not a train logger: it has no log_stats, or is a class.")
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

    def _report(self, meta: Stats, stages: Mapping[str, Stats], verbose: bool | None) -> None:
        stats: dict[str, Any] = {f"{name}_stats": one for name, one in stages.items()}
        for one in self.loggers:
            one.log_stats(meta, **stats, **({} if verbose is None else {"verbose": verbose}))

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
        >>> len(list(join_loggers({"train_logger": [TrainLogger(), TrainLogger()]})["train_logger"]))
        2
    """
    if not isinstance(hparams, Mapping):
        raise ConfigError(f"hparams is {kind_of(hparams)}, not a mapping: give what load_hparams returns.")
    found = hparams.get("train_logger")
    joined = {"train_logger": TrainLoggers(*found)} if isinstance(found, (list, tuple)) else {}
    return {**hparams, **joined}


class _MainTrainLogger(TrainLogger):
    """The base of the loggers in this module, which override ``_log``: called on the main process alone.

    What it is given also goes to the run's log, and what was logged with ``self.log`` is in it.
    """

    run_log_beside: Path | None = None  # where no run log is set

    @main_process_only(hand_over=False)
    def _report(self, meta: Stats, stages: Mapping[str, Stats], verbose: bool | None) -> None:
        self._log(meta, stages, verbose)
        log = Current.log or (self.run_log_beside and RunLog(self.run_log_beside))
        if log:
            log.write_stats(plain({"meta": meta, **stages}))

    def _log(self, meta: Stats, stages: Mapping[str, Stats], verbose: bool | None) -> None:
        raise NotImplementedError


class FileTrainLogger(_MainTrainLogger):
    """Writes one line per call to a text file: ``epoch: 1 - train loss: 2.31 - valid loss: 9.10e-01``.

    The same statistics go to the run's log, at full precision (``metrics.jsonl`` beside ``save_file`` where
    no run log is set).

    The line is also logged to the console, unless ``log_stats`` is called with ``verbose=False``.

    Args:
        save_file: the text file; it is appended to. A run with ``--resume=never`` moves an earlier one away.
        precision: digits after the point. Floats between 1 and 100 are written plainly, others with an
            exponent.

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
        """Move the text file, and ``metrics.jsonl`` beside it where no run log is set, to ``earlier-<time>``.

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

    def _log(self, meta: Stats, stages: Mapping[str, Stats], verbose: bool | None) -> None:
        self._has_written = True
        parts = [self._line(meta), *(self._line(stats, f"{name} ") for name, stats in stages.items())]
        line, path = " - ".join(parts), Path(self.save_file)
        with writing(f"save_file={self.save_file!r}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            append(path, line + "\n")
        if verbose is not False:
            logger.info("%s", line)

    def _line(self, stats: Stats, stage: str = "") -> str:
        return ", ".join(f"{stage}{name}: {self._text(plain(value))}" for name, value in stats.items())

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
        global_step: how often each value has been written; it is what TensorBoard shows on the x axis.

    Raises:
        MissingExtraError: TensorBoard is not installed.

    Ranks: all, or the main process alone; only it writes.

    State: saves ``global_step`` as JSON, so that curves go on after a restart where they ended. Give the
    logger to the checkpointer for that.

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
        """Move event files to ``earlier-<time>`` in their folder, where TensorBoard shows them as another run.

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

    def _log(self, meta: Stats, stages: Mapping[str, Stats], verbose: bool | None) -> None:
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
    def log_audio(self, name: str, value: torch.Tensor, sample_rate: int) -> None:
        """Write a sound.

        Args:
            name: its tag.
            value: samples between -1 and 1, shape ``(num_samples,)`` or ``(1, num_samples)``.
            sample_rate: samples per second.

        Ranks: all, or the main process alone; only it writes.
        """
        self._add("audio", name, value, self.global_step["meta"], sample_rate=sample_rate)

    @main_process_only(hand_over=False)
    def log_figure(self, name: str, value: Any) -> None:
        """Write a picture.

        Args:
            name: its tag.
            value: a matplotlib figure, or a tensor of grey values between 0 and 1, shape ``(height, width)``.

        Ranks: all, or the main process alone; only it writes.
        """
        step = self.global_step["meta"]
        if isinstance(value, torch.Tensor):
            self._add("image", name, value.detach(), step, dataformats="HW")
        else:
            self._add("figure", name, value, step)

    def close(self) -> None:
        """Write out what is still in memory, and close the event file.

        Ranks: local.
        """
        writer = self.__dict__.pop("writer", None)
        if writer is not None:
            writer.close()

    def _write(self, tag: str, value: Any, step: int) -> None:
        if isinstance(value, bool | int | float):
            self._add("scalar", tag, value, step)
        else:
            self._add("text", tag, str(value), step)

    def _add(self, kind: str, tag: str, value: Any, step: int, **options: Any) -> None:
        getattr(self.writer, f"add_{kind}")(tag, value, global_step=step, **options)

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps(self.global_step), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        self.global_step = {"meta": int(saved["meta"]), **{s: dict(saved[s]) for s in ("train", "valid", "test")}}


class WandBLogger(_MainTrainLogger):
    """Writes statistics through a run object, such as a run of Weights & Biases.

    The step is ``stats_meta["epoch"]`` where there is one.

    Args:
        initializer: called on the main process only, with all the other arguments; returns an object with
            ``log(stats, step=...)``. In YAML: ``initializer: !name:wandb.init``.
        args: for the initializer.
        kwargs: for the initializer.

    Attributes:
        run: what the initializer returned; None on the other ranks.

    Raises:
        ConfigError: the initializer failed; its own exception is the cause. Raised on the main process.
        MainProcessError: the same, on the other ranks.

    Ranks: all, or the main process alone; only it writes.

    Example:
        >>> class Run:
        ...     def log(self, stats, step=None):
        ...         print(step, stats)
        >>> WandBLogger(Run).log_stats({"epoch": 1}, {"loss": 0.5})
        1 {'train': {'loss': 0.5}, 'epoch': 1}
    """

    def __init__(self, initializer: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.run: Any = None

        def start() -> None:
            if not if_main_process():  # without a process group every rank comes here
                return
            try:
                self.run = initializer(*args, **kwargs)
            except Exception as error:
                raise ConfigError(
                    f"WandBLogger: initializer={initializer!r} failed with {type(error).__name__}: {error}. "
                    "Its own error stands above."
                ) from error

        run_on_main(start)

    def _log(self, meta: Stats, stages: Mapping[str, Stats], verbose: bool | None) -> None:
        stats = plain_numbers({**stages, **meta})
        self.run.log(stats, **({"step": stats["epoch"]} if "epoch" in stats else {}))


class ProgressSampleLogger:
    """Saves what a model makes of a few samples, epoch by epoch: ``<output_path>/<epoch>/<name>.<extension>``.

    Call :meth:`remember` while training, and :meth:`save` at the end of a stage.

    Args:
        output_path: folder; made at the first save.
        formats: the format of an item by its name; ``"image"`` where none is given.
        format_defs: formats besides ``"raw"`` (``torch.save``, .pth) and ``"image"`` (``torchvision.utils.save_image``,
            .png), by name: a dict with ``saver``, called with the data, a path and ``kwargs``, and ``extension``.
        batch_sample_size: how many items :meth:`get_batch_sample` takes of a batch.

    Attributes:
        progress_samples: what is remembered, by name.

    Ranks: all, or the main process alone; only it writes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samples = ProgressSampleLogger(folder, formats={"output": "raw"})
        ...     samples.remember(output=samples.get_batch_sample(torch.ones(8, 3)))
        ...     samples.save(epoch=2)
        ...     torch.load(f"{folder}/2/output.pth").shape
        torch.Size([1, 3])
    """

    DEFAULT_FORMAT = "image"

    def __init__(
        self,
        output_path: str | os.PathLike[str],
        formats: Mapping[str, str] | None = None,
        format_defs: Mapping[str, Mapping[str, Any]] | None = None,
        batch_sample_size: int = 1,
    ) -> None:
        self.output_path = os.fspath(output_path)
        self.formats = dict(formats or {})
        self.format_defs: dict[str, Mapping[str, Any]] = {
            "raw": {"extension": "pth", "saver": torch.save, "kwargs": {}},
            "image": {"extension": "png", "saver": _save_image, "kwargs": {}},
            **(format_defs or {}),
        }
        self.batch_sample_size = batch_sample_size
        self.progress_samples: dict[str, Any] = {}

    def require_writable(self) -> None:
        """Refuse a folder that cannot be written, before the first epoch.

        Raises:
            ConfigError: :attr:`output_path` cannot be written.

        Ranks: the main process alone.
        """
        require_writable(f"output_path={self.output_path!r}", self.output_path)

    def reset(self) -> None:
        """Forget what is remembered.

        Ranks: local.
        """
        self.progress_samples = {}

    def remember(self, **items: Any) -> None:
        """Keep items, detached, until the next save; one of the same name is replaced.

        Args:
            items: tensors, and lists, tuples and dicts of them, by name.

        Ranks: local.
        """
        on_cpu = map_values(items, lambda one: one.detach().cpu() if isinstance(one, torch.Tensor) else one)
        self.progress_samples.update(on_cpu)

    def get_batch_sample(self, value: Any) -> Any:
        """Take the first ``batch_sample_size`` items of a batch.

        Args:
            value: a tensor with the batch as its first dimension, a list, or a dict of them; all else stays as it is.

        Returns:
            The same with fewer items.

        Ranks: local.
        """
        if isinstance(value, Mapping):
            return {name: self.get_batch_sample(item) for name, item in value.items()}
        return value[: self.batch_sample_size] if isinstance(value, (torch.Tensor, list)) else value

    @main_process_only(hand_over=False)
    def save(self, epoch: int) -> None:
        """Write all that is remembered.

        Args:
            epoch: name of the folder.

        Raises:
            ConfigError: a file cannot be written.
            KeyError: ``formats`` names a format that is not defined.
            MissingExtraError: an image is to be saved, and torchvision is not installed.

        Ranks: all, or the main process alone; only it writes.
        """
        for name, item in self.progress_samples.items():
            self.save_item(name, item, epoch)

    @main_process_only(hand_over=False)
    def save_item(self, key: str, data: Any, epoch: int) -> None:
        """Write one item.

        Args:
            key: its name.
            data: what its format's ``saver`` takes.
            epoch: name of the folder.

        Raises:
            ConfigError: as :meth:`save`.
            MissingExtraError: as :meth:`save`.

        Ranks: all, or the main process alone; only it writes.
        """
        form = self.format_defs[self.formats.get(key, self.DEFAULT_FORMAT)]
        path = Path(self.output_path, str(epoch), f"{key}.{form['extension']}")
        with writing(f"output_path={self.output_path!r}: {str(path)!r}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as unfinished:
                form["saver"](data, str(unfinished), **form.get("kwargs", {}))


def _save_image(data: torch.Tensor, path: str) -> None:
    try:
        from torchvision.utils import save_image  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "An image is saved with torchvision, which is not installed. "
            "Run `pip install torchvision`, or choose another format for it in `formats`."
        ) from error
    save_image(data, path)
