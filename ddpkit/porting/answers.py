"""Answers the modules of SpeechBrain's training core: a finder for imports, and modules that have
ddpkit's names.
"""

from __future__ import annotations

import ast
import functools
import importlib
import multiprocessing
import os
import symtable
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from ddpkit import __version__
from ddpkit.base import rank_if_known
from ddpkit.errors import ConfigError
from ddpkit.porting.names import PACKAGE, TABLE

__all__ = ["ANSWERED", "VARIABLE", "environment", "install", "is_switched_off"]

#: The variable that tells processes started from here. ``0`` switches all of it off.
VARIABLE = "DDPKIT_SPEECHBRAIN"
_TOLD = "told"  # its value where a process above this one has said who answers what

_UTILS = (
    *(
        "autocast",
        "checkpoints",
        "distributed",
        "epoch_loop",
        "logger",
        "optimizers",
        "profiling",
        "run_opts",
    ),
    *("seed", "train_logger"),
)
_DATAIO = ("dataloader", "sampler")

#: The modules of SpeechBrain that are answered. The package's own names (``speechbrain.Brain``)
#: come from them.
ANSWERED = (
    f"{PACKAGE}.core",
    *(f"{PACKAGE}.utils.{name}" for name in _UTILS),
    *(f"{PACKAGE}.dataio.{name}" for name in _DATAIO),
)

# Names of these modules that are SpeechBrain's own: constants and functions that know neither ranks
# nor checkpoints, and what its Pretrainer reads weights with (it renames keys of old files). Its
# `core` and `dataio.dataloader` are never run: they turn TF32 on and patch torch's DataLoader.
_OWN = {
    f"{PACKAGE}.utils.checkpoints": (
        "CKPT_PREFIX KEYS_MAPPING "
        "hook_on_loading_state_dict_checkpoint "
        "torch_parameter_transfer torch_patched_state_dict_load"
    ),
    f"{PACKAGE}.utils.logger": "ORDERS_ABBREV ORDERS_WORDS",
    f"{PACKAGE}.utils.run_opts": "HELP_TEXTS",
    f"{PACKAGE}.utils.seed": "max_seed_value min_seed_value",
    f"{PACKAGE}.utils.train_logger": "detach plot_spectrogram",
}
_CHECKPOINTS = f"{PACKAGE}.utils.checkpoints"


def is_switched_off() -> bool:
    """Say whether the environment forbids it, so that a recipe runs as before.

    Ranks: local.

    Example:
        >>> before = os.environ.get(VARIABLE)
        >>> os.environ[VARIABLE] = "0"
        >>> is_switched_off()
        True
        >>> _ = (
        ...     os.environ.pop(VARIABLE)
        ...     if before is None
        ...     else os.environ.update({VARIABLE: before})
        ... )
    """
    return os.environ.get(VARIABLE) == "0"


def install() -> None:
    """Answer the training core of SpeechBrain in this process, and in its child processes.

    Raises:
        ConfigError: a module of SpeechBrain has been imported already.

    Ranks: all, before anything imports SpeechBrain.

    State: a finder at the front of ``sys.meta_path``; ``DDPKIT_SPEECHBRAIN`` and ``PYTHONPATH`` in
    the environment.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    loaded = sorted(name for name in sys.modules if name.split(".")[0] == PACKAGE)
    if loaded:
        raise ConfigError(
            f"SpeechBrain was imported before ddpkit.speechbrain ({len(loaded)} of its modules, "
            f"the first is {loaded[0]}), and what it has handed out cannot be replaced. Make "
            "`import ddpkit.speechbrain` the first line of the script, or run it with `python -m "
            "ddpkit.speechbrain`."
        )
    sys.meta_path.insert(0, _Finder())
    os.environ.update(environment())


def environment() -> dict[str, str]:
    """Return the variables by which processes that are started from here are answered too.

    Ranks: local.

    Example:
        >>> sorted(environment())
        ['DDPKIT_SPEECHBRAIN', 'PYTHONPATH']
    """
    folder = str(Path(__file__).parents[1] / PACKAGE)  # ddpkit.speechbrain: it has a sitecustomize
    rest = os.environ.get("PYTHONPATH", "")
    paths = [folder, *(path for path in rest.split(os.pathsep) if path and path != folder)]
    return {VARIABLE: os.environ.get(VARIABLE) or "1", "PYTHONPATH": os.pathsep.join(paths)}


class _Finder(MetaPathFinder):
    """Finds the modules that are answered; all others are left to the finders behind it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in ANSWERED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        # SpeechBrain 1.0 has no run_opts
        original = next((spec for spec in specs if spec is not None), None)
        return ModuleSpec(fullname, _Answers(original), origin=f"answered by {__name__}")


