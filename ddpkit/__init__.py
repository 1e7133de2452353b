"""ddpkit: a data-parallel training loop for PyTorch.

One recipe, a subclass of :class:`~ddpkit.brain.Brain` with a HyperPyYAML file, runs on one CPU, one
GPU, several GPUs of one process or several processes under a launcher, and gives the same answer on
each.

Importing this package imports nothing else: not torch, not its own modules. A name of ``__all__``
or a module is loaded when it is first used. Where a name lives says ``__init__.pyi``, also to type
checkers.

Example:
    >>> import ddpkit as sb
    >>> sb.Stage.TRAIN.name
    'TRAIN'
    >>> sb.distributed.run_on_main is sb.run_on_main
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__version__ = "0.1.0"

__all__ = [
    "AMPConfig",
    "AuditError",
    "BatchError",
    "Brain",
    "BucketingError",
    "CheckpointError",
    "CheckpointUsageError",
    "ConfigError",
    "DataError",
    "DdpkitError",
    "FitResult",
    "FolderInUseError",
    "LaunchError",
    "MainCheckpointError",
    "MainProcessError",
    "MissingExtraError",
    "MissingFileError",
    "NonFiniteLossError",
    "ObjectStoreError",
    "ObjectStoreUsageError",
    "ParityError",
    "Part",
    "RankFailedError",
    "RankMismatchError",
    "RunOptions",
    "RunStopped",
    "Stage",
    "create_experiment_directory",
    "ddp_init_group",
    "if_main_process",
    "load_hparams",
    "main_process_only",
    "notebook_launch",
    "parse_arguments",
    "run_on_main",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    """Load a public name, or a module of the package, when it is first asked for (PEP 562)."""
    import sys
    from importlib import import_module
    from importlib.util import find_spec

    # of SpeechBrain, whose recipes say `sb.utils.distributed.run_on_main`
    if name in {"core", "utils", "dataio"}:
        return sys.modules[__name__]
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        return _names_of_stub(__name__)(name)
    return import_module(f"{__name__}.{name}")


def _names_of_stub(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: it loads the names in its ``__init__.pyi``, each
    when it is first used.

    Type checkers read the same file. A name that is not in it is private to the package.
    """

    def find(name: str) -> Any:
        import ast
        import sys
        from importlib import import_module
        from pathlib import Path

        namespace = vars(sys.modules[package])
        if "_homes" not in namespace:
            stub = ast.parse(
                Path(namespace["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8")
            )
            froms = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
            namespace["_homes"] = {
                alias.name: node.module for node in froms for alias in node.names
            }
        if name not in namespace["_homes"]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return namespace.setdefault(name, getattr(import_module(namespace["_homes"][name]), name))

    return find


def __dir__() -> list[str]:
    """List the public names besides what is loaded already."""
    return sorted({*globals(), *__all__})
