"""``python -m ddpkit port``: what changes when a recipe of SpeechBrain moves to ddpkit for good.

It shows a diff, name by name: ddpkit's own names are renamed, all others stay SpeechBrain's. Then
it lists what behaves differently in this recipe, with lines and links. Files are changed with
``--write`` alone, and copied before.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpkit.cli import command_parser, say
from ddpkit.porting.recipes import PortedRecipe, port_recipe, write_recipe

__all__ = ["run"]

PROGRAM = "python -m ddpkit port"

_DESCRIPTION = """\
Show what changes in a recipe that moves from SpeechBrain to ddpkit: a diff, then what behaves differently.
Python and YAML files are looked at. What ddpkit lacks stays SpeechBrain's, which has to be installed then."""  # noqa: E501

_EPILOG = """\
examples:
  python -m ddpkit port recipes/digits                 show it; nothing is written
  python -m ddpkit port recipes/digits --write         write it, and keep a copy of each file
  python -m ddpkit port recipes/digits > digits.patch  for `patch -p1` in the folder

Pages that it names (docs/...) are in ddpkit's repository. To try: python -m ddpkit.speechbrain train.py hparams.yaml
"""  # noqa: E501


def run(words: Sequence[str]) -> int:
    """Show what changes in a recipe, and write it if that was asked for.

    Args:
        words: what stands after ``port`` on the command line.

    Returns:
        The exit status: 0, or 1 if a file was left because it cannot be read, parsed or written.

    Raises:
        ConfigError: there is no such recipe.
        OSError: a file cannot be written.
        SystemExit: after ``--help``, and with status 2 for wrong usage.

    Example:
        >>> import tempfile
        >>> run([tempfile.mkdtemp()])
        nothing to change: no Python or YAML file here names anything of SpeechBrain that ddpkit has
        0
    """
    options = _parser().parse_args(words)
    recipe = port_recipe(options.recipe)
    for file in recipe.changed:
        say(file.diff(), end="")
    backup = write_recipe(recipe) if options.write else None
    now = recipe if backup is None else port_recipe(options.recipe)  # with the lines as they are
    say("".join(_told(now)), end="")
    for problem in recipe.problems:
        say(
            f"{PROGRAM}: error: {problem.name}: left as it is: {problem.problem}", stream=sys.stderr
        )
    say(_summary(recipe, backup))
    return 1 if recipe.problems else 0


def _told(recipe: PortedRecipe) -> Iterator[str]:
    """What is left and why, then what behaves differently."""
    for title, kind in (
        ("Left as it is", "left"),
        ("What behaves differently in this recipe", "notes"),
    ):
        told = [(file.name, note) for file in recipe.files for note in getattr(file, kind)]
        yield f"\n{title}:\n\n" if told else ""
        for name, note in told:
            link = f"    {note.link}\n" if note.link else ""
            yield f"{name}:{', '.join(map(str, note.lines))}: {note.text}\n{link}"


def _summary(recipe: PortedRecipe, backup: Path | None) -> str:
    if not recipe.changed:
        return (
            "nothing to change: no Python or YAML file here names anything of SpeechBrain that "
            "ddpkit has"
        )
    if backup is None:
        return f"\n{len(recipe.changed)} file(s) would change; nothing was written (--write does)"
    return (
        f"\n{len(recipe.changed)} file(s) have changed; as they were: {str(backup)!r}\n"
        f"To go back: cp -a {shlex.quote(str(backup))}/. {shlex.quote(str(recipe.root))}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "recipe",
        type=Path,
        help="the folder of a recipe, or one .py or .yaml file",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="change the files; copies of them are kept in the folder",
    )
    return parser
