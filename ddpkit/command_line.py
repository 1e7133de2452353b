"""Reading a recipe's command line: the YAML file, the run options, and overrides of YAML keys.

What is not a run option overrides a key of the YAML. The file is read for its keys only: nothing in
it is constructed or called here.
"""

from __future__ import annotations

import platform
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML  # a part of HyperPyYAML, which parses the overrides with it later
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ddpkit import __version__
from ddpkit.base import rank_if_known
from ddpkit.errors import ConfigError
from ddpkit.options import IN_YAML, ON_COMMAND_LINE, OPTION_BY_NAME, OPTIONS, PARSER_ONLY, Option
from ddpkit.overrides import close_names, nested_override, require_same_kind
from ddpkit.recipe_yaml import check_references, pairs, read_document, with_overrides

__all__ = ["CommandLine", "help_text", "override_line", "read_command_line"]

_YAML_TAG = "tag:yaml.org,2002:"
_YAML_SUFFIXES = (".yaml", ".yml")
_FLAG_EXITS = ("-h", "--help", "--version")

_USAGE = """python train.py hparams.yaml [--option=value ...] [--yaml_key=value ...]

  one device:                   python train.py hparams.yaml
  N processes (best for GPUs):  python train.py hparams.yaml --nproc N
  the same by torch's launcher: torchrun --standalone --nproc_per_node=N train.py hparams.yaml
  GPUs of one process:          python train.py hparams.yaml --data_parallel_backend"""

_EPILOG = """The default stands in brackets. A switch takes a value too: --debug=False turns off what the YAML
turns on. Any other --name=value overrides the key `name` of the YAML, with a value in YAML syntax.
Command line before YAML before default."""  # noqa: E501


@dataclass(frozen=True)
class CommandLine:
    """What a command line says.

    Args:
        param_file: path of the hyperparameter YAML.
        given: the run options on the command line, typed.
        overrides: YAML text, one ``key: value`` per line, for :func:`ddpkit.hparams.load_hparams`.
        in_yaml: the run options that the YAML sets as plain values (not through tags), typed.
        may_name_urls: whether the YAML or an override may name a URL.

    Ranks: local.

    Example:
        >>> CommandLine("hparams.yaml", {"debug": True}, "seed: 3", {}).given["debug"]
        True
    """

    param_file: str
    given: dict[str, Any]
    overrides: str
    in_yaml: dict[str, Any]
    may_name_urls: bool = False


