"""The command line of the package itself: ``python -m ddpkit``.

A recipe has its own command line (see :func:`ddpkit.run_opts.parse_arguments`). This one is for
what concerns no single recipe. Each command is a module with ``run(words)``, of this package or
named in :data:`ELSEWHERE`. It is imported when the command is used: the help of ``python -m
ddpkit`` loads nothing heavy.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from ddpkit import __version__
from ddpkit.errors import DdpkitError

__all__ = ["main"]

PROGRAM = "python -m ddpkit"

#: The commands: what each is for.
COMMANDS = {
    "ckpt": "look at checkpoints: list, show, verify, average and export them",
    "diff": "say at which step two runs part, to the bit, and what of it differs first",
    "doctor": (
        "look at this machine, or at all of a launch: what is wrong for training, and what to do"
    ),
    "estimate": "rehearse a recipe: what memory each process would take, and what fits",
    "kubernetes": "write the YAML of a training job for Kubeflow in a Kubernetes cluster",
    "lr-find": "try rising learning rates with a recipe: at which its loss falls fastest",
    "port": "show what changes in a SpeechBrain recipe that moves to ddpkit, or change it",
    "report": (
        "write one page about a run, or several against each other: curves, speed, goodput, "
        "settings"
    ),
    "scale": "measure a recipe on one process and on several: how fast, and what holds it back",
    "skypilot": "write the YAML of a task that SkyPilot runs on machines of a cloud",
    "slurm": "write the batch script that trains on several nodes of a Slurm cluster",
}

#: Commands whose module is not in this package.
ELSEWHERE = {"port": "ddpkit.porting.command"}

INTERRUPTED = 130  # what a shell reports for a program that was ended by SIGINT

_EPILOG = """\
commands:
{commands}
  A command says more with --help: python -m ddpkit ckpt --help

To train, run a recipe:

  python train.py hparams.yaml                                             one process
  torchrun --standalone --nproc_per_node=2 train.py hparams.yaml           two processes on this machine
  python train.py --help                                                   the options of a recipe
  python -m ddpkit.speechbrain train.py hparams.yaml                       a SpeechBrain recipe as it is
"""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m ddpkit`` and return its exit status.

    Without arguments it prints its help. ``--version``, ``--help`` and a wrong argument leave
    through :class:`SystemExit`, as :mod:`argparse` does.

    Args:
        arguments: The words after ``python -m ddpkit``; ``None`` takes them from ``sys.argv``.

    Returns:
        The exit status: 0 if all is well, 1 if a command has found something wrong and said what,
        130 after Ctrl-C.

    Raises:
        SystemExit: With status 0 after ``--version`` or ``--help``, with 2 for arguments that are
            wrong.

    Example:
        >>> main([])  # doctest: +ELLIPSIS
        usage: python -m ddpkit [-h] [--version] [command] ...
        ...
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        module = ELSEWHERE.get(words[0], f"{__name__}.{words[0].replace('-', '_')}")
        return _guarded(lambda: int(importlib.import_module(module).run(words[1:])))
    purposes = "\n".join(f"  {name:12}{purpose}" for name, purpose in COMMANDS.items())
    description = "ddpkit: a data-parallel training loop for PyTorch."
    parser = command_parser(PROGRAM, description, _EPILOG.format(commands=purposes))
    parser.usage = "%(prog)s [-h] [--version] [command] ..."
    parser.add_argument("--version", action="version", version=f"ddpkit {__version__}")
    parser.add_argument(
        "command",
        nargs="?",
        choices=sorted(COMMANDS),
        help=argparse.SUPPRESS,
    )
    parser.parse_args(words)
    return _guarded(parser.print_help)


def command_parser(program: str, description: str, epilog: str) -> argparse.ArgumentParser:
    r"""Make the parser of a command: its help keeps the lines of these texts, and options are
    written out.

    Args:
        program: the words that start the command.
        description: what it does, before the options.
        epilog: examples, after them.

    Returns:
        The parser, to which arguments are added.

    Example:
        >>> command_parser(
        ...     "python -m ddpkit port", "Show what changes.", "examples: ..."
        ... ).format_usage()
        'usage: python -m ddpkit port [-h]\n'
    """
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        program,
        None,
        description,
        epilog,
        formatter_class=layout,
        allow_abbrev=False,
    )


def say(text: str = "", end: str = "\n", stream: TextIO | None = None) -> None:
    """Write to the standard output, or to another stream, whatever its encoding.

    Args:
        text: what to write.
        end: what is written after it.
        stream: None: the standard output.

    Example:
        >>> say("nothing to change")
        nothing to change
    """
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(f"{text}{end}".encode(encoding, "backslashreplace").decode(encoding))


def whole_number(minimum: int) -> Callable[[str], int]:
    """Make an argument's type: a whole number that is not below a minimum.

    Args:
        minimum: the smallest number.

    Returns:
        What turns text into the number, for :meth:`argparse.ArgumentParser.add_argument`.

    Example:
        >>> whole_number(1)("3")
        3
    """

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} on")
        return int(text)

    return convert


def _guarded(run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; a user sees no traceback for what is not ddpkit's
    fault.
    """
    try:
        status = run() or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except DdpkitError as error:
        problem: Exception = error
    except OSError as error:  # perhaps of the output, which the interpreter would flush once more
        problem = error
        sys.stdout = None
    sys.stderr.write(f"{PROGRAM}: error: {problem}\n")
    return 1
