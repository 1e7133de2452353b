"""A program that a rank starts inherits the rank's variables, and is not a second one of the same
rank.
"""

from __future__ import annotations

import re
import textwrap
import time

import pytest

from tests.launching import Run, python, soon, start_by_hand, torchrun

# What each rank starts, and how.
SCRIPT = """
    import multiprocessing, os, subprocess, sys
    import ddpkit
    from ddpkit.distributed import environment_without_launch, get_rank, run_on_main

    HOW = sys.argv[1]

    def child(words, env=None):
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
        print(done.stdout, done.stderr, f"code {done.returncode}", sep="\\n", flush=True)

    def spawned(rank=None):
        print(f"spawned {get_rank()}", flush=True)

    def replace():
        os.environ["AGAIN"] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

    WAYS = {
        "as it is": lambda: child(["evaluate.py"]),
        "a Brain alone": lambda: child(["brain.py"]),
        "without the launch": lambda: child(["evaluate.py"], environment_without_launch()),
        "torchrun inside": lambda: child(
            ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "evaluate.py"]
        ),
        "a command": lambda: child(["-m", "ddpkit", "ckpt", "list", "."]),
        "nothing of ranks": lambda: child(["-c", "from ddpkit.distributed import get_rank; print('fine', get_rank())"]),
        "multiprocessing": lambda: multiprocessing.get_context("spawn").Process(target=spawned).start(),
    }

    if __name__ == "__main__":
        ddpkit.ddp_init_group({"device": "cpu"})
        if HOW == "exec" and "AGAIN" not in os.environ:
            replace()
        if HOW in WAYS:
            run_on_main(WAYS[HOW])
        elif HOW == "on every rank":
            env = {name: value for name, value in os.environ.items() if name != "DDPKIT_RANK_PROCESS"}
            child(["evaluate.py"], env)
        print(f"done {get_rank()}", flush=True)
"""  # noqa: E501
EVALUATE = """
    import ddpkit
    from ddpkit.distributed import get_rank, get_world_size
    ddpkit.ddp_init_group({"device": "cpu"})
    print(f"evaluated as {get_rank()} of {get_world_size()}", flush=True)
"""
BRAIN = """
    import ddpkit
    ddpkit.Brain({}, run_opts={"device": "cpu"})
"""
REFUSED = (
    r"evaluate\.py: error: this process \(pid \d+\) was started by rank 0 \(pid \d+\) and has "
    r"inherited its variables \(LOCAL_RANK=0 MASTER_ADDR=\S+ MASTER_PORT=\d+ RANK=0 "
    r"WORLD_SIZE=2\)\. .*env=ddpkit\.distributed\.environment_without_launch\(\)"
)


@pytest.fixture
def folder(tmp_path):
    for name, text in (("train", SCRIPT), ("evaluate", EVALUATE), ("brain", BRAIN)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    return tmp_path


def start(folder, how):
    began = time.monotonic()
    run = Run(torchrun(2, "train.py", how), folder, warm=how != "exec").wait(60)
    assert run.code == 0, run.err
    assert soon(began, 30), "far from the limit of the process group"
    assert sorted(re.findall(r"done \d", run.out)) == ["done 0", "done 1"]
    return run


def test_it_is_refused_at_once_with_what_to_do(folder):
    run = start(folder, "as it is")
    assert re.search(REFUSED, run.out), run.out
    assert "code 2" in run.out
    assert "Traceback" not in run.out


@pytest.mark.slow
def test_without_the_launch_it_is_a_single_process(folder):
    run = start(folder, "without the launch")
    assert "evaluated as None of 1" in run.out
    assert "code 0" in run.out


@pytest.mark.slow
def test_a_brain_alone_is_refused_alike(folder):
    run = start(folder, "a Brain alone")
    assert re.search(REFUSED.replace("evaluate", "brain"), run.out), run.out


@pytest.mark.slow
def test_a_launcher_inside_a_rank_starts_ranks_of_its_own(folder):
    run = start(folder, "torchrun inside")
    assert sorted(re.findall(r"evaluated as \d of 2", run.out)) == [
        "evaluated as 0 of 2",
        "evaluated as 1 of 2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a command", "code"),
        ("nothing of ranks", "fine 0"),
        ("multiprocessing", "spawned 0"),
        pytest.param("exec", "done 0", marks=pytest.mark.exhaustive),
    ],
)
def test_what_needs_no_group_and_the_rank_itself_go_on(folder, how, said):
    run = start(folder, how)
    assert said in run.out
    assert "was started by rank" not in run.out + run.err


@pytest.mark.slow
def test_every_rank_may_start_one_of_a_group_of_their_own(folder):
    run = start(folder, "on every rank")
    assert sorted(re.findall(r"evaluated as \d of 2", run.out)) == [
        "evaluated as 0 of 2",
        "evaluated as 1 of 2",
    ]


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_are_no_children(folder):
    (folder / "train.py").write_text(
        textwrap.dedent("""
            import os, ddpkit
            from ddpkit.distributed import get_rank
            ddpkit.ddp_init_group({"device": "cpu"})
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise ValueError("once")
            print(f"done {get_rank()}", flush=True)
        """)
    )
    run = Run(torchrun(2, "--max-restarts=1", "train.py"), folder, warm=True).wait(60)
    assert run.code == 0, run.err
    assert run.out.count("done") == 2


@pytest.mark.slow
def test_by_hand_it_is_the_same_sentence(folder):
    runs = [
        run.wait(60) for run in start_by_hand(python("train.py", "as it is"), folder, 2, warm=True)
    ]
    assert [run.code for run in runs] == [0, 0]
    assert re.search(REFUSED, runs[0].out), runs[0].out