class _Answers(Loader):
    """Makes a module that is answered.

    Args:
        spec: of SpeechBrain's own module, if it has one.
    """

    def __init__(self, spec: ModuleSpec | None) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Answered(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        _tell_once()
        answers: Any = module
        answers.__all__ = [
            name for names in TABLE[module.__name__].values() for name in names.split()
        ]
        if module.__name__ == _CHECKPOINTS:
            answers.DEFAULT_TRANSFER_HOOKS.update(self.original.DEFAULT_TRANSFER_HOOKS)

    @functools.cached_property
    def original(self) -> Any:
        """SpeechBrain's own module, beside that in ``sys.modules``; what it imports is answered."""
        spec: Any = self._spec
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    @functools.cached_property
    def _source(self) -> tuple[set[str], dict[str, tuple[str, str]]]:
        """The names of SpeechBrain's own module, and where those come from that it imports from
        others.
        """
        spec: Any = self._spec
        if spec is None:
            return set(), {}
        source = spec.loader.get_source(spec.name)
        symbols = symtable.symtable(source, spec.name, "exec").get_symbols()
        names = {
            symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()
        }
        froms = {
            alias.asname or alias.name: (
                resolve_name("." * node.level + (node.module or ""), spec.parent),
                alias.name,
            )
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        return names, froms

    def find(self, module: str, name: str) -> Any:
        """Return what a name of a module stands for: in ddpkit, or else in SpeechBrain.

        Args:
            module: its full name.
            name: in it.

        Raises:
            AttributeError: it has no such name.
            ImportError: SpeechBrain has the name, and it cannot be used beside ddpkit's core. (The
                message of an AttributeError would be hidden by ``from module import name``.)
        """
        if self._spec is not None and name in _OWN.get(module, "").split():
            return getattr(self.original, name)
        for home, known in TABLE[module].items():
            if name in known.split():
                return getattr(importlib.import_module(home), name)
        names, froms = self._source
        if name in froms:
            home, inner = froms[name]
            return getattr(importlib.import_module(home), inner)
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise ImportError(
            f"{module}.{name} is part of SpeechBrain's training core, which ddpkit answers, and "
            "ddpkit has no such name. SpeechBrain's own would know other ranks, options and "
            "checkpoints than the run has. Leave it out (docs/porting.md says what takes the "
            f"place of what), or run the recipe as before, with {VARIABLE}=0.",
            name=module,
        )


class _Answered(ModuleType):
    """A module of SpeechBrain with ddpkit's names, each looked up when it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        loader: Any = None if self.__spec__ is None else self.__spec__.loader
        if name.startswith("__") or loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        vars(self)[name] = value = loader.find(self.__name__, name)
        return value


def _tell_once() -> None:
    """Say who answers what: once in a run, by its main process."""
    was_told = os.environ.get(VARIABLE) == _TOLD or multiprocessing.parent_process() is not None
    os.environ[VARIABLE] = _TOLD
    if was_told or (rank_if_known() or 0) > 0:
        return
    origin = getattr(sys.modules.get(PACKAGE), "__file__", None) or "?"
    sys.stderr.write(
        f"ddpkit {__version__} answers {PACKAGE}.core, .utils.({'|'.join(_UTILS)}), .dataio.("
        f"{'|'.join(_DATAIO)}); all else is SpeechBrain's, from {Path(origin).parent}. "
        f"{VARIABLE}=0 switches it off.\n"
    )
