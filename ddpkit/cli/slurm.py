r"""``python -m ddpkit slurm``: write the batch script that trains on several nodes of a Slurm cluster.

The script is ordinary ``bash``, to be read, changed and kept beside the recipe. Nothing is submitted. What is decided
where a script could be written in several ways:

- One task of ``srun`` per node, and in it torchrun, which starts one process per GPU. So torchrun's restarts and error
  summary work, and a node is entered once.
- The signal before the time limit goes to the batch shell (``--signal=B:``). It passes the signal on to the training
  processes and, when these have ended, requeues the job. It need not know why they ended: torchrun makes 1 of every
  exit code.
- When a node fails, Slurm requeues the job, but only after ``SlurmdTimeout`` (300 s is usual), and not if the script
  has ended before. The processes on the other nodes end within seconds, and ``srun`` gives up ``--wait`` seconds
  later. So the script waits as long as Slurm still counts tasks of that step.
- Port and rendezvous carry the number of the job and of the attempt. After a failure of the network Slurm may start a
  job again while a part of the old attempt lives: the two cannot meet. The folder of checkpoints is fenced by its lock
  (:mod:`ddpkit.run_lock`).

Source: https://slurm.schedmd.com/sbatch.html , https://slurm.schedmd.com/srun.html and
https://docs.pytorch.org/docs/stable/elastic/run.html .
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ddpkit.errors import ConfigError

__all__ = ["Plan", "batch_script", "run", "seconds_of"]

PROGRAM = "python -m ddpkit slurm"
EXECUTABLE = 0o755

# Slurm counts limits in minutes and may send its signal a minute early.
USUAL_NOTICE = 300
SHORTEST_NOTICE, LONGEST_NOTICE = 10, 65535
CPUS_PER_GPU_PROCESS = 4

# Below Linux's ephemeral ports (32768 to 60999), above those of services.
FIRST_PORT, PORTS = 20000, 10000

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+@-]*")
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,+@-]*")
_EXTRA = re.compile(r"(?:--[a-z][a-z0-9-]*|-[A-Za-z])(?:[= ].*)?")
_OWN = ("nodes", "ntasks", "ntasks-per-node", "time", "signal", "requeue", "no-requeue", "job-name")  # options of ours

_DESCRIPTION = """\
Write a commented sbatch script that trains a recipe on several nodes: one task per node, in each of them torchrun.
The signal before the time limit, requeueing and the rendezvous are in it. Nothing is submitted."""

_EPILOG = """\
What stands after -- goes to the recipe.

examples:
  python -m ddpkit slurm train.py hparams.yaml --nodes 2 --gpus-per-node 4 --time 20:00:00 -o train.sbatch
  sbatch train.sbatch

  python -m ddpkit slurm train.py hparams.yaml --nodes 4 --gpus-per-node 8 --time 2-00:00:00 --partition gpu \\
      --account speech --sbatch=--constraint=a100 --setup "module load cuda" -- --lr=0.01 --precision=bf16

  python -m ddpkit slurm train.py hparams.yaml --nodes 2 --gpus-per-node 0 --nproc-per-node 16 --time 4:00:00
