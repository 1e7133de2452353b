"""What must be the same on all ranks before they can work together, and how a difference is reported.

Ranks that run different code take different paths through a script, until one waits forever for a call that another
does not make. So software, script and backend are compared over the launcher's store right after the rendezvous,
before the ranks join a process group. Each rank writes its facts under its rank, rank 0 compares them, and every rank
raises the result. The exchange itself does not depend on the facts compared.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddpkit import __version__
from ddpkit.base import host_name, is_library, spans
from ddpkit.errors import LaunchError, RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed import Store

MOST_SHOWN = 8
LONGEST_VALUE = 200
MOST_FILES = 256
LARGEST_FILE_BYTES = 1 << 20
SHORTEST_NAP, LONGEST_NAP = 0.001, 0.1

SCRIPT, YAML_FILE, FILE = "script", "hyperparameter file", "file "
SOFTWARE = ("Python", "torch", "numpy", "ddpkit")
_UNKNOWN_TO_SOME = (SCRIPT, YAML_FILE, FILE)  # a rank that does not know such a fact has no other one

_DEFAULT_ADVICE = "Start every rank with the same script, the same command line and the same data."
_ADVICE = {
    SOFTWARE: "Install the same versions on every machine, best as one environment that all of them see.",
    (SCRIPT, FILE, "Brain"): "Give every machine the same files of code.",
    (YAML_FILE,): "Give every rank the same YAML; what differs between machines, such as a folder, belongs on the "
    "command line: --name=value.",
}


# ------------------------------------------------------------------------------------------------ facts


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


def script_facts() -> dict[str, str]:
    """Name the script that runs, and a digest of its text.

    Returns:
        One entry; none in a notebook, under ``python -c``, where an installed program runs, or where it cannot be read.

    Ranks: local.

    Example:
        >>> len(script_facts()) <= 1
        True
    """
    script = _script()
    digest = "" if script is None else file_digest(str(script))
    return {} if script is None or not digest else {SCRIPT: f"{script.name} (code {digest})"}


def recipe_facts(brain_class: type, param_file: str = "") -> dict[str, str]:
    """Describe the code of a recipe: the class of its Brain, what was imported from the script's folder, the YAML.

    Args:
        brain_class: the class; the file that it is written in is looked at.
        param_file: the hyperparameter file, if there is one.

    Returns:
        One entry per file. What cannot be read, or is not a file, has none.

    Ranks: local.

    Example:
        >>> class Mine:
        ...     pass
        >>> recipe_facts(Mine)["Brain"]
        'Mine'
    """
    facts = {"Brain": brain_class.__qualname__}
    digest = file_digest(param_file) if param_file else ""
    if digest:
        facts[YAML_FILE] = f"content {digest}"
    script, home = _script(), _file_of(sys.modules.get(brain_class.__module__))
    files = {} if script is None else _files_beside(script)
    if home is not None and home not in files and Path(home) != script:
        files[home] = Path(home).name  # it may be written in a folder or a package of its own
    digests = {name: file_digest(file) for file, name in files.items()}
    return facts | {f"{FILE}{name}": f"code {digest}" for name, digest in digests.items() if digest}


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


def _script() -> Path | None:
    """Return the script that runs, if it is the user's own and a file."""
    file = _file_of(sys.modules.get("__main__"))
    return None if file is None or is_library(file) else Path(file).absolute()


def _file_of(module: Any) -> str | None:
    """Return the source file of a module, from its ``__dict__``: ``getattr`` may run a lazy module's code."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) and file.endswith(".py") else None


def _files_beside(script: Path) -> dict[str, str]:
    """Return the files that have been imported from the folder of a script, or from below it, with short names."""
    folder = f"{script.parent}{os.sep}"
    files = {file for file in map(_file_of, list(sys.modules.values())) if file is not None and file.startswith(folder)}
    own = sorted(file for file in files if not is_library(file) and file != str(script))
    return {file: file[len(folder) :] for file in own[:MOST_FILES]}


# ------------------------------------------------------------------------------------------- differences


def strict_part(facts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return those facts that every rank must have, in their order.

    Args:
        facts: of one rank.

    Ranks: local.

    Example:
        >>> strict_part({"torch": "2.13.0", "file nets.py": "code 0a1b2c3d"})
        [('torch', '2.13.0')]
    """
    return [(name, value) for name, value in facts.items() if not name.startswith(_UNKNOWN_TO_SOME)]


