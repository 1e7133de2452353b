"""``python -m ddpkit kubernetes``: write the YAML of a training job for Kubeflow in a Kubernetes
cluster.

The files are ``kubernetes_trainjob.yaml`` and ``kubernetes_pytorchjob.yaml`` beside this one, with
the few things filled in that vary. Their comments say why they are as they are. Nothing is applied.

Source: of a TrainJob and its runtime, https://www.kubeflow.org/docs/components/trainer/ ; of their
restarts, https://jobset.sigs.k8s.io/docs/concepts/ ; of a PyTorchJob,
https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/ ; that ``$(X)`` in
a command becomes the value of a variable,
https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/ .
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpkit.cli import command_parser, whole_number
from ddpkit.cli.job_file import (
    check_files,
    check_processes,
    fill,
    job_name,
    recipe_command,
    scalar,
    split_at_dashes,
    variables,
)
from ddpkit.errors import ConfigError

__all__ = ["job_file", "run"]

PROGRAM = "python -m ddpkit kubernetes"
KINDS = ("trainjob", "pytorchjob")
GRACE = 300  # seconds
LEAST_REST = 30  # seconds between torchrun's limit and that of the pod

#: What Kubeflow Trainer sets, and refuses in a job.
SET_BY_CONTROLLER = (
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)

DESCRIPTION = """\
Write the YAML of a training job: a TrainJob of Kubeflow Trainer (v2) with its runtime, or a PyTorchJob of the
training operator (v1). Restarts, a volume and time for a checkpoint are in it."""  # noqa: E501

EPILOG = """\
What stands after -- goes to the recipe.

examples:
  python -m ddpkit kubernetes train.py hparams.yaml --image team/speech:1 --volume speech-work \\
      --nodes 2 --gpus-per-node 4 > train.yaml
  kubectl apply -f train.yaml

  python -m ddpkit kubernetes train.py hparams.yaml --image team/speech:1 --volume speech-work \\
      --kind pytorchjob --nodes 4 --min-nodes 2 --gpus-per-node 8 --cpus-per-node 64 --memory-per-node 500Gi \\
      --env NCCL_DEBUG=INFO -- --precision=bf16 --ckpt_interval_minutes=15
"""  # noqa: E501


def run(words: Sequence[str]) -> int:
    """Write the file that the options describe to the standard output.

    Args:
        words: what stands after ``kubernetes`` on the command line.

    Returns:
        0.

    Raises:
        ConfigError: a value is wrong, or a file of the recipe is not there.
        SystemExit: after ``--help``, and with status 2 for wrong usage.
    """
    own, arguments = split_at_dashes(words)
    sys.stdout.write(job_file(_parser().parse_args(own), arguments))
    return 0


def job_file(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Fill in the template.

    Args:
        options: of the command line.
        arguments: of the recipe.

    Returns:
        The text of the file, YAML.

    Raises:
        ConfigError: a value is wrong, or a file of the recipe is not there.
    """
    _check(options)
    processes = check_processes(options, options.gpus_per_node)
    least = options.min_nodes or options.nodes
    template = Path(__file__).with_name(f"kubernetes_{options.kind}.yaml")
    return fill(
        template.read_text(encoding="utf-8"),
        {
            "script": scalar(options.script),
            "nodes": options.nodes,
            "min_nodes": least,
            "nodes_in_words": " to ".join(dict.fromkeys([str(least), str(options.nodes)])),
            "processes": processes,
            "name": scalar(job_name(options)),
            "namespace": f"namespace: {scalar(options.namespace)}" if options.namespace else "",
            "max_restarts": options.max_restarts,
            "notice": options.grace,
            "image": scalar(options.image),
            "workdir": scalar(options.workdir or options.mount_path),
            "mount_path": scalar(options.mount_path),
            "volume": scalar(options.volume),
            "command": _command(options, processes, arguments),
            "env": _environment(options, processes),
            "resources": _resources(options),
        },
    )


def _command(options: argparse.Namespace, processes: int, arguments: Sequence[str]) -> str:
    """Return the words of the command, one a line."""
    # The v1 controller passes the number of processes on only where there is a Master.
    number = [f"--nproc-per-node={processes}"] if options.kind == "pytorchjob" else []
    recipe = recipe_command(options, arguments)
    return "\n".join(f"- {scalar(_literal(word))}" for word in ["torchrun", *number, *recipe])