"""


@dataclass(frozen=True)
class Plan:
    """What a batch script is to do. Every value is checked when the plan is made.

    Args:
        script: the recipe, as seen from the folder in which ``sbatch`` is called.
        arguments: its arguments: the YAML file, and options of the recipe.
        nodes: number of nodes.
        processes: per node: one per GPU, or as many as asked for on nodes without GPUs.
        gpus: per node; 0 asks for none.
        time: limit, as Slurm writes it.
        notice: seconds between the signal and the limit.
        cpus: per node.
        job_name: name of the job.
        partition: partition or several, separated by commas; empty leaves it to Slurm.
        account: account; empty leaves it to Slurm.
        max_restarts: how often torchrun may start the processes again, without Slurm.
        requeue: whether the job is to be queued again at the limit and when a node fails.
        extra: more options of sbatch.
        setup: lines of shell that come before the training.
        python: the interpreter on the nodes.
        own_signals: whether this torch's torchrun can be told which signals to pass on.

    Raises:
        ConfigError: a value is wrong; the message says what would be right.

    Ranks: local.

    Example:
        >>> Plan("train.py", ("hparams.yaml",), nodes=2, processes=4, gpus=4, time="20:00:00", notice=300).seconds
        72000
    """

    script: str
    arguments: tuple[str, ...]
    nodes: int
    processes: int
    gpus: int
    time: str
    notice: int
    cpus: int = 1
    job_name: str = "train"
    partition: str = ""
    account: str = ""
    max_restarts: int = 0
    requeue: bool = True
    extra: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str = "python"
    own_signals: bool = True

    def __post_init__(self) -> None:
        _require_name("--job-name", self.job_name, _NAME)
        for option, value in (("--partition", self.partition), ("--account", self.account)):
            if value:
                _require_name(option, value, _NAMES)
        for value in self.extra:
            _require_extra(value)
        for text in (self.script, self.python, *self.arguments, *self.setup):
            if not text.isprintable():
                raise ConfigError(f"{text!r} has a character that cannot be printed, and would break the script.")
        if not SHORTEST_NOTICE <= self.notice < min(self.seconds, LONGEST_NOTICE):
            raise ConfigError(
                f"--signal-before={self.notice} and --time={self.time}: the signal would come {self.notice} s before "
                f"the limit of {self.seconds} s. It has to come at least {SHORTEST_NOTICE} s before it, and after the "
                "start."
            )

    @property
    def seconds(self) -> int:
        """The time limit in seconds."""
        return seconds_of(self.time)


def seconds_of(time: str) -> int:
    """Return how many seconds a time limit of Slurm is.

    Args:
        time: ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``, ``days-hours:minutes`` or
            ``days-hours:minutes:seconds``.

    Returns:
        Seconds, above 0.

    Raises:
        ConfigError: it is none of these.

    Ranks: local.

    Example:
        >>> seconds_of("90"), seconds_of("20:00:00"), seconds_of("1-12")
        (5400, 72000, 129600)
    """
    found = _TIME.fullmatch(time)
    if found is None:
        raise ConfigError(f"--time={time!r} is no time limit. Give 20:00:00 for hours, 90 for minutes, 2-00 for days.")
    numbers = [int(number) for number in found["rest"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        hours += 24 * int(found["days"])
    elif len(numbers) == 3:  # noqa: PLR2004 -- hours, minutes, seconds
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    total = (hours * 60 + minutes) * 60 + seconds
    if total <= 0:
        raise ConfigError(f"--time={time!r} is no time at all. Give 20:00:00 for twenty hours.")
    return total


def _require_name(option: str, value: str, form: re.Pattern[str]) -> None:
    if form.fullmatch(value) is None:
        raise ConfigError(
            f"{option}={value!r} is no name that can stand in a batch script: letters, digits and _ . + @ - are "
            "possible, with a letter or digit first."
        )


def _require_extra(value: str) -> None:
    if _EXTRA.fullmatch(value) is None or not value.isprintable():
        raise ConfigError(
            f"--sbatch={value!r} is no option of sbatch. Give one option each time, with its dashes: "
            "--sbatch=--constraint=a100"
        )
    name = re.split("[= ]", value.lstrip("-"), maxsplit=1)[0]
    if name in _OWN:
        raise ConfigError(f"--sbatch={value!r}: the script sets --{name} itself, from the options of {PROGRAM}.")


# ---------------------------------------------------------------------------------------- the script


def batch_script(plan: Plan) -> str:
    """Write the batch script.

    Args:
        plan: what it is to do.

    Returns:
        The text of the script, for bash.

    Ranks: local.

    Example:
        >>> plan = Plan("train.py", ("hparams.yaml",), nodes=2, processes=4, gpus=4, time="20:00:00", notice=300)
        >>> print(batch_script(plan).splitlines()[0])
        #!/bin/bash
    """
    parts = [_head(plan), _surroundings(plan), _MEETING, _signals(plan), _training(plan), _end(plan)]
    return "\n".join(parts)


def _head(plan: Plan) -> str:
    rows: list[tuple[str, str]] = [
        (f"--job-name={plan.job_name}", ""),
        (f"--nodes={plan.nodes}", ""),
        ("--ntasks-per-node=1", "torchrun, which starts one process per " + ("GPU" if plan.gpus else "rank")),
        (f"--cpus-per-task={plan.cpus}", f"of a node, for its {_several(plan.processes)} and their loader workers"),
    ]
    rows += [(f"--gpus-per-node={plan.gpus}", "")] if plan.gpus else []
    rows += [(f"--partition={plan.partition}", "")] if plan.partition else []
    rows += [(f"--account={plan.account}", "")] if plan.account else []
    again = "--requeue" if plan.requeue else "--no-requeue"
    rows += [
        (f"--time={plan.time}", ""),
        (f"--signal=B:USR1@{plan.notice}", f"to this shell, {plan.notice} s before the limit; see below"),
        (again, "when a node fails or another job takes its place" if plan.requeue else "one attempt"),
        ("--open-mode=append", "an attempt does not overwrite the output of the one before"),
    ]
    rows += [(value, "") for value in plan.extra]
    where = f"{plan.nodes} node{'s' if plan.nodes > 1 else ''} x {_several(plan.processes)}"
    lines = ["#!/bin/bash", f"# Trains {plan.script} on {where}. Submit it with sbatch, from here.", ""]
    lines += [f"#SBATCH {value:<26}{'# ' + why if why else ''}".rstrip() for value, why in rows]
    return "\n".join(lines) + "\n"


def _several(processes: int) -> str:
    return f"{processes} process{'es' if processes > 1 else ''}"


def _surroundings(plan: Plan) -> str:
    threads = max(1, plan.cpus // plan.processes) if not plan.gpus else 1
    lines = [
        "restart=${SLURM_RESTART_COUNT:-0}  # how often this job was queued again",
        "",
        "# Python on the nodes: the interpreter that wrote this script. It has to be there on every node.",
        f"python={shlex.quote(plan.python)}",
        f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}",
        "# Without it torch 2.13 keeps a node that joins again after a restart waiting for a store that is gone.",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "# Where the nodes have several networks, name the fast one:",
        "# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0",
        *(["", *plan.setup] if plan.setup else []),
    ]
    return "\n".join(lines) + "\n"


_MEETING = f"""\
# Where the processes meet: on the first node, where this shell runs. The port comes from the number of the job and of
# the attempt, so that two jobs on a node, or what is left of an earlier attempt, do not get in its way. Checkpoints
# are fenced by the lock in their folder: an earlier attempt that still lives can no longer save there.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({FIRST_PORT} + (SLURM_JOB_ID * 16 + restart) % {PORTS}))
while (: < "/dev/tcp/$head/$port") 2> /dev/null; do  # somebody listens there
    port=$((port + 1))
