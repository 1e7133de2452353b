"""Platforms that start one process per node, and say by variables of their own which node it is.

``python train.py`` there is as many lonely runs as there are nodes, each of which takes itself for
the main process. It is refused, with the command that starts the ranks; ``--nproc`` starts them. To
support another platform, write a function that reads its variables, and put it into
:data:`PLATFORMS`.

Source: of Kubeflow Trainer, whose variables torchrun reads as its own options,
https://docs.pytorch.org/docs/stable/elastic/run.html ; of Kubeflow's PyTorchJob, where
``WORLD_SIZE`` counts processes and ``RANK`` pods,
https://github.com/kubeflow/training-operator/blob/release-1.9/pkg/controller.v1/pytorch/envvar.go ;
of SkyPilot, https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html ; of dstack,
https://dstack.ai/docs/concepts/tasks ; of SageMaker,
https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md ; of AWS
Batch, https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html ; of Runpod,
https://docs.runpod.io/instant-clusters/configuration . Those of Beaker, Lepton, Volcengine and
ModelArts are as job scripts in public repositories use them. Numbers of nodes in ``RANK`` and
``WORLD_SIZE``: of Vertex AI, https://cloud.google.com/vertex-ai/docs/training/distributed-training
; of PAI, https://www.alibabacloud.com/help/en/pai/general-environment-variables .
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddpkit.base import get_world_size, size
from ddpkit.errors import LaunchError

DEFAULT_PORT = "29500"  # torchrun's own
EXAMPLE = "train.py hparams.yaml"
#: The variables without which a platform says nothing of several nodes.
TELL_NODES = (
    "PET_NNODES",
    "SKYPILOT_NUM_NODES",
    "DSTACK_NODES_NUM",
    "SM_HOSTS",
    "AWS_BATCH_JOB_NUM_NODES",
    "PRIMARY_ADDR",
    "BEAKER_LEADER_REPLICA_HOSTNAME",
    "LEPTON_JOB_TOTAL_WORKERS",
    "MLP_WORKER_NUM",
    "MA_NUM_HOSTS",
)

_NO_SCRIPT = ("-", "-c")  # options of Python: its code comes from a pipe, or the command line
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # the next word is theirs
_NPROC = re.compile(r"--nproc(=.*)?")
_NUMBER_OF_NODES = re.compile(r"([0-9]+)(?::([0-9]+))?")
_STATIC = "static"  # torchrun's rendezvous at the address of node 0
_WORDS_FOR_PROCESSES = ("auto", "cpu", "gpu")  # what both torchrun and --nproc take for a number
_LAST_PORT = 65535


@dataclass(frozen=True)
class Node:
    """One of the nodes of a job, as its platform says.

    Attributes:
        platform: its name.
        num_nodes: how many there are, as torchrun's ``--nnodes`` has it: such as ``"2"`` or
            ``"1:4"``.
        number_in: the variable with that number.
        rank: the number of this one, from 0; empty where nothing says it.
        rank_in: the variable with that number, or empty.
        address: of node 0; empty where nothing says it.
        address_in: the variable with that address, or empty.
        port: there; empty where nothing says it.
        processes: how many to start on each, as torchrun's ``--nproc_per_node`` has it; empty where
            nothing says it.
        meet_at: host and port where an elastic job meets; then neither address nor rank is needed.
        backend: torchrun's rendezvous there.
        asks_torchrun: whether variables of torchrun ask for a rendezvous, which its options are to
            override.
        told_by: the variable without which nothing says that there are several; empty:
            ``number_in``.
        is_rank_there: whether ``rank_in`` holds the number itself.

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
    address_in: str = ""
    port: str = ""
    processes: str = ""
    meet_at: str = ""
    backend: str = "c10d"
    asks_torchrun: bool = False
    told_by: str = ""
    is_rank_there: bool = True

    @property
    def most(self) -> int:
        """How many nodes there are, or may be; 0 where that cannot be read."""
        found = _NUMBER_OF_NODES.fullmatch(self.num_nodes)
        if found is None:
            return 0
        least = int(found[1])
        most = int(found[2] or least)
        return most if 1 <= least <= most else 0

    @property
    def several(self) -> bool:
        """Whether there are, or may be, several nodes."""
        return self.most > 1

    @property
    def place(self) -> str:
        """Which of the nodes this is, in words."""
        return f"node {self.rank} of {self.num_nodes}" if self.rank else f"one of {self.num_nodes}"

    @property
    def meeting(self) -> str:
        """Host and port where the nodes meet."""
        return self.meet_at or f"{self.address}:{self.port or DEFAULT_PORT}"

    def check(self) -> Node:
        """Return the node, if what is there of it can be.

        Raises:
            LaunchError: a number is none, or too large.
        """
        given = f"{self.number_in}={self.num_nodes!r}"
        if not self.most:
            raise self._wrong(f"{given} is not a number of nodes, from 1 on")
        is_rank = not self.rank or (self.rank.isdecimal() and int(self.rank) < self.most)
        if not is_rank and not self.meet_at:
            name = self.rank_in or "the number of this node"
            wanted = f"a number from 0 to {self.most - 1}, as {given}"
            raise self._wrong(f"{name}={self.rank!r} is not {wanted}")
        if self.port and not (self.port.isdecimal() and 1 <= int(self.port) <= _LAST_PORT):
            raise self._wrong(f"the port of node 0, {self.port!r}, is not from 1 to {_LAST_PORT}")
        for address in (self.address, self.meet_at):
            if not address.isprintable() or " " in address:
                raise self._wrong(f"the address of node 0, {address!r}, is not one word")
        return self

    def _wrong(self, reason: str) -> LaunchError:
        return LaunchError(
            f"{reason}. This is read as a job of {self.platform}. Correct the variable; or, if "
            f"this is no such job, unset {self.told_by or self.number_in}."
        )

    def require_place(self) -> None:
        """Raise where something is missing that torchrun needs to start the ranks of this node.

        Raises:
            LaunchError: naming the variable.
        """
        if self.meet_at:
            return
        missing = [
            f"{name} ({meaning})" if name else meaning
            for value, name, meaning in (
                (self.rank, self.rank_in, "the number of this node"),
                (self.address, self.address_in, "the address of node 0"),
            )
            if not value
        ]
        if missing:
            raise LaunchError(
                f"--nproc cannot start the ranks of this node, one of {self.num_nodes} "
                f"({self.platform}). Not set: {', '.join(missing)}. Set it, or start the ranks of "
                f"each node with:\n  {_torchrun(self, _processes(self))}"
            )

    def options(self, processes: str | int) -> list[str]:
        """Return torchrun's options for this node.

        Args:
            processes: how many to start on it.
        """
        words = [f"--nnodes={self.num_nodes}", f"--nproc_per_node={processes}"]
        if self.meet_at:
            return [*words, f"--rdzv_backend={self.backend}", f"--rdzv_endpoint={self.meet_at}"]
        words += [f"--node_rank={self.rank or '<number of this node>'}"]
        address = self.address or "<address of node 0>"
        port = self.port or DEFAULT_PORT
        if self.asks_torchrun:
            return [*words, f"--rdzv_backend={_STATIC}", f"--rdzv_endpoint={address}:{port}"]
        return [*words, f"--master_addr={address}", f"--master_port={port}"]


