"""Mistakes that can be seen in a recipe's YAML without loading it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml.nodes import Node

from ddpkit.errors import ConfigError
from ddpkit.recipe_yaml.document import (
    OVERRIDES,
    YAML_TAG,
    Document,
    key_of,
    overrides_node,
    pairs,
    place,
    read_document,
    walk,
    with_values,
)
from ddpkit.recipe_yaml.references import (
    Missing,
    included_path,
    is_include,
    is_reference,
    look_up,
    references,
    with_included,
)


def check_overrides(document: Document, overrides: Mapping[str, Any] | str | None) -> None:
    """Refuse overrides of keys that are not in the file.

    Raises:
        ConfigError: a key is not there.
    """
    if not overrides:
        return
    known = [key.value for key, _ in pairs(document.root)]
    for key, _ in pairs(overrides_node(overrides)):
        if key.value not in known:
            raise ConfigError(
                f"{OVERRIDES}: {key.value!r} is no key of {document.file!r}."
                f"{meant(key.value, known)} Correct the name, or add the key to the file."
            )


def check_references(
    document: Document,
    outer: tuple[Path, ...] = (),
    *,
    includes: bool = True,
) -> None:
    """Refuse references to nothing or in a circle, and includes of files that are not there.

    Args:
        document: with its overrides.
        outer: the files that include it.
        includes: files to include have to be there: whoever gives HyperPyYAML a text has them
            elsewhere.

    Raises:
        ConfigError: with file, line and key of the first mistake.
    """
    for path, shown, node in walk(document.root):
        if is_include(node) and (includes or included_path(document, node).is_file()):
            inner = (*outer, Path(document.file).resolve())
            _check_include(document, node, place(path, shown), inner)
        for text, parts in references(node):
            found = look_up(document, parts)
            if isinstance(found, Missing):
                words = _missing(document, f"{node.tag} <{text}>", found)
                raise ConfigError(f"{place(path, shown)}: {words}")
    _check_circles(document)


def check_names(document: Document) -> None:
    """Refuse a key at the top level that is no text: HyperPyYAML looks how each begins.

    Raises:
        ConfigError: with file, line and key of the first.
    """
    for key, _ in pairs(document.root):
        if key.tag != f"{YAML_TAG}str":
            where = place((key.value,), key)
            raise ConfigError(f"{where}: a key at the top level must be text. Put it in quotes.")


def check_placeholders(document: Document) -> None:
    """Refuse a `!PLACEHOLDER` that nothing has replaced.

    Raises:
        ConfigError: with file, line and key of the first.
    """
    for own in with_included(document):
        _check_placeholders(own, is_outer=own is document)


def _check_placeholders(document: Document, *, is_outer: bool) -> None:
    for path, shown, node in walk(document.root):
        if node.tag == "!PLACEHOLDER":
            option = f"--{path[0]}=..." if is_outer and len(path) == 1 else "a value"
            raise ConfigError(
                f"{place(path, shown)}: a !PLACEHOLDER has to be replaced. Give {option} on the "
                "command line, or write a value into the file."
            )


def meant(name: str, known: Iterable[str], form: str = "{}") -> str:
    """Return the question whether a close name was meant; empty where none is close.

    Example:
        >>> meant("optimiser", ["optimizer", "seed"])
        " Did you mean 'optimizer'?"
    """
    close = difflib.get_close_matches(
        name,
        list(dict.fromkeys(known)),
        n=2,
    )
    words = " or ".join(repr(form.format(name)) for name in close)
    return f" Did you mean {words}?" if close else ""


def _missing(document: Document, text: str, missing: Missing) -> str:
    before = key_of(missing.before) if missing.before else ""
    words = f"{text} names nothing:"
    if before and not missing.known:
        cure = "An item of a list cannot be referred to: give it a key of its own."
        return f"{words} {before!r} has no keys. {cure}"
    words = f"{words} {missing.part!r} is no key of {before or document.file!r}."
    form = f"<{before}[{{}}]>" if before else "<{}>"
    close = meant(missing.part, missing.known, form)
    deeper = [
        f"<{key_of(path)}>"
        for path, _, _ in walk(document.root)
        if path[-1] == missing.part and len(path) > 1
    ]
    close = close or (f" Did you mean {deeper[0]!r}?" if deeper else "")
    return f"{words}{close} Correct the name, or add the key."


def _check_circles(document: Document) -> None:
    """Refuse references that go round in a circle."""
    left = {id(node) for _, _, node in walk(document.root) if is_reference(node)}
    for path, shown, node in walk(document.root):
        circle = _circle(document, node, key_of(path), {}, left)
        if circle:
            raise ConfigError(
                f"{place(path, shown)}: the references go round in a circle: "
                f"{' -> '.join(circle)}. Give one of them a value."
            )


def _circle(
    document: Document,
    node: Node,
    name: str,
    way: dict[int, str],
    left: set[int],
) -> list[str]:
    """Return the names on a circle that a reference leads into; empty if there is none.

    Args:
        document: in which it stands.
        node: the reference.
        name: its key.
        way: the references that have led here, with their keys.
        left: the references of the document that may lead into a circle; it becomes smaller.
    """
    if id(node) not in left:
        return []
    way[id(node)] = name
    named = [parts for _, parts in references(node)]
    ways = [parts[: number + 1] for parts in named for number in range(len(parts))]
    for parts in ways:
        target = look_up(document, parts)
        if id(target) in way:
            names = list(way.values())
            return [*names[list(way).index(id(target)) :], key_of(parts)]
        if isinstance(target, Node):
            circle = _circle(document, target, key_of(parts), way, left)
            if circle:
                return circle
    del way[id(node)]
    left.discard(id(node))
    return []


def _check_include(
    document: Document,
    node: Node,
    where: str,
    outer: tuple[Path, ...],
) -> None:
    """Check a file that is included, with the values that it is given."""
    path = included_path(document, node)
    if not path.is_file():
        raise ConfigError(
            f"{where}: {node.tag} names {str(path)!r}, which is no file. "
            f"It is looked for beside {document.file!r}."
        )
    if path.resolve() in outer:
        raise ConfigError(
            f"{where}: {node.tag} includes a file that includes this one. Take one of the two away."
        )
    check_references(with_values(read_document(str(path)), node), outer)
