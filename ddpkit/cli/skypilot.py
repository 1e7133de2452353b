"""``python -m ddpkit skypilot``: write the YAML of a task for SkyPilot.

The file is ``skypilot.yaml`` beside this one, with the few things filled in that vary. Nothing is
launched.

Source: https://docs.skypilot.co/en/stable/reference/yaml-spec.html and
https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html .
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpkit.cli import command_parser, whole_number
from ddpkit.cli.job_file import (
    check_files,
    fill,
    job_name,
    recipe_command,
    scalar,
    split_at_dashes,
    variables,
)
from ddpkit.errors import ConfigError

__all__ = ["run", "task_file"]

PROGRAM = "python -m ddpkit skypilot"
TEMPLATE = Path(__file__).with_suffix(".yaml")

DESCRIPTION = """\
Write the YAML of a task for SkyPilot: one torchrun on each node, with SkyPilot's addresses and numbers."""  # noqa: E501

EPILOG = """\
What stands after -- goes to the recipe.

examples:
  python -m ddpkit skypilot train.py hparams.yaml --nodes 2 --accelerators H100:8 > train.sky.yaml
  sky jobs launch train.sky.yaml

  python -m ddpkit skypilot train.py hparams.yaml --nodes 2 --accelerators A100:4 --spot --volume speech-work \\
      --mount-path /work --setup "pip install -r requirements.txt" -- --output_folder=/work/results/1 \\
      --ckpt_interval_minutes=15

  python -m ddpkit skypilot train.py hparams.yaml --nodes 2 --cpus 16+ --nproc-per-node 16
"""  # noqa: E501


def run(words: Sequence[str]) -> int:
    """Write the file that the options describe to the standard output.

    Args:
        words: what stands after ``skypilot`` on the command line.

    Returns:
        0.

    Raises:
        ConfigError: a value is wrong, or a file of the recipe is not there.
        SystemExit: after ``--help``, and with status 2 for wrong usage.
    """
    own, arguments = split_at_dashes(words)
    sys.stdout.write(task_file(_parser().parse_args(own), arguments))
    return 0


def task_file(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Fill in the template.

    Args:
        options: of the command line.
        arguments: of the recipe.

    Returns:
        The text of the file, YAML.

    Raises:
        ConfigError: a value is wrong, or a file of the recipe is not there.
    """
    check_files(options)
    processes = _processes(options)
    return fill(
        TEMPLATE.read_text(encoding="utf-8"),
        {
            "script": scalar(options.script),
            "nodes": options.nodes,
            "name": scalar(job_name(options)),
            "processes": processes,
            "max_restarts": options.max_restarts,
            "resources": _resources(options),
            "volumes": _volumes(options),
            "env": _environment(options),
            "setup": _setup(options),
            "recipe": " \\\n  ".join(map(_quoted, recipe_command(options, arguments))),
        },
    )


def _processes(options: argparse.Namespace) -> str:
    """Return what torchrun starts on a node, for bash."""
    if options.nproc_per_node:
        return str(options.nproc_per_node)
    if not options.accelerators:
        raise ConfigError(
            "without --accelerators, how many processes on a node? Give --nproc-per-node."
        )
    return '"$SKYPILOT_NUM_GPUS_PER_NODE"'


def _resources(options: argparse.Namespace) -> str:
    found = {
        "infra": options.infra,
        "accelerators": options.accelerators,
        "cpus": options.cpus,
        "memory": options.memory,
        "image_id": options.image,
    }
    lines = [f"{name}: {scalar(value)}" for name, value in found.items() if value]
    return "\n".join([*lines, *(["use_spot: true"] if options.spot else [])])


def _volumes(options: argparse.Namespace) -> str:
    if not options.volume:
        return ""
    if not options.mount_path.startswith("/"):
        raise ConfigError(
            f"--mount-path={options.mount_path!r} is a path on the nodes: give an absolute one, "
            "such as /work."
        )
    return f"volumes:\n  {scalar(options.mount_path)}: {scalar(options.volume)}"


def _setup(options: argparse.Namespace) -> str:
    lines = "\n".join(options.setup).splitlines()
    if not lines:
        return ""
    # the first line tells a reader of YAML how far all are indented, unless it is said
    is_indented = next(filter(str.strip, lines), "").startswith(" ")
    return "\n".join(["setup: |2" if is_indented else "setup: |", *(f"  {line}" for line in lines)])


def _environment(options: argparse.Namespace) -> str:
    whole = re.match(r"\d+", options.cpus or "")  # of "16+", and of "7.5"
    cpus = int(whole[0]) if whole else 0
    threads = 1 if options.accelerators else max(1, cpus // (options.nproc_per_node or 1))
    found = {"OMP_NUM_THREADS": str(threads)} | variables(options.env)
    return "\n".join(f"{name}: {scalar(value)}" for name, value in found.items())


def _quoted(word: str) -> str:
    r"""Write a word for bash on one line.

    Example:
        >>> print(_quoted("--lr=0.1"), _quoted("a\nb"))
        --lr=0.1 $'a\nb'
    """
    if word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def _escaped(letter: str) -> str:
    """Write a letter for bash between ``$'`` and ``'``; what YAML may change, or refuse, as
    bytes.
    """
    if letter == "\n":
        return "\\n"
    if not letter.isprintable():
        return "".join(f"\\x{byte:02x}" for byte in letter.encode())
    return f"\\{letter}" if letter in "\\'" else letter


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.usage = (
        "%(prog)s SCRIPT HPARAMS --nodes N --accelerators NAME:N [options] [-- recipe options]"
    )
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="the recipe, such as train.py")
    add("hparams", metavar="HPARAMS", nargs="?", help="its YAML file")
    add("--nodes", type=whole_number(1), metavar="N", required=True, help="number of nodes")
    add("--accelerators", metavar="NAME:N", help="GPUs of a node, such as H100:8")
    add(
        "--nproc-per-node",
        type=whole_number(1),
        metavar="N",
        help="processes on a node (default: one per GPU)",
    )
    add("--cpus", metavar="N", help="CPUs of a node, such as 16 or 16+")
    add("--memory", metavar="GB", help="of a node, such as 64 or 64+")
    add("--infra", metavar="WHERE", help="such as aws, k8s or gcp/us-central1 (default: any)")
    add("--image", metavar="ID", help="of the machines, such as docker:NAME (default: SkyPilot's)")
    add("--spot", action="store_true", help="machines that can be taken away, for less")
    _add_more(parser)
    return parser


def _add_more(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-restarts",
        type=whole_number(0),
        default=3,
        metavar="N",
        help="how often a failed job starts again, by `sky jobs launch` (default: 3)",
    )
    add("--volume", metavar="NAME", help="a volume of SkyPilot that every node has")
    add(
        "--mount-path",
        default="/work",
        metavar="PATH",
        help="where the volume is on the nodes (default: /work)",
    )
    add("--job-name", metavar="NAME", help="default: the name of the recipe")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable; may be repeated",
    )
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a line of shell to run first, once; may be repeated",
    )