def _own_words() -> str:
    """Return the script and its arguments, without ``--nproc``, which torchrun has now."""
    import shlex  # for a message alone

    words = script_and_arguments(sys.orig_argv[1:])
    if not words or not hasattr(sys.modules["__main__"], "__file__"):  # typed in, or a notebook
        return EXAMPLE
    left = []
    is_number = False
    for word in words:
        if not is_number and not _NPROC.fullmatch(word):
            left.append(word)
        is_number = word == "--nproc"
    return shlex.join(left)


def script_and_arguments(words: Sequence[str]) -> Sequence[str]:
    """Return a command line of Python without Python's own options; ``-m`` is torchrun's, too."""
    for number, word in enumerate(words):
        is_value = number > 0 and words[number - 1] in _WITH_VALUE
        if not is_value and (word == "-m" or not word.startswith("-")):
            return words[number:]
        if word in _NO_SCRIPT:
            return ()
    return ()


def _positive(environ: Mapping[str, str], *names: str) -> str:
    return str(size(environ, *names) or "")


def met_at(environ: Mapping[str, str], node: Node) -> Node:
    """Return the node with the user's address and port of node 0, which win over the platform's.

    Args:
        environ: the environment.
        node: as its platform says.
    """
    asked = ("PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT")
    return dataclasses.replace(
        node,
        address=environ.get("MASTER_ADDR", "").strip() or node.address.strip(),
        port=environ.get("MASTER_PORT", "").strip() or node.port.strip(),
        asks_torchrun=any(environ.get(name, "").strip() for name in asked),
    )


