"""Platforms that start one process per node, and say by variables of their own which node it is.

``python train.py`` there is as many lonely runs as there are nodes, each of which takes itself for
the main process. It is refused, with the command that starts the ranks. To support another
platform, write a function that reads its variables, and put it into :data:`PLATFORMS`.

Source: of Kubeflow Trainer, whose variables torchrun reads as its own options,
https://docs.pytorch.org/docs/stable/elastic/run.html ; of SkyPilot,
https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html ; of dstack,
https://dstack.ai/docs/concepts/tasks ; of SageMaker,
https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md ; of AWS
Batch, https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html . Numbers of nodes in
``RANK`` and ``WORLD_SIZE``: of Vertex AI,
https://cloud.google.com/vertex-ai/docs/training/distributed-training ; of PAI,
https://www.alibabacloud.com/help/en/pai/user-guide/general-environment-variables .
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddpkit.base import size
from ddpkit.errors import LaunchError

DEFAULT_PORT = "29500"  # torchrun's own
EXAMPLE = "train.py hparams.yaml"
#: The variables with the number of nodes: where one is missing its platform says nothing.
NUMBERS_OF_NODES = (
    "PET_NNODES",
    "SKYPILOT_NUM_NODES",
    "DSTACK_NODES_NUM",
    "SM_HOSTS",
    "AWS_BATCH_JOB_NUM_NODES",
)

_NOT_SCRIPTS = ("", "-", "-c")
_NPROC = re.compile(r"--nproc(=.*)?")


@dataclass(frozen=True)
class Node:
    """One of the nodes of a job, as its platform says.

    Attributes:
        platform: its name.
        num_nodes: how many there are, as torchrun's ``--nnodes`` has it: such as ``"2"`` or
            ``"1:4"``.
        number_in: the variable with that number; without it nothing says that there are several.
        rank: the number of this one, from 0; empty where nothing says it.
        rank_in: the variable with that number, or empty.
        address: of node 0; empty where nothing says it.
        port: there; empty where nothing says it.
        processes: how many to start on each, as torchrun's ``--nproc_per_node`` has it; empty where
            nothing says it.
        meet_at: host and port where an elastic job meets; then neither address nor rank is needed.

    Example:
        >>> Node("SkyPilot", "2", "SKYPILOT_NUM_NODES", rank="0", address="10.0.0.1").several
        True
    """

    platform: str
    num_nodes: str
    number_in: str
    rank: str = ""
    rank_in: str = ""
    address: str = ""
    port: str = ""
    processes: str = ""
    meet_at: str = ""

    @property
    def several(self) -> bool:
        """Whether there are, or may be, several nodes."""
        most = self.num_nodes.rpartition(":")[2]
        return most.isdecimal() and int(most) > 1

    def torchrun(self, devices: int = 0) -> str:
        """Return the command that starts the ranks of this node.

        Args:
            devices: accelerators that were found here: so many processes, where the platform does
                not say.
        """
        words = [f"--nnodes={self.num_nodes}", f"--nproc_per_node={self.processes or devices or 1}"]
        if self.meet_at:
            words += ["--rdzv_backend=c10d", f"--rdzv_endpoint={self.meet_at}"]
        else:
            words += [
                f"--node_rank={self.rank or '<number of this node>'}",
                f"--master_addr={self.address or '<address of node 0>'}",
                f"--master_port={self.port or DEFAULT_PORT}",
            ]
        return f"torchrun {' '.join(words)} {_own_words()}"


def _own_words() -> str:
    """Return the script and its arguments, without ``--nproc``, which torchrun has now."""
    import shlex  # for a message alone

    if sys.argv[0] in _NOT_SCRIPTS:
        return EXAMPLE
    left = []
    is_number = False
    for word in sys.argv:
        if not is_number and not _NPROC.fullmatch(word):
            left.append(word)
        is_number = word == "--nproc"
    return shlex.join(left)


def _positive(environ: Mapping[str, str], *names: str) -> str:
    return str(size(environ, *names) or "")


# ---------------------------------------------------------------------------- one for each platform


def _kubeflow(environ: Mapping[str, str]) -> Node | None:
    """Read torchrun's options as variables: of Kubeflow Trainer, and of the training operator
    before it.
    """
    if "PET_NNODES" not in environ:
        return None
    return Node(
        "Kubeflow",
        num_nodes=environ["PET_NNODES"],
        number_in="PET_NNODES",
        rank=environ.get("PET_NODE_RANK", ""),
        rank_in="PET_NODE_RANK",
        address=environ.get("PET_MASTER_ADDR", ""),
        port=environ.get("PET_MASTER_PORT", ""),
        processes=environ.get("PET_NPROC_PER_NODE", ""),
        meet_at=environ.get("PET_RDZV_ENDPOINT", ""),
    )


def _skypilot(environ: Mapping[str, str]) -> Node | None:
    if "SKYPILOT_NUM_NODES" not in environ:
        return None
    return Node(
        "SkyPilot",
        num_nodes=environ["SKYPILOT_NUM_NODES"],
        number_in="SKYPILOT_NUM_NODES",
        rank=environ.get("SKYPILOT_NODE_RANK", ""),
        rank_in="SKYPILOT_NODE_RANK",
        address=next(iter(environ.get("SKYPILOT_NODE_IPS", "").split()), ""),  # one a line
        processes=_positive(environ, "SKYPILOT_NUM_GPUS_PER_NODE"),
    )


def _dstack(environ: Mapping[str, str]) -> Node | None:
    if "DSTACK_NODES_NUM" not in environ:
        return None
    return Node(
        "dstack",
        num_nodes=environ["DSTACK_NODES_NUM"],
        number_in="DSTACK_NODES_NUM",
        rank=environ.get("DSTACK_NODE_RANK", ""),
        rank_in="DSTACK_NODE_RANK",
        address=environ.get("DSTACK_MASTER_NODE_IP", ""),
        processes=_positive(environ, "DSTACK_GPUS_PER_NODE"),
    )


def _sagemaker(environ: Mapping[str, str]) -> Node | None:
    """Read a list of hosts, in JSON. They are numbered by their names, as SageMaker's own
    containers do.
    """
    hosts = None
    with contextlib.suppress(ValueError):
        hosts = json.loads(environ.get("SM_HOSTS", ""))
    if not isinstance(hosts, list):
        return None
    names = sorted(map(str, hosts))
    here = environ.get("SM_CURRENT_HOST")
    return Node(
        "SageMaker",
        num_nodes=str(len(names)),
        number_in="SM_HOSTS",
        rank=str(names.index(here)) if here in names else "",
        address=next(iter(names), ""),
        processes=_positive(environ, "SM_NUM_GPUS"),
    )


def _aws_batch(environ: Mapping[str, str]) -> Node | None:
    """Read the variables of a multi-node parallel job; its main node is told no address of its
    own.
    """
    if "AWS_BATCH_JOB_NUM_NODES" not in environ:
        return None
    return Node(
        "AWS Batch",
        num_nodes=environ["AWS_BATCH_JOB_NUM_NODES"],
        number_in="AWS_BATCH_JOB_NUM_NODES",
        rank=environ.get("AWS_BATCH_JOB_NODE_INDEX", ""),
        rank_in="AWS_BATCH_JOB_NODE_INDEX",
        address=environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", ""),
    )


#: The platforms, in the order in which they are asked.
PLATFORMS: tuple[Callable[[Mapping[str, str]], Node | None], ...] = (
    _kubeflow,
    _skypilot,
    _dstack,
    _sagemaker,
    _aws_batch,
)


def find_node(environ: Mapping[str, str]) -> Node | None:
    """Find out whether this is one of several nodes, by the variables of a platform.

    Args:
        environ: the environment.

    Returns:
        The node; None where no platform tells of several.

    Example:
        >>> find_node({"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1"}).rank
        '1'
        >>> find_node({"DSTACK_NODES_NUM": "1"}) is None
        True
    """
    found = (read(environ) for read in PLATFORMS)
    return next((node for node in found if node is not None and node.several), None)


def numbers_nodes(environ: Mapping[str, str]) -> Node | None:
    """Find out whether ``RANK`` and ``WORLD_SIZE`` number nodes, not processes.

    Vertex AI, Kubeflow's PyTorchJob, PAI and AIHC set them once per node, without ``LOCAL_RANK``.

    Args:
        environ: the environment.

    Returns:
        The node, by a platform's own variables where it has some; None where these are the
        variables of a process, or there is one node.

    Example:
        >>> numbers_nodes({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}).torchrun(8).split()[
        ...     1:4
        ... ]
        ['--nnodes=2', '--nproc_per_node=8', '--node_rank=1']
    """
    of_process = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    if "RANK" not in environ or any(name in environ for name in of_process):
        return None
    node = Node(
        "RANK and WORLD_SIZE",
        num_nodes=environ.get("WORLD_SIZE", ""),
        number_in="WORLD_SIZE",
        rank=environ["RANK"],
        rank_in="RANK",
        address=environ.get("MASTER_ADDR", ""),
        port=environ.get("MASTER_PORT", ""),
    )
    is_number = node.rank.isdecimal() and node.several and int(node.rank) < int(node.num_nodes)
    return (find_node(environ) or node) if is_number else None


def refuse_lonely_node(environ: Mapping[str, str] | None = None) -> None:
    """Raise if this process was started by no launcher, once on each of several nodes.

    Args:
        environ: the environment, without a launcher's variables; None reads ``os.environ``.

    Raises:
        LaunchError: it was. The message has the command to start instead.
    """
    node = find_node(os.environ if environ is None else environ)
    if node is not None:
        where = f"node {node.rank}" if node.rank else "one"
        raise LaunchError(
            f"this is {where} of {node.num_nodes} nodes ({node.platform}), and one process was "
            "started on each: every node would train alone, as the main process. "
            f"{_what_to_do(node)}To train alone on each node, as in a sweep, unset "
            f"{node.number_in}, and give each node an output folder of its own."
        )


def refuse_numbers_of_nodes(node: Node) -> LaunchError:
    """Make the error for a process that knows the number of its node alone.

    Args:
        node: of :func:`numbers_nodes`.

    Example:
        >>> node = numbers_nodes({"RANK": "1", "WORLD_SIZE": "2"})
        >>> str(refuse_numbers_of_nodes(node)).partition(":")[0]
        'RANK and WORLD_SIZE are set and LOCAL_RANK is not'
    """
    more = "" if node.number_in == "WORLD_SIZE" else f" {node.number_in}"
    return LaunchError(
        "RANK and WORLD_SIZE are set and LOCAL_RANK is not: they number the nodes, and this is "
        f"node {node.rank} of {node.num_nodes} nodes. {_what_to_do(node)}"
        "If they number processes, set LOCAL_RANK, too: the number of the process on its node. To "
        f"train alone on each node, as in a sweep, unset RANK WORLD_SIZE{more}, and give each "
        "node an output folder of its own."
    )


def _what_to_do(node: Node) -> str:
    from ddpkit.base import accelerator_kind, count_devices  # with torch: for a message alone

    kind = accelerator_kind()
    command = node.torchrun(0 if kind == "cpu" else count_devices(kind))
    variable = f" (--node_rank is ${node.rank_in})" if node.rank_in and not node.meet_at else ""
    return f"Start the ranks of each node{variable} with:\n  {command}\n"
