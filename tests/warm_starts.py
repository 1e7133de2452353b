"""Starts Python scripts in processes that have imported torch already: for tests of what a real
process does.

Importing torch, and what its first optimizer imports, costs each process seconds; forking one that
has done so costs milliseconds. What runs in the fork is a process of its own: its environment, its
streams, its signals, the way it ends. What it shares with the others is what was set when Python
started, such as the hash seed. So the tests of starting and ending itself start processes cold, and
so does one test at least of each kind.

To take torch's modules apart at its end costs a process 0.4 s, too: a forked one runs what was
registered for its exit, and leaves its memory to the system. `make launch` sets WHOLE_EXIT; there
each ends as Python does.

Run as a script, this is the process that is forked.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

SERVER = "DDPKIT_TEST_WARM_SERVER"
MARKER = "DDPKIT_TEST_RUN"
WHOLE_EXIT = "DDPKIT_TEST_WHOLE_EXIT"
# What tests fork processes with: the first optimizer imports the second, ranks would import the
# others one by one.
PRELOADED = [
    "tests.rank_pool",
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "ddpkit.brain",
    "ddpkit.epoch_loop",
]
NO_MARKER = "0" * 32  # as long as any: a forked process writes its own over it
# of a process on another host, as tests see one: its network, its name, its files
NAMESPACES = ("net", "uts", "mnt")
# to import torch takes three; a loaded machine takes its time
START_SECONDS = 300.0
POLL_SECONDS = 0.02

# a process that was forked for another host starts others there
_namespaces_of = None


class WarmProcess:
    """A Python command in a forked process, with what is used of :class:`subprocess.Popen`.

    Args:
        namespaces_of: the id of a process in whose namespaces it runs, as by ``nsenter``.
    """

    def __init__(
        self, args, *, env=None, cwd=None, stdin=None, stdout=None, stderr=None,
        start_new_session=False,
        namespaces_of=None,
        preexec_fn=None,  # of the parent's death: the parent of a forked process is another
    ):  # fmt: skip
        if stdin not in (None, subprocess.DEVNULL):
            raise ValueError(f"a forked process reads nothing, and stdin={stdin!r} was asked for")
        self.args = args
        self.returncode = None
        path = os.environ.get(SERVER) or _server.path()
        self._connection = _connected(path)
        wanted = {
            # or a script that names its Python
            "words": list(args[1:] if args[0] == sys.executable else args),
            "env": {**(os.environ if env is None else env), SERVER: path},
            "cwd": str(cwd or Path.cwd()),
            "session": start_new_session,
            "namespaces_of": namespaces_of or _namespaces_of,
        }
        streams = [
            1 if stdout is None else stdout.fileno(),
            2 if stderr is None else stderr.fileno(),
        ]
        self._connection.sendall(len(text := json.dumps(wanted).encode()).to_bytes(4, "big"))
        socket.send_fds(self._connection, [text[:1]], streams)
        self._connection.sendall(text[1:])
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())

    def poll(self):
        return self._status(block=False)

    def wait(self, timeout=None):
        if self._status(block=True, timeout=timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _status(self, *, block, timeout=None):
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout if block else 0):
                    return None
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    # What subprocess.run does with a process whose streams are files.

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()

    def communicate(self, _=None, timeout=None):
        self.wait(timeout)
        return None, None


def _connected(path):
    """Connect to the process that is forked, once it has imported everything."""
    limit = time.monotonic() + START_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if _server.has_ended() or time.monotonic() > limit:
                raise RuntimeError(
                    "the process that is to be forked has not come up; its words stand above"
                ) from None
            time.sleep(POLL_SECONDS)


class _Server:
    """The process that is forked, as seen from the tests: started when it is first wanted."""

    def __init__(self):
        self.process = None

    def path(self):
        if self.process is None or self.process.poll() is not None:
            self.folder = tempfile.TemporaryDirectory(prefix="ddpkit-warm-")
            path = str(Path(self.folder.name) / "socket")
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                MARKER: NO_MARKER,
            }
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), path],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            atexit.register(self.close)
        return str(Path(self.folder.name) / "socket")

    def close(self):
        """End it. It would end by itself with its input, as it does when the tests are killed."""
        atexit.unregister(self.close)
        if self.process is not None:
            self.process.stdin.close()
            self.process.kill()
            self.process.wait()
            self.folder.cleanup()
            self.process = None

    def has_ended(self):
        return self.process is not None and self.process.poll() is not None


_server = _Server()
# the first does not wait until it is ready
prepare = _server.path
close = _server.close


# ----------------------------------------------------------------------- the process that is forked


def _import_everything():
    import torch
    import torch.distributed.launch
    import torch.distributed.run

    import ddpkit.brain
    import ddpkit.epoch_loop
    import ddpkit.experiment
    import ddpkit.run_opts
    import ddpkit.train_logger  # noqa: F401 -- for the processes that are forked

    # the first optimizer imports two seconds' worth
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads: a forked process would have one of them")


def _receive(connection):
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    streams = array.array("i")
    first, (ancillary, *_), _, _ = connection.recvmsg(1, socket.CMSG_SPACE(2 * streams.itemsize))
    streams.frombytes(ancillary[2])
    return json.loads(first + connection.recv(size - 1, socket.MSG_WAITALL)), list(streams)


def _serve(path):
    """Fork for each request; return, in the forked process, its command. Ends the process when its
    input ends.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    children = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                sys.exit()
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                wanted, streams = _receive(connection)
                pid = os.fork()
                if not pid:
                    _drop(selector, listener, children)
                    _settle(wanted, streams, connection)
                    return wanted["words"]
                for fd in streams:
                    os.close(fd)
                handle = os.pidfd_open(pid)
                children[handle] = connection, pid
                selector.register(handle, selectors.EVENT_READ)
            elif key.data is None:
                selector.unregister(key.fd)
                connection, _ = children[key.fd]
                _tell_the_end(key.fd, connection)
                selector.register(connection, selectors.EVENT_READ, key.fd)
            else:  # whoever asked knows: until then a signal may be sent to it, as by a parent
                selector.unregister(key.fileobj)
                connection, pid = children.pop(key.data)
                os.waitpid(pid, 0)
                os.close(key.data)
                connection.close()