# ---------------------------------------------------------------------------- one for each platform


def _kubeflow(environ: Mapping[str, str]) -> Node | None:
    """Read torchrun's options as variables: of Kubeflow Trainer, and of the training operator
    before it.
    """
    if not environ.get("PET_NNODES"):
        return None
    processes = environ.get("PET_NPROC_PER_NODE", "")
    node = Node(
        "Kubeflow",
        num_nodes=environ["PET_NNODES"],
        number_in="PET_NNODES",
        rank=environ.get("PET_NODE_RANK", ""),
        rank_in="PET_NODE_RANK",
        address=environ.get("PET_MASTER_ADDR", ""),
        address_in="PET_MASTER_ADDR",
        port=environ.get("PET_MASTER_PORT", ""),
        processes=(
            processes
            if processes in _WORDS_FOR_PROCESSES
            else _positive(environ, "PET_NPROC_PER_NODE")
        ),
        meet_at=environ.get("PET_RDZV_ENDPOINT", "").strip(),
        backend=environ.get("PET_RDZV_BACKEND", "").strip() or "c10d",
    )
    if node.meet_at and node.backend == _STATIC:
        address, port = _host_and_port(node.meet_at)
        return dataclasses.replace(node, address=address, port=port, meet_at="")
    return node


def _host_and_port(endpoint: str) -> tuple[str, str]:
    """Part an endpoint at its last colon, as torchrun does; one without a port has an empty one."""
    address, colon, port = endpoint.rpartition(":")
    is_whole = not colon or endpoint.endswith("]")  # of an address of IPv6
    return (endpoint, "") if is_whole else (address, port)


def _skypilot(environ: Mapping[str, str]) -> Node | None:
    if not environ.get("SKYPILOT_NUM_NODES"):
        return None
    head = next(iter(environ.get("SKYPILOT_NODE_IPS", "").split()), "")  # one a line
    return Node(
        "SkyPilot",
        num_nodes=environ["SKYPILOT_NUM_NODES"],
        number_in="SKYPILOT_NUM_NODES",
        rank=environ.get("SKYPILOT_NODE_RANK", ""),
        rank_in="SKYPILOT_NODE_RANK",
        address=head,
        address_in="SKYPILOT_NODE_IPS",
        processes=_positive(environ, "SKYPILOT_NUM_GPUS_PER_NODE"),
    )


def _dstack(environ: Mapping[str, str]) -> Node | None:
    if not environ.get("DSTACK_NODES_NUM"):
        return None
    return Node(
        "dstack",
        num_nodes=environ["DSTACK_NODES_NUM"],
        number_in="DSTACK_NODES_NUM",
        rank=environ.get("DSTACK_NODE_RANK", ""),
        rank_in="DSTACK_NODE_RANK",
        address=environ.get("DSTACK_MASTER_NODE_IP", ""),
        address_in="DSTACK_MASTER_NODE_IP",
        processes=_positive(environ, "DSTACK_GPUS_PER_NODE"),
    )


