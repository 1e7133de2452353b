"""Pretrained parameters from files on disk, given to the objects of a recipe before it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddpkit.base import kind_of
from ddpkit.checkpoints import PARAMFILE_EXT, find_load_hook, find_transfer_hook
from ddpkit.errors import ConfigError, MissingFileError
from ddpkit.logger import get_logger

__all__ = ["Pretrainer"]

logger = get_logger(__name__)


class Pretrainer:
    """Finds the files of pretrained objects, and loads them; never code out of them.

    It downloads nothing: what a path or ``default_source`` names must be on disk. An object is
    loaded by its custom hook; else by the method that ``mark_as_transfer`` has marked, ddpkit's or
    SpeechBrain's; else, if it is a module, by name, with a warning for each parameter that only one
    side has; else as from a checkpoint.

    ``loadables``, ``paths``, ``custom_hooks`` and ``conditions`` are dicts, which a recipe may add
    to.

    Args:
        collect_in: a folder whose file ``<name>.ckpt`` is taken where the source is not on disk.
            Nothing is written there.
        loadables: objects by name.
        paths: files by name.
        custom_hooks: by name; called with the object and the path.
        conditions: by name: whether the object is loaded, or a function that says so.

    Ranks: local; give every rank the same.

    Example:
        >>> import tempfile, torch
        >>> folder, pretrained, model = (
        ...     tempfile.mkdtemp(),
        ...     torch.nn.Linear(2, 1),
        ...     torch.nn.Linear(2, 1),
        ... )
        >>> torch.save(pretrained.state_dict(), f"{folder}/best.pt")
        >>> pretrainer = Pretrainer(
        ...     loadables={"model": model}, paths={"model": f"{folder}/best.pt"}
        ... )
        >>> files = pretrainer.collect_files()
        >>> pretrainer.load_collected()
        >>> torch.equal(model.weight, pretrained.weight)
        True
    """

    def __init__(
        self,
        collect_in: str | Path | None = None,
        loadables: Mapping[str, Any] | None = None,
        paths: Mapping[str, Any] | None = None,
        custom_hooks: Mapping[str, Callable[[Any, Path], object]] | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        self.loadables = dict(loadables or {})
        self.paths = dict(paths or {})
        self.custom_hooks = dict(custom_hooks or {})
        self.conditions = dict(conditions or {})
        self._default_source: str | Path | None = None
        self.set_collect_in(collect_in)

    def set_collect_in(self, path: str | Path | None) -> None:
        """Choose the folder whose files take the place of sources that are not on disk."""
        self.collect_in = None if path is None else Path(path)

    def is_loadable(self, name: str) -> bool:
        """Return whether the condition of an object holds, or it has none.

        Args:
            name: of the object.
        """
        condition = self.conditions.get(name, True)
        return bool(condition() if callable(condition) else condition)

    def collect_files(self, default_source: str | Path | None = None) -> dict[str, Path]:
        """Find the file of each object; a missing file is an error before anything is loaded.

        Args:
            default_source: a folder with ``<name>.ckpt`` for objects without a path; kept for
                :meth:`load_collected`.

        Returns:
            The files by name.

        Raises:
            ConfigError: an object has no path, and there is no ``default_source``.
            MissingFileError: a source is not on disk, such as the address of a page or a name on a
                hub.

        Ranks: local; every rank, or, if every object has a path, the main process alone, as in
        ``run_on_main(pretrainer.collect_files)``.
        """
        self._default_source = default_source
        return {name: self._find(name) for name in self.loadables if self.is_loadable(name)}

    def load_collected(self) -> None:
        """Load each object from its file.

        Raises:
            MissingFileError: a file is not on this rank's disk. Nothing is loaded then.
            ConfigError: an object has no path, or nothing loads one of its kind. Nothing is loaded
                then.
            CheckpointError: a file is damaged, does not fit, or could run code.

        Ranks: local; call it on every rank.
        """
        names = [name for name in self.loadables if self.is_loadable(name)]
        work = [
            (
                self._hook(name),
                self.loadables[name],
                self._find(name),
            )
            for name in names
        ]
        logger.info(
            "Pretrained: %s",
            ", ".join(f"{name} from {path}" for name, (*_, path) in zip(names, work, strict=True)),
        )
        for hook, obj, path in work:
            hook(obj, path)

    def _source(self, name: str) -> str:
        if name in self.paths:
            return str(
                getattr(
                    self.paths[name],
                    "path",
                    self.paths[name],
                )
            )  # of a FetchSource
        folder = self._default_source
        if folder is None:
            raise ConfigError(
                f"Pretrainer: {name!r} has no path: give paths={{{name!r}: ...}}, or call "
                "collect_files with a default_source on every rank."
            )
        return f"{getattr(folder, 'path', folder)}/{name}{PARAMFILE_EXT}"

    def _find(self, name: str) -> Path:
        """Return the file that a source names, or the one in ``collect_in``."""
        source = self._source(name)
        ready = None if self.collect_in is None else self.collect_in / f"{name}{PARAMFILE_EXT}"
        for path in (Path(source).expanduser(), ready):
            if path is not None and path.is_file():
                return path.absolute()
        place = "" if ready is None else f", or put it at {ready}"
        raise MissingFileError(
            f"Pretrainer: {source}, for {name!r}, is not a file on disk, and ddpkit downloads "
            f"nothing. Download it first and give its path{place}."
        )

    def _hook(self, name: str) -> Callable[[Any, Path], object]:
        obj = self.loadables[name]
        hook = self.custom_hooks.get(name) or find_transfer_hook(obj)
        if hook is not None:
            return hook
        load = find_load_hook(obj)
        if load is None:
            raise ConfigError(
                f"Pretrainer: nothing loads {name!r}, {kind_of(obj)}: mark a method with "
                "mark_as_transfer, or give custom_hooks."
            )
        return lambda obj, path: load(obj, path, False)  # no epoch has ended
