"""A recipe's YAML loaded by HyperPyYAML, with every failure told by file, line and key.

The file is loaded once. HyperPyYAML takes a class of loaders, and a class made here notes which
value fails.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import hyperpyyaml
from ruamel.yaml.error import YAMLError
from ruamel.yaml.loader import Loader
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ddpkit.base import with_article
from ddpkit.errors import ConfigError, DdpkitError
from ddpkit.recipe_yaml.arguments import argument_problem
from ddpkit.recipe_yaml.document import (
    Document,
    NamedText,
    pairs,
    place,
    read_document,
    walk,
    with_overrides,
)
from ddpkit.recipe_yaml.named_objects import UnusableNameError, find_object, own_line
from ddpkit.recipe_yaml.places import find_place
from ddpkit.recipe_yaml.static_checks import (
    check_names,
    check_overrides,
    check_placeholders,
    check_references,
    meant,
)
from ddpkit.recipe_yaml.unresolved import unresolved_reference

TAGS = (
    "!new:",
    "!name:",
    "!apply:",
    "!module:",
    "!applyref:",
    "!include:",
    "!ref",
    "!copy",
    "!tuple",
    "!PLACEHOLDER",
)
_PREFIX = "Invalid argument to "  # what HyperPyYAML puts before the words of a TypeError

_Constructor = Callable[[Any, str, Node], Any]


class _Failure(Exception):  # noqa: N818 -- never leaves this module
    """A value that cannot be constructed.

    Args:
        path: keys and numbers from the top level on, in the text that HyperPyYAML has made of the
            file.
        words: a sentence.
        follow: a `!ref` at the path stands for what it refers to.
    """

    def __init__(
        self,
        path: tuple[str, ...],
        words: str,
        *,
        follow: bool = True,
    ) -> None:
        super().__init__(words)
        self.path = path
        self.words = words
        self.follow = follow


def construct(
    file: str,
    overrides: Mapping[str, Any] | str | None = None,
) -> dict[str, Any]:
    """Load a recipe's YAML file with HyperPyYAML.

    Args:
        file: its path.
        overrides: values that replace some of the file's: a mapping, or YAML text.

    Returns:
        What :func:`hyperpyyaml.load_hyperpyyaml` returns.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: the file cannot be loaded; file, line, key and reason in one sentence.

    State: what the file constructs and calls.
    """
    written = read_document(file)
    check_overrides(written, overrides)
    document = with_overrides(written, overrides)
    check_references(document)
    check_names(document)
    check_placeholders(document)
    _check_early_calls(document)
    text = NamedText(written.text, file)
    try:
        loaded: dict[str, Any] = hyperpyyaml.load_hyperpyyaml(text, overrides, loader=_new_loader())
    except _Failure as failure:
        where = find_place(document, failure.path, follow=failure.follow)
        raise ConfigError(f"{where}: {failure.words}") from failure.__cause__
    except DdpkitError:
        raise
    except Exception as error:
        where = _early_place(document, error) or repr(file)
        words = f"{where}: HyperPyYAML cannot load it: {_reason(error)}"
        raise ConfigError(unresolved_reference(document, error) or words) from error
    return loaded


# ---------------------------------------------------------------- while references are resolved


def _early_calls(document: Document) -> list[tuple[str, str, bool]]:
    """Return the place and the name of each `!applyref:`, and whether it is given arguments."""
    return [
        (
            place(path, shown),
            str(node.tag).removeprefix("!applyref:"),
            _has_arguments(node),
        )
        for path, shown, node in walk(document.root)
        if str(node.tag).startswith("!applyref:")
    ]


def _check_early_calls(document: Document) -> None:
    for where, name, has_arguments in _early_calls(document):
        try:
            _found("!applyref:", name, has_arguments=has_arguments)
        except UnusableNameError as problem:
            raise ConfigError(f"{where}: {problem}") from problem.__cause__


def _early_place(document: Document, error: Exception) -> str:
    """Return where the `!applyref:` stands that has failed; empty if it can be one of several."""
    calls = _early_calls(document)
    names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    return calls[0][0] if len(calls) == 1 and "_applyref_function" in names else ""


# ---------------------------------------------------------------- while values are constructed


def _new_loader() -> type[Loader]:
    """Make a class of loaders that says which value cannot be constructed.

    A class for each file: HyperPyYAML registers its tags on it, and ``ruamel.yaml.Loader`` is
    everybody's.
    """

    class TellingLoader(Loader):
        paths: dict[int, tuple[str, ...]]

        def get_single_node(self) -> Any:
            root = super().get_single_node()
            self.paths = {}
            for path, _, node in walk(root):
                self.paths.setdefault(id(node), path)  # an anchor's first
            return root

        def construct_object(self, node: Any, deep: bool = True) -> Any:
            try:
                return super().construct_object(node, deep=deep)
            except (_Failure, DdpkitError):
                raise
            except Exception as error:
                path = self.paths.get(id(node), ())
                words = _unknown_tag(node) or _reason(error)
                raise _Failure(path, words, follow=node.tag != "!ref") from error

        @classmethod
        def add_multi_constructor(cls, tag_prefix: Any, multi_constructor: Any) -> None:
            super().add_multi_constructor(tag_prefix, _telling(tag_prefix, multi_constructor))

    return TellingLoader


def _telling(tag: str, construct_with: _Constructor) -> _Constructor:
    """Return a constructor that says why a value with this tag cannot be made."""

    def make(loader: Any, name: str, node: Node) -> Any:
        path = loader.paths.get(id(node), ())
        try:
            found = _found(tag, name, has_arguments=_has_arguments(node))
        except UnusableNameError as problem:
            raise _Failure(path, str(problem)) from problem.__cause__
        if tag == "!name:" and callable(found):
            _check_arguments(found, name, node, path, is_whole=False)
        try:
            return construct_with(loader, name, node)
        except ConfigError as error:
            raise _Failure(path, str(error)) from error
        except (_Failure, DdpkitError):
            raise
        except Exception as error:
            if isinstance(error, TypeError):
                _check_arguments(found, name, node, path, is_whole=True, cause=error)
            words = "" if name == "getattr" else f"{name} has failed: "
            raise _Failure(path, f"{words}{_reason(error)}") from error

    return make


def _found(
    tag: str,
    name: str,
    *,
    has_arguments: bool,
) -> Any:
    """Return what a name stands for, if it can stand behind a tag."""
    try:
        found = find_object(name)
    except UnusableNameError as problem:
        raise UnusableNameError(f"{tag}{name}: {problem}") from problem.__cause__
    is_function = inspect.isroutine(found)
    wrong = ""
    if tag == "!new:" and not inspect.isclass(found):
        wrong = (
            f"makes an object of a class. Call a function with !apply:{name}"
            if is_function
            else "needs a class"
        )
    elif tag in {"!apply:", "!applyref:"} and not is_function:
        wrong = (
            f"calls a function. Make an object with !new:{name}"
            if inspect.isclass(found)
            else "needs a function"
        )
    elif tag == "!module:" and not inspect.ismodule(found):
        wrong = f"needs a module. Write !name:{name}"
    elif tag == "!name:" and has_arguments and not (inspect.isclass(found) or is_function):
        wrong = "takes arguments for a class or a function only"
    if wrong:
        kind = "class" if inspect.isclass(found) else type(found).__name__
        raise UnusableNameError(f"{tag}{name}: {name} is {with_article(kind)}, and {tag} {wrong}.")
    return found


def _has_arguments(node: Node) -> bool:
    return isinstance(node, (MappingNode, SequenceNode)) and bool(node.value)


def _check_arguments(
    found: Any,
    name: str,
    node: Node,
    path: tuple[str, ...],
    *,
    is_whole: bool,
    cause: Exception | None = None,
) -> None:
    """Refuse arguments that a callable does not take."""
    keywords = [key.value for key, _ in pairs(node)] if isinstance(node, MappingNode) else []
    positional = len(node.value) if isinstance(node, SequenceNode) else 0
    problem = argument_problem(
        found,
        name,
        positional,
        list(dict.fromkeys(keywords)),
        is_whole=is_whole,
    )
    if problem is not None:
        words, argument = problem
        place_of = (*path, argument) if argument else path
        raise _Failure(place_of, words, follow=not argument) from cause


def _unknown_tag(node: Node) -> str:
    """Say what is wrong with a tag that HyperPyYAML does not know; empty if it knows it."""
    tag = str(node.tag)
    if tag == "!ref" and isinstance(node, ScalarNode):
        return (
            f"the value that is referred to is itself `!ref {node.value}`, and stands further "
            f"down. Refer to {node.value} here, or move this key below it."
        )
    if not tag.startswith("!") or tag.startswith(TAGS):
        return ""
    prefix, colon, _ = tag.partition(":")
    return (
        f"{tag} is no tag of HyperPyYAML.{meant(prefix + colon, TAGS)} It knows {', '.join(TAGS)}."
    )


def _reason(error: Exception) -> str:
    """Return an exception in words, with the innermost line of the user's code."""
    arguments = error.args
    if len(arguments) > 1 and str(arguments[0]).startswith(_PREFIX):
        arguments = arguments[1:]
    text = str(arguments[0]) if len(arguments) == 1 and arguments != error.args else str(error)
    if isinstance(error, YAMLError):
        text = " ".join(text.split())
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"{kind}{text}{own_line(error)}"
