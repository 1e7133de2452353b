"""``python -m ddpkit slurm``: the script that it writes, and what it refuses to write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

import pytest

from ddpkit.cli import main, slurm
from ddpkit.cli.slurm import run, seconds_of
from ddpkit.errors import ConfigError

PASSES_SIGNALS_ON = pytest.mark.skipif(
    not slurm._passes_signals_on(), reason="this torchrun knows TERM only"
)
USUAL = ("train.py", "hparams.yaml", "--nodes=2", "--gpus-per-node=4", "--time=20:00:00")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "hparams.yaml"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def write(recipe, capsys):
    """Write a script, and have bash look at it."""

    def write(*words):
        assert main(["slurm", *words]) == 0
        text = capsys.readouterr().out
        bash("-n", text=text)
        return text

    return write


def bash(*words, text, **environment):
    found = {**os.environ, **environment}
    done = subprocess.run(
        ["bash", *words],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env=found,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def options(text):
    """The options that sbatch finds: their values by name."""
    lines = re.findall(r"^#SBATCH (--\S+)", text, re.MULTILINE)
    return dict(line.removeprefix("--").partition("=")[::2] for line in lines)


def call_of_srun(text, **environment):
    """What reaches srun, and what a task of it then runs."""
    [call] = re.findall(r"^(?:export python.*\n)(srun (?:.|\n)*?) &$", text, re.MULTILINE)
    words = bash(text=f"srun() {{ printf '%s\\0' \"$@\"; }}\n{call}").split("\0")[:-1]
    at = words.index("bash")
    inner = words[at + 2].replace("exec ", "printf '%s\\0' ", 1)
    task = {"python": "py", "head": "n1", "port": "20001", "restart": "0", **environment}
    done = subprocess.run(
        ["bash", "-c", inner, *words[at + 3 :]],
        capture_output=True,
        text=True,
        check=True,
        env=task,
    )
    return words[:at], done.stdout.split("\0")[:-1]


def test_the_usual_script(write):
    text = write(*USUAL)
    assert options(text) == {
        "job-name": "train",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "16",
        "gpus-per-node": "4",
        "time": "20:00:00",
        "signal": "B:USR1@300",
        "requeue": "",
        "open-mode": "append",
    }
    assert text.startswith("#!/bin/bash\n")
    # sbatch stops reading at the first command
    assert text.index("#SBATCH --open-mode") < text.index("restart=")
    assert "\nexport TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in text
    assert 'scontrol show hostnames "$SLURM_JOB_NODELIST"' in text
    assert f"\npython={sys.executable}\n" in text
    assert max(map(len, text.splitlines())) <= 120


def test_what_runs_on_a_node(write):
    srun, task = call_of_srun(write(*USUAL), SLURM_NODEID="1", SLURM_JOB_ID="77")
    assert {
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=16",
        "--export=ALL",
    } <= set(srun)
    assert {"--kill-on-bad-exit=0", "--wait=270"} <= set(srun)
    assert task[:3] == ["py", "-m", "torch.distributed.run"]
    assert task[-2:] == ["train.py", "hparams.yaml"]
    assert set(task[3:-2]) - {
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "--shutdown-timeout=270",
    } == {
        "--nnodes=2",
        "--nproc-per-node=4",
        "--node-rank=1",
        "--master-addr=n1",
        "--master-port=20001",
        "--rdzv-id=77.0",
    }


def test_torchrun_knows_every_option(write):
    """All that is given to it: by its own parser, and both ways of meeting."""
    from torch.distributed.run import parse_args

    for more, backend in ((), "static"), (("--max-restarts=3",), "c10d"):
        _, task = call_of_srun(
            write(*USUAL, *more),
            SLURM_NODEID="0",
            SLURM_JOB_ID="77",
            SLURMD_NODENAME="n1",
        )
        found = parse_args(task[3:])
        assert (found.rdzv_backend, found.rdzv_id, found.max_restarts) == (
            backend,
            "77.0",
            3 if more else 0,
        )
        assert (found.nnodes, found.nproc_per_node) == ("2", "4")
        assert getattr(found, "shutdown_timeout", 270) == 270
        assert found.training_script_args == ["hparams.yaml"]
    assert (found.rdzv_conf, found.local_addr, found.rdzv_endpoint) == (
        "is_host=1",
        "n1",
        "n1:20001",
    )


@pytest.mark.parametrize(
    "word",
    ["a b", "it's", '"', "$HOME", "`id`", "$(id)", "; id", "\\", "*", "~", "--x=é", ""],
)
def test_what_goes_to_the_recipe_arrives_as_it_was(write, word):
    _, task = call_of_srun(
        write(*USUAL, "--", "--lr=0.1", word),
        SLURM_NODEID="0",
        SLURM_JOB_ID="1",
    )
    assert task[-4:] == ["train.py", "hparams.yaml", "--lr=0.1", word]


def test_a_path_with_blanks(recipe, write):
    (recipe / "my recipes").mkdir()
    (recipe / "my recipes" / "it's train.py").touch()
    text = write("my recipes/it's train.py", *USUAL[1:], "--python=/opt/my python/bin/python")
    _, task = call_of_srun(text, SLURM_NODEID="0", SLURM_JOB_ID="1")
    assert task[-2:] == ["my recipes/it's train.py", "hparams.yaml"]
    assert options(text)["job-name"] == "it_s_train"
    assert "\npython='/opt/my python/bin/python'\n" in text


@PASSES_SIGNALS_ON
def test_every_option_is_in_the_script(write):
    words = [
        "--partition=gpu,long",
        "--account=speech",
        "--cpus-per-task=32",
        "--job-name=big-1",
        "--signal-before=120",
    ]
    more = [
        "--sbatch=--constraint=a100",
        "--sbatch=--mem=0",
        "--setup=module load cuda",
        ("--setup=ulimit -n 65536"),
    ]
    text = write(*USUAL, *words, *more, "--no-requeue")
    found = options(text)
    assert (found["partition"], found["account"], found["cpus-per-task"]) == (
        "gpu,long",
        "speech",
        "32",
    )
    assert (found["job-name"], found["signal"], found["constraint"]) == (
        "big-1",
        "B:USR1@120",
        "a100",
    )
    assert (found["mem"], found["no-requeue"]) == ("0", "")
    assert "requeue" not in found
    assert "\nrequeues=0 " in text
    assert text.index("module load cuda\nulimit -n 65536\n") < text.index("srun ")
    assert "--shutdown-timeout=90" in text


def test_nodes_without_gpus(write):
    text = write(
        *USUAL[:3],
        "--gpus-per-node=0",
        "--nproc-per-node=16",
        "--time=90",
        "--cpus-per-task=32",
    )
    assert "gpus-per-node" not in options(text)
    assert options(text)["cpus-per-task"] == "32"
    assert "OMP_NUM_THREADS:-2}" in text
    assert "--nproc-per-node=16" in text


def test_a_torchrun_that_knows_term_only(write, monkeypatch):
    monkeypatch.setattr(slurm, "_passes_signals_on", lambda: False)
    text = write(*USUAL)
    assert "--signals-to-handle" not in text
    assert "--shutdown-timeout" not in text
    assert "scancel --signal=TERM" in text


def test_this_torch_is_looked_at_without_loading_it(recipe):
    text = (
        "import sys; from ddpkit.cli import main; "
        f"assert main(['slurm', *{USUAL!r}]) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    from torch.distributed.run import get_args_parser

    known = "--signals-to-handle" in get_args_parser().format_help()
    assert ("scancel --signal=USR1" in done.stdout) == known


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("20:00:00", 72000),
        ("1-0", 86400),
        ("1-12:30", 131400),
        ("0-0:0:30", 30),
    ],
)
def test_limits(time, seconds):
    assert seconds_of(time) == seconds


@pytest.mark.parametrize(
    "time",
    ["", "1h", "-5", "1:2:3:4", "1-", "x", "0", "00:00:00", "1-2:3:4:5", "10\n", "1.5"],
)
def test_limits_that_are_none(time):
    with pytest.raises(ConfigError, match=r"--time=.*Give 20:00:00"):
        seconds_of(time)


@pytest.mark.parametrize(("time", "notice"), [("20:00:00", 300), ("10:00", 150), ("1:00", 15)])
def test_the_signal_comes_early_enough(write, time, notice):
    assert options(write(*USUAL[:4], f"--time={time}"))["signal"] == f"B:USR1@{notice}"


def test_a_signal_before_the_start_is_refused(recipe, capsys):
    assert main(["slurm", *USUAL, "--signal-before=80000"]) == 1
    captured = capsys.readouterr()
    assert "it would come before the start" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (USUAL[:2], "required: --nodes, --gpus-per-node, --time"),
        ((*USUAL, "--nodes=0"), "not a whole number from 1 on"),
        ((*USUAL, "--gpus-per-node=-1"), "not a whole number from 0 on"),
        ((*USUAL, "--max-restarts=x"), "not a whole number from 0 on"),
        ((*USUAL, "--lr=0.1"), "unrecognized arguments: --lr=0.1"),
    ],
)
def test_wrong_usage(recipe, capsys, words, said):
    with pytest.raises(SystemExit) as left:
        main(["slurm", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_no_gpus_and_no_number_of_processes(recipe):
    with pytest.raises(ConfigError, match="Give --nproc-per-node"):
        run([*USUAL[:3], "--gpus-per-node=0", "--time=90"])


@pytest.mark.parametrize("missing", ["train.py", "hparams.yaml"])
def test_a_file_that_is_not_there(recipe, missing):
    (recipe / missing).unlink()
    with pytest.raises(ConfigError, match=f"there is no file '{missing}'"):
        run(USUAL)


def test_ports_differ_between_jobs_and_attempts(write):
    """By the very lines of the script, with a head on which nobody listens."""
    [lines] = re.findall(r"^(port=(?:.|\n)*?done)$", write(*USUAL), re.MULTILINE)

    def port(job, restart):
        text = f"head=127.0.0.1; SLURM_JOB_ID={job}; restart={restart}\n{lines}\necho $port"
        return int(bash(text=text))

    ports = {port(job, restart) for job in (1, 2, 123456789) for restart in (0, 1)}
    assert len(ports) == 6
    assert all(20000 <= one < 30000 for one in ports)


def test_a_port_that_is_taken_is_passed_over(write):
    import socket

    [loop] = re.findall(r"^(while \(: (?:.|\n)*?done)$", write(*USUAL), re.MULTILINE)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert int(bash(text=f"head=127.0.0.1 port={number}\n{loop}\necho $port")) > number


def waiting(text, training, counted=0):
    """Run the script from its traps on, with stand-ins for the training and for Slurm's commands.

    So often Slurm says, after srun has ended, that it counts tasks of the step.
    """
    [requeues] = re.findall(r"^requeues=.", text, re.MULTILINE)
    traps = text[text.index("asked_to_stop=0") : text.index("# One task")]
    rest = text[text.index("training=$!") :]
    stand_ins = f"""
        scancel() {{ echo "scancel $*"; kill -USR1 "$training"; }}
        scontrol() {{
            [ "$1" = show ] || {{ echo "scontrol $*"; return; }}
            echo >> "$asked"
            [ "$*" != "show step 77" ] || [ $(wc -l < "$asked") -gt {counted} ] || echo "  X=1 Name=ranks Y=2"
        }}
        sleep() {{ [ "$1" = 1 ] && command sleep 0.05 || command sleep "$1"; }}
    """  # noqa: E501
    with tempfile.NamedTemporaryFile() as asked:
        done = subprocess.run(
            ["bash", "-c", f"{requeues}\n{stand_ins}{traps}{training} &\n{rest}"],
            env={**os.environ, "SLURM_JOB_ID": "77", "asked": asked.name},
            capture_output=True,
            text=True,
            check=False,
        )
    return done.returncode, re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", done.stdout).splitlines()


# Signals the shell as Slurm does, once this has come to `wait`, and ends when the signal is passed
# on to it.
STOPS = (
    'bash -c \'trap "exit 3" USR1; sleep 0.3; kill -USR1 $PPID; for n in {1..1200}; do sleep '
    "0.05; done; exit 9'"
)


@PASSES_SIGNALS_ON
def test_the_shell_waits_and_requeues_after_the_signal(write):
    text = write(*USUAL)
    assert waiting(text, "(exit 0)") == (0, ["ended with status 0"])
    assert waiting(text, "(sleep 0.2; exit 7)") == (7, ["ended with status 7"])
    assert waiting(text, STOPS) == (
        0,
        [
            "the time limit is near",
            "scancel --signal=USR1 77",
            "ended with status 3",
            "queued again: the next attempt goes on from the newest checkpoint",
            "scontrol requeue 77",
        ],
    )
    assert waiting(text, STOPS.replace("exit 3", "exit 0"))[1][-1] == "ended with status 0", (
        "it was done anyway"
    )
    code, said = waiting(write(*USUAL, "--no-requeue"), STOPS)
    assert (code, said[-1]) == (3, "ended with status 3")


def test_the_shell_waits_for_slurm_to_find_out_that_a_node_is_lost(write):
    """Slurm queues the job again, but none that has ended."""
    text = write(*USUAL)
    failure = "(exit 7)"
    waits = "a node does not answer; Slurm will queue the job again if it stays so"
    assert waiting(text, failure, counted=4) == (7, ["ended with status 7", waits])
    assert waiting(text, "(exit 0)", counted=4) == (0, ["ended with status 0"])
    asked = "for n in {1..1200}; do [ $(wc -l < $asked) -gt 3 ] && break; sleep 0.05; done"
    late = f"bash -c '({asked}; kill -USR1 $PPID) & exit 7'"
    code, said = waiting(text, late, counted=1000)
    assert (code, said[1:3], said[-1]) == (
        0,
        [waits, "the time limit is near"],
        ("scontrol requeue 77"),
    )
    ended = waiting(text, late.replace("USR1", "TERM"), counted=1000)
    assert ended == (7, ["ended with status 7", waits]), "scancel ends it for good"
    assert waiting(write(*USUAL, "--no-requeue"), failure, counted=1000) == (
        7,
        [("ended with status 7")],
    )


def test_term_does_not_end_the_shell_before_the_training(write):
    training = "bash -c 'kill -TERM $PPID; sleep 0.3; exit 5'"
    assert waiting(write(*USUAL), training) == (5, ["ended with status 5"])
