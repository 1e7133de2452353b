"""Logs to TensorBoard."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import (
    POSITION,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
    require_writable,
    writing,
)
from ddpkit.distributed import if_main_process, main_process_only
from ddpkit.errors import MissingExtraError
from ddpkit.mirror import local_file
from ddpkit.reporting import Stats, move_logs_away, plain
from ddpkit.train_logger.event_files import (
    EVENT_FILES,
    StandingValues,
    event_file_sizes,
    events_after,
)
from ddpkit.train_logger.main_logger import MainTrainLogger
from ddpkit.train_logger.step_axis import StepAxis

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.tensorboard import SummaryWriter


@register_checkpoint_hooks
class TensorboardLogger(MainTrainLogger):
    """Writes statistics for TensorBoard. Needs ``pip install tensorboard``.

    Every value is written under ``<name>/<stage>``. The x axis shows optimizer steps, and in a
    script without a Brain how often a value has been written. Every element of a list is a step of
    its own, counted from 1.

    A run that goes on from a checkpoint writes later steps again, and has TensorBoard hide the
    first ones. A value of the checkpoint's own step that stands in the files already is not written
    again. Where lists have been written, which count otherwise, values are shown twice.

    Args:
        save_dir: folder of the event files; it is made at the first write.

    Attributes:
        global_step: how often each value has been written.

    Raises:
        MissingExtraError: TensorBoard is not installed.

    Ranks: all, or the main process alone; only it writes.

    State: saves ``global_step`` as JSON, so that curves go on after a restart where they ended, and
    the sizes of the event files. The Brain gives the logger to the checkpointer, unless the recipe
    does.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tensorboard = TensorboardLogger(folder)
        ...     tensorboard.log_stats({"epoch": 1}, {"loss": [0.5, 0.4]})
        ...     tensorboard.close()
        ...     tensorboard.global_step["train"]
        {'loss': 2}
    """

    save_dir: str

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingExtraError(
                "TensorboardLogger needs tensorboard, which is not installed. "
                "Run `pip install tensorboard`, or leave the logger out of the recipe."
            )
        self.save_dir = local_file("save_dir", save_dir)
        self.global_step: dict[str, Any] = {"train": {}, "valid": {}, "test": {}, "meta": 0}
        self._axis = StepAxis()
        self._purge_step: int | None = None
        self._has_lists = False
        # of the checkpoint that fit goes on from, and what was written at its step after it
        self._saved_sizes: dict[str, int] | None = None
        self._standing: StandingValues | None = None

    def begin_anew(self) -> None:
        """Move event files to ``earlier-<time>`` in their folder, where TensorBoard shows them as
        another run.

        Raises:
            ConfigError: as :meth:`TrainLogger.begin_anew`.

        Ranks: the main process alone.
        """
        if "writer" not in self.__dict__:
            move_logs_away(Path(self.save_dir).glob(EVENT_FILES))

    @functools.cached_property
    def writer(self) -> SummaryWriter | None:
        """The TensorBoard writer: made at first use on the main process, None on the others.

        Ranks: local.
        """
        if not if_main_process():
            return None
        from torch.utils.tensorboard import SummaryWriter

        with writing(f"save_dir={self.save_dir!r}"):
            return SummaryWriter(self.save_dir, purge_step=self._purge_step)

    def require_writable(self) -> None:
        """Refuse a folder that cannot be written, before the first epoch.

        Raises:
            ConfigError: :attr:`save_dir` cannot be written.

        Ranks: the main process alone.
        """
        require_writable(f"save_dir={self.save_dir!r}", self.save_dir)

    def begin_fit(self, optimizer_step: int) -> None:
        """Have TensorBoard hide what an earlier start has written of later steps; look what it has
        written of this step after the checkpoint.

        Args:
            optimizer_step: where the run goes on; 0: nothing is hidden.

        Raises:
            ConfigError: the event files cannot be read.

        Ranks: the main process alone.
        """
        sizes = self._saved_sizes
        self._saved_sizes = self._standing = None
        if not optimizer_step or self._has_lists or "writer" in self.__dict__:
            return
        self._purge_step = optimizer_step + 1
        if sizes is not None:
            with writing(f"save_dir={self.save_dir!r}"):
                later = events_after(self.save_dir, sizes)
                self._standing = StandingValues(later, optimizer_step)

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        step = self._axis.step_of({})
        self.global_step["meta"] += 1
        for name, value in meta.items():
            self._write(name, plain(value), self._at(step, self.global_step["meta"]))
        for stage, stats in stages.items():
            for name, values in stats.items():
                self._write_values(stage, name, plain(values), step)
        self._flush()

    def _write_values(
        self,
        stage: str,
        name: str,
        found: Any,
        step: int | None,
    ) -> None:
        counts = self.global_step[stage]
        self._has_lists = self._has_lists or isinstance(found, list)
        for value in found if isinstance(found, list) else [found]:
            counts[name] = counts.get(name, 0) + 1
            at = counts[name] if isinstance(found, list) else self._at(step, counts[name])
            self._write(f"{name}/{stage}", value, at)

    @staticmethod
    def _at(step: int | None, count: int) -> int:
        return count if step is None else step

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
            self._at(self._axis.step_of({}), self.global_step["meta"]),
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
        step = self._at(self._axis.step_of({}), self.global_step["meta"])
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
            with writing(f"save_dir={self.save_dir!r}"):
                writer.close()

    def _write(
        self,
        tag: str,
        value: Any,
        step: int,
    ) -> None:
        found = _number_or_text(value)
        if self._standing is None or not self._standing.take(tag, found, step):
            self._add("text" if isinstance(found, str) else "scalar", tag, found, step)

    def _add(
        self,
        kind: str,
        tag: str,
        value: Any,
        step: int,
        **options: Any,
    ) -> None:
        add = getattr(self.writer, f"add_{kind}")
        with writing(f"save_dir={self.save_dir!r}"):
            add(tag, value, global_step=step, **options)

    def _flush(self) -> None:
        writer = self.__dict__.get("writer")
        if writer is not None:
            with writing(f"save_dir={self.save_dir!r}"):
                writer.flush()

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        self._flush()
        state = {
            **self.global_step,
            "has_lists": self._has_lists,
            "sizes": event_file_sizes(self.save_dir),
        }
        Path(path).write_text(json.dumps(state), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        self.global_step = {
            "meta": int(saved["meta"]),
            **{s: dict(saved[s]) for s in ("train", "valid", "test")},
        }
        # an earlier version did not say it, and counted all values as it counted lists
        self._has_lists = bool(saved.get("has_lists", True))
        # What is recovered for an evaluation is not gone on from.
        is_fitting = POSITION.progress is not None and POSITION.progress.is_fitting
        self._saved_sizes = saved.get("sizes") if is_fitting else None


def _number_or_text(value: Any) -> float | str:
    if isinstance(value, bool | int | float):
        with contextlib.suppress(OverflowError):  # an integer that no float can hold is a text
            float(value)
            return value
    return str(value).encode(errors="backslashreplace").decode()
