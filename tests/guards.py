"""What a test must leave as it found it: a picture of the process before it, compared with one
after it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Not SIGALRM: pytest-timeout changes its handler in the middle of a test.
WATCHED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
THREAD_GRACE_SECONDS = 30.0

# Variables that others change for reasons of their own, in the middle of a test.
FOREIGN_VARIABLES = {
    "PYTEST_CURRENT_TEST",  # pytest: the phase that is running
    "KMP_DUPLICATE_LIB_OK",  # set by libraries around OpenMP when they load
    "KMP_INIT_AT_FORK",  # the same
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile, on its first use
    "TRITON_CACHE_DIR",  # torch.compile, on its first use
    "TRITON_PTXAS_PATH",  # the same, on GPUs
    "DDPKIT_RANK_PROCESS",  # comes with a process group of several ranks, to stay
    "CUDA_MODULE_LOADING",  # torch, when it first computes on a GPU
}


def _loaded(module: str) -> Any:
    """Return a module if something has imported it: the guards themselves import nothing heavy."""
    return sys.modules.get(module)


def _group_is_open() -> bool:
    dist = _loaded("torch.distributed")
    return bool(dist and dist.is_available() and dist.is_initialized())


def _close_group(_: Any) -> None:
    if _group_is_open():
        _loaded("torch.distributed").destroy_process_group()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(_environment()) - set(before):
        del os.environ[name]
    os.environ.update(before)


def _excepthook() -> Any:
    """Return the hook below that of ddpkit; ``None`` for torch's. Both come with a process group,
    to stay.
    """
    hook = sys.excepthook
    while type(hook).__module__ == "ddpkit.control.failure":
        hook = hook.previous
    installed_by_torch = (getattr(hook, "__module__", None) or "").startswith("torch.distributed")
    return None if installed_by_torch else hook


def _root_handlers() -> list[logging.Handler]:
    """Return the root logger's handlers, less those that pytest puts there and takes away for each
    phase.
    """
    return [h for h in logging.getLogger().handlers if not type(h).__module__.startswith("_pytest")]


def _restore_root_handlers(before: list[logging.Handler]) -> None:
    root = logging.getLogger()
    for handler in _root_handlers():
        if handler not in before:
            root.removeHandler(handler)
            handler.close()
    for handler in before:
        root.addHandler(handler)


def _signal_handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in WATCHED_SIGNALS}


def _restore_signal_handlers(before: dict[str, Any]) -> None:
    for name, handler in before.items():
        signal.signal(signal.Signals[name], handler)


def _torch_state() -> dict[str, Any] | None:
    torch = _loaded("torch")
    if torch is None or not hasattr(torch, "set_default_dtype"):
        return None
    return {
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "grad enabled": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


def _restore_torch_state(before: dict[str, Any]) -> None:
    torch = _loaded("torch")
    torch.set_default_dtype(before["default dtype"])
    torch.use_deterministic_algorithms(before["deterministic algorithms"])
    torch.set_grad_enabled(before["grad enabled"])
    torch.set_num_threads(before["threads"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that the setting has a successor
        torch.set_float32_matmul_precision(before["matmul precision"])


@dataclass(frozen=True)
class Guarded:
    """One thing that is watched: how to read it, and how to put back what was read.

    A reading of ``None`` means that there is nothing to compare with.
    """

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], None]


GUARDED = (
    Guarded("environment variables", _environment, _restore_environment),
    Guarded("process group", _group_is_open, _close_group),
    Guarded("root log handlers", _root_handlers, _restore_root_handlers),
    Guarded(
        "root log level",
        lambda: logging.getLogger().level,
        lambda level: logging.getLogger().setLevel(level),
    ),
    Guarded("sys.excepthook", _excepthook, lambda hook: setattr(sys, "excepthook", hook)),
    Guarded(
        "threading.excepthook",
        lambda: threading.excepthook,
        lambda hook: setattr(threading, "excepthook", hook),
    ),
    Guarded("signal handlers", _signal_handlers, _restore_signal_handlers),
    Guarded("working directory", os.getcwd, os.chdir),
    Guarded("torch state", _torch_state, _restore_torch_state),
)


def _describe(before: Any, after: Any) -> str:
    """Say what changed, for dicts by key alone."""
    if isinstance(before, dict) and isinstance(after, dict):
        missing = object()
        keys = sorted(
            k for k in {*before, *after} if before.get(k, missing) != after.get(k, missing)
        )
        return ", ".join(
            f"{k}: {before.get(k, 'unset')!r} -> {after.get(k, 'unset')!r}" for k in keys
        )
    return f"{before!r} -> {after!r}"


def _new_threads(before: set[threading.Thread]) -> list[str]:
    """Name the non-daemon threads that were started and do not end within the grace time."""
    end = time.monotonic() + THREAD_GRACE_SECONDS
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(max(0.0, end - time.monotonic()))
    return sorted(t.name for t in set(threading.enumerate()) - before if not t.daemon)


class Picture:
    """The watched state at one moment; :meth:`leaks` restores it and says what had changed."""

    def __init__(self) -> None:
        self.values = {guarded.name: guarded.read() for guarded in GUARDED}
        self.threads = set(threading.enumerate())

    def leaks(self) -> list[str]:
        """Put everything back, and return a line for each thing that was not as in the picture."""
        found = []
        for guarded in GUARDED:
            before = self.values[guarded.name]
            after = guarded.read()
            if before is not None and after is not None and before != after:
                found.append(f"{guarded.name}: {_describe(before, after)}")
                guarded.restore(before)
        found += [f"thread still running: {name}" for name in _new_threads(self.threads)]
        return found
