"""What must be the same on all ranks before they can work together, and how a difference is
reported.

Ranks that run different code take different paths through a script, until one waits forever for a
call that another does not make. So software, script and backend are compared over the launcher's
store right after the rendezvous, before the ranks join a process group: each rank writes its facts
under its rank, rank 0 compares them, and every rank raises the result. Model, options, optimizers
and data are compared over the store before training starts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ddpkit import __version__
from ddpkit.base import POSITION, host_name, is_distributed_initialized, is_library, spans
from ddpkit.comm.mailbox import get_runtime
from ddpkit.distributed import exchange, get_world_size
from ddpkit.errors import CheckpointError, LaunchError, RankFailedError, RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.distributed import Store

T = TypeVar("T")

MOST_SHOWN = 8
MOST_FILES = 256
LARGEST_FILE_BYTES = 1 << 20
SHORTEST_NAP = 0.001
LONGEST_NAP = 0.1

# A path, or what only the main process shows: a rank may have its own.
OWN_OF_EACH_RANK = frozenset(
    {
        "device",
        "local_rank",
        "param_file",
        "log_config",
        "noprogressbar",
        "tqdm_colored_bar",
        "tqdm_barcolor",
    }
)
SCRIPT = "script"
YAML_FILE = "hyperparameter file"
MODULE = "module "
SELECTED = "samples that "
SOFTWARE = ("Python", "torch", "numpy", "ddpkit")
# a rank that does not know such a fact has no other one
_UNKNOWN_TO_SOME = (SCRIPT, YAML_FILE, MODULE)
_DEFAULT_ADVICE = "Start every rank with the same script, the same command line and the same data."
_ADVICE = {
    SOFTWARE: (
        "Install the same versions on every machine, best as one environment that all of them see."
    ),
    (SCRIPT, MODULE, "Brain"): "Give every machine the same files of code.",
    (YAML_FILE,): (
        "Give every rank the same YAML; what differs between machines, such as a folder, belongs "
        "on the command line: --name=value."
    ),
    (SELECTED,): (
        "A split of the data must be the same on all ranks. Seed it: give random_split a "
        "generator, KFold or train_test_split a random_state; or call seed_everything first. If "
        "each rank shall keep a part of its own, give a DataLoader of it with `loader.is_sharded "
        "= True`."
    ),
}


# -------------------------------------------------------------------------------------------- facts


def software_facts() -> dict[str, str]:
    """Name the versions of what computes.

    Returns:
        One entry per part.

    Ranks: local.

    Example:
        >>> list(software_facts())
        ['Python', 'torch', 'numpy', 'ddpkit']
    """
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "ddpkit": __version__,
    }


def code_facts() -> dict[str, str]:
    """Give a digest of each file of the user's own code that runs: the script, and what has been
    imported so far.

    Returns:
        One entry per file. In a notebook and under ``python -c`` there is no script; what cannot be
        read has no entry.

    Ranks: local.

    Example:
        >>> SOFTWARE[0] in code_facts()
        False
    """
    files = {  # from their __dict__: getattr may run a lazy module's code
        SCRIPT if name == "__main__" else f"{MODULE}{name}": str(
            getattr(module, "__dict__", {}).get("__file__")
        )
        for name, module in list(sys.modules.items())
    }
    own = sorted(
        name for name, file in files.items() if file.endswith(".py") and not is_library(file)
    )
    digests = {name: file_digest(files[name]) for name in own[-MOST_FILES:]}
    return {
        name: f"{Path(files[name]).name} (code {digest})"
        for name, digest in digests.items()
        if digest
    }


def recipe_facts(brain_class: type, param_file: str = "") -> dict[str, str]:
    """Describe the code of a recipe: its files, the class of its Brain, the YAML.

    Args:
        brain_class: the class.
        param_file: the hyperparameter file, if there is one.

    Returns:
        One entry per file, and one for the class. What cannot be read has none.

    Ranks: local.

    Example:
        >>> class Mine:
        ...     pass
        >>> recipe_facts(Mine)["Brain"]
        'Mine'
    """
    digest = file_digest(param_file) if param_file else ""
    recipe = {"Brain": brain_class.__qualname__} | (
        {YAML_FILE: f"content {digest}"} if digest else {}
    )
    return recipe | code_facts()


@functools.cache
def file_digest(path: str) -> str:
    """Return a short digest of a file's content, as it was when it was first looked at.

    Args:
        path: the file.

    Returns:
        Eight hexadecimal digits; nothing where the file cannot be read or is larger than a MiB.

    Ranks: local.

    Example:
        >>> len(file_digest(__file__)), file_digest("/no/such/file")
        (8, '')
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: a name that no file can have
        if Path(path).stat().st_size <= LARGEST_FILE_BYTES:
            return hashlib.blake2b(Path(path).read_bytes(), digest_size=4).hexdigest()
    return ""


