"""A recipe under other libraries' starters: it trains, a killed rank ends it, the next start goes
on.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.clusters.recipe import HPARAMS, SCRIPT, read_ends, read_steps
from tests.launching import BIN, Run, free_port, python, soon, wait_until

pytestmark = pytest.mark.launch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "other-starters.md"
STEPS = 20
KILLED_AFTER = 13
SAVED = 10  # at the end of the first epoch
OWN = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "HF_HUB_OFFLINE": "1"}
# Ray looks after its workers every two seconds, and starts more processes than the two
SOONER = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


def needs(package):
    reason = f"{package}: in the extra `ecosystem`, pip install -e '.[ecosystem]'"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def block(title, text=None):
    """Return the code block of the page that begins with a comment."""
    text = PAGE.read_text() if text is None else text
    [found] = re.findall(
        rf"^```\w*\n(# {re.escape(title)}\n.*?)^```$", text, re.DOTALL | re.MULTILINE
    )
    return found


@pytest.fixture(scope="module")
def weights_of_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    prepare(folder)
    run = Run(python("train.py", "hparams.yaml"), folder, warm=True).wait(60)
    assert run.code == 0, run.err
    return weights(folder)


def prepare(folder):
    shutil.copy(SCRIPT, folder / "train.py")
    text = HPARAMS.read_text().replace("step_seconds: 0.02", "step_seconds: 0.005")
    (folder / "hparams.yaml").write_text(text)
    (folder / "results").mkdir()


def weights(folder):
    [newest] = (folder / "results/save").glob("CKPT+*")
    return torch.load(newest / "net.ckpt", weights_only=True)


def hold(folder):
    (folder / "results/wait").write_text(str(KILLED_AFTER))


def kill_rank_1(folder, runs):
    """Kill it once both ranks are there, and let the others go on; return when, and its number."""

    def held():
        steps = read_steps(folder / "results")
        return {one.rank: one.pid for one in steps if one.step == KILLED_AFTER}

    def over():
        return len(held()) == 2 or any(run.process.poll() is not None for run in runs)

    assert wait_until(over, 60)
    assert len(held()) == 2, "\n".join(run.out + run.err for run in runs)
    pid = held()[1]
    os.kill(pid, signal.SIGKILL)
    (folder / "results/wait").unlink()
    return time.monotonic(), pid


DISAPPEARED = r"rank 1 \([^ ]+, pid {pid}\) disappeared in TRAIN of epoch 2"


def assert_names(text, pid, words=DISAPPEARED):
    assert re.search(words.format(pid=pid), text), text
    lines = [line for line in text.splitlines() if line.startswith("ERROR: ")]
    assert len(set(lines)) == len(lines), text


def assert_went_on(folder, first_pids, weights_of_one):
    """The later ranks began after the last checkpoint, and have the weights of one process."""
    steps = read_steps(folder / "results")
    later = [one.step for one in steps if one.pid not in first_pids]
    assert (min(later), max(later)) == (SAVED + 1, STEPS)
    assert [end["world_size"] for end in read_ends(folder / "results")] == [2, 2]
    for name, value in weights(folder).items():
        torch.testing.assert_close(value, weights_of_one[name], rtol=0, atol=1e-6)


def pids(folder):
    return {one.pid for one in read_steps(folder / "results")}


def train_kill_and_go_on(
    folder,
    command,
    weights_of_one,
    *,
    logs=lambda run: run.out + run.err,
    words=DISAPPEARED,
    warm_again=False,
):
    """For starters that do not start again by themselves; the second start may be a warm one."""
    prepare(folder)
    hold(folder)
    run = Run(command, folder, OWN)
    began, pid = kill_rank_1(folder, [run])
    run.wait(60)
    assert soon(began, 15)
    assert run.code != 0
    assert_names(logs(run), pid, words)
    first = pids(folder)
    run = Run(command, folder, OWN, name="again", warm=warm_again).wait(120)
    assert run.code == 0, run.out + run.err
    assert_went_on(folder, first, weights_of_one)


def kill_and_see_it_go_on(folder, command, weights_of_one, words=DISAPPEARED, *, warm=False):
    """For starters that start again by themselves."""
    prepare(folder)
    hold(folder)
    run = Run(command, folder, {**OWN, **SOONER}, warm=warm)
    began, pid = kill_rank_1(folder, [run])
    first = pids(folder)
    named = re.compile(words.format(pid=pid))
    assert wait_until(lambda: named.search(run.out + run.err), 15), run.out + run.err
    assert soon(began, 15)
    run.wait(120)
    assert run.code == 0, run.out + run.err
    assert_went_on(folder, first, weights_of_one)


def script(folder, title, **changes):
    text = block(title)
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / title).write_text(text)
    return python(title)


@pytest.mark.exhaustive
@needs("ray")
def test_ray_train(tmp_path, weights_of_one):
    """Ray makes the group, runs the function in a thread, and starts it again by itself. Whoever is
    first names the rank: the other rank, or Ray, which then ends that one.
    """
    words = DISAPPEARED + r"|\[Rank 1 Error Snippet\]"
    command = script(tmp_path, "start_ray.py")
    kill_and_see_it_go_on(tmp_path, command, weights_of_one, words)


@needs("submitit")
def test_submitit(tmp_path, weights_of_one):
    def logs(run):
        return "".join(path.read_text() for path in (tmp_path / "submitit_logs").glob("*.err"))

    train_kill_and_go_on(tmp_path, script(tmp_path, "start_submitit.py"), weights_of_one, logs=logs)


@pytest.mark.parametrize(
    "way",
    ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)],
)
def test_elastic_launch_of_a_function(tmp_path, weights_of_one, way):
    """As Flyte's elastic task calls it, in both its ways; it starts the function again by itself.

    Forked ranks have imported torch already.
    """
    changes = {"max_restarts=1": f'max_restarts=1, start_method="{way}"'}
    command = script(tmp_path, "start_elastic.py", **changes)
    kill_and_see_it_go_on(tmp_path, command, weights_of_one, warm=way == "fork")


@pytest.mark.exhaustive
def test_mp_spawn(tmp_path, weights_of_one):
    command = script(tmp_path, "start_spawn.py", **{"29511": str(free_port())})
    train_kill_and_go_on(tmp_path, command, weights_of_one)


@needs("accelerate")
def test_accelerate_launch(tmp_path, weights_of_one):
    [words] = re.findall(r"^accelerate (launch .*)$", PAGE.read_text(), re.MULTILINE)
    port = f"--main_process_port={free_port()}"
    command = [str(BIN / "accelerate"), *words.replace("launch", f"launch {port}", 1).split()]
    train_kill_and_go_on(tmp_path, command, weights_of_one, warm_again=True)


def test_torchrun_with_the_variables_of_kubeflow(tmp_path, weights_of_one):
    """Two pods of one process, each with a torchrun; the controller starts both again."""
    prepare(tmp_path)
    hold(tmp_path)

    def start(name):
        common = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
        common["PET_MASTER_PORT"] = str(free_port())
        command = [str(BIN / "torchrun"), "train.py", "hparams.yaml"]
        ranks = [{**common, "PET_NODE_RANK": str(node)} for node in range(2)]
        return [
            Run(command, tmp_path, rank, f"{name}{node}", warm=True)
            for node, rank in enumerate(ranks)
        ]

    pods = start("pod")
    began, pid = kill_rank_1(tmp_path, pods)
    for pod in pods:
        assert pod.wait(60).code != 0
    assert soon(began, 15)
    assert_names(pods[0].err, pid)
    first = pids(tmp_path)
    for pod in start("again"):
        assert pod.wait(60).code == 0, pod.err
    assert_went_on(tmp_path, first, weights_of_one)
