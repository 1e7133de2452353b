"""ddpkit: a data-parallel training loop for PyTorch.

One recipe, a subclass of :class:`~ddpkit.brain.Brain` with a HyperPyYAML file, runs on one CPU, one GPU,
several GPUs of one process or several processes under a launcher, and gives the same answer on each.

Importing this package imports nothing else: not torch, not its own modules. A name of ``__all__`` or a module
is loaded when it is first used.

Example:
    >>> import ddpkit as sb
    >>> sb.Stage.TRAIN.name
    'TRAIN'
    >>> sb.distributed.run_on_main is sb.run_on_main
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AMPConfig",
    "BatchError",
    "Brain",
    "BucketingError",
    "CheckpointError",
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
    "ParityError",
    "RankCheckpointError",
    "RankFailedError",
    "RankMismatchError",
    "RunOptions",
    "RunStopped",
    "Stage",
    "create_experiment_directory",
    "ddp_init_group",
    "if_main_process",
    "main_process_only",
    "parse_arguments",
    "run_on_main",
    "seed_everything",
    "spawn",
]

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpkit import (
        augmentation,
        batch,
        brain,
        checkpoints,
        cli,
        dataloader,
        device,
        distributed,
        ema,
        epoch_loop,
        errors,
        experiment,
        logger,
        metric_stats,
        metrics,
        optim,
        parameter_transfer,
        precision,
        profiler,
        run_opts,
        sampler,
        schedulers,
        seed,
        syncbn,
        testing,
        train_logger,
        types,
    )
    from ddpkit.brain import Brain
    from ddpkit.distributed import ddp_init_group, if_main_process, main_process_only, run_on_main
    from ddpkit.errors import (
        BatchError,
        BucketingError,
        CheckpointError,
        ConfigError,
        DataError,
        DdpkitError,
        FolderInUseError,
        LaunchError,
        MainProcessError,
        MissingExtraError,
        MissingFileError,
        NonFiniteLossError,
        ParityError,
        RankCheckpointError,
        RankFailedError,
        RankMismatchError,
    )
    from ddpkit.experiment import create_experiment_directory
    from ddpkit.launch import spawn
    from ddpkit.precision import AMPConfig
    from ddpkit.run_opts import RunOptions, parse_arguments
    from ddpkit.seed import seed_everything
    from ddpkit.types import FitResult, Stage
else:
    # Where each name of `__all__` that is not an error lives. Type checkers read the imports above instead: with
    # a module `__getattr__` in sight they would take any misspelt name for good.
    _HOMES = {
        "AMPConfig": "precision",
        "Brain": "brain",
        "FitResult": "types",
        "RunOptions": "run_opts",
        "Stage": "types",
        "create_experiment_directory": "experiment",
        "ddp_init_group": "distributed",
        "if_main_process": "distributed",
        "main_process_only": "distributed",
        "parse_arguments": "run_opts",
        "run_on_main": "distributed",
        "seed_everything": "seed",
        "spawn": "launch.spawning",
    }

    # Ported recipes say `sb.core.Stage` or `sb.utils.distributed.run_on_main`: here all of that is one floor.
    _OLD_FLOORS = frozenset({"core", "utils", "dataio"})

    def __getattr__(name: str) -> Any:
        """Load a public name, or a module of the package, when it is first asked for (PEP 562)."""
        import sys
        from importlib import import_module
        from importlib.util import find_spec

        if name in __all__:
            value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
        elif name in _OLD_FLOORS:
            value = sys.modules[__name__]
        elif name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        else:
            value = import_module(f"{__name__}.{name}")
        globals()[name] = value
        return value


def _names_of_stub(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: it loads the names in its ``__init__.pyi``, each when it is first used.

    Type checkers read the same file. A name that is not in it is private to the package.
    """

    def find(name: str) -> Any:
        import ast
        import sys
        from importlib import import_module
        from pathlib import Path

        namespace = vars(sys.modules[package])
        if "_homes" not in namespace:
            stub = ast.parse(Path(namespace["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8"))
            froms = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
            namespace["_homes"] = {alias.name: node.module for node in froms for alias in node.names}
        if name not in namespace["_homes"]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return namespace.setdefault(name, getattr(import_module(namespace["_homes"][name]), name))

    return find


def __dir__() -> list[str]:
    """List the public names besides what is loaded already."""
    return sorted({*globals(), *__all__})
