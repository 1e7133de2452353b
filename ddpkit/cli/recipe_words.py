"""How the commands that run a recipe read their command line."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

from ddpkit.cli import say


def split_words(
    words: Sequence[str],
    switches: Sequence[str],
    with_value: Sequence[str],
    with_values: Sequence[str] = (),
) -> tuple[list[str], list[str]]:
    """Part the words of a command from those of the recipe.

    Args:
        words: all of them.
        switches: options of the command without a value.
        with_value: options of the command with a value.
        with_values: options of the command with several values.

    Returns:
        Options of the command with their values, and the command line of the recipe.

    Example:
        >>> words = ["train.py", "--nproc", "1,2", "h.yaml", "--lr=0.1", "--", "--json=x"]
        >>> split_words(words, ["--help"], ["--nproc", "--json"])
        (['--nproc', '1,2'], ['train.py', 'h.yaml', '--lr=0.1', '--json=x'])
    """
    own: list[str] = []
    recipe: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name = word.partition("=")[0]
        if word == "--":
            recipe += rest
            break
        if word in switches or (name in {*with_value, *with_values} and "=" in word):
            own.append(word)
        elif word in with_value:
            own += [word, *rest[:1]]
            rest = rest[1:]
        elif word in with_values:
            files = list(itertools.takewhile(lambda argument: not argument.startswith("--"), rest))
            own += [word, *files]
            rest = rest[len(files) :]
        else:
            recipe.append(word)
    return own, recipe


def require_recipe_words(
    parser: argparse.ArgumentParser,
    recipe: Sequence[str],
) -> None:
    """End the program where a command was given no recipe.

    Args:
        parser: of the command.
        recipe: what it was given.

    Raises:
        SystemExit: there is none; with status 2.
    """
    if not recipe:
        parser.error("give the recipe, such as train.py hparams.yaml")


def positive(text: str) -> float:
    """Read a finite number above 0, as an argument's type.

    Example:
        >>> positive("1e-3")
        0.001
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def tell(line: str) -> None:
    """Say at once how far a measurement is, apart from its result.

    Args:
        line: goes to stderr.
    """
    say(line, stream=sys.stderr)
    sys.stderr.flush()
