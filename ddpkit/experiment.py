"""The experiment folder: script and hyperparameters of a run, its environment, and its log."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from hyperpyyaml import resolve_references
from ruamel.yaml.error import YAMLError

from ddpkit.base import (
    COUNTERS,
    POSITION,
    PROCESS,
    cannot_write,
    counters_of,
    replacing,
    to_plain,
    unwritten_skips,
    writing,
)
from ddpkit.checkpointing import FolderLock
from ddpkit.comm import outside_frame
from ddpkit.control import is_shown_without_traceback, show_without_traceback, watch_uncaught
from ddpkit.distributed import get_world_size, if_main_process, run_on_main
from ddpkit.errors import (
    CheckpointError,
    ConfigError,
    DdpkitError,
    FolderInUseError,
    MissingFileError,
    RankFailedError,
)
from ddpkit.launch import PARITY, find_launch, find_slice
from ddpkit.logger import close_logging, get_logger, setup_logging, shown_path
from ddpkit.object_store import is_url
from ddpkit.recipe_yaml import (
    check_references,
    named_module_files,
    override_values,
    read_document,
    with_overrides,
)
from ddpkit.reporting import (
    close_torn_line,
    end_before,
    environment_facts,
    file_identity,
    git_commit,
    move_logs_away,
    process_start,
    tell_of_moved_logs,
    working_directory,
)
from ddpkit.run_opts import RunOptions, command_line_options
from ddpkit.seed import global_seed
from ddpkit.train_logger import run_event, set_run_log

if TYPE_CHECKING:
    from types import FrameType

    from ddpkit.mirror import Mirror

__all__ = ["close_experiment", "create_experiment_directory", "get_environment_description"]

logger = get_logger(__name__)

RULE = "=" * 80
LOCK_NAME = ".run.lock"  # beside that of a folder of checkpoints, which may be the same folder

_CLAIMED = contextlib.ExitStack()  # releases the lock of the folder that is this process's


def create_experiment_directory(
    experiment_directory: str | os.PathLike[str],
    hyperparams_to_save: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | str | None = None,
    log_config: str | os.PathLike[str] | None = None,
    save_env_desc: bool = True,
) -> None:
    """Make the experiment's folder, note in it what is run, and start logging.

    The main process writes ``hyperparams.yaml`` (references resolved), copies of the calling script
    and of the modules beside it that the YAML names, ``env.log`` and, from then on, ``log.txt``
    (everything from DEBUG on) and ``metrics.jsonl`` (see :class:`ddpkit.train_logger.RunLog`). A
    rank above 0 that has a warning to log writes ``log.rank<r>.txt`` as well.

    The folder belongs to one run at a time, until its main process ends. While it lives, a second
    start is refused before anything is written; so call this before data is prepared. Later starts
    overwrite the files of the start and append to the others; with ``--resume=never`` they move the
    logs that are there to ``earlier-<time>`` in the folder. Whoever starts with ``--test_only``
    leaves those as they are, is not refused, and logs to ``log.test_only.txt`` and
    ``metrics.test_only.jsonl``.

    From then on every rank also logs the exception that ends it, before Python prints it as usual,
    and leaves it for the summary that torchrun prints.

    Call it after :func:`ddpkit.distributed.ddp_init_group`; before that the other ranks do not wait
    for the folder.

    Args:
        experiment_directory: the folder; made with its parents if it is not there.
        hyperparams_to_save: the recipe's YAML file.
        overrides: values that replace some of that file's: a mapping (it is not changed), or YAML
            text.
        log_config: YAML file in the form of :func:`logging.config.dictConfig` to use instead of the
            built-in logging; the ``filename`` of its handler ``file_handler``, if there is one,
            becomes ``log.txt``. ``--log_config``, where :func:`ddpkit.run_opts.parse_arguments` has
            read one, wins over it.
        save_env_desc: write ``env.log``.

    Raises:
        ConfigError: the folder cannot be made or written to, or the YAML file cannot be understood.
            Raised on every rank.
        MissingFileError: ``hyperparams_to_save`` or ``log_config`` does not exist.
        FolderInUseError: another run lives in the folder; raised on every rank.

    Ranks: all, or the main process alone.

    State: the root logger's handlers, ``sys.excepthook``, the run's log, and a lock, ``.run.lock``
    in the folder; see :func:`close_experiment`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     create_experiment_directory(f"{parent}/results/1234", save_env_desc=False)
        ...     close_experiment()
        ...     sorted(os.listdir(f"{parent}/results/1234"))
        ['log.txt', 'metrics.jsonl']
    """
    given = os.fspath(experiment_directory)
    folder = Path(_mirror_of(given) if is_url(given) else given)
    if _is_left_alone(folder):
        _log_what_ends_this()
        return
    script = _script_of(outside_frame())
    options = command_line_options() or RunOptions()
    log_config = options.log_config or log_config
    suffix = ".test_only" if options.test_only else ""
    log_file = folder / f"log{suffix}.txt"

    def prepare() -> DdpkitError | None:
        if not if_main_process():  # without a process group every rank comes here
            return None
        try:
            own = _with_url(overrides, folder)
            files = _files_to_write(hyperparams_to_save, own, script, save_env_desc)
            with writing(f"experiment_directory={str(folder)!r}"):
                _write_files(folder, files, log_file, options)
            setup_logging(log_config, log_file=log_file)
            tell_of_moved_logs()
        except DdpkitError as error:
            return error
        return None

    error = run_on_main(prepare)
    if isinstance(error, FolderInUseError):
        show_without_traceback(error, code=1)  # unlike a mistake in the command line, it passes
    if error is not None:
        raise error
    if not if_main_process():
        setup_logging(log_config, log_file=log_file)
    _log_what_ends_this()
    log = folder / f"metrics{suffix}.jsonl"
    set_run_log(log)
    _record_start(log, options, hyperparams_to_save, overrides, script)
    seed = global_seed()
    shown = shown_path(folder) if is_url(shown_path(folder)) else f"{folder}"
    logger.info("Experiment folder: %s%s", shown, "" if seed is None else f" (seed {seed})")


def close_experiment() -> None:
    """Undo what :func:`create_experiment_directory` changed in this process; the folder stays.

    For notebooks and tests that run several experiments; a script that ends need not call it.

    Ranks: local.

    State: the root logger's handlers and the run's log are as before, an exception that ends this
    process is not logged, and the folder may be another run's.

    Example:
        >>> close_experiment()
    """
    _CLAIMED.close()
    close_logging()
    set_run_log(None)
    PROCESS.log = PROCESS.note_end = None


def get_environment_description(folder: str | os.PathLike[str] | None = None) -> str:
    """Describe what this process runs on: Python, packages, git revision, torch and devices.

    Args:
        folder: whose git revision is noted; ``None`` for the working directory.

    Returns:
        Text of several lines.

    Ranks: local.

    Example:
        >>> "torch==" in get_environment_description()
        True
    """
    numbers = (
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, ROCm {torch.version.hip}",
        f"CUDA devices: {torch.cuda.device_count()}",
        f"CPUs: {os.cpu_count()}, threads in this process: {torch.get_num_threads()}",
        f"processes: {get_world_size()}",
    )
    packages = {
        f"{package.name}=={package.version}"
        for package in importlib.metadata.distributions()
        if package.name
    }
    where = Path(folder or ".").resolve()
    sections = [
        f"Python {' '.join(sys.version.split())}\n{platform.platform()}\n{sys.executable}",
        "Installed packages:\n" + "\n".join(sorted(packages, key=str.lower)),
        f"Git revision of {where}: {git_commit(where) or 'none'}",
        "\n".join(numbers),
    ]
    return f"\n{RULE}\n".join(sections) + "\n"


# ------------------------------------------------------------------------------- whose folder it is


def _is_left_alone(folder: Path) -> bool:
    """Return whether this process only measures or checks; a folder of its own is made, for data
    that it prepares.
    """
    plan = find_slice()
    if plan is not None and plan.holds(folder):
        run_on_main(folder.mkdir, kwargs={"parents": True, "exist_ok": True})
    # then it belongs to the process that runs the parity check
    return plan is not None or PARITY in os.environ


def _lock_folder(folder: Path) -> None:
    """Make a folder this run's."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder, LOCK_NAME)
    try:
        lock.acquire()
    except FolderInUseError as error:
        raise FolderInUseError(
            f"experiment_directory={str(folder)!r}: {error} Nothing was written, for its files "
            "would be lost. Where a script starts ranks by itself, make its folder in the ranks, "
            "after ddp_init_group."
        ) from error
    except CheckpointError as error:  # its words are for a folder of checkpoints
        reason = error.__cause__
        if not isinstance(reason, OSError):
            raise
        raise cannot_write(f"experiment_directory={str(folder)!r}", reason) from error
    _CLAIMED.close()
    _CLAIMED.callback(lock.release)
    mirror = _mirror_holding(folder)
    if mirror is not None and mirror.travels:
        try:
            own = mirror.run_lock()
            own.acquire()
        except CheckpointError:
            _CLAIMED.close()
            raise
        _CLAIMED.callback(own.release)
        _CLAIMED.callback(mirror.close)