@dataclass
class _Argument:
    """One ``--name`` with its values; ``is_open`` if they were taken from the words that follow by
    guess.
    """

    name: str
    values: list[str] = field(default_factory=list)
    is_open: bool = False

    @property
    def option(self) -> Option | None:
        option = OPTION_BY_NAME.get(self.name)
        return option if option is not None and option.group else None


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Read and check a command line.

    Args:
        words: the words after the script's name.

    Returns:
        What they say.

    Raises:
        MissingFileError: there is no such YAML file.
        ConfigError: a word, a value or the YAML file cannot be used.
        SystemExit: with code 0, after ``--help`` or ``--version`` has been printed.

    Ranks: local; each rank reads the file.

    Example:
        >>> read_command_line(["nowhere.yaml"])
        Traceback (most recent call last):
        ddpkit.errors.MissingFileError: There is no file 'nowhere.yaml'...
    """
    arguments, loose = _split(words)
    param_file = _take_param_file(arguments, loose)
    given = {a.name: _value(a, a.option) for a in arguments if a.option is not None}
    others = [argument for argument in arguments if argument.option is None]
    overrides = {other.name: other.values[0] if other.values else None for other in others}
    document = read_document(param_file)
    nodes = {key.value: value for key, value in pairs(document.root)}
    _check_overrides(overrides, nodes, param_file)
    values = {
        key: _switched_on(key, nodes[key]) if value is None else value
        for key, value in overrides.items()
    }
    text = "\n".join(override_line(key, value) for key, value in values.items())
    check_references(with_overrides(document, text), includes=False)
    # a file that is included may name one, too
    may_name_urls = any(word in f"{document.text}\n{text}" for word in ("://", "!include:"))
    return CommandLine(param_file, given, text, _options_in(nodes), may_name_urls)


def override_line(key: str, value: str) -> str:
    """Write an override as a line of YAML.

    The value stays YAML where it is YAML (numbers, null, lists, ``!ref <key>``); where it would
    break the line, or lose a part, it is quoted.

    Args:
        key: a key of the YAML file.
        value: the text from the command line.

    Returns:
        One line.

    Raises:
        ConfigError: the value begins as a list or a mapping, and has no end.

    Ranks: local.

    Example:
        >>> print(override_line("lr", "0.1"), override_line("name", "a: b #1"))
        lr: 0.1 name: "a: b #1"
    """
    line = f"{key}: {value}"
    if _is_kept(line, value):
        return line
    if value.lstrip()[:1] in {"[", "{"} and _is_open(value):
        text = (
            "the bracket at its beginning is not closed. Close it; a text that begins so needs "
            "quotes of its own"
        )
        raise ConfigError(f"--{key}={value} is not valid YAML: {text}, such as --{key}='\"[a\"'.")
    # YAML takes no control characters, and nothing of a file's name that is not UTF-8.
    quoted = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
    return f'{key}: "{quoted}"'


def help_text() -> str:
    """Write what ``--help`` prints: one line of at most 100 columns per option.

    Ranks: local.

    Example:
        >>> max(len(line) for line in help_text().splitlines()) <= 100
        True
    """
    lines = [f"usage: {_USAGE}", "", "General:"]
    lines += [
        f"  {'hparams.yaml':38} the hyperparameter YAML, anywhere",
        (f"  {'-h, --help':38} print this and stop"),
    ]
    lines.append(f"  {'--version':38} print the versions and stop")
    for group in dict.fromkeys(option.group for option in OPTIONS if option.group):
        lines += ["", f"{group}:"]
        for option in (option for option in OPTIONS if option.group == group):
            flag = f"--{option.name} {option.form}".rstrip()
            lines.append(f"  {flag:38} {option.help} [{option.shown_default}]")
    return "\n".join([*lines, "", _EPILOG, ""])


# ---------------------------------------------------------------------------------------- the words


def _split(words: Sequence[str]) -> tuple[list[_Argument], list[str]]:
    """Part the words into arguments with their values, and words that stand alone."""
    arguments: list[_Argument] = []
    loose: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word in _FLAG_EXITS:
            versions = (
                f"ddpkit {__version__} (torch {torch.__version__}, Python "
                f"{platform.python_version()})\n"
            )
            if not rank_if_known():  # once is enough
                sys.stdout.write(versions if word == "--version" else _help_with(words))
            raise SystemExit(0)
        if word == "--":
            loose.extend(rest)
            break
        if word.startswith("--"):
            arguments.append(_argument(word, rest))
        else:
            loose.append(word)
    return arguments, loose


def _help_with(words: Sequence[str]) -> str:
    """Return what ``--help`` prints, with the parts of the YAML among the words."""
    named = [word for word in words if word.endswith(_YAML_SUFFIXES) and word[0] != "-"]
    # a single one that is not there is told, too
    files = named if len(named) == 1 else [word for word in named if Path(word).is_file()]
    if len(files) != 1:
        return help_text()
    from ddpkit.parts import help_of_yaml  # loads the modules of the parts

    told = help_of_yaml(files[0])
    return f"{help_text()}{told}\n" if told else help_text()


def _argument(word: str, rest: deque[str]) -> _Argument:
    """Read one ``--name`` or ``--name=value``, with the words that belong to it."""
    name, equals, value = word[2:].partition("=")
    argument = _Argument("local_rank" if name == "local-rank" else name)
    if equals:
        argument.values.append(_whole(value, rest))
        return argument
    option = argument.option
    if option is not None and (option.type is bool or option.bare):
        return argument  # never swallows a word
    is_list = option is not None and option.type is list
    argument.is_open = option is None or is_list
    while (
        rest
        and rest[0] != "-h"
        and not rest[0].startswith("--")
        and (is_list or not argument.values)
    ):
        argument.values.append(_whole(rest.popleft(), rest))
    return argument


def _whole(value: str, rest: deque[str]) -> str:
    """Join a list or a mapping that the shell has cut at its blanks: ``--channels=[64, 128]``
    without quotes.

    SpeechBrain joins words so, too.
    """
    words = [value]
    while (
        value[:1] in {"[", "{"}
        and _is_open(" ".join(words))
        and rest
        and not rest[0].startswith("--")
    ):
        if rest[0].endswith(_YAML_SUFFIXES):
            break
        words.append(rest.popleft())
    return " ".join(words)


def _is_open(text: str) -> bool:
    return any(text.count(opening) > text.count(end) for opening, end in ("[]", "{}"))


def _take_param_file(arguments: list[_Argument], loose: list[str]) -> str:
    """Find the YAML file among the words that stand alone, or after a flag that took it for its
    value.
    """
    if len(loose) == 1:
        return loose[0]
    places = [] if loose else [(a, word) for a in arguments if a.is_open for word in a.values]
    found = [place for place in places if place[1].endswith(_YAML_SUFFIXES)]
    found = found or [place for place in places if Path(place[1]).is_file()]
    if len(found) != 1:
        words = ", ".join(map(repr, loose or [word for _, word in found])) or "none"
        raise ConfigError(
            f"Give one hyperparameter YAML; found: {words}. Put it first, and write all else as "
            f"--name=value (a switch too: --debug=False).{_without_dashes(loose)} --help shows "
            "the options."
        )
    argument, word = found[0]
    argument.values.remove(word)
    return word


def _without_dashes(loose: list[str]) -> str:
    """Say that a word such as ``lr=0.1`` lacks its two dashes."""
    found = [word.lstrip("-") for word in loose if "=" in word]
    return f" With two dashes: --{found[0]}." if found else ""


def _value(argument: _Argument, option: Option) -> Any:
    """Type the value of a run option."""
    if option.type is bool and not argument.values:
        return True
    if option.bare and not argument.values:
        return option.bare
    if option.type is list and argument.is_open:
        return option.coerce(argument.values, ON_COMMAND_LINE)
    if not argument.values or not argument.values[0].strip():
        raise ConfigError(
            f"--{option.name} needs a value, --{option.name}={option.form}: {option.help}."
        )
    return option.coerce(argument.values[0], ON_COMMAND_LINE)


# ----------------------------------------------------------------------------------------- the YAML


def _options_in(nodes: Mapping[str, Node]) -> dict[str, Any]:
    """Type the run options that the YAML sets as plain values."""
    values: dict[str, Any] = {}
    for name, node in nodes.items():
        option = OPTION_BY_NAME.get(name)
        is_plain = isinstance(node, ScalarNode) and str(node.tag).startswith(_YAML_TAG)
        if option is not None and is_plain and name not in {*PARSER_ONLY, "param_file"}:
            value = None if node.tag == f"{_YAML_TAG}null" else node.value
            values[name] = option.coerce(value, IN_YAML)
    return values


def _check_overrides(
    overrides: Mapping[str, str | None],
    nodes: Mapping[str, Node],
    param_file: str,
) -> None:
    """Refuse overrides that match nothing, with the names that come close."""
    options = [option.name for option in OPTIONS if option.group]
    for key, value in overrides.items():
        if key in nodes:
            if value is not None:
                require_same_kind(key, value, nodes[key], param_file)
            continue
        outer = nodes.get(key.partition(".")[0])
        if isinstance(outer, SequenceNode):
            raise ConfigError(
                f"--{key} is no key of {param_file!r}, and an item of a list cannot be changed on "
                "the command line. Let its value refer to a key of the file: "
                f"{key.rpartition('.')[2]}: !ref <key>, and give --key."
            )
        nested = nested_override(key, value, nodes)
        if nested is not None:
            raise ConfigError(
                f"--{key} is no key of {param_file!r}. A key inside of another is given as YAML: "
                f"{nested} changes it, and keeps the others."
            )
        close = close_names(key, nodes, options)
        meant = f"; did you mean --{' or --'.join(close)}?" if close else "."
        raise ConfigError(
            f"--{key} is neither a run option nor a key of {param_file!r}{meant} Correct the "
            "name, or add the key to the file; --help shows the options."
        )


def _switched_on(key: str, node: Node) -> str:
    """Return the value of an override without one: a switch of the YAML is turned on; other keys
    need a value.
    """
    if node.tag != f"{_YAML_TAG}bool":
        raise ConfigError(
            f"--{key} needs a value, as the YAML has no true or false there: --{key}=... (null "
            "for none)."
        )
    return "True"


def _is_kept(line: str, value: str) -> bool:
    """Say whether a line of YAML means one key with the whole value."""
    try:
        root = YAML(typ="safe", pure=True).compose(line)
    except (YAMLError, ValueError):
        return False
    if not isinstance(root, MappingNode) or len(root.value) != 1:
        return False
    node = root.value[0][1]
    if not isinstance(node, ScalarNode) or value.lstrip().startswith("!"):
        return True  # a list, a mapping or a tag
    if node.style in ("'", '"'):
        return value.rstrip().endswith(node.style)
    return bool(node.value == value and node.anchor is None)
