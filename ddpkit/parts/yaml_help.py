"""What ``--help`` says of the parts of a recipe's YAML, and of a strategy that stands there."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.parts.part import Part
from ddpkit.recipe_yaml import (
    Document,
    UnusableNameError,
    find_object,
    key_of,
    look_up,
    pairs,
    read_document,
    target,
    whole_reference,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ruamel.yaml.nodes import Node

WIDTH = 100
COLUMN = 41  # where the words of an argument begin, as those of an option
STRATEGY = "strategy"  # a run option, too: on the command line it is no key of the YAML
ADVICE = (
    "An argument without an option beside it is changed in the file. To change it on the command "
    "line, let it refer to a key: `{0}: !ref <{0}>`, and --{0}=..."
)
UNKNOWN = "no such argument"
_NEW = "!new:"
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ARGS = re.compile(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^(\*{0,2}\w+)(?: \([^)]*\))?:", re.MULTILINE)


def help_of_yaml(file: str) -> str:
    """Return the arguments of the parts that a recipe's YAML uses, and of its own strategy.

    Args:
        file: path of the YAML. The modules of its parts are imported; nothing is made of them.

    Returns:
        Lines of at most 100 columns, each argument with its default, the value that the file gives,
        and the option that changes it; empty if there are none. A file or a class that cannot be
        read is told in words.

    Ranks: local.

    State: imports modules.
    """
    try:
        document = read_document(file)
        lines = [
            line
            for path, node in _objects(document)
            for line in _lines(
                document,
                path,
                node,
            )
        ]
    except (ConfigError, UnusableNameError) as error:
        lines = textwrap.wrap(f"The parts of {file} cannot be listed: {error}", WIDTH)
    else:
        without = [line.split()[0] for line in lines if _has_no_option(line)]
        lines += ["", *textwrap.wrap(ADVICE.format(without[0]), WIDTH)] if without else []
    return "\n".join(lines)


def _objects(document: Document) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield the places and values of parts, and of a strategy that is an object."""
    values = {key.value: value for key, value in pairs(document.root)}
    for key in ("parts", STRATEGY):
        found = _behind(
            document,
            (key,),
            values.get(key),
        )
        if found is None:
            continue
        path, node = found
        if isinstance(node.value, list) and not str(node.tag).startswith("!"):
            for number, item in enumerate(node.value):
                one = _behind(
                    document,
                    (*path, str(number)),
                    item,
                )
                if one is not None:
                    yield one
        else:
            yield path, node


def _behind(
    document: Document,
    path: tuple[str, ...],
    node: Any,
) -> tuple[tuple[str, ...], Node] | None:
    """Return the place and the value that a value stands for, which may be `!ref <key>`."""
    if node is None:
        return None
    found = target(document, node)
    if found is None or found[0] is not document:
        return None
    return whole_reference(node) or path, found[1]


def _lines(
    document: Document,
    path: tuple[str, ...],
    node: Node,
) -> list[str]:
    """Return the lines on one part; none for what is no part."""
    tag = str(node.tag)
    name = tag.removeprefix(_NEW)
    kind = find_object(name) if tag.startswith(_NEW) else None
    if not inspect.isclass(kind) or not (path[0] == STRATEGY or issubclass(kind, Part)):
        return []
    given = _given(node)
    words = _described(kind)
    lines = ["", f"{name}, key {key_of(path)!r}:"]
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.kind in _ANY:
            continue
        value = given.get(parameter.name)
        option = _option(
            document,
            path,
            parameter.name,
            value,
        )
        flag = f"{parameter.name} {option}".rstrip()
        said = f"{words.get(parameter.name, '')} {_values(document, parameter, value)}".strip()
        lines += textwrap.wrap(
            f"  {flag:{COLUMN - 3}} {said}",
            WIDTH,
            subsequent_indent=" " * COLUMN,
            break_long_words=False,
        )
    known = inspect.signature(kind).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        wrong = [name for name in given if name not in known]
        lines += [f"  {name:{COLUMN - 3}} {UNKNOWN}" for name in wrong]
    return lines


def _has_no_option(line: str) -> bool:
    """Say whether a line begins the words on an argument that the command line cannot change."""
    is_argument = line.startswith("  ") and not line.startswith("   ")
    return is_argument and not line.endswith(UNKNOWN) and "--" not in line[:COLUMN]


def _given(node: Node) -> dict[str, Node]:
    """Return the arguments that a value of the YAML has, by name."""
    if not isinstance(node.value, list) or not all(isinstance(one, tuple) for one in node.value):
        return {}
    return {key.value: value for key, value in node.value}


def _option(
    document: Document,
    path: tuple[str, ...],
    name: str,
    value: Node | None,
) -> str:
    """Return the option that changes an argument; empty where the file has to be changed."""
    referred = () if value is None else whole_reference(value)
    if len(referred) == 1 and look_up(document, referred) is not None:
        return f"--{referred[0]}"
    is_key = len(path) == 1 and path[0] != STRATEGY
    return f"--{path[0]}='{{{name}: ...}}'" if is_key else ""


def _values(
    document: Document,
    parameter: inspect.Parameter,
    node: Node | None,
) -> str:
    """Return the default of an argument, and what the file gives, as far as a line can show it."""
    is_needed = parameter.default is parameter.empty
    default = "needed" if is_needed else str(parameter.default)
    found = None if node is None else target(document, node)
    if found is None:
        return f"[{default}]"
    value = found[1].value
    return f"[{default}; here {value if isinstance(value, str) else 'several values'}]"


def _described(kind: type) -> dict[str, str]:
    """Return the first sentence that the docstring of a class has for each argument."""
    text = "\n".join(inspect.getdoc(one) or "" for one in (kind, kind.__init__))  # type: ignore[misc]
    found = _ARGS.search(text)
    if found is None:
        return {}
    entries = _ENTRY.split(textwrap.dedent(found[1]))
    return {
        name.strip("*"): _first_sentence(words)
        for name, words in zip(
            entries[1::2],
            entries[2::2],
            strict=True,
        )
    }


def _first_sentence(words: str) -> str:
    whole = " ".join(words.split()).replace("``", "")
    sentence = re.split(
        r"\.(?:\s+(?=[A-Z\"])|$)",
        whole,
        maxsplit=1,
    )[0]
    return sentence.partition("; ")[0]
