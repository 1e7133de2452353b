"""What a run was told and what it ran on: options, hyperparameters, environment; its texts as plain
data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpkit.errors import ConfigError
from ddpkit.recipe_yaml import pairs, read_document
from ddpkit.see.report.history import RunHistory
from ddpkit.see.report.records import number_of
from ddpkit.see.report.run_files import RunFiles
from ddpkit.see.report.words import number

HYPERPARAMETERS = "hyperparams.yaml"
ENVIRONMENT = "env.log"
LOG = "log.txt"
LOG_OF_TESTS = "log.test_only.txt"
MOST_VALUES = 2000  # of a YAML file
MOST_BYTES = 1_000_000  # of a text file
LONGEST_VALUE = 300  # letters
MOST_LINES = 40  # of env.log
TAIL_LINES = 60
TAIL_BYTES = 64_000
LONGEST_LOG_LINE = 400
OTHER_RANKS = 4  # whose logs are shown

#: What of a call of ``fit`` is shown beside the environment.
OF_FIT = (
    "strategy",
    "samples_per_step",
    "grad_accumulation_factor",
    "steps_per_epoch",
    "total_steps",
    "parameters",
)
_SHORT = "..."
_PACKAGE = re.compile(r"^(\S+)==(\S+)$")


def options_of(history: RunHistory) -> dict[str, str]:
    """Return the options of the last start that differ from their defaults.

    A log that does not list them has the words of the command line.

    Example:
        >>> history = RunHistory()
        >>> history.add(
        ...     {"event": "start", "time": 1.0, "arguments": ["train.py", "p.yaml", "--debug"]}
        ... )
        >>> options_of(history)
        {'debug': 'True'}
    """
    start = history.now.start if history.attempts else {}
    fit = history.now.fit if history.attempts else {}
    for options in (fit.get("options"), start.get("options")):  # of `fit`: with those of the YAML
        if isinstance(options, dict):
            return {str(name): text_of(value) for name, value in sorted(options.items())}
    return dict(_options_in(start.get("arguments")))


def _options_in(arguments: Any) -> Iterator[tuple[str, str]]:
    words = [str(argument) for argument in arguments] if isinstance(arguments, list) else []
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, has_value, value = word[2:].partition("=")
        following = words[at + 1] if at + 1 < len(words) else "--"
        if not has_value:
            value = "True" if following.startswith("--") else following
        yield name, text_of(value)


def command_of(history: RunHistory) -> str:
    """Return the command line of the last start; empty where the log does not say."""
    arguments = history.now.start.get("arguments") if history.attempts else None
    return text_of(" ".join(map(str, arguments))) if isinstance(arguments, list) else ""


# ---------------------------------------------------------------------------- hyperparameters


def hyperparameters_of(run: RunFiles) -> dict[str, str]:
    """Return the values of a run's ``hyperparams.yaml`` by their keys. Nothing in it is made or
    called.

    Returns:
        Texts by keys such as ``net[0][out_channels]``; under an empty key why the file cannot be
        read.
    """
    path = run.find(HYPERPARAMETERS)
    if path is None:
        return {}
    found: dict[str, str] = {}
    try:
        if path.stat().st_size > MOST_BYTES:
            return {"": f"{HYPERPARAMETERS} has more than {MOST_BYTES} bytes"}
        for key, value in _leaves(
            read_document(str(path)).root,
            "",
            (),
        ):
            if len(found) >= MOST_VALUES:
                found[_SHORT] = f"only the first {MOST_VALUES} values are shown"
                break
            found[key] = value
    except (ConfigError, OSError, RecursionError) as error:
        return {"": text_of(str(error))}
    return found


def _leaves(
    node: Any,
    key: str,
    above: tuple[int, ...],
) -> Iterator[tuple[str, str]]:
    """Yield the values below a node of a YAML file, with what is called and made as a text."""
    if id(node) in above:  # an anchor inside of itself
        return
    within = (*above, id(node))
    tag = str(node.tag or "")
    if tag.startswith("!"):
        yield key or "(file)", tag
    if isinstance(node.value, str) or not node.value:
        if node.value or not tag.startswith("!"):
            yield key, text_of(node.value)
        return
    is_list = type(node).__name__ == "SequenceNode"
    items = (
        ((str(at), item) for at, item in enumerate(node.value))
        if is_list
        else ((str(name.value), value) for name, value in pairs(node))
    )
    for name, value in items:
        yield from _leaves(value, f"{key}[{name}]" if key else name, within)


# ---------------------------------------------------------------------------- environment


def environment_of(history: RunHistory) -> dict[str, str]:
    """Return what a run ran on, by name: what the record of its start says."""
    start = history.now.start if history.attempts else {}
    found = {"processes": text_of(start["world_size"])} if "world_size" in start else {}
    if "torch" in start:
        found["torch"] = text_of(start["torch"])
    fit = history.now.fit if history.attempts else {}
    found |= {name.replace("_", " "): text_of(fit[name]) for name in OF_FIT if name in fit}
    per_step = number_of(history.flops.get("per_step"))
    if per_step is not None:
        found["floating-point operations of a step"] = number(per_step)
    ranks = fit.get("ranks")
    if isinstance(ranks, list):
        places = Counter(_place_of(rank) for rank in ranks)
        found["ranks"] = text_of("; ".join(f"{num} x {place}" for place, num in places.items()))
    for name in ("environment", "yaml"):
        told = start.get(name)
        before = "" if name == "environment" else "YAML "
        if isinstance(told, dict):
            found |= {k: value for k, value in flat(told, before).items() if value != "None"}
    return found


def _place_of(rank: Any) -> str:
    facts = rank if isinstance(rank, dict) else {}
    device = re.sub(
        r":\d+",
        "",
        str(facts.get("device", "?")),
    )  # cuda:3 is one of its kind
    return f"{facts.get('host', '?')}, {device}"


def packages_of(run: RunFiles) -> dict[str, str]:
    """Return the installed packages that ``env.log`` lists, with their versions."""
    found = (_PACKAGE.match(line) for line in text_in(run.find(ENVIRONMENT)).splitlines())
    return {match[1]: match[2] for match in found if match}


def environment_lines(run: RunFiles) -> list[str]:
    """Return the lines of ``env.log`` that are no package and no rule."""
    lines = (printable(line) for line in text_in(run.find(ENVIRONMENT)).splitlines())
    facts = [line for line in lines if line.strip("= ") and not _PACKAGE.match(line)]
    return [line for line in facts if not line.endswith("packages:")][:MOST_LINES]


def flat(value: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return a mapping of mappings as one, with keys such as ``git.commit``.

    Example:
        >>> flat({"git": {"commit": "1a"}, "cpus": 2})
        {'git.commit': '1a', 'cpus': '2'}
    """
    found: dict[str, str] = {}
    for name, item in list(value.items())[:MOST_VALUES]:
        key = f"{before}{name}"
        nested = isinstance(item, dict) and before.count(".") < 4  # noqa: PLR2004 -- deeper is shown as text
        found |= flat(item, f"{key}.") if nested else {key: text_of(item)}
    return found


