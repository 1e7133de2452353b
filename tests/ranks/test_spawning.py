"""``--nproc`` and ``ddpkit.spawn``: real processes, and what becomes of them when something goes wrong."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from tests.launching import Run, python, soon, wait_until

TRAIN = """
    import os, sys, time
    from pathlib import Path

    import torch

    import ddpkit as sb
    from ddpkit.distributed import ddp_barrier, ddp_all_reduce, get_rank, get_world_size, run_on_main

    file, run_opts, overrides = sb.parse_arguments()
    sb.ddp_init_group(run_opts)
    rank = get_rank()
    ones = torch.ones(1)
    if get_world_size() > 1:
        ddp_all_reduce(ones)
    threads = os.environ["OMP_NUM_THREADS"]
    Path(f"facts.{rank}").write_text(f"{os.getpid()} {os.getppid()} {int(ones)} {threads} {' '.join(sys.argv[1:])}")
    Path(f"ready.{rank}").touch()

"""
WORDS = ("h.yaml", "--device=cpu")


def write(folder: Path, body: str = "", name: str = "train.py", head: str = TRAIN) -> str:
    (folder / "h.yaml").write_text("lr: 0.1\n")
    (folder / name).write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return name


def facts(folder: Path, processes: int) -> list[list[str]]:
    return [(folder / f"facts.{rank}").read_text().split() for rank in range(processes)]


def ready(folder: Path, processes: int) -> bool:
    return wait_until(lambda: all((folder / f"ready.{rank}").exists() for rank in range(processes)), 60)


@pytest.mark.parametrize("processes", [2, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 3))])
def test_nproc(tmp_path, processes):
    """More than there are cores, too."""
    run = Run(python(write(tmp_path), *WORDS, f"--nproc={processes}", "--lr=0.5"), tmp_path).wait()
    assert run.code == 0, run.err
    assert run.out == ""
    for pid, parent, total, _, *words in facts(tmp_path, processes):
        assert total == str(processes)
        assert parent == str(run.process.pid) != pid
        assert words == [*WORDS, f"--nproc={processes}", "--lr=0.5"], "the command line is handed on as it was"
    many = "3 processes share" if processes > len(os.sched_getaffinity(0)) else ""
    assert all(many and line.startswith(many) for line in run.lines), run.err


@pytest.mark.slow
def test_nproc_by_module_and_from_the_yaml_device(tmp_path):
    write(tmp_path)
    (tmp_path / "h.yaml").write_text("device: cpu\n")
    run = Run(python("-W", "error::ResourceWarning", "-m", "train", "h.yaml", "--nproc", "2"), tmp_path).wait()
    assert run.code == 0, run.err
    assert len(facts(tmp_path, 2)) == 2


@pytest.mark.slow
def test_the_threads_of_each(tmp_path):
    script = write(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = ["env", "-u", "OMP_NUM_THREADS", *python(script, *WORDS, "--nproc=2")]
    assert Run(command, tmp_path, environment).wait().code == 0
    wanted = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [threads for _, _, _, threads, *_ in facts(tmp_path, 2)] == [wanted] * 2


def test_f1_an_exception_on_one_rank(tmp_path):
    body = """
        if rank == 1:
            raise ValueError("boom")
        time.sleep(60)
    """
    run = Run(python(write(tmp_path, body), *WORDS, "--nproc=2"), tmp_path, warm=True).wait(40)
    assert run.code == 1
    last = run.tail(1)
    assert last.startswith("Rank 1 of 2 (process "), run.err
    assert last.endswith("ended with exit code 1: ValueError: boom. It was the first; the others were ended.")
    assert run.err.count("ValueError: boom") == 3, "its own traceback, where that was, and the last line"


@pytest.mark.slow
def test_the_exit_code_of_the_first(tmp_path):
    body = """
        if rank == 1:
            os._exit(77)
        time.sleep(60)
    """
    run = Run(python(write(tmp_path, body), *WORDS, "--nproc=2"), tmp_path).wait(40)
    assert run.code == 77, run.err
    assert "Rank 1 of 2" in run.tail(1)


@pytest.mark.faults
def test_f1_a_rank_is_killed(tmp_path):
    run = Run(python(write(tmp_path, "time.sleep(60)"), *WORDS, "--nproc=2"), tmp_path)
    assert ready(tmp_path, 2), run.err
    began = time.monotonic()
    os.kill(int(facts(tmp_path, 2)[1][0]), signal.SIGKILL)
    run.wait(20)
    assert soon(began, 5)
    assert run.code == 137
    assert "was killed by SIGKILL" in run.tail(1)


@pytest.mark.faults
def test_f2_the_parent_is_killed(tmp_path):
    run = Run(python(write(tmp_path, "time.sleep(60)"), *WORDS, "--nproc=2"), tmp_path)
    assert ready(tmp_path, 2), run.err
    began = time.monotonic()
    run.signal(signal.SIGKILL)
    run.wait(20)
    assert soon(began, 5)


@pytest.mark.faults
def test_f2_the_parent_is_killed_while_they_start(tmp_path):
    """The ranks are not Python programs of ours yet."""
    run = Run(python(write(tmp_path, "time.sleep(60)"), *WORDS, "--nproc=2"), tmp_path)
    assert wait_until(lambda: len(run.alive()) > 1, 60)
    run.signal(signal.SIGKILL)
    run.wait(5)
    assert not (tmp_path / "ready.0").exists()


@pytest.mark.faults
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_f10_a_signal_to_the_parent_reaches_each_rank_once(tmp_path, name, code):
    body = f"""
        import signal
        def hear(number, frame):
            with open(f"heard.{{rank}}", "a") as file:
                file.write(signal.Signals(number).name + "\\n")
        signal.signal(signal.SIGUSR1, hear)
        signal.signal(signal.{name}, lambda *a: (hear(*a), time.sleep(rank), os._exit({code})))
        Path(f"hears.{{rank}}").touch()
        while True:
            time.sleep(0.05)
    """
    run = Run(python(write(tmp_path, body), *WORDS, "--nproc=2"), tmp_path)
    assert wait_until(lambda: all((tmp_path / f"hears.{rank}").exists() for rank in range(2)), 60), run.err
    run.signal(signal.SIGUSR1)
    assert wait_until(lambda: all((tmp_path / f"heard.{rank}").exists() for rank in range(2)), 10)
    run.signal(getattr(signal, name))
    run.wait(20)
    assert run.code == code
    for rank in range(2):
        assert (tmp_path / f"heard.{rank}").read_text().split() == ["SIGUSR1", name]
    assert "It was the first" not in run.err, "to be stopped is no failure"


@pytest.mark.faults
def test_f10_ctrl_c_at_the_terminal(tmp_path):
    """The terminal signals its process group, and the ranks are not in it."""
    run = Run(["setsid", "--wait", *python(write(tmp_path, "time.sleep(60)"), *WORDS, "--nproc=2")], tmp_path)
    assert ready(tmp_path, 2), run.err
    parent = int(facts(tmp_path, 2)[0][1])
    began = time.monotonic()
    os.killpg(parent, signal.SIGINT)
    run.wait(20)
    assert soon(began, 8)
    assert run.code in {1, 130}, run.err
    assert run.err.count("KeyboardInterrupt") <= 3, run.err


@pytest.mark.slow
def test_a_rank_that_hangs_when_another_fails_is_ended_when_one_loses_patience(tmp_path):
    """It is outside of fit, where there is no limit of time, and hears no signal; it may be saving."""
    body = """
        import signal
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            Path("deaf").touch()
            while True:
                time.sleep(1)
        while not Path("deaf").exists():
            time.sleep(0.05)
        os._exit(3)
    """
    run = Run(python(write(tmp_path, body), *WORDS, "--nproc=2"), tmp_path)
    assert wait_until((tmp_path / "deaf").exists, 60)
    assert wait_until(lambda: len(run.alive()) < 3, 20), "the one that has failed"
    run.signal(signal.SIGINT)
    time.sleep(1.5)
    assert len(run.alive()) == 2
    began = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.wait(20).code == 3
    assert soon(began, 10), "exactly: in tests/clusters/test_process_monitor.py"


@pytest.mark.faults
def test_f1_a_save_that_takes_a_while_is_ended_when_another_rank_fails(tmp_path):
    body = """
        from ddpkit.control.periodic_sync import terminating_later
        if rank == 0:
            with terminating_later():
                Path("saving").touch()
                time.sleep(6)
                Path("saved").touch()
            time.sleep(60)
        while not Path("saving").exists():
            time.sleep(0.05)
        os._exit(3)
    """
    run = Run(python(write(tmp_path, body), *WORDS, "--nproc=2"), tmp_path)
    assert wait_until((tmp_path / "saving").exists, 60)
    began = time.monotonic()
    assert run.wait(30).code == 3, run.err
    assert (tmp_path / "saved").exists()
    assert soon(began, 16), "and no longer"


@pytest.mark.slow
def test_nproc_under_a_launcher_is_refused(tmp_path):
    script = write(tmp_path)
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
        "SLURM_GTIDS": "0,1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
    }  # fmt: skip
    run = Run(python(script, *WORDS, "--nproc=2"), tmp_path, step).wait()
    assert run.code == 2
    assert "--nproc starts the processes itself, but slurm has started this one already, as rank 1 of 2" in run.err
    assert "SLURM_PROCID" in run.err
    step |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0"}
    run = Run(python(script, *WORDS, "--nproc=2"), tmp_path, step).wait()
    assert run.code == 0, "one task of srun may start as many as it likes"
    assert len(facts(tmp_path, 2)) == 2


@pytest.mark.slow
def test_nproc_needs_a_script(tmp_path):
    script = write(tmp_path)
    code = (tmp_path / script).read_text()
    run = Run(["bash", "-c", f"{python()[0]} - {' '.join(WORDS)} --nproc=2 < {script}"], tmp_path).wait()
    assert "--nproc starts the running script again, and there is none" in run.tail(1), run.err
    body = code.replace("parse_arguments()", "parse_arguments(['h.yaml', '--nproc=2'])")
    (tmp_path / "other.py").write_text(body)
    run = Run(python("other.py", *WORDS), tmp_path).wait()
    assert "Call ddpkit.spawn(function, nprocs) instead" in run.tail(1), run.err
    run = Run(python("-c", code, *WORDS, "--nproc=2"), tmp_path).wait()
    assert run.code == 0, run.err
    assert len(facts(tmp_path, 2)) == 2


@pytest.mark.slow
def test_a_port_that_is_taken(tmp_path):
    import socket

    with socket.create_server(("", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        run = Run(python(write(tmp_path), *WORDS, "--nproc=2"), tmp_path, {"MASTER_PORT": port}).wait()
    assert run.code == 2
    assert f"train.py: error: the store of the run cannot be kept at port {port} of MASTER_PORT" in run.err


# ------------------------------------------------------------------------------------------------- spawn

CALL = """
    import os, sys, threading, time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import ddpkit as sb
    from ddpkit.distributed import ddp_all_reduce, get_rank, get_world_size

    def begin():
        sb.ddp_init_group({"device": "cpu"})
        ones = torch.ones(1)
        if get_world_size() > 1:
            ddp_all_reduce(ones)
        Path(f"facts.{get_rank()}").write_text(f"{os.getpid()} {os.getppid()}")
        Path(f"ready.{get_rank()}").touch()
        return int(ones)

    def add(x, y):
        more = bytes(3_000_000)  # than a pipe holds
        return {"rank": get_rank() if begin() else None, "sum": x + y, "pid": os.getpid(), "more": more}

    def fail(victim):
        begin()
        if get_rank() == victim:
            raise ValueError(f"boom on {victim}")
        ddp_all_reduce(torch.ones(1))

    def hang(victim):
        begin()
        if get_rank() == victim:
            raise ValueError("boom")
        while True:
            time.sleep(1)

    def die(victim):
        begin()
        if get_rank() == victim:
            os.kill(os.getpid(), 9)
        time.sleep(60)

    def rest():
        begin()
        time.sleep(60)