def model_facts(modules: Mapping[str, nn.Module] | nn.ModuleDict) -> dict[str, str]:
    """Describe every parameter and buffer: shape, dtype and whether it is trained.

    Args:
        modules: such as a ``torch.nn.ModuleDict``.

    Returns:
        One entry per parameter or buffer, in order.

    Ranks: local.

    Example:
        >>> model_facts({"net": torch.nn.Linear(2, 1)})["parameter net.bias"]
        '(1,) torch.float32 trained'
    """
    facts = {}
    for entry, module in modules.items():
        for name, parameter in module.named_parameters():
            kind = "trained" if parameter.requires_grad else "frozen"
            facts[f"parameter {entry}.{name}"] = (
                f"{tuple(parameter.shape)} {parameter.dtype} {kind}"
            )
        for name, buffer in module.named_buffers():
            facts[f"buffer {entry}.{name}"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    facts["the order of the parameters"] = _digest(dict.fromkeys(facts, ""))
    return facts


def option_facts(options: Mapping[str, Any]) -> dict[str, str]:
    """Describe the run options that must be the same on every rank.

    Args:
        options: such as a ``RunOptions``.

    Returns:
        One entry per option.

    Ranks: local.

    Example:
        >>> option_facts({"device": "cpu", "precision": "bf16"})
        {'option precision': "'bf16'"}
    """
    names = [name for name in sorted(options.keys()) if name not in OWN_OF_EACH_RANK]
    return {f"option {name}": _shown(options[name]) for name in names}


def _shown(value: Any) -> str:
    """Write a value in words that are the same on every rank where the value is."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()  # it may be on a device of each rank's own
    elif isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def optimizer_facts(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, str]:
    """Describe the optimizers: class, and the settings of every parameter group.

    Args:
        optimizers: by name.

    Returns:
        One entry per setting.

    Ranks: local.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer_facts({"sgd": torch.optim.SGD([weight], lr=0.1)})["optimizer sgd group 0 lr"]
        '0.1'
    """
    facts = {}
    for name, optimizer in optimizers.items():
        facts[f"optimizer {name}"] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                shown = len(value) if key == "params" else value
                facts[f"optimizer {name} group {number} {key}"] = _shown(shown)
    return facts


def data_facts(
    name: str,
    loader: Any,
    batches: int | None,
    *,
    sharded: bool,
) -> dict[str, str]:
    """Describe what a loader gives: batches, samples, batch size and seed.

    Args:
        name: such as ``"train"``.
        loader: any loader, or None.
        batches: its number of batches, where it is known.
        sharded: whether the ranks must have the same number of batches.

    Returns:
        One entry per fact.

    Ranks: local.

    Example:
        >>> data_facts("train", [1, 2], 2, sharded=True)
        {'train batches': '2'}
    """
    facts = {}
    if sharded:
        facts[f"{name} batches"] = str(batches)
    sampler = getattr(loader, "batch_sampler", None)
    for attribute, words in (
        ("batch_size", "batch size"),
        ("seed", "shuffling seed"),
        ("shuffle", "shuffling"),
    ):
        if hasattr(sampler, attribute) and hasattr(sampler, "count"):
            facts[f"{name} {words}"] = str(getattr(sampler, attribute))
    dataset = getattr(loader, "dataset", None)
    # else a recipe may give each rank a set of its own
    if hasattr(sampler, "count") and isinstance(dataset, Sized):
        facts[f"{name} samples"] = str(len(dataset))
    return facts


# -------------------------------------------------------------------------------------- differences


def describe_differences(everybody: Sequence[Mapping[str, str]], places: Sequence[str]) -> str:
    """Say in which facts the ranks differ.

    A file of code that only some ranks have imported, or could read, is not a difference.

    Args:
        everybody: the facts of every rank.
        places: where each rank is, such as ``"gpu07 (pid 4711)"``; shown for the first of those
            with one value.

    Returns:
        A message with one line per fact that differs; empty if none does.

    Ranks: local.

    Example:
        >>> print(
        ...     describe_differences(
        ...         [{"train batches": "12"}, {"train batches": "11"}], ["a (pid 7)", "b (pid 8)"]
        ...     )
        ... )
        The ranks are not about to run the same training:
          train batches: 12 on rank 0; 11 on rank 1
          rank 0 is on a (pid 7); rank 1 is on b (pid 8)
        Start every rank with the same script, the same command line and the same data.
    """
    names = dict.fromkeys(name for facts in everybody for name in facts)
    found = {name: groups for name in names if len(groups := _groups(name, everybody)) > 1}
    if not found:
        return ""
    lines = [f"  {name}: {_values(groups)}" for name, groups in found.items()]
    more = [f"  and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    firsts = sorted({ranks[0] for groups in found.values() for ranks in groups.values()})[
        :MOST_SHOWN
    ]
    where = "; ".join(f"rank {rank} is on {places[rank]}" for rank in firsts)
    advice = [
        words for names, words in _ADVICE.items() if any(name.startswith(names) for name in found)
    ]
    title = "The ranks are not about to run the same training:"
    return "\n".join([title, *lines[:MOST_SHOWN], *more, f"  {where}", *advice, _DEFAULT_ADVICE])


def _values(groups: Mapping[str, list[int]]) -> str:
    """Say who has what."""
    words = [
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"
        for value, ranks in list(groups.items())[:MOST_SHOWN]
    ]
    return "; ".join(words) + ("; and more" if len(groups) > MOST_SHOWN else "")


def process_label() -> str:
    """Say where this process is, in the words of :func:`describe_differences`.

    Ranks: local.

    Example:
        >>> process_label().endswith(f"(pid {os.getpid()})")
        True
    """
    return f"{host_name()} (pid {os.getpid()})"


def _groups(
    name: str,
    everybody: Sequence[Mapping[str, str]],
) -> dict[str, list[int]]:
    """Return the ranks by value of a fact, without the ranks that cannot know this fact."""
    groups: dict[str, list[int]] = {}
    for rank, facts in enumerate(everybody):
        if name in facts or not name.startswith(_UNKNOWN_TO_SOME):
            groups.setdefault(facts.get(name, "missing"), []).append(rank)
    return groups


# ----------------------------------------------------------------------------------- over the store


def compare_over_store(
    store: Store,
    rank: int,
    world_size: int,
    facts: Mapping[str, str],
    seconds: float,
) -> None:
    """Compare facts between processes that have met at a store, before there is a process group.

    Args:
        store: with a name of this attempt.
        rank: this process.
        world_size: number of processes.
        facts: of this process.
        seconds: how long to wait for the others.

    Raises:
        RankMismatchError: on every rank, naming what differs and on which rank.
        LaunchError: a rank joined the run and does not answer, or the store has gone.

    Ranks: collective.
    """
    end = time.monotonic() + seconds
    store.set(f"ddpkit/start/{rank}", json.dumps([dict(facts), process_label()]))
    if rank == 0:
        found = [
            json.loads(_get(store, f"ddpkit/start/{other}", end, other))
            for other in range(world_size)
        ]
        everybody, places = zip(*found, strict=True)
        message = describe_differences(everybody, places)
        store.set("ddpkit/start/verdict", message)
    else:
        message = _get(store, "ddpkit/start/verdict", end, 0)
    if message:
        raise RankMismatchError(message)


def tell_all_ranks(
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    own: Any,
    seconds: float,
) -> list[Any]:
    """Return what each rank says: rank 0 collects it, and all read its list.

    Args:
        store: with a name of this attempt.
        name: of the keys in it.
        rank: this process.
        world_size: number of processes.
        own: what this rank says, as JSON has it.
        seconds: how long to wait for the others.

    Raises:
        LaunchError: a rank joined the run and does not answer.

    Ranks: collective.
    """
    end = time.monotonic() + seconds
    store.set(f"{name}/{rank}", json.dumps(own))
    if rank == 0:
        told = [
            json.loads(_get(store, f"{name}/{other}", end, other)) for other in range(world_size)
        ]
        store.set(name, json.dumps(told))
        return told
    found: list[Any] = json.loads(_get(store, name, end, 0))
    return found


def _get(
    store: Store,
    key: str,
    end: float,
    other: int,
) -> str:
    for _ in poll_until(end):
        if store.check([key]):
            return bytes(store.get(key)).decode()
    raise LaunchError(
        f"rank {other} joined the run and has not come further since. Look into its output. "
        "--distributed_timeout_minutes says how long to wait."
    )


def poll_until(end: float) -> Iterator[None]:
    """Poll with exponential back-off until the deadline; at least once.

    Args:
        end: as ``time.monotonic()`` counts.

    Ranks: local.

    Example:
        >>> len(list(poll_until(0.0)))
        1
    """
    nap = SHORTEST_NAP
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(nap)
        nap = min(nap * 1.5, LONGEST_NAP)


# ----------------------------------------------------------------------- what all ranks do together


def on_every_rank(work: Callable[[], T]) -> T:
    """Do something on every rank; if it fails on one, fail on all, naming the rank, before anybody
    waits for it.

    Args:
        work: done by every rank by itself.

    Returns:
        What it returned on this rank.

    Raises:
        RankFailedError: it failed on another rank.
        Exception: it failed on this rank; the original exception.

    Ranks: collective (over the store).

    Example:
        >>> on_every_rank(lambda: 3)
        3
    """
    values: list[T] = []
    own, failures = failures_of(lambda: values.append(work()))
    if own is not None:
        raise own
    if failures:
        raise RankFailedError(f"the run cannot start, because it failed elsewhere: {failures}")
    return values[0]


def failures_of(
    work: Callable[[], object],
    kind: type[Exception] = Exception,
    *,
    waits: bool = False,
) -> tuple[Exception | None, str]:
    """Do something on every rank, and tell every rank who failed.

    A rank that has failed waits for the others for some seconds. Those that have not come by then
    may be waiting for it, in a collective of the work, and would wait for ever.

    Args:
        work: done by every rank by itself; if it communicates, a failure is raised on the ranks
            where it happens, and ends the others.
        kind: of the exceptions that are told; others are raised at once.
        waits: whether a rank that has failed waits as long as it takes, since the run goes on.

    Returns:
        This rank's exception, or None, and the words of all ranks that failed; empty if none did.

    Raises:
        Exception: this rank's, where others have not come.

    Ranks: collective (over the store).

    Example:
        >>> failures_of(lambda: 1 / 0)
        (ZeroDivisionError('division by zero'), 'rank 0: ZeroDivisionError: division by zero')
    """
    own: Exception | None = None
    words = ""
    try:
        work()
    except kind as error:  # raised by the caller, once the others know
        own = error
        words = "".join(traceback.format_exception_only(error)).strip()
        if isinstance(error, CheckpointError):
            words = str(error) or words  # they name the recoverable
    hurries = own is not None and not waits and is_distributed_initialized()
    limit = get_runtime().mailbox.after_failure() if hurries else contextlib.nullcontext()
    try:
        with limit:
            # One line for both outcomes: the line is part of the exchange's key.
            told = exchange(words)
    except RankFailedError:
        if own is None:
            raise
        raise own from None
    return own, "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)


@POSITION.at("comparing the ranks")
def require_agreement(
    facts: Mapping[str, str],
    *,
    about: Any = None,
    site: str | None = None,
) -> list[Any]:
    """Compare the facts of all ranks; raise if any differs.

    Args:
        facts: what must be the same everywhere, in words.
        about: what this rank tells of itself besides; it may differ.
        site: names the call where the ranks may come from different lines of a script; None: from
            the same one.

    Returns:
        ``about`` of every rank.

    Raises:
        RankMismatchError: on every rank, naming what differs and on which rank.

    Ranks: collective (over the store).

    Example:
        >>> require_agreement({"train batches": "12"}, about="here")
        ['here']
    """
    if get_world_size() == 1:
        return [about]
    values = exchange((_digest(facts), about), site)
    if len({digest for digest, _ in values}) > 1:
        everybody = exchange(
            (dict(facts), process_label()),
            None if site is None else (f"{site}, in detail"),
        )
        message = describe_differences(
            [own for own, _ in everybody],
            [place for _, place in everybody],
        )
        if message:
            raise RankMismatchError(message)
    return [value for _, value in values]


def _digest(facts: Mapping[str, str]) -> str:
    return hashlib.blake2b(repr(list(facts.items())).encode(), digest_size=16).hexdigest()