# ---------------------------------------------------------------------------- texts


def log_tails(run: RunFiles) -> dict[str, list[str]]:
    """Return the last lines of a run's logs, by the names of the files."""
    names = [LOG_OF_TESTS if "test_only" in run.metrics.name else LOG]
    names += sorted(path.name for path in run.folder.glob("log.rank*.txt"))[:OTHER_RANKS]
    tails = {name: tail_of(run.find(name)) for name in names}
    return {name: lines for name, lines in tails.items() if lines}


def tail_of(path: Path | None) -> list[str]:
    """Return the last lines of a text file; of an unreadable one the reason."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    lines = text.splitlines()
    if size > TAIL_BYTES:
        lines = lines[1:]  # it may begin in the middle
    return [_cut(printable(line), LONGEST_LOG_LINE) for line in lines[-TAIL_LINES:]]


def text_in(path: Path | None) -> str:
    """Return the text of a small file; empty where there is none that can be read."""
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def text_of(value: Any) -> str:
    """Return a value of a record as one short line.

    Example:
        >>> text_of({"a": [1, None]}), text_of(0.1), text_of("x" * 400)[-5:]
        ('{"a": [1, null]}', '0.1', 'x ...')
    """
    is_plain = value is None or isinstance(value, str | bool | int | float)
    text = str(value) if is_plain else json.dumps(value, default=str, ensure_ascii=False)
    return _cut(printable(text), LONGEST_VALUE)


def printable(text: str) -> str:
    r"""Return a text as one line without control characters; a tab is four blanks.

    Example:
        >>> printable("a" + chr(27) + "[1mb")
        'a\\x1b[1mb'
    """
    spaced = text.replace("\t", "    ")
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in spaced
    )


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 4]} {_SHORT}"