# ------------------------------------------------------------------------------ an object store's


def _mirror_of(url: str) -> Path:
    """Return the folder of this machine that mirrors a URL."""
    from ddpkit.mirror import mirror_of  # nothing else needs it

    options = command_line_options() or RunOptions()
    rehearses = options.debug and not options.debug_persistently
    return mirror_of(url, options.ckpt_local, travels=not rehearses)


def _mirror_holding(folder: Path) -> Mirror | None:
    """Return the mirror that a folder is; None of most."""
    if not is_url(shown_path(folder)):  # what messages show in its place
        return None
    from ddpkit.mirror import mirror_holding

    return mirror_holding(folder)


def _begin_mirror(folder: Path) -> None:
    mirror = _mirror_holding(folder)
    if mirror is not None:
        mirror.begin()


def _with_url(
    overrides: Mapping[str, Any] | str | None,
    folder: Path,
) -> Mapping[str, Any] | str | None:
    """Return overrides that name the URL again, which is the output folder of every start."""
    mirror = _mirror_holding(folder)
    if mirror is None or str(folder) not in str(overrides):
        return overrides
    from ddpkit.recipe_yaml import with_output_folder

    return cast("Mapping[str, Any] | str", with_output_folder(overrides, mirror.url))


# ---------------------------------------------------------------------------------------- the files