"""
GUARD = 'if __name__ == "__main__":\n'


def call(folder: Path, body: str) -> Run:
    """Run code after the functions above."""
    indented = textwrap.indent(textwrap.dedent(body), "    ")
    return Run(python(write(folder, GUARD + indented, "call.py", CALL)), folder, warm=True)


def test_spawn_returns_what_all_ranks_returned(tmp_path):
    body = """
        threads = threading.active_count()
        found = sb.spawn(add, 2, 3, 4)
        assert [one["rank"] for one in found] == [0, 1], found
        assert {(one["sum"], len(one["more"])) for one in found} == {(7, 3_000_000)}
        assert len({os.getpid(), *(one["pid"] for one in found)}) == 3
        assert sb.spawn(os.getenv, 1, "LOCAL_RANK") == ["0"], "and once more"
        assert "RANK" not in os.environ and threading.active_count() == threads
    """
    run = call(tmp_path, body).wait()
    assert run.code == 0, run.err
    assert all("processes share" in line for line in run.lines), run.err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_spawn_raises_the_failure_of_the_first(tmp_path, victim):
    body = f"""
        try:
            sb.spawn(fail, 2, {victim})
        except sb.RankFailedError as error:
            text = str(error)
        assert text.startswith("rank {victim} of 2 failed: ValueError: boom on {victim}"), text
        assert "--- traceback of rank {victim} ---" in text and "in fail" in text, text
        print("right")
    """
    run = call(tmp_path, body).wait()
    assert run.out == "right\n", run.err


@pytest.mark.faults
@pytest.mark.parametrize(
    ("function", "words"),
    [("hang", "rank 1 of 2 failed: ValueError: boom"), ("die", "was killed by SIGKILL before the function returned")],
)
def test_f1_spawn_ends_all_when_one_fails(tmp_path, function, words):
    run = call(tmp_path, f"sb.spawn({function}, 2, 1)")
    assert ready(tmp_path, 2), run.err
    began = time.monotonic()
    run.wait(30)
    assert soon(began, 8)
    assert run.code == 1
    assert words in run.err, run.err


@pytest.mark.faults
def test_f2_spawned_ranks_end_with_their_parent(tmp_path):
    run = call(tmp_path, "sb.spawn(rest, 2)")
    assert ready(tmp_path, 2), run.err
    began = time.monotonic()
    run.signal(signal.SIGKILL)
    run.wait(20)
    assert soon(began, 5)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_f10_spawn_stops_by_a_signal(tmp_path, name):
    body = """
        import tempfile
        tempfile.tempdir = os.getcwd()
        try:
            sb.spawn(rest, 2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    run = call(tmp_path, body)
    assert ready(tmp_path, 2), run.err
    run.signal(getattr(signal, name))
    run.wait(20)
    assert not list(tmp_path.glob("ddpkit-*")), "what the ranks have returned in"
    assert (run.code, run.out) == ((0, "interrupted\n") if name == "SIGINT" else (-signal.SIGTERM, ""))


@pytest.mark.slow
def test_values_that_cannot_be_sent_back(tmp_path):
    run = call(tmp_path, "sb.spawn(threading.Lock, 1)").wait()
    assert run.code == 1
    assert "rank 0 of 1 failed: TypeError: cannot pickle" in run.err


@pytest.mark.slow
def test_an_unguarded_call_and_code_from_a_pipe_are_explained(tmp_path):
    unguarded = write(tmp_path, "sb.spawn(add, 1, 1, 2)", "bare.py", CALL)
    run = Run(python(unguarded), tmp_path).wait()
    assert run.code == 1
    assert 'Put the call under `if __name__ == "__main__":`' in run.err
    code = write(tmp_path, GUARD + "    sb.spawn(add, 1, 1, 2)", "call.py", CALL)
    run = Run(["bash", "-c", f"exec {python()[0]} < {tmp_path / code}"], tmp_path).wait()
    assert "called in a notebook, an interactive Python or a pipe" in run.err
    assert "%%writefile" in run.err
