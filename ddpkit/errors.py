"""Every exception that ddpkit raises on purpose.

::

    Exception
    └── DdpkitError
        ├── ConfigError (ValueError)             an option, argument or file cannot work as given
        │   ├── MissingFileError (FileNotFoundError)   a file named on the command line is not there
        │   ├── MissingExtraError (ImportError)        an optional dependency is not installed
        │   └── BucketingError (NotImplementedError)   a sampler by length lacks buckets or lengths
        ├── LaunchError (RuntimeError)           the launcher's environment contradicts itself
        │   └── RankMismatchError                the ranks disagree on what they are about to do
        ├── BatchError (TypeError)               a hook returned something the loop cannot train on
        ├── DataError (ValueError)               a dataset or loader cannot feed the run
        ├── CheckpointError (RuntimeError)       a checkpoint cannot be written, found or trusted
        │   ├── FolderInUseError                 another run saves into the folder
        │   ├── ObjectStoreError                 an object store cannot be reached, or refuses
        │   │   └── ObjectStoreUsageError (CheckpointUsageError)   its bucket, credentials or a permission is missing
        │   └── CheckpointUsageError (ConfigError)     what was given does not go with checkpoints, or with this one
        ├── NonFiniteLossError (ValueError)      too many steps of an epoch were not finite
        ├── ParityError (AssertionError)         several processes would not train as one does
        ├── AuditError (RuntimeError)            processes compute different bits of the same shard
        └── RankFailedError (RuntimeError)       another rank failed; carries that rank's own words
            └── MainProcessError                 the main process failed inside a main-only call
                └── MainCheckpointError (CheckpointError)    and that call was about checkpoints

    SystemExit
    └── RunStopped                               the run was asked to stop, and did, with its checkpoint saved

Each one also derives from the built-in that a caller would catch, so ``except ValueError`` keeps
working for code that has never heard of ddpkit. A message says what was given, why it cannot work
and what to do.
"""  # noqa: E501

from __future__ import annotations

__all__ = [
    "AuditError",
    "BatchError",
    "BucketingError",
    "CheckpointError",
    "CheckpointUsageError",
    "ConfigError",
    "DataError",
    "DdpkitError",
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
    "RankFailedError",
    "RankMismatchError",
    "RunStopped",
]


class DdpkitError(Exception):
    """The root of the tree: everything that ddpkit raises on purpose."""


class ConfigError(DdpkitError, ValueError):
    """An option, an argument or a file cannot work as given."""


class MissingFileError(ConfigError, FileNotFoundError):
    """A file that the user named does not exist."""

    def __str__(self) -> str:
        """Show the message alone: ``FileNotFoundError`` would print it as an errno pair."""
        return str(self.args[0]) if self.args else ""


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is needed and not installed; the message names its package."""

    def __str__(self) -> str:
        """Show the message alone."""
        return str(self.args[0]) if self.args else ""


class BucketingError(ConfigError, NotImplementedError):
    """A sampler that groups samples by length was given no buckets, or no way to know the
    lengths.
    """


class LaunchError(DdpkitError, RuntimeError):
    """The launcher's environment contradicts itself or cannot be used."""


class RankMismatchError(LaunchError):
    """The ranks disagree on what they are about to do (model, options, data)."""


class BatchError(DdpkitError, TypeError):
    """A hook returned something that the loop cannot train on.

    Args:
        message: what was returned, why that cannot work, and what to do.
        hook: name of the hook, such as ``"compute_objectives"``, whose line in the recipe is then
            shown; empty where the traceback leads to the line.
    """

    def __init__(
        self,
        message: str = "",
        *,
        hook: str = "",
    ) -> None:
        super().__init__(message)
        self.hook = hook


class DataError(DdpkitError, ValueError):
    """A dataset, a sampler or a loader cannot feed the run."""


class CheckpointError(DdpkitError, RuntimeError):
    """A checkpoint cannot be written, found or trusted."""


class CheckpointUsageError(CheckpointError, ConfigError):
    """A path that was given is no checkpoint or no folder for them, or what was given does not fit
    the checkpoint.
    """


class FolderInUseError(CheckpointError):
    """Another run saves into the folder, or has taken it over."""


class ObjectStoreError(CheckpointError):
    """An object store, such as S3, cannot be reached or refuses what was asked."""


class ObjectStoreUsageError(ObjectStoreError, CheckpointUsageError):
    """An object store refuses whatever is asked: its bucket, credentials or a permission is
    missing.
    """


class NonFiniteLossError(DdpkitError, ValueError):
    """More steps of one epoch were not finite than ``nonfinite_patience`` allows."""


class ParityError(DdpkitError, AssertionError):
    """``--check_parity`` found that several processes would not train as one does. The message is
    its report.
    """


class AuditError(DdpkitError, RuntimeError):
    """``--audit_every`` found that two processes compute different bits of the same shard. The
    message names the one that is wrong, where that can be told.
    """


class RankFailedError(DdpkitError, RuntimeError):
    """Another rank failed. The message carries that rank's number and its own traceback."""


class MainProcessError(RankFailedError):
    """The main process failed inside a main-only call; raised on every other rank."""


class MainCheckpointError(CheckpointError, MainProcessError):
    """The main process failed in a call about checkpoints, and says why; raised on every other
    rank.
    """


class RunStopped(SystemExit):
    """The run was asked to stop, by a signal or its time limit, and has done so on all ranks at the
    same step.

    Attributes:
        code: what the process exits with: 128 plus the number of the signal, or 75 at the time
            limit.
        cause: one of :data:`ddpkit.control.signals.CAUSES`.
        words: where it has stopped, and where it goes on from.
    """

    words = ""

    def __init__(self, code: int, cause: str) -> None:
        super().__init__(code)
        self.cause = cause