def _environment(options: argparse.Namespace, processes: int) -> str:
    """Return the environment variables, two lines each."""
    cpus = options.cpus_per_node or 0
    threads = 1 if options.gpus_per_node else max(1, cpus // processes)
    rest = min(LEAST_REST, options.grace // 2)
    found = {
        "OMP_NUM_THREADS": str(threads),
        "PET_SHUTDOWN_TIMEOUT": str(options.grace - rest),
    }
    if options.kind == "pytorchjob":
        # Without it torch 2.13 keeps a node that joins again waiting for a store that is gone.
        found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    found |= variables(options.env, SET_BY_CONTROLLER)
    return "\n".join(
        f"- name: {name}\n  value: {_quoted(_literal(value))}" for name, value in found.items()
    )


def _resources(options: argparse.Namespace) -> str:
    limits = {
        "cpu": options.cpus_per_node,
        "memory": scalar(options.memory_per_node) if options.memory_per_node else None,
        scalar(options.gpu_resource): options.gpus_per_node or None,
    }
    lines = [f"    {name}: {value}" for name, value in limits.items() if value is not None]
    if not lines:
        return ""
    head = "resourcesPerNode" if options.kind == "trainjob" else "resources"
    return "\n".join([f"{head}:", "  limits:", *lines])


def _literal(text: str) -> str:
    """Keep Kubernetes from putting a variable in the place of ``$(NAME)``."""
    return text.replace("$", "$$")


def _quoted(text: str) -> str:
    """Write a value that must be a string, also one that looks like a number."""
    plain = scalar(text)
    return plain if plain.startswith('"') else f'"{plain}"'


def _check(options: argparse.Namespace) -> None:
    check_files(options)
    least = options.min_nodes
    if least is not None and options.kind == "trainjob":
        raise ConfigError(
            f"--min-nodes={least}: a TrainJob has always as many nodes as it was given, and all "
            "are made anew when one fails. Give --kind=pytorchjob, or leave it out."
        )
    if least is not None and least > options.nodes:
        raise ConfigError(
            f"--min-nodes={least} is more than --nodes={options.nodes}. Give {options.nodes} or "
            "less."
        )
    for name in ("image", "volume", "gpu_resource"):
        if not getattr(options, name).strip():
            raise ConfigError(
                f"--{name.replace('_', '-')}={getattr(options, name)!r} is empty: give a name."
            )
    for name in ("mount_path", "workdir"):
        path = getattr(options, name)
        if path is not None and not path.startswith("/"):
            raise ConfigError(
                f"--{name.replace('_', '-')}={path!r} is a path in the container: give an absolute "
                "one, such as /work."
            )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.usage = (
        "%(prog)s SCRIPT HPARAMS --image IMAGE --volume CLAIM --nodes N --gpus-per-node N "
        "[options] [-- recipe options]"
    )
    _add_required(parser)
    _add_sizes(parser)
    _add_places(parser)
    return parser


def _add_required(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="the recipe, such as train.py")
    add("hparams", metavar="HPARAMS", nargs="?", help="its YAML file")
    add("--image", required=True, help="of the containers, with torch and ddpkit in it")
    add(
        "--volume",
        required=True,
        metavar="CLAIM",
        help="a PersistentVolumeClaim that every node has: checkpoints lie there",
    )
    add("--nodes", type=whole_number(1), metavar="N", required=True, help="number of nodes")
    add(
        "--gpus-per-node",
        type=whole_number(0),
        metavar="N",
        required=True,
        help="0 on nodes without GPUs",
    )
    add(
        "--kind",
        choices=KINDS,
        default=KINDS[0],
        help="of Kubeflow v2, or of v1 (default: trainjob)",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    positive = whole_number(1)
    add(
        "--nproc-per-node",
        type=positive,
        metavar="N",
        help="processes on a node (default: one per GPU)",
    )
    add(
        "--min-nodes",
        type=positive,
        metavar="N",
        help="a PyTorchJob goes on with so few (default: --nodes)",
    )
    add("--cpus-per-node", type=positive, metavar="N", help="default: the cluster's")
    add("--memory-per-node", metavar="SIZE", help="such as 200Gi (default: the cluster's)")
    add(
        "--gpu-resource",
        default="nvidia.com/gpu",
        metavar="NAME",
        help="what the cluster calls GPUs (default: nvidia.com/gpu)",
    )
    add(
        "--max-restarts",
        type=whole_number(0),
        default=3,
        metavar="N",
        help="how often a failed job starts again (default: 3)",
    )
    add(
        "--grace",
        type=positive,
        default=GRACE,
        metavar="S",
        help="seconds from SIGTERM to the end, for a checkpoint (default: 300)",
    )


def _add_places(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--mount-path",
        default="/work",
        metavar="PATH",
        help="where the volume is in a container (default: /work)",
    )
    add(
        "--workdir",
        metavar="PATH",
        help="folder of the recipe in a container (default: --mount-path)",
    )
    add("--job-name", metavar="NAME", help="default: the name of the recipe")
    add("--namespace", metavar="NAME", help="default: that of kubectl")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable; may be repeated",
    )