def _drop(selector, listener, children):
    """Close, in a forked process, what is not its own."""
    selector.close()
    listener.close()
    for fd, (other, _) in children.items():
        os.close(fd)
        other.close()


def _tell_the_end(handle, connection):
    """Send the exit code of a process that has ended, and leave the process there."""
    ended = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT)
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(OSError):  # whoever asked has ended
        connection.sendall(f"{code}\n".encode())


def _settle(wanted, streams, connection):
    """Be a process as the request wants it."""
    if wanted["session"]:
        os.setsid()
    for fd, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, fd)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    for fd in {empty, *streams} - {0, 1, 2}:
        os.close(fd)
    _write_marker(wanted["env"].get(MARKER, NO_MARKER))
    os.environ.clear()
    os.environ.update(wanted["env"])
    _enter_namespaces(wanted["namespaces_of"])
    os.chdir(wanted["cwd"])
    more = wanted["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [one for one in more if one and one not in sys.path[1:]]
    sys.modules["numpy"].random.seed()  # as a process that starts
    connection.sendall(f"{os.getpid()}\n".encode())
    connection.close()


def _enter_namespaces(pid):
    global _namespaces_of  # noqa: PLW0603 -- of this process
    _namespaces_of = pid
    if pid is None:
        return
    spaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {pid}")
        os.close(space)


def _write_marker(marker):
    """Write it where the system shows the environment that a process was started with."""
    ctypes.memmove(_marker_address, marker.encode(), len(NO_MARKER))


def _run_as_main(words):
    """Do what ``python words...`` does."""
    sys.orig_argv = [sys.executable, *words]
    _start_warm_processes()
    while words[0] == "-u":
        words = words[1:]
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        sys.modules["__main__"] = main
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
        return
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    script = words[0]
    sys.argv = words
    sys.path[0] = str(Path(script).resolve().parent)
    main.__file__ = os.path.abspath(script)  # noqa: PTH100 -- no link is followed
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), main.__file__, "exec"), main.__dict__)


def _start_warm_processes():
    """Let what this process starts be started as it was itself: a launcher, and the ranks of
    torchrun and --nproc.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    cold = subprocess.Popen

    def popen(args, *more, **options):
        words = list(args) if isinstance(args, (list, tuple)) else []
        piped = {subprocess.PIPE, subprocess.STDOUT} & {
            options.get(name) for name in ("stdin", "stdout", "stderr")
        }
        if more or piped or words[:1] != [sys.executable] or words[1:2] in (["-c"], ["-"]):
            return cold(args, *more, **options)
        options = {name: value for name, value in options.items() if value is not None}
        return WarmProcess(words, **options)

    def become_torchrun(_program, words):
        from torch.distributed import run

        assert words[1:3] == ["-m", "torch.distributed.run"]
        sys.exit(run.main(words[3:]))

    subprocess.Popen = subprocess_handler.Popen = popen
    os.execv = become_torchrun  # by --nproc


def _exit(code):
    """End as Python does, up to the modules."""
    if not isinstance(code, (int, type(None))):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.getenv.restype = ctypes.c_void_p
    _marker_address = libc.getenv(MARKER.encode())
    _import_everything()
    gc.collect()
    gc.freeze()
    todo = _serve(sys.argv[1])
    is_quick = WHOLE_EXIT not in os.environ
    try:
        _run_as_main(todo)
    except SystemExit as error:
        if not is_quick:
            raise
        _exit(error.code)
    except BaseException as error:
        # As Python does it, but without the lines of this file; and once.
        error.__traceback__ = error.__traceback__.tb_next.tb_next
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:  # by the library's hook, for what is said without a traceback
            if not is_quick:
                raise
            _exit(end.code)
        sys.excepthook = lambda *_: None
        # by which Python dies as by the signal
        if not is_quick or isinstance(error, KeyboardInterrupt):
            raise
        _exit(1)
    if is_quick:
        _exit(0)