def _sagemaker(environ: Mapping[str, str]) -> Node | None:
    """Read a list of hosts, in JSON. They are numbered by their names, as SageMaker's own
    containers do.
    """
    if not environ.get("SM_HOSTS"):
        return None
    names = _names_in_json(environ["SM_HOSTS"])
    here = environ.get("SM_CURRENT_HOST", "")
    if here and here not in names:
        raise LaunchError(
            f"SM_CURRENT_HOST={here!r} is none of SM_HOSTS={environ['SM_HOSTS']!r}. This is read "
            "as a job of SageMaker. Correct the variable; or, if this is no such job, unset "
            "SM_HOSTS."
        )
    main = environ.get("SM_MASTER_ADDR") or names[0]
    return Node(
        "SageMaker",
        num_nodes=str(len(names)),
        number_in="SM_HOSTS",
        rank=str(names.index(here)) if here else "",
        rank_in="SM_CURRENT_HOST",
        is_rank_there=False,
        address=main,
        address_in="SM_HOSTS",
        port=environ.get("SM_MASTER_PORT", ""),
        processes=_positive(environ, "SM_NUM_GPUS"),
    )


def _names_in_json(text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not names:
        raise LaunchError(
            f"SM_HOSTS={text!r} is not a list of hosts in JSON, such as "
            '["algo-1", "algo-2"]. This is read as a job of SageMaker. Correct the variable; or, '
            "if this is no such job, unset SM_HOSTS."
        )
    return sorted(map(str, names))


def _aws_batch(environ: Mapping[str, str]) -> Node | None:
    """Read the variables of a multi-node parallel job. Its main node is told no address of its own,
    and need not be the first.
    """
    if not environ.get("AWS_BATCH_JOB_NUM_NODES"):
        return None
    index = environ.get("AWS_BATCH_JOB_NODE_INDEX", "")
    main = environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX") or "0"
    is_main = index == main
    address = environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "")
    return Node(
        "AWS Batch",
        num_nodes=environ["AWS_BATCH_JOB_NUM_NODES"],
        number_in="AWS_BATCH_JOB_NUM_NODES",
        rank="0" if is_main else main if index == "0" else index,
        rank_in="AWS_BATCH_JOB_NODE_INDEX",
        is_rank_there=main == "0",
        address_in="AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
        address=address or ("127.0.0.1" if is_main else ""),
    )


def _runpod(environ: Mapping[str, str]) -> Node | None:
    """Read the variables of an Instant Cluster; that with the number of nodes has a name that
    others use, too.
    """
    if not environ.get("PRIMARY_ADDR") or not environ.get("NUM_NODES"):
        return None
    return Node(
        "Runpod",
        num_nodes=environ["NUM_NODES"],
        number_in="NUM_NODES",
        rank=environ.get("NODE_RANK", ""),
        rank_in="NODE_RANK",
        address=environ["PRIMARY_ADDR"],
        address_in="PRIMARY_ADDR",
        port=environ.get("PRIMARY_PORT", ""),
        processes=_positive(environ, "NUM_TRAINERS"),
        told_by="PRIMARY_ADDR",
    )


def _beaker(environ: Mapping[str, str]) -> Node | None:
    """Read the variables of replicas with a leader; without one they are runs of their own."""
    leader = environ.get("BEAKER_LEADER_REPLICA_HOSTNAME")
    if not leader or not environ.get("BEAKER_REPLICA_COUNT"):
        return None
    return Node(
        "Beaker",
        num_nodes=environ["BEAKER_REPLICA_COUNT"],
        number_in="BEAKER_REPLICA_COUNT",
        rank=environ.get("BEAKER_REPLICA_RANK", ""),
        rank_in="BEAKER_REPLICA_RANK",
        address=leader,
        address_in="BEAKER_LEADER_REPLICA_HOSTNAME",
        processes=_positive(environ, "BEAKER_ASSIGNED_GPU_COUNT"),
        told_by="BEAKER_LEADER_REPLICA_HOSTNAME",
    )


