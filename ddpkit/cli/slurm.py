"""``python -m ddpkit slurm``: write the batch script that trains on several nodes of a Slurm
cluster.

The script is ``slurm.sbatch`` beside this file, with the few things filled in that vary. Its
comments say why it is as it is. It is ordinary ``bash``, to be read, changed and kept beside the
recipe. Nothing is submitted.

Source: https://slurm.schedmd.com/sbatch.html , https://slurm.schedmd.com/srun.html and
https://docs.pytorch.org/docs/stable/elastic/run.html .
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ddpkit.cli import command_parser, whole_number
from ddpkit.cli.job_file import Template, check_processes, recipe_command, split_at_dashes
from ddpkit.errors import ConfigError

__all__ = ["batch_script", "run", "seconds_of"]

PROGRAM = "python -m ddpkit slurm"
TEMPLATE = Path(__file__).with_suffix(".sbatch")
USUAL_NOTICE = 300  # seconds; Slurm may send its signal a minute early
CPUS_PER_GPU_PROCESS = 4

LINE = " \\\n        "  # continues the call of torchrun
RUN = '--rdzv-id="$SLURM_JOB_ID.$restart"'
STATIC = f'--node-rank="$SLURM_NODEID" --master-addr="$head" --master-port="$port"{LINE}{RUN}'
C10D = (  # restarts need the agents' elastic rendezvous
    f'--rdzv-backend=c10d {RUN} --rdzv-endpoint="$head:$port"{LINE}'
    '--rdzv-conf="is_host=$((SLURM_NODEID == 0))" --local-addr="$SLURMD_NODENAME"'
)

DESCRIPTION = """\
Write a commented sbatch script that trains a recipe on several nodes: one task per node, in each of them
torchrun. The signal before the time limit, requeueing and the rendezvous are in it."""  # noqa: E501

EPILOG = """\
What stands after -- goes to the recipe.

examples:
  python -m ddpkit slurm train.py hparams.yaml --nodes 2 --gpus-per-node 4 --time 20:00:00 > train.sbatch
  sbatch train.sbatch

  python -m ddpkit slurm train.py hparams.yaml --nodes 4 --gpus-per-node 8 --time 2-00:00:00 --partition gpu \\
      --account speech --sbatch=--constraint=a100 --setup "module load cuda" -- --lr=0.01 --precision=bf16

  python -m ddpkit slurm train.py hparams.yaml --nodes 2 --gpus-per-node 0 --nproc-per-node 16 --time 4:00:00