done
echo "$(date '+%F %T') job $SLURM_JOB_ID, attempt $restart: $SLURM_JOB_NODELIST, meeting at $head:$port"
"""


def _signals(plan: Plan) -> str:
    number = "USR1" if plan.own_signals else "TERM"
    after = " Then the job is queued again." if plan.requeue else ""
    why = "" if plan.own_signals else "\n# This torchrun knows TERM only, and kills its processes 30 s later."
    return f"""\
# {plan.notice} s before the limit Slurm sends USR1 to this shell alone, which passes it on.{after}{why}
# scancel and preemption send TERM to the processes and to this shell, which waits for them: Slurm does the rest.
asked_to_stop=0 asked_to_end=0
pass_on() {{
    asked_to_stop=1
    echo "$(date '+%F %T') the time limit is near"
    scancel --signal={number} "$SLURM_JOB_ID"
}}
trap pass_on USR1
trap 'asked_to_end=1' TERM
{_STILL if plan.requeue else ""}"""


_STILL = """\
still_counted() { scontrol show step "$SLURM_JOB_ID" 2> /dev/null | grep -q ' Name=ranks '; }
"""


def _training(plan: Plan) -> str:
    """Write the call of srun; with restarts the agents of torchrun meet in another way than without."""
    words = ['"$python" -m torch.distributed.run', f"--nnodes={plan.nodes} --nproc-per-node={plan.processes}"]
    if plan.max_restarts:
        words += [
            f"--max-restarts={plan.max_restarts} --rdzv-backend=c10d",
            '--rdzv-id="$SLURM_JOB_ID.$restart" --rdzv-endpoint="$head:$port"',
            '--rdzv-conf="is_host=$((SLURM_NODEID == 0))" --local-addr="$SLURMD_NODENAME"',
        ]
    else:
        words += [
            '--node-rank="$SLURM_NODEID" --master-addr="$head" --master-port="$port"',
            '--rdzv-id="$SLURM_JOB_ID.$restart"',
        ]
    if plan.own_signals:
        words += [
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            f"--shutdown-timeout={_grace(plan)}",
        ]
    words += ['"$@"']
    inner = " \\\n        ".join(words)
    recipe = " \\\n    ".join(shlex.quote(word) for word in (plan.script, *plan.arguments))
    return f"""\
