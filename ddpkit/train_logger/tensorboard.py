"""TensorBoard."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
    require_writable,
    writing,
)
from ddpkit.distributed import if_main_process, main_process_only
from ddpkit.errors import MissingExtraError
from ddpkit.reporting import Stats, move_logs_away, plain
from ddpkit.train_logger.main_logger import MainTrainLogger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.tensorboard import SummaryWriter


@register_checkpoint_hooks
class TensorboardLogger(MainTrainLogger):
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