def _script_of(frame: FrameType | None) -> Path | None:
    """Return the file of the code that calls; None in a notebook or an interactive session."""
    path = Path("" if frame is None else frame.f_code.co_filename)
    return path.resolve() if path.suffix == ".py" and path.is_file() else None


def _files_to_write(
    hyperparams: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any] | str | None,
    script: Path | None,
    save_env_desc: bool,
) -> dict[str, bytes | Path]:
    """Collect the contents of the files that are written at the start, by name; a path stands for a
    copy.
    """
    files: dict[str, bytes | Path] = {}
    if hyperparams is not None:
        files["hyperparams.yaml"] = _resolved_hyperparams(Path(hyperparams), overrides).encode()
    if script is not None:
        files[script.name] = script
    if script is not None and hyperparams is not None:
        files.update(_modules_beside(script, Path(hyperparams), overrides))
    if save_env_desc:
        files["env.log"] = get_environment_description(script.parent if script else None).encode()
    return files


def _begin_logs(folder: Path, log_file: Path, options: RunOptions) -> None:
    """Move the logs of an earlier run away, if this run begins anew and its launcher has not
    restarted it.
    """
    if options.resume == "never" and not find_launch().restart_count:
        files = [log_file, *folder.glob("log.rank*.txt"), folder / "metrics.jsonl"]
        move_logs_away(files, tells=False)  # the new log is to have it


def _resolved_hyperparams(path: Path, overrides: Mapping[str, Any] | str | None) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            own = to_plain(overrides) if isinstance(overrides, Mapping) else overrides
            resolved = resolve_references(file, own).getvalue()
    except FileNotFoundError as error:
        raise MissingFileError(
            f"hyperparams_to_save={str(path)!r}: {error.filename!r} does not exist. "
            "Give the YAML file that the recipe was started with."
        ) from error
    except (
        YAMLError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"hyperparams_to_save={str(path)!r} with overrides={overrides!r} cannot be resolved: "
            f"{_mistake(path, overrides) or error}. "
            "Check the file's references and that the overrides have its structure."
        ) from error
    today = dt.datetime.now(tz=dt.timezone.utc).date()
    return f"# Generated {today} from:\n# {path.resolve()}\n# yamllint disable\n{resolved}"