# One task per node. What stands in single quotes runs there, with that node's number. A task that ends leaves the
# others {_grace(plan)} s: they may still be saving.
export python head port restart
srun --export=ALL --nodes={plan.nodes} --ntasks={plan.nodes} --ntasks-per-node=1 --cpus-per-task={plan.cpus} \\
    --job-name=ranks --kill-on-bad-exit=0 --wait={_grace(plan)} \\
    bash -c 'exec {inner}' train \\
    {recipe} &
training=$!
"""


def _grace(plan: Plan) -> int:
    """Return how many seconds processes have between a signal and their being killed."""
    return max(SHORTEST_NOTICE // 2, plan.notice - min(30, plan.notice // 2))


def _end(plan: Plan) -> str:
    return f"""\
while kill -0 "$training" 2> /dev/null; do  # a signal ends `wait`, not the training
    wait "$training"
done
wait "$training"
status=$?
echo "$(date '+%F %T') ended with status $status"
{_AGAIN if plan.requeue else ""}exit "$status"
"""


_AGAIN = """\
# If a node is lost, srun gives up, and Slurm still counts the tasks there. It finds out later (SlurmdTimeout, often
# 300 s), and queues the job again, but not one that has ended before. So this shell waits for it.
if [ "$status" != 0 ] && still_counted; then
    echo "$(date '+%F %T') a node does not answer; Slurm will queue the job again if it stays so"
    while [ "$asked_to_stop$asked_to_end" = 00 ] && still_counted; do
        sleep 1
    done
fi
if [ "$asked_to_stop" = 1 ] && [ "$status" != 0 ]; then
    echo "$(date '+%F %T') queued again: the next attempt goes on from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" && exit 0  # Slurm ends this shell