def _lepton(environ: Mapping[str, str]) -> Node | None:
    """Read the variables of a batch job. Worker 0 has a name below that of the job."""
    if not environ.get("LEPTON_JOB_TOTAL_WORKERS"):
        return None
    job = environ.get("LEPTON_JOB_NAME", "")
    prefix = environ.get("LEPTON_JOB_SERVICE_PREFIX") or job
    domain = environ.get("LEPTON_SUBDOMAIN") or (job and f"{job}-job-svc")
    return Node(
        "Lepton",
        num_nodes=environ["LEPTON_JOB_TOTAL_WORKERS"],
        number_in="LEPTON_JOB_TOTAL_WORKERS",
        rank=environ.get("LEPTON_JOB_WORKER_INDEX", ""),
        rank_in="LEPTON_JOB_WORKER_INDEX",
        address=f"{prefix}-0.{domain}" if prefix and domain else "",
        address_in="LEPTON_JOB_NAME",
        processes=_positive(environ, "LEPTON_RESOURCE_ACCELERATOR_NUM"),
    )


def _volcengine(environ: Mapping[str, str]) -> Node | None:
    if not environ.get("MLP_WORKER_NUM"):
        return None
    return Node(
        "Volcengine",
        num_nodes=environ["MLP_WORKER_NUM"],
        number_in="MLP_WORKER_NUM",
        rank=environ.get("MLP_ROLE_INDEX", ""),
        rank_in="MLP_ROLE_INDEX",
        address=environ.get("MLP_WORKER_0_HOST", ""),
        address_in="MLP_WORKER_0_HOST",
        port=environ.get("MLP_WORKER_0_PORT", ""),
        processes=_positive(environ, "MLP_WORKER_GPU"),
    )


def _modelarts(environ: Mapping[str, str]) -> Node | None:
    if not environ.get("MA_NUM_HOSTS"):
        return None
    return Node(
        "ModelArts",
        num_nodes=environ["MA_NUM_HOSTS"],
        number_in="MA_NUM_HOSTS",
        rank=environ.get("VC_TASK_INDEX", ""),
        rank_in="VC_TASK_INDEX",
        address=environ.get("VC_WORKER_HOSTS", "").partition(",")[0],
        address_in="VC_WORKER_HOSTS",
        processes=_positive(environ, "MA_NUM_GPUS"),
    )


#: The platforms, in the order in which they are asked.
PLATFORMS: tuple[Callable[[Mapping[str, str]], Node | None], ...] = (
    _kubeflow,
    _skypilot,
    _dstack,
    _sagemaker,
    _aws_batch,
    _runpod,
    _beaker,
    _lepton,
    _volcengine,
    _modelarts,
)


def find_node(environ: Mapping[str, str]) -> Node | None:
    """Find out whether this is one of several nodes, by the variables of a platform.

    Args:
        environ: the environment.

    Returns:
        The node; None where no platform tells of several.

    Raises:
        LaunchError: what a platform says cannot be, or two say different things.

    Example:
        >>> find_node({"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1"}).rank
        '1'
        >>> find_node({"DSTACK_NODES_NUM": "1"}) is None
        True
    """
    read = [node for read_node in PLATFORMS if (node := read_node(environ)) is not None]
    told = [met_at(environ, node).check() for node in read]
    several = [node for node in told if node.several]
    for other in several[1:]:
        first = several[0]
        ranks = {node.rank for node in (first, other) if node.rank}
        if other.num_nodes != first.num_nodes or len(ranks) > 1:
            raise LaunchError(
                f"{first.platform} says that this is {first.place} nodes ({first.number_in}), and "
                f"{other.platform} that it is {other.place} ({other.number_in}). Unset the "
                "variable of the platform that did not start this process: "
                f"{first.told_by or first.number_in} or {other.told_by or other.number_in}."
            )
    return several[0] if several else None