def _modules_beside(
    script: Path,
    path: Path,
    overrides: Mapping[str, Any] | str | None,
) -> dict[str, Path]:
    """Return the files of the modules beside a script that a YAML file names, by their paths in its
    folder.
    """
    try:
        document = with_overrides(read_document(str(path)), overrides)
    except ConfigError:  # it can be resolved, so that it is empty or a list: it names none
        return {}
    return named_module_files(document, script.parent)


def _mistake(path: Path, overrides: Mapping[str, Any] | str | None) -> str:
    """Say what is wrong in a YAML file, with line and key; empty if it is not seen without loading
    the file.
    """
    try:
        check_references(with_overrides(read_document(str(path)), overrides))
    except ConfigError as error:
        return str(error).rstrip(".")
    return ""


def _write_files(
    folder: Path,
    files: Mapping[str, bytes | Path],
    log_file: Path,
    options: RunOptions,
) -> None:
    """Write the files into a folder that is this run's; with ``test_only`` only missing ones, into
    anybody's.
    """
    keep = options.test_only
    if not keep:
        _lock_folder(folder)
    _begin_mirror(folder)
    if not keep:
        _begin_logs(folder, log_file, options)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        target = folder / name
        if keep and target.exists():
            continue
        if isinstance(content, bytes) or not (target.exists() and target.samefile(content)):
            target.parent.mkdir(parents=True, exist_ok=True)  # of a module in a package
            with replacing(target) as unfinished:
                unfinished.write_bytes(
                    content if isinstance(content, bytes) else content.read_bytes()
                )
    if log_file.exists() and log_file.stat().st_size > 0:
        with log_file.open("a", encoding="utf-8") as log:
            log.write(f"\n{RULE}\n")


# ---------------------------------------------------------------------------- the record of the run


def _record_start(
    log: Path,
    options: RunOptions,
    hyperparams: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any] | str | None,
    script: Path | None,
) -> None:
    """Write the event ``start``; the main process alone looks at what it is about."""
    if not if_main_process():
        return
    with writing(f"the run's log {str(log)!r}"):
        before = {} if options.test_only else end_before(log)
        close_torn_line(log)
    facts: dict[str, Any] = {
        "arguments": sys.argv,
        "command": sys.orig_argv[1:],
        "directory": working_directory(),
        "world_size": get_world_size(),
        "torch": torch.__version__,
        "pid": os.getpid(),
        "process_start": process_start(),
        "options": options.changed(),
        **_facts_of_recipe(hyperparams, overrides, script),
        "environment": environment_facts(script.parent if script else Path.cwd()),
    }
    run_event("start", **facts, **before)


def _facts_of_recipe(
    hyperparams: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any] | str | None,
    script: Path | None,
) -> dict[str, Any]:
    """Return what tells one recipe from another: its YAML, what replaces values of it, and its
    script.
    """
    try:
        replaced: dict[str, str] | None = override_values(overrides)
    except ConfigError:  # whoever loads the YAML says what is wrong in them
        replaced = None
    return {
        "yaml": None if hyperparams is None else file_identity(hyperparams),
        "overrides": replaced,
        "script": None if script is None else file_identity(script),
    }


# ------------------------------------------------------------------------------- log and exceptions


def _log_what_ends_this() -> None:
    PROCESS.log = _log_uncaught
    PROCESS.note_end = _note_end
    watch_uncaught()


def _log_uncaught(error: BaseException) -> None:
    # The console shows no traceback here: the hook prints it, or one sentence, so that the reason
    # is last.
    kind = type(error).__name__
    level = logging.DEBUG if is_shown_without_traceback(error) else logging.ERROR
    logger.log(
        level,
        "Uncaught %s:",
        kind,
        exc_info=error,
        extra={"traceback_follows": True},
    )
    with contextlib.suppress(ConfigError):  # a full disk must not hide the reason
        run_event(
            "exception",
            type=kind,
            message=str(error),
            **vars(error).get(COUNTERS, {}),
        )


def _note_end(text: str) -> None:
    """Note that another thread ends this process: its main thread does not move, or another rank
    has failed.
    """
    with contextlib.suppress(ConfigError):
        if skips := unwritten_skips(POSITION.progress):
            run_event("skipped_steps", **skips)
        run_event(
            "exception",
            type=RankFailedError.__name__,
            message=text,
            **counters_of(POSITION.progress),
        )