fi
"""


# ---------------------------------------------------------------------------------------- the words


def run(words: Sequence[str]) -> int:
    """Write the script that the options describe.

    Args:
        words: what stands after ``slurm`` on the command line.

    Returns:
        0.

    Raises:
        ConfigError: a value is wrong, a file of the recipe is not there, or the output is there already.
        SystemExit: after ``--help``, and with status 2 for wrong usage.

    Ranks: local.

    Example:
        >>> run(["no_such_file.py", "--nodes", "2", "--gpus-per-node", "4", "--time", "20:00:00"])
        Traceback (most recent call last):
            ...
        ddpkit.errors.ConfigError: there is no file 'no_such_file.py'. ...
    """
    words = list(words)
    split = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:split])
    text = batch_script(_plan(options, tuple(words[split + 1 :])))
    if options.output is None:
        sys.stdout.write(text)
        return 0
    if options.output.exists() and not options.force:
        raise ConfigError(f"{str(options.output)!r} is there already. Give --force to replace it, or another name.")
    options.output.write_text(text, encoding="utf-8")
    options.output.chmod(EXECUTABLE)
    return 0


def _plan(options: argparse.Namespace, arguments: tuple[str, ...]) -> Plan:
    for file in (options.script, options.hparams):
        if file is not None and not Path(file).is_file():
            raise ConfigError(
                f"there is no file {file!r}. Give the recipe and its YAML as seen from the folder in which you will "
                "call sbatch, and write the script there."
            )
    gpus, processes = options.gpus_per_node, options.nproc_per_node
    if not gpus and processes is None:
        raise ConfigError("--gpus-per-node=0: how many processes on a node? Give --nproc-per-node.")
    processes = processes or gpus
    cpus = options.cpus_per_task or processes * (CPUS_PER_GPU_PROCESS if gpus else 1)
    notice = options.signal_before
    return Plan(
        script=options.script,
        arguments=(*([options.hparams] if options.hparams else []), *arguments),
        nodes=options.nodes,
        processes=processes,
        gpus=gpus,
        time=options.time,
        notice=min(USUAL_NOTICE, seconds_of(options.time) // 4) if notice is None else notice,
        cpus=cpus,
        job_name=options.job_name or _name_of(options.script),
        partition=options.partition,
        account=options.account,
        max_restarts=options.max_restarts,
        requeue=options.requeue,
        extra=tuple(options.sbatch),
        setup=tuple(options.setup),
        python=options.python,
        own_signals=_passes_signals_on(),
    )


def _name_of(script: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+@-]", "_", Path(script).stem).lstrip("_.+@-") or "train"


def _passes_signals_on() -> bool:
    """Say whether this torch's torchrun can be told which signals to pass on; torch itself is not loaded for that."""
    found = find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        source = Path(folder, "distributed", "run.py")
        if source.is_file():
            return "--signals-to-handle" in source.read_text(encoding="utf-8")
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s SCRIPT HPARAMS --nodes N --gpus-per-node N --time LIMIT [options] [-- recipe options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT", help="the recipe, such as train.py")
    parser.add_argument("hparams", metavar="HPARAMS", nargs="?", help="its YAML file")
    add = parser.add_argument
    add("--nodes", type=_positive, metavar="N", required=True, help="number of nodes")
    add("--gpus-per-node", type=_natural, metavar="N", required=True, help="0 on nodes without GPUs")
    add("--time", metavar="LIMIT", required=True, help="of one attempt: 20:00:00, 2-00:00:00, or minutes")
    add("--nproc-per-node", type=_positive, metavar="N", help="processes on a node (default: one per GPU)")
    add("--cpus-per-task", type=_positive, metavar="N", help="CPUs of a node (default: 4 per GPU, 1 per process else)")
    add("--job-name", metavar="NAME", help="default: the name of the recipe")
    add("--partition", default="", metavar="NAME", help="default: that of the cluster")
    add("--account", default="", metavar="NAME", help="default: yours")
    add("--max-restarts", type=_natural, default=0, metavar="N", help="restarts by torchrun, within a job (default: 0)")
    add(
        "--signal-before",
        type=_positive,
        metavar="S",
        help="seconds before the limit (default: 300, less of a short one)",
    )
    add("--no-requeue", dest="requeue", action="store_false", help="do not queue the job again at the limit")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="one more option of sbatch; may be repeated")
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a line of shell before the training; may be repeated",
    )
    add("--python", default=sys.executable, metavar="PATH", help="on the nodes (default: the one that runs this)")
    add("-o", "--output", type=Path, metavar="FILE", help="write to a file (default: standard output)")
    add("--force", action="store_true", help="replace a file that is there")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or above")
    return int(text)
