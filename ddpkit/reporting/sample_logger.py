"""What a model makes of a few samples, saved epoch by epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddpkit.base import map_values, replacing, require_writable, writing
from ddpkit.distributed import main_process_only
from ddpkit.errors import MissingExtraError


class ProgressSampleLogger:
    """Saves what a model makes of a few samples, epoch by epoch:
    ``<output_path>/<epoch>/<name>.<extension>``.

    Call :meth:`remember` while training, and :meth:`save` at the end of a stage.

    Args:
        output_path: folder; made at the first save.
        formats: the format of an item by its name; ``"image"`` where none is given.
        format_defs: formats besides ``"raw"`` (``torch.save``, .pth) and ``"image"``
            (``torchvision.utils.save_image``, .png), by name: a dict with ``saver``, called with
            the data, a path and ``kwargs``, and ``extension``.
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
        on_cpu = map_values(
            items,
            lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value,
        )
        self.progress_samples.update(on_cpu)

    def get_batch_sample(self, value: Any) -> Any:
        """Take the first ``batch_sample_size`` items of a batch.

        Args:
            value: a tensor with the batch as its first dimension, a list, or a dict of them; all
                else stays as it is.

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
    def save_item(
        self,
        key: str,
        data: Any,
        epoch: int,
    ) -> None:
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
                form["saver"](
                    data,
                    str(unfinished),
                    **form.get("kwargs", {}),
                )


def _save_image(data: torch.Tensor, path: str) -> None:
    try:
        from torchvision.utils import save_image  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "An image is saved with torchvision, which is not installed. "
            "Run `pip install torchvision`, or choose another format for it in `formats`."
        ) from error
    save_image(data, path)