def numbers_nodes(environ: Mapping[str, str]) -> Node | None:
    """Find out whether ``RANK`` and ``WORLD_SIZE`` are those of a node, not of a process.

    Vertex AI, Kubeflow's PyTorchJob, PAI, AIHC and Volcano set them once per node, without
    ``LOCAL_RANK``.

    Args:
        environ: the environment.

    Returns:
        The node, by a platform's own variables where it has some; it may be the only one. None
        where these are the variables of a process.

    Raises:
        LaunchError: the number of the node is not below that of the nodes.

    Example:
        >>> node = numbers_nodes({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})
        >>> node.options(8)[:3]
        ['--nnodes=2', '--nproc_per_node=8', '--node_rank=1']
    """
    of_process = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    if "RANK" not in environ or any(name in environ for name in of_process):
        return None
    node = Node(
        "nodes that RANK numbers",
        num_nodes=environ.get("WORLD_SIZE", ""),
        number_in="WORLD_SIZE",
        rank=environ["RANK"],
        rank_in="RANK",
        address=environ.get("MASTER_ADDR", ""),
        address_in="MASTER_ADDR",
        port=environ.get("MASTER_PORT", ""),
        processes=_positive(environ, "NPROC_PER_NODE"),
        told_by="RANK",
    )
    if not (node.rank.isdecimal() and node.num_nodes.isdecimal()):
        return None
    # of a PyTorchJob WORLD_SIZE is the number of processes, though RANK is that of the pod
    own = find_node(environ) or _kubeflow(environ)
    return own or met_at(environ, node).check()


def refuse_lonely_node(environ: Mapping[str, str] | None = None) -> None:
    """Raise if this process was started by no launcher, once on each of several nodes.

    One that is in a process group already is not alone.

    Args:
        environ: the environment, without a launcher's variables; None reads ``os.environ``.

    Raises:
        LaunchError: it was. The message has the command to start instead.
    """
    node = find_node(os.environ if environ is None else environ)
    if node is not None and get_world_size() == 1:
        where = f"node {node.rank}" if node.rank else "one"
        raise LaunchError(
            f"this is {where} of {node.num_nodes} nodes ({node.platform}), and one process was "
            "started on each: every node would train alone, as the main process. "
            f"{_what_to_do(node)}To train alone on each node, as in a sweep, unset "
            f"{node.told_by or node.number_in}, and give each node an output folder of its own."
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
    more = "" if node.number_in == "WORLD_SIZE" else f" {node.told_by or node.number_in}"
    return LaunchError(
        "RANK and WORLD_SIZE are set and LOCAL_RANK is not: they are those of a node, and this is "
        f"node {node.rank} of {node.num_nodes} nodes. {_what_to_do(node)}"
        "If they number processes, set LOCAL_RANK, too: the number of the process on its node. To "
        f"train alone on each node, as in a sweep, unset RANK WORLD_SIZE{more}, and give each "
        "node an output folder of its own."
    )


def _what_to_do(node: Node) -> str:
    processes = _processes(node)
    is_there = node.rank and node.rank_in and node.is_rank_there and not node.meet_at
    variable = f" (--node_rank is ${node.rank_in})" if is_there else ""
    return (
        f"Start the ranks of each node{variable} with:\n  {_torchrun(node, processes)}\n"
        "A script that calls parse_arguments does the same by itself, with one command for all "
        f"nodes, if you add --nproc={processes} to it.\n"
    )


def _processes(node: Node) -> str | int:
    from ddpkit.base import accelerator_kind, count_devices  # with torch: for a message alone

    kind = accelerator_kind()
    return node.processes or (0 if kind == "cpu" else count_devices(kind)) or 1


def _torchrun(node: Node, processes: str | int) -> str:
    return f"torchrun {' '.join(node.options(processes))} {_own_words()}"