"""  # noqa: E501


def run(words: Sequence[str]) -> int:
    """Write the script that the options describe to the standard output.

    Args:
        words: what stands after ``slurm`` on the command line.

    Returns:
        0.

    Raises:
        ConfigError: a value is wrong, or a file of the recipe is not there.
        SystemExit: after ``--help``, and with status 2 for wrong usage.
    """
    own, arguments = split_at_dashes(words)
    sys.stdout.write(batch_script(_parser().parse_args(own), arguments))
    return 0


def batch_script(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Fill in the template.

    Args:
        options: of the command line.
        arguments: of the recipe.

    Returns:
        The text of the script, for bash.

    Raises:
        ConfigError: a value is wrong, or a file of the recipe is not there.
    """
    _check_files(options)
    gpus = options.gpus_per_node
    processes = check_processes(options, gpus)
    cpus = options.cpus_per_task or processes * (CPUS_PER_GPU_PROCESS if gpus else 1)
    notice = _notice(options)
    grace = notice - min(30, notice // 2)
    more = [f"--gpus-per-node={gpus}"] if gpus else []
    names = {name: getattr(options, name) for name in ("partition", "account")}
    more += [f"--{name}={shlex.quote(value)}" for name, value in names.items() if value]
    torchrun = [f"--max-restarts={options.max_restarts}"] if options.max_restarts else []
    own_signals = _passes_signals_on()
    if own_signals:
        torchrun += [
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            f"--shutdown-timeout={grace}",
        ]
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        vars(options),
        processes=processes,
        cpus=cpus,
        threads=1 if gpus else max(1, cpus // processes),
        notice=notice,
        grace=grace,
        job_name=re.sub(
            r"[^\w.+@-]",
            "_",
            options.job_name or Path(options.script).stem,
            flags=re.ASCII,
        ),
        more="\n".join(f"#SBATCH {value}" for value in [*more, *options.sbatch]),
        requeue="requeue" if options.requeue else "no-requeue",
        requeues=int(options.requeue),
        python=shlex.quote(options.python),
        setup="\n".join(options.setup),
        signal="USR1" if own_signals else "TERM",  # a torchrun that knows TERM only
        rendezvous=C10D if options.max_restarts else STATIC,
        torchrun="".join(f"{word}{LINE}" for word in torchrun),
        recipe=" \\\n    ".join(map(shlex.quote, recipe_command(options, arguments))),
    )


def seconds_of(time: str) -> int:
    """Return the seconds of a time limit of Slurm.

    Args:
        time: ``[days-]hours:minutes:seconds``, ``minutes[:seconds]``, ``days-hours[:minutes]``.

    Returns:
        Seconds, above 0.

    Raises:
        ConfigError: it is none of these.

    Example:
        >>> seconds_of("90"), seconds_of("20:00:00"), seconds_of("1-12")
        (5400, 72000, 129600)
    """
    days, dash, clock = time.rpartition("-")
    numbers = clock.split(":")
    units = (3600, 60, 1) if dash or len(numbers) == len("HMS") else (60, 1)
    total = 0
    if re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        total = 86_400 * int(days or 0) + sum(
            unit * int(number) for unit, number in zip(units, numbers, strict=False)
        )
    if total <= 0:
        raise ConfigError(
            f"--time={time!r} is not a time limit. Give 20:00:00 for hours, 90 for minutes, 2-00 "
            "for days."
        )
    return total


def _notice(options: argparse.Namespace) -> int:
    """Return how many seconds before the limit the signal comes."""
    limit = seconds_of(options.time)
    notice: int = options.signal_before or min(USUAL_NOTICE, limit // 4)
    if notice >= limit:
        raise ConfigError(
            f"--signal-before={notice} and --time={options.time}: it would come before the start."
        )
    return notice


def _check_files(options: argparse.Namespace) -> None:
    for file in (options.script, options.hparams):
        if file is not None and not Path(file).is_file():
            raise ConfigError(
                f"there is no file {file!r}. Call this in the folder in which you will call sbatch."
            )


def _passes_signals_on() -> bool:
    """Say whether this torch's torchrun can be told which signals to pass on; torch itself is not
    loaded for that.
    """
    found = find_spec("torch")
    sources = [
        Path(folder, "distributed", "run.py")
        for folder in (found and found.submodule_search_locations) or ()
    ]
    return any(
        "--signals-to-handle" in source.read_text(encoding="utf-8")
        for source in sources
        if source.is_file()
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.usage = (
        "%(prog)s SCRIPT HPARAMS --nodes N --gpus-per-node N --time LIMIT [options] [-- recipe "
        "options]"
    )
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="the recipe, such as train.py")
    add("hparams", metavar="HPARAMS", nargs="?", help="its YAML file")
    positive = whole_number(1)
    natural = whole_number(0)
    add(
        "--nodes",
        type=positive,
        metavar="N",
        required=True,
        help="number of nodes",
    )
    add(
        "--gpus-per-node",
        type=natural,
        metavar="N",
        required=True,
        help="0 on nodes without GPUs",
    )
    add(
        "--time",
        metavar="LIMIT",
        required=True,
        help="of one attempt: 20:00:00, 2-00:00:00, or minutes",
    )
    add(
        "--nproc-per-node",
        type=positive,
        metavar="N",
        help="processes on a node (default: one per GPU)",
    )
    add(
        "--cpus-per-task",
        type=positive,
        metavar="N",
        help="CPUs of a node (default: 4 per GPU, 1 per process else)",
    )
    add("--job-name", metavar="NAME", help="default: the name of the recipe")
    add("--partition", metavar="NAME", help="default: the cluster's")
    add("--account", metavar="NAME", help="default: yours")
    add(
        "--max-restarts",
        type=natural,
        default=0,
        metavar="N",
        help="restarts by torchrun, within a job (default: 0)",
    )
    add(
        "--signal-before",
        type=positive,
        metavar="S",
        help="seconds before the limit (default: 300, or a quarter)",
    )
    add(
        "--no-requeue",
        dest="requeue",
        action="store_false",
        help="do not queue the job again at the limit",
    )
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more option of sbatch; may be repeated",
    )
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a line of shell to run first; may be repeated",
    )
    add(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="on the nodes (default: the one that runs this)",
    )
    return parser
