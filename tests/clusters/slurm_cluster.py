"""A real Slurm of two nodes on one machine: munge, slurmctld and two slurmd, up in about three
seconds.

Each node is a machine of its own (see ``machines.py``), so host names differ and the cable between
them can be cut. Where namespaces are refused, both slurmd run side by side on the loopback. There
is no systemd, no cgroup and no account in it; users, limits and GPUs are therefore not part of what
the tests can see.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.launching import free_port, wait_until

from .harness import MARKER, Found, clean_environment, find, kill, rank_of, seconds_until, tail
from .machines import (
    OWNER,
    Machine,
    cut,
    may_have_namespaces,
    mend,
    new_machines,
    owner_mark,
    sweep,
)
from .packages import CannotSetUpError, need

__all__ = ["Job", "SlurmCluster", "slurm_cluster"]

NODES = ("node1", "node2")
CPUS_PER_NODE = 8  # more than there are: nothing in these jobs computes for long
PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
START_SECONDS = 30.0
ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
}

# Of a job, in a report: what Slurm knows, and how many lines of its output and of each daemon's
# log.
TOLD = ("JobId", "JobState", "Reason", "Restarts", "ExitCode", "RunTime", "StartTime", "NodeList")
OUTPUT_LINES = 25
LOG_LINES = 15
LINE_LENGTH = 160
NODE_LINE = re.compile(
    r"not responding|now responding|returned to service|slurmd "
    r"version|_rpc_signal_tasks: "
)
DETAIL = re.compile(
    r"\] debug:(?! +(?:_rpc|_handle_signal|credential|signal for))|debug "
    r"levels|plugin loaded"
)

# Credentials that expire soon make a requeued job start again after six seconds instead of two
# minutes. What Slurm had to tell its nodes about the first attempt may then still be under way: see
# `bring_back`.
SETTINGS = """\
ClusterName=ddpkit
SlurmctldHost={head}
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
KillWait=6
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes=ALL MaxTime=INFINITE State=UP
"""


@dataclass
class Job:
    """A job that was submitted, and all processes that come from it."""

    cluster: SlurmCluster
    number: str
    folder: Path
    marker: str
    submitted: float = field(default_factory=time.monotonic)

    def facts(self) -> dict[str, str]:
        """Return what Slurm knows of it."""
        said = self.cluster.run("scontrol", "show", "job", "-o", self.number)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def output(self) -> str:
        return tail(self.folder / f"slurm-{self.number}.out", 1000)

    def processes(self) -> list[Found]:
        return find(MARKER, self.marker)

    def ranks(self, script: str = "recipe.py") -> dict[int, Found]:
        """Return the processes that train, by rank."""
        return rank_of(self.processes(), script)

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> float:
        """Wait for something; return how long it took, or fail with all there is to know."""
        return seconds_until(condition, seconds, what, self.report)

    def wait(self, seconds: float = 60.0) -> str:
        """Wait until it has ended and all its processes are gone; return its state."""

        def ended() -> bool:
            time.sleep(0.15)  # each look is a process
            return self.state in ENDED

        self.until(ended, seconds, "the end of the job")
        self.until(lambda: not self.processes(), 5, "the end of its processes")
        return self.state

    def cancel(self, *words: str) -> None:
        """Call scancel; words such as ``-s USR1 -b`` only send a signal."""
        self.cluster.run("scancel", *words, self.number)

    def requeue(self) -> None:
        self.cluster.run("scontrol", "requeue", self.number)

    def give_time(self, limit: str) -> None:
        """Set another time limit, as an administrator may while the job runs."""
        self.cluster.run("scontrol", "update", f"JobId={self.number}", f"TimeLimit={limit}")

    def report(self) -> str:
        """Return what helps when something goes wrong; short, as a long one is cut off where it is
        shown.
        """
        known = self.facts()
        state = " ".join(f"{name}={known.get(name)}" for name in TOLD)
        logs = [
            self._said(path)
            for path in sorted(self.cluster.folder.glob("slurm*.log"))
            if ".said" not in path.name
        ]
        nodes = self.cluster.run(
            "sinfo",
            "--noheader",
            "--Node",
            "--partition=main",
            "--format=%N %T %E",
        )
        left = [f"{one.pid}: {' '.join(one.command)}" for one in self.processes()]
        output = tail(self.folder / f"slurm-{self.number}.out", OUTPUT_LINES)
        return "\n".join([state, nodes, *logs, "processes:", *left, output])

    def _said(self, log: Path) -> str:
        """Return the last lines of a daemon's log that are about this job, or about a node that
        comes or goes.
        """
        own = re.compile(
            rf"JobId={self.number}\b|\bjob(id)? "
            rf"{self.number}\b|StepId={self.number}\.|\[{self.number}\."
        )
        lines = log.read_text(errors="replace").splitlines()
        told = [
            line
            for line in lines
            if (own.search(line) or NODE_LINE.search(line)) and not DETAIL.search(line)
        ]
        return "\n".join([f"--- {log.name}", *(line[:LINE_LENGTH] for line in told[-LOG_LINES:])])


@dataclass
class SlurmCluster:
    """The cluster while it is up."""

    folder: Path
    machines: Sequence[Machine]  # none where both nodes are on the loopback
    mark: str

    def __post_init__(self) -> None:
        self.daemons = _Daemons(self)

    def command(self, *words: str, node: int = 0, folder: Path | None = None) -> list[str]:
        return self.machines[node].enter(*words, folder=folder) if self.machines else list(words)

    def environment(self, **more: str) -> dict[str, str]:
        return clean_environment(SLURM_CONF=str(self.folder / "slurm.conf"), **more)

    def run(self, *words: str, folder: Path | None = None, **environment: str) -> str:
        """Run one of Slurm's commands on the first node and return what it printed."""
        done = subprocess.run(
            self.command(*words, folder=folder),
            cwd=folder,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
        return done.stdout

    @contextlib.contextmanager
    def submit(self, folder: Path, *words: str, **environment: str) -> Iterator[Job]:
        """Submit a job: options of sbatch, the script and its arguments. What is left of it at the
        end is killed.
        """
        marker = uuid.uuid4().hex
        said = self.run(
            "sbatch",
            "--parsable",
            *words,
            folder=folder,
            **environment,
            **{MARKER: marker},
        )
        job = Job(self, said.strip().partition(";")[0], folder, marker)
        try:
            yield job
        finally:
            if job.state not in ENDED:
                job.cancel("--signal=KILL", "--full")
                job.cancel()
            kill(job.processes)
            # The nodes must be free for the next test.
            assert wait_until(lambda: job.state in ENDED, 20), job.report()
            assert wait_until(self._is_idle, 20), self.run("sinfo", "-N", "-l")

    def cut(self) -> None:
        """Cut the cable between the nodes. The first node and the controller are on the same
        side.
        """
        cut(self.machines)

    def mend(self) -> None:
        """Bring the cable back and wait until both nodes are there again."""
        mend(self.machines)
        assert wait_until(self._is_idle, 60), self.run("sinfo", "-N", "-l")

    def lose(self, node: int) -> None:
        """Kill all that runs on a node, its slurmd too: it has crashed. Not the first, which has
        the controller.
        """
        assert node > 0
        kill(self.machines[node].processes)

    def bring_back(self, node: int) -> None:
        """Start a node again that Slurm has found to be lost, and give it no job before it has its
        old messages.

        The controller keeps what it could not deliver: for ten seconds it tries to end the jobs
        that the node had, and once a minute to kill the steps that srun gave up. These messages
        name no attempt of a job: if it runs again when they come, they end its new processes. So
        this takes a minute.
        """
        self.run(
            "scontrol",
            "update",
            f"NodeName={NODES[node]}",
            "State=DRAIN",
            "Reason=it comes back",
        )
        self.daemons.start_node(node)
        assert wait_until(lambda: self._states()[node] == "drained", START_SECONDS), self.run(
            "sinfo",
            "-N",
            "-l",
        )
        # A message on its way from the queue to the one who sends it is in neither: so look twice.
        assert wait_until(lambda: self._has_sent_all() and self._has_sent_all(), 90), self.run(
            "sdiag"
        )
        self.run("scontrol", "update", f"NodeName={NODES[node]}", "State=RESUME")

    def _has_sent_all(self) -> bool:
        """Say whether the controller has no message left that it is sending, or has to send
        again.
        """
        time.sleep(0.1)
        said = self.run("sdiag")
        counts = re.findall(r"^Agent (?:count|queue size):\s*(\d+)", said, re.MULTILINE)
        assert len(counts) == 2, said
        return counts == ["0", "0"]

    def _states(self) -> list[str]:
        time.sleep(0.1)
        return self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()

    def _is_idle(self) -> bool:
        return self._states() == ["idle"] * len(NODES)


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Bring up a cluster; at the end nothing of it is left.

    Raises:
        CannotSetUpError: a program is missing or the daemons do not start here.
    """
    need(PROGRAMS)
    if os.geteuid() != 0:
        raise CannotSetUpError("the daemons of Slurm are started as root, and this process is not")
    sweep()
    # short: a path to a socket has at most 107 characters
    folder = Path(tempfile.mkdtemp(prefix="slurm."))
    try:
        with contextlib.ExitStack() as stack:
            machines = (
                stack.enter_context(new_machines(NODES, folder)) if may_have_namespaces() else []
            )
            mark = machines[0].mark if machines else owner_mark()
            stack.callback(kill, lambda: find(OWNER, mark) if not machines else [])
            cluster = SlurmCluster(folder, machines, mark)
            stack.callback(cluster.daemons.stop)
            cluster.daemons.start()
            yield cluster
    finally:
        shutil.rmtree(folder)


class _Daemons:
    """All of them stay in the foreground, so they are children of the tests and end with them."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        (self.folder / "state").mkdir()
        self._write_settings()
        self._start_munge()
        self._start("slurmctld", "-D", "-i")
        for number in range(len(NODES)):
            self.start_node(number)
        if not wait_until(self._are_up, START_SECONDS):
            logs = "\n".join(tail(path, 10) for path in sorted(self.folder.glob("*.log")))
            raise CannotSetUpError(f"Slurm does not start here:\n{logs}")

    def start_node(self, number: int) -> None:
        name = NODES[number]
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._start("slurmd", "-D", "-N", name, node=number)

    def stop(self) -> None:
        for daemon in reversed(self.running):
            daemon.kill()
            daemon.wait(10)

    def _write_settings(self) -> None:
        apart = bool(self.cluster.machines)
        ports = [6817, 6818, 6818] if apart else [free_port() for _ in range(3)]
        head = (
            f"{NODES[0]}({self.cluster.machines[0].address})"
            if apart
            else f"{os.uname().nodename}(127.0.0.1)"
        )
        nodes = [
            (
                f"NodeName={name} NodeHostname={name if apart else os.uname().nodename} "
                f"Port={port} CPUs={CPUS_PER_NODE} "
                f"NodeAddr={self.cluster.machines[number].address if apart else '127.0.0.1'} "
                "State=UNKNOWN"
            )
            for number, (name, port) in enumerate(zip(NODES, ports[1:], strict=True))
        ]
        text = SETTINGS.format(head=head, ports=ports, folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)

    def _start_munge(self) -> None:
        """One for both nodes: they meet at a socket in the file system, which both see."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)  # all users may pass, and only root may write: munge looks at both
        at = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        places = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in at.items()]
        self._start("munged", "--foreground", "--force", *places, node=None)
        if not wait_until((self.folder / "munge.socket").exists, 5):
            raise CannotSetUpError(
                f"munge does not start here:\n{tail(self.folder / 'munged.said.log')}"
            )

    def _start(self, program: str, *words: str, node: int | None = 0) -> None:
        path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        command = ["setpriv", "--pdeathsig", "KILL", str(path), *words]
        said = self.folder / f"{program}{'' if node is None else node}.said.log"
        with said.open("wb") as out:
            daemon = subprocess.Popen(
                command if node is None else self.cluster.command(*command, node=node),
                cwd="/",
                env={**self.cluster.environment(), OWNER: self.cluster.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.running.append(daemon)

    def _are_up(self) -> bool:
        dead = [daemon for daemon in self.running if daemon.poll() is not None]
        if dead:
            logs = "\n".join(tail(path, 10) for path in sorted(self.folder.glob("*.log")))
            raise CannotSetUpError(f"a daemon of Slurm has ended: {dead[0].args}\n{logs}")
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            return self.cluster._is_idle()
        return False
