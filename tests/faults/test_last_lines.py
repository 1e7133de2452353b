"""The last fifteen lines that a user sees of a failure: rank, host, step, file and line, and the
reason.

``python -m tests.faults.test_last_lines FOLDER [case ...]`` shows them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.launching import Run, python, start_by_hand, torchrun, wait_until

pytestmark = pytest.mark.faults

RECIPE = str(Path(__file__).with_name("control_recipe.py"))
LINES = 15
LAUNCHERS = ("torchrun", "nproc", "plain")
HANG = ("--hang_warning=8", "--hang_timeout=16")  # a start is slow on a machine that is busy

# What happens, and where, on which rank; and what is said of that.
CASES = {
    "forward": (
        "fault=raise@forward",
        1,
        r"in TRAIN of epoch 1 at step \d+",
        ("ValueError: boom from the fault"),
    ),
    "worker": (
        "fault=raise@worker",
        1,
        r"in TRAIN of epoch 1 at step \d+",
        ("ValueError: boom from the fault"),
    ),
    "run_on_main": (
        "fault=raise@main",
        0,
        r"in VALID of epoch 1\b",
        ("ValueError: boom from the fault"),
    ),
    "on_stage_end": (
        "fault=raise@end",
        1,
        r"in TRAIN of epoch 1 at step \d+",
        ("ValueError: boom from the fault"),
    ),
    "lost": (
        "fault=kill@forward",
        1,
        r"in TRAIN of epoch 1 at step \d+",
        ("disappeared .* was killed, or has crashed"),
    ),
    "stuck": ("fault=sleep@forward", 1, r"in TRAIN of epoch 1 at step \d+", "no step for"),
}


def run_case(folder, case, launcher):
    """Start it, and wait for its end."""
    fault, rank, *_ = CASES[case]
    words = [
        RECIPE,
        str(folder / "out"),
        fault,
        f"rank={rank}",
        "size=160",
        *(HANG if case == "stuck" else ()),
    ]
    words += ["step=1000"] if case == "run_on_main" else []
    words += ["workers=2"] if case == "worker" else []
    if launcher == "plain":
        runs = start_by_hand(python(*words), folder, 2, warm=True)
    elif launcher == "nproc":
        runs = [Run(python(*words, "--nproc=2"), folder, warm=True)]
    else:
        runs = [Run(torchrun(2, *words), folder, warm=True)]
    assert wait_until((folder / "out" / "fault").exists, 60.0), runs[0].err
    for run in runs:
        run.wait(60.0)
    return runs


# Each case by a launcher, and each launcher with a rank that raises and one that is lost.
@pytest.mark.parametrize(
    ("case", "launcher"),
    [
        *((case, launcher) for case in ("forward", "lost") for launcher in LAUNCHERS),
        ("worker", "nproc"),
        ("run_on_main", "plain"),
        ("on_stage_end", "torchrun"),
        ("stuck", "torchrun"),
        ("stuck", "plain"),
    ],
)
def test_the_last_fifteen_lines_tell_rank_host_step_line_and_reason(tmp_path, case, launcher):
    _, rank, place, reason = CASES[case]
    runs = run_case(tmp_path, case, launcher)
    wanted = [rf"rank {rank} \({socket.gethostname()}, pid \d+\)", place, reason]
    wanted += [r"control_recipe\.py(:\d+|\", line \d+,) in happen"] if case != "lost" else []
    for number, run in enumerate(runs):
        if run.code == -signal.SIGKILL:  # it cannot say anything
            continue
        missing = [words for words in wanted if not re.search(words, run.tail(LINES))]
        assert not missing, f"shell {number}:\n{run.tail(LINES)}"
    if case == "worker":
        said = "".join(run.err for run in runs)
        assert said.count("Original Traceback") == 1


@pytest.mark.parametrize("where", ["fit", "start", "forward", "valid"])
def test_without_a_launcher_the_loss_of_rank_0_stands_below_what_torch_writes_of_its_store(
    tmp_path,
    where,
):
    """Rank 0 keeps the store, and each rank that asks it prints thirty lines of frames.

    Lost as early as in the comparison of the data, it may have told no rank its host and its
    process yet.
    """
    words = [RECIPE, str(tmp_path / "out"), f"fault=kill@{where}", "rank=0", "size=80"]
    _, *others = [run.wait(60.0) for run in start_by_hand(python(*words), tmp_path, 3, warm=True)]
    for run in others:
        assert run.code == 1
        last = "\n".join(run.err.rstrip().splitlines()[-2:])
        assert re.search(r"rank 0( \([^ ]+, pid \d+\))? disappeared", last), run.err


@pytest.mark.parametrize("launcher", ["torchrun", "torchrun itself", "nproc", "plain"])
def test_a_clean_stop_leaves_the_last_word_to_where_the_run_goes_on(tmp_path, launcher):
    """torchrun that is signalled itself ends with a traceback of its own, whatever its processes
    do.
    """
    words = [RECIPE, str(tmp_path / "out"), "epochs=1000"]
    asked = signal.SIGTERM
    if launcher == "plain":
        runs = start_by_hand(python(*words), tmp_path, 2, warm=True)
    elif launcher == "nproc":
        runs = [Run(python(*words, "--nproc=2"), tmp_path, warm=True)]
        asked = signal.SIGINT
    else:
        runs = [Run(torchrun(2, *words), tmp_path, warm=True)]
    steps = tmp_path / "out" / "steps-1.jsonl"
    assert wait_until(lambda: steps.exists() and len(steps.read_text().splitlines()) > 3, 60.0), (
        runs[0].err
    )
    if launcher == "torchrun":
        os.kill(json.loads(steps.read_text().splitlines()[0])[1], signal.SIGTERM)
    else:
        runs[0].signal(asked)
    for run in runs:
        run.wait(60.0)
    said = "".join(run.err for run in runs)
    path = re.escape(json.loads((tmp_path / "out" / "stopped.json").read_text())["checkpoint"])
    sentence = (
        rf"Stopped by {asked.name} in TRAIN of epoch 1 at step \d+, .* The same command goes on "
        rf"from {path}\."
    )
    assert re.search(
        sentence,
        said if launcher in {"torchrun itself", "nproc"} else runs[0].tail(3),
    ), said
    assert "RunStopped" not in said
    assert said.count("Traceback") == (launcher != "plain"), "torchrun's own"


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or CASES:
        for how in LAUNCHERS:
            home = out / f"{name}-{how}"
            home.mkdir(parents=True)
            for shell in run_case(home, name, how):
                print(
                    f"\n======== {name} {how} {shell.name} code {shell.code}\n{shell.tail(LINES)}",
                    flush=True,
                )
