"""``python -m ddpkit doctor``: look at this machine, or at all machines of a launch.

What is looked at stands in :mod:`ddpkit.see.doctor.order`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddpkit.cli import command_parser, say, whole_number

__all__ = ["run"]

PROGRAM = "python -m ddpkit doctor"

DESCRIPTION = """\
Look at this machine, or at all machines of a launch: what is wrong for training, what it costs and
what to do. Nothing is changed. Exits with 1 if there is a problem."""

EPILOG = """\
examples:
  python -m ddpkit doctor                                        this machine
  python -m ddpkit doctor --nproc 4                              as four processes of this machine
  torchrun --nproc_per_node=4 -m ddpkit doctor                   as the launcher starts a run
  srun python -m ddpkit doctor --output_folder /scratch/results  on all nodes of a job of Slurm
  python -m ddpkit doctor --output_folder s3://bucket/run        with the store that keeps a run
  python -m ddpkit doctor --recipe train.py                      with the loader of a recipe
  python -m ddpkit doctor --recipe train.py hparams.yaml -- --batch_size=8    that has a YAML, and options
"""  # noqa: E501


def run(words: Sequence[str]) -> int:
    """Look at the machines, and say what was found.

    Args:
        words: what stands after ``doctor`` on the command line.

    Returns:
        1 if there is a problem, 0 else.

    Raises:
        ConfigError: an option makes no sense.
        LaunchError: the ranks have lost each other.
        MissingExtraError: the extra ``see`` is not installed.
        SystemExit: after ``--help``, and with status 2 for wrong usage.

    Ranks: collective.
    """
    words = list(words)
    split = words.index("--") if "--" in words else len(words)
    options = _options(words[:split])
    from ddpkit.see import Request, run_doctor, run_ranks

    if options.nproc is not None:
        return run_ranks(options.nproc, options.device, _without_nproc(words))
    return run_doctor(
        Request(
            device=options.device,
            output_folder=options.output_folder,
            ckpt_local=options.ckpt_local,
            recipe=(*options.recipe, *words[split + 1 :]),
            workers=options.workers,
            timeout=float(options.timeout),
            with_pairs=options.pairs,
            as_json=options.json,
            verbose=options.verbose,
        ),
        say,
    )


def _options(words: Sequence[str]) -> argparse.Namespace:
    """Read the options; what looks like the recipe's own is refused with the command as it should
    be.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(words)
    files, more = options.recipe[:2], options.recipe[2:]
    misplaced = [*more, *unknown]
    if misplaced and files:
        command = f"{PROGRAM} --recipe {' '.join(files)} -- {' '.join(misplaced)}"
        parser.error(
            f"--recipe takes a script and its YAML file, if it has one. If "
            f"{' '.join(misplaced)} is for the recipe, it stands after --: {command}"
        )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _without_nproc(words: Sequence[str]) -> list[str]:
    left: list[str] = []
    is_number = False
    for word in words:
        if word != "--nproc" and not word.startswith("--nproc=") and not is_number:
            left.append(word)
        is_number = word == "--nproc"
    return left


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, DESCRIPTION, EPILOG)
    positive = whole_number(1)
    natural = whole_number(0)
    add = parser.add_argument
    add("--nproc", metavar="N", help="start so many processes here: a number, gpu, cpu or auto")
    add("--device", choices=("cpu", "cuda"), help="what a run would take (default: what is there)")
    add(
        "--output_folder",
        metavar="FOLDER",
        help="where a run would write, a path or a URL (default: the recipe's, or the present one)",
    )
    add(
        "--ckpt_local",
        metavar="FOLDER",
        help="where a run with a URL would save first (default: the recipe's, or none)",
    )
    add("--workers", type=natural, metavar="N", help="loader processes of each rank")
    add(
        "--recipe",
        nargs="+",
        default=[],
        metavar=("SCRIPT", "HPARAMS"),
        help="a recipe, with its YAML if it has one: its folder, loader and data; its own options "
        "stand after --",
    )
    add(
        "--timeout",
        type=positive,
        default=120,
        metavar="S",
        help="seconds to wait for a rank (default: 120)",
    )
    add("--pairs", action="store_true", help="measure each pair of hosts (one host: of ranks)")
    add("--json", action="store_true", help="write JSON, with all values")
    add(
        "--verbose",
        action="store_true",
        help="say of what is well, too, what was expected and why",
    )
    return parser