def describe_differences(everybody: Sequence[Mapping[str, str]], places: Sequence[str] = ()) -> str:
    """Say in which facts the ranks differ.

    A file of code that only some ranks have imported, or could read, is not a difference.

    Args:
        everybody: the facts of every rank.
        places: where each rank is, such as ``"gpu07 (pid 4711)"``; shown for ranks that differ from the majority.

    Returns:
        A message with one line per fact that differs; empty if none does.

    Ranks: local.

    Example:
        >>> print(describe_differences([{"train batches": "12"}, {"train batches": "11"}], ["a (pid 7)", "b (pid 8)"]))
        The ranks are not about to run the same training:
          train batches: 12 on rank 0; 11 on rank 1
          rank 0 is on a (pid 7); rank 1 is on b (pid 8)
        Start every rank with the same script, the same command line and the same data.
    """
    found = {name: groups for name in _names(everybody) if len(groups := _groups(name, everybody)) > 1}
    lines = [f"  {name}: {_values(groups)}" for name, groups in found.items()]
    if not lines and len({tuple(strict_part(facts)) for facts in everybody}) > 1:
        lines = ["  the order of the parameters"]
    if not lines:
        return ""
    if len(lines) > MOST_SHOWN:
        lines = [*lines[:MOST_SHOWN], f"  and {len(lines) - MOST_SHOWN} more"]
    odd = sorted(set().union(*map(_odd_ones, found.values())))
    if places and odd:
        shown = "; ".join(f"rank {rank} is on {places[rank]}" for rank in odd[:MOST_SHOWN])
        lines.append(f"  {shown}{'; ...' if len(odd) > MOST_SHOWN else ''}")
    advice = [words for names, words in _ADVICE.items() if any(name.startswith(names) for name in found)]
    return "\n".join(["The ranks are not about to run the same training:", *lines, *advice, _DEFAULT_ADVICE])


def _values(groups: Mapping[str, list[int]]) -> str:
    """Say who has what; long values are shown around the place where the first two part."""
    first, second = list(groups)[:2]
    common = len(os.path.commonprefix([first, second]))  # noqa: RUF071 -- characters are meant
    start = max(0, common - LONGEST_VALUE // 2) if max(len(first), len(second)) > LONGEST_VALUE else 0
    words = []
    for value, where in list(groups.items())[:MOST_SHOWN]:
        part = value[start : start + LONGEST_VALUE]
        before, after = "..." if start else "", "..." if len(value) > start + LONGEST_VALUE else ""
        words.append(f"{before}{part}{after} on rank{'s' if len(where) > 1 else ''} {spans(where)}")
    more = len(groups) - MOST_SHOWN
    return "; ".join(words) + (f"; and {more} more values" if more > 0 else "")


def own_place() -> str:
    """Say where this process is, in the words of :func:`describe_differences`.

    Ranks: local.

    Example:
        >>> own_place().endswith(f"(pid {os.getpid()})")
        True
    """
    return f"{host_name()} (pid {os.getpid()})"


def _names(everybody: Iterable[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for facts in everybody for name in facts))


def _groups(name: str, everybody: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return the ranks by value of a fact, without the ranks that cannot know this fact."""
    groups: dict[str, list[int]] = {}
    for rank, facts in enumerate(everybody):
        if name in facts or not name.startswith(_UNKNOWN_TO_SOME):
            groups.setdefault(facts.get(name, "missing"), []).append(rank)
    return groups


def _odd_ones(groups: Mapping[str, list[int]]) -> list[int]:
    """Return the ranks that differ from the majority; all ranks if there is no majority."""
    most = max(map(len, groups.values()))
    of_most = [ranks for ranks in groups.values() if len(ranks) == most]
    common = of_most[0] if len(of_most) == 1 else []
    return [rank for ranks in groups.values() for rank in ranks if rank not in common]


# --------------------------------------------------------------------------------------- over the store


def compare_over_store(store: Store, rank: int, world_size: int, facts: Mapping[str, str], seconds: float) -> None:
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

    Example:
        >>> from torch.distributed import HashStore
        >>> compare_over_store(HashStore(), 0, 1, {"torch": "2.13.0"}, 1.0)
    """
    end = time.monotonic() + seconds
    store.set(f"ddpkit/start/{rank}", json.dumps([dict(facts), own_place()]))
    if rank == 0:
        found = [json.loads(_get(store, f"ddpkit/start/{other}", end, other)) for other in range(world_size)]
        everybody, places = zip(*found, strict=True)
        message = describe_differences(everybody, places)
        store.set("ddpkit/start/verdict", message)
    else:
        message = _get(store, "ddpkit/start/verdict", end, 0)
    if message:
        raise RankMismatchError(message)


def _get(store: Store, key: str, end: float, other: int) -> str:
    for _ in poll_until(end):
        if store.check([key]):
            return bytes(store.get(key)).decode()
    raise LaunchError(
        f"rank {other} joined the run and has not come further since. Look into its output. "
        "--distributed_timeout_minutes says how long to wait."
    )


def poll_until(end: float) -> Iterator[None]:
    """Yield, with naps between that get longer, until a time has come; at least once.

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
