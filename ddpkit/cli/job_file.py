"""What the commands have in common that write a job file for another program, such as Slurm,
Kubernetes or SkyPilot.
"""

from __future__ import annotations

import argparse
import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from ddpkit.errors import ConfigError

#: A name that Kubernetes takes for a job whose pods add some words of their own: 63 in all.
LONGEST_NAME = 40

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_PLAIN = re.compile(r"[\w./=@%+,:~-]+", re.ASCII)
_DOUBTFUL = re.compile(r"[-+.]?[.\d]|[yn]$", re.IGNORECASE)
# these end a line in YAML, or are refused there
_NOT_PLAIN_IN_QUOTES = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff]")
_NPROC = re.compile(r"--nproc(=.*)?", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Template(string.Template):
    """Text with ``@names``: a shell's own mark is the dollar."""

    delimiter = "@"


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the options of a command from what goes to the recipe: all that stands after ``--``.

    Example:
        >>> split_at_dashes(["train.py", "--nodes", "2", "--", "--lr=0.1"])
        (['train.py', '--nodes', '2'], ['--lr=0.1'])
    """
    words = list(words)
    split = words.index("--") if "--" in words else len(words)
    return words[:split], words[split + 1 :]


def recipe_command(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Return the command line of the recipe.

    Args:
        options: with ``script`` and ``hparams``, which may be None.
        arguments: of the recipe.

    Raises:
        ConfigError: they would start processes a second time.

    Example:
        >>> recipe_command(argparse.Namespace(script="train.py", hparams=None), ["--lr=0.1"])
        ['train.py', '--lr=0.1']
    """
    starts_again = next(filter(_NPROC.fullmatch, arguments), None)
    if starts_again is not None:
        raise ConfigError(
            f"{starts_again}, after --: torchrun starts the processes of each node in this job, "
            "and refuses to start each of them again. Leave it out; --nproc-per-node says how many "
            "there are."
        )
    return [options.script, *([options.hparams] if options.hparams else []), *arguments]


def fill(template: str, values: Mapping[str, object]) -> str:
    r"""Fill in a template. A line that holds nothing but a name becomes the lines of its value, at
    the same indentation; an empty value takes the line away.

    Args:
        template: text with ``@names``.
        values: by name.

    Example:
        >>> fill("env:\n  @more\nend: @end", {"more": "- a\n- b", "end": 1})
        'env:\n  - a\n  - b\nend: 1'
        >>> fill("env:\n  @more\nend: @end", {"more": "", "end": 1})
        'env:\nend: 1'
    """
    lines = []
    for line in template.split("\n"):
        name = line.strip().removeprefix("@")
        if line.strip() != f"@{name}" or name not in values:
            lines.append(Template(line).substitute(values))
            continue
        indent = line[: len(line) - len(line.lstrip())]
        lines += [f"{indent}{part}".rstrip() for part in str(values[name]).split("\n") if part]
    return "\n".join(lines)


def scalar(text: str) -> str:
    """Write a string for YAML: as it is where every reader takes it for itself, else in quotes.

    Example:
        >>> scalar("train.py"), scalar("--lr=0.1"), scalar("1e-3"), scalar("no"), scalar("a: b")
        ('train.py', '--lr=0.1', '"1e-3"', '"no"', '"a: b"')
    """
    # versions of YAML differ in what they take for a number, a time or a truth value
    is_plain = _PLAIN.fullmatch(text) is not None and not _DOUBTFUL.match(text)
    if is_plain and not text.endswith(":") and yaml.safe_load(text) == text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _NOT_PLAIN_IN_QUOTES.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)


def check_files(options: argparse.Namespace) -> None:
    """Refuse a recipe that is not there. What is given by an absolute path is a path over there.

    Args:
        options: with ``script`` and ``hparams``.

    Raises:
        ConfigError: a file is not in this folder.
    """
    for file in (options.script, options.hparams):
        if file is not None and not file.startswith("/") and not Path(file).is_file():
            raise ConfigError(
                f"there is no file {file!r}. Call this in the folder of the recipe, or give the "
                "absolute path that the file has over there."
            )


def check_processes(options: argparse.Namespace, gpus: int) -> int:
    """Return how many processes a node has.

    Args:
        options: with ``nproc_per_node``.
        gpus: of a node.

    Raises:
        ConfigError: nothing says it.
    """
    processes: int = options.nproc_per_node or gpus
    if not processes:
        raise ConfigError("--gpus-per-node=0: how many processes on a node? Give --nproc-per-node.")
    return processes


def job_name(options: argparse.Namespace) -> str:
    """Return the name of a job: as it was given, or the recipe's, in letters that may be in it.

    Args:
        options: with ``job_name`` and ``script``.

    Raises:
        ConfigError: it was given, and has other letters, or too many.

    Example:
        >>> job_name(argparse.Namespace(job_name=None, script="recipes/Train_ASR.py"))
        'train-asr'
    """
    given = options.job_name
    if given is None:
        words = re.sub(r"[^a-z0-9]+", "-", Path(options.script).stem.lower())
        return words.lstrip("-0123456789")[:LONGEST_NAME].strip("-") or "train"
    if not _NAME.fullmatch(given) or len(given) > LONGEST_NAME:
        raise ConfigError(
            f"--job-name={given!r} must have lower-case letters, digits and '-' only, begin with a "
            f"letter, end with no '-', and have {LONGEST_NAME} at most."
        )
    return str(given)


def variables(given: Sequence[str], reserved: Sequence[str] = ()) -> dict[str, str]:
    """Read environment variables.

    Args:
        given: each as ``NAME=VALUE``.
        reserved: names that the engine sets itself.

    Raises:
        ConfigError: it is none, or is reserved.

    Example:
        >>> variables(["NCCL_DEBUG=INFO", "A=b=c"])
        {'NCCL_DEBUG': 'INFO', 'A': 'b=c'}
    """
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise ConfigError(f"--env={word!r} is no variable. Give --env NAME=VALUE.")
        if name in reserved:
            raise ConfigError(
                f"--env={word!r}: {name} is set by the controller, which refuses a job that sets "
                "it. Leave it out."
            )
        found[name] = value
    return found
