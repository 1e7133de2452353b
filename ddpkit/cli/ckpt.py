"""``python -m ddpkit ckpt``: look at checkpoints without Python.

``ls``, ``show`` and ``verify`` only read: they lock nothing, change nothing, and work on a
read-only folder and beside a run that is saving. ``average`` and ``export`` write the one file they
are told to. Directories made by SpeechBrain are understood. No code of a checkpoint ever runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpkit.cli import command_parser, whole_number

__all__ = ["run"]

PROGRAM = "python -m ddpkit ckpt"

#: The formats that `export` and `average` write, by the suffix of the file.
SUFFIXES = {
    ".safetensors": "safetensors",
    ".pt": "pt",
    ".pth": "pt",
    ".bin": "pt",
    ".ckpt": "pt",
}

_DESCRIPTION = """\
Look at checkpoints. A CKPT is a checkpoint's directory; a DIR is the folder that holds them, such as
results/1234/save, or a URL of one in a store, such as s3://bucket/run/save. ls, show and verify change nothing."""  # noqa: E501

_EPILOG = """\
examples:
  python -m ddpkit ckpt ls results/1234/save
  python -m ddpkit ckpt ls s3://bucket/run/save
  python -m ddpkit ckpt show results/1234/save --tensors
  python -m ddpkit ckpt verify results/1234/save
  python -m ddpkit ckpt average results/1234/save --recoverable model --min-key loss --num 5 --output mean.pt
  python -m ddpkit ckpt export results/1234/save/CKPT+best --recoverable model --output model.safetensors
"""  # noqa: E501


def run(words: Sequence[str]) -> int:
    """Run one command.

    Args:
        words: what stands after ``ckpt`` on the command line.

    Returns:
        The exit status: 0, or 1 if there is no checkpoint or one is damaged.

    Raises:
        CheckpointError: the command cannot be carried out; nothing has been written.
        MissingExtraError: a format's package is not installed.
        SystemExit: after ``--help``, and with status 2 for wrong usage.

    Example:
        >>> import tempfile
        >>> run(["verify", tempfile.mkdtemp()])
        Traceback (most recent call last):
        ddpkit.errors.CheckpointError: there is no checkpoint in '...'.
    """
    options = _parser().parse_args(words)
    if "output" in options and options.format is None:
        options.format = SUFFIXES.get(options.output.suffix)
        if options.format is None:
            known = ", ".join(SUFFIXES)
            options.parser.error(
                f"--output {options.output}: the suffix is none of {known}; give --format."
            )
    from ddpkit.cli import checkpoint_commands  # loads torch, which --help does without
    from ddpkit.mirror import copied_down

    # these read small files alone
    stays = options.command == "command_ls" or (
        options.command == "command_show" and not options.tensors
    )
    if "path" in options and not stays:
        options.path = copied_down(options.path)
    if "paths" in options:
        options.paths = [copied_down(path) for path in options.paths]
    return int(getattr(checkpoint_commands, options.command)(options))


# ---------------------------------------------------------------------------------------- the words


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, _DESCRIPTION, _EPILOG)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    ls = _command(commands, "ls", "list the checkpoints of a folder, newest first")
    ls.add_argument(
        "path",
        metavar="DIR",
        nargs="?",
        default=".",
        help="a folder, or a URL of one in a store (default: the current folder)",
    )

    show = _command(commands, "show", "show what is in one checkpoint")
    show.add_argument(
        "path",
        metavar="CKPT",
        help="a checkpoint; of a folder, its newest",
    )
    show.add_argument(
        "--tensors",
        action="store_true",
        help="name, shape and dtype of every tensor",
    )
    show.add_argument(
        "--lines",
        type=whole_number(1),
        default=20,
        metavar="N",
        help="lines per file (default: 20)",
    )

    verify = _command(commands, "verify", "read every byte and compare it with what was saved")
    verify.add_argument(
        "paths",
        metavar="DIR|CKPT",
        nargs="+",
        help="folders or checkpoints",
    )

    average = _command(commands, "average", "average the weights of several checkpoints")
    average.add_argument(
        "paths",
        metavar="DIR|CKPT",
        nargs="+",
        help="folders or checkpoints",
    )
    _add_best(average)
    average.add_argument(
        "--num",
        type=whole_number(1),
        metavar="N",
        help="the N best, or newest (default: all)",
    )
    _add_output(average)

    export = _command(
        commands,
        "export",
        "write the weights of one checkpoint to a file of their own",
    )
    export.add_argument(
        "path",
        metavar="CKPT",
        help="a checkpoint; of a folder, its newest or best",
    )
    _add_best(export)
    _add_output(export)
    return parser


def _command(commands: Any, name: str, purpose: str) -> Any:
    parser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose.capitalize()}.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=f"command_{name}", parser=parser)
    return parser


def _add_best(parser: argparse.ArgumentParser) -> None:
    best = parser.add_mutually_exclusive_group()
    best.add_argument(
        "--min-key",
        metavar="KEY",
        help="best is the smallest value of this key of the meta",
    )
    best.add_argument(
        "--max-key",
        metavar="KEY",
        help="best is the greatest value of this key of the meta",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recoverable",
        metavar="NAME",
        required=True,
        help="which file: NAME.ckpt, such as model",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        required=True,
        help="the file to write",
    )
    parser.add_argument(
        "--format",
        choices=("safetensors", "pt"),
        help="default: by the suffix of FILE",
    )
    parser.add_argument(
        "--base",
        metavar="FILE",
        type=Path,
        help="the base weights, of a checkpoint that holds only what was trained",
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
