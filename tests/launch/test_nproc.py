"""How many processes are meant, how they begin, and what is refused before any is started."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.run import config_from_args, get_args_parser

from ddpkit.errors import ConfigError, LaunchError
from ddpkit.launch import nproc
from ddpkit.launch.nproc import become_torchrun, cores, count_processes
from ddpkit.run_opts import parse_arguments


@pytest.fixture
def machine(monkeypatch):
    def have(gpus, cores=4):
        monkeypatch.setattr(nproc, "accelerator_kind", lambda: "cuda" if gpus else "cpu")
        monkeypatch.setattr(nproc, "count_devices", lambda kind: gpus if kind == "cuda" else 1)
        monkeypatch.setattr(nproc, "cores", lambda: cores)

    have(0)
    return have


@pytest.fixture
def yaml(tmp_path):
    path = tmp_path / "h.yaml"
    path.write_text("lr: 0.1\n")
    return str(path)


@pytest.mark.parametrize(
    ("asked", "device", "gpus", "number"),
    [
        ("3", None, 0, 3), (2, None, 8, 2), ("auto", None, 8, 8), ("auto", None, 0, 4), ("auto",
        "cpu", 8, 4),
        ("gpu", None, 8, 8), ("gpu", "cuda", 8, 8), ("cpu", None, 8, 4), ("AUTO", "cpu:0", 8, 4),
        (" 2 ", None, 0, 2),
    ],
)  # fmt: skip
def test_how_many(machine, asked, device, gpus, number):
    machine(gpus)
    assert count_processes(asked, device) == number


@pytest.mark.parametrize("asked", ["0", 0, "-1", -1, "x", "", "2.5", 2.5, True, None, "1e3", "²"])
def test_numbers_that_make_no_sense(machine, asked):
    with pytest.raises(
        ConfigError,
        match="nproc must be >= 1, got .* Give a number of processes, gpu .* cpu .* or auto",
    ):
        count_processes(asked)


def test_gpus_that_are_not_there(machine, caplog):
    with pytest.raises(ConfigError, match="no GPU was found or asked for"):
        count_processes("gpu")
    machine(8)
    with pytest.raises(ConfigError, match="no GPU was found or asked for"):
        count_processes("gpu", "cpu")
    with pytest.raises(
        ConfigError,
        match="nproc='9', but there are 8 GPUs.*--nproc=8 or less.*--device=cpu",
    ):
        count_processes("9")
    assert not caplog.records
    assert count_processes("9", "cpu") == 9
    assert "9 processes share 4 processor cores" in caplog.text


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        *((asked, f"nproc must be >= 1, got '{asked}'") for asked in ("0", "-1", "x")),
        ("gpu", ("no GPU was found")),
    ],
)
def test_nproc_on_the_command_line(machine, monkeypatch, yaml, asked, said):
    words = [yaml, f"--nproc={asked}", "--device=cpu"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(ConfigError, match=said):
        parse_arguments()


def test_nproc_needs_a_value(yaml):
    with pytest.raises(ConfigError, match="--nproc needs a value, --nproc=N"):
        parse_arguments([yaml, "--nproc"])


def test_nproc_of_another_command_line_than_the_scripts(yaml):
    with pytest.raises(
        ConfigError,
        match="sys.argv, but parse_arguments was given other arguments",
    ):
        parse_arguments([yaml, "--nproc=2"])


def test_the_yaml_is_checked_before_anything_is_started(monkeypatch, yaml):
    monkeypatch.setattr(sys, "argv", ["train.py", yaml, "--nproc=2", "--learning_rate=3"])
    with pytest.raises(ConfigError, match="neither a run option nor a key"):
        parse_arguments()


def test_a_rank_does_not_start_ranks_again(monkeypatch, yaml):
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "DDPKIT_NPROC": "2",
    }.items():
        monkeypatch.setenv(name, value)
    hook = sys.excepthook
    try:
        _, run_opts, _ = parse_arguments([yaml, "--nproc=2", "--device=cpu"])
    finally:
        sys.excepthook = hook
    assert run_opts.distributed_launch
    assert "nproc" not in run_opts


def test_under_a_launcher(monkeypatch, machine):
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        LaunchError,
        match="torchrun has started this one already, as rank 1 of 2",
    ) as caught:
        become_torchrun(2, "cpu")
    assert "TORCHELASTIC_RUN_ID" in str(caught.value)


def test_an_interactive_python_has_no_script(monkeypatch, machine):
    for name in nproc.NOT_SCRIPTS:
        monkeypatch.setattr(sys, "argv", [name])
        with pytest.raises(
            ConfigError,
            match="--nproc starts the running script again, and there is none",
        ):
            become_torchrun(2, "cpu")


# ---------------------------------------------------------------------------------- what is started


@pytest.mark.parametrize(
    ("number", "given", "threads"),
    [("3", None, "2"), ("99", None, "1"), ("3", "5", "5")],
)
def test_this_process_becomes_torchrun(monkeypatch, machine, number, given, threads):
    machine(0, cores=8)
    started = []
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_NUM_THREADS": given})
    words = ["-u", "-m", "train", "h.yaml", f"--nproc={number}", "--", "-x"]
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    become_torchrun(number)
    [(program, found)] = started
    where = ["--standalone", "--local_addr=localhost", "--rdzv_conf=keep_alive_interval=86400"]
    options = [
        "-m",
        "torch.distributed.run",
        *where,
        f"--nproc_per_node={number}",
        "--no_python",
        "--",
    ]
    assert program == sys.executable
    assert found == [sys.executable, *options, sys.executable, *words]
    assert os.environ == {"OMP_NUM_THREADS": threads, "DDPKIT_NPROC": number}
    launcher = get_args_parser().parse_args(found[3:])
    assert [launcher.training_script, *launcher.training_script_args] == [sys.executable, *words], (
        "all is the script's"
    )


def test_torchrun_has_no_thread_in_the_store_when_a_signal_ends_it(monkeypatch, machine):
    """By default it has one every 5 s, for the first time 5 s after the start; see
    :mod:`ddpkit.launch.nproc`.
    """
    started = []
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words[1]))
    monkeypatch.setattr(os, "environ", {})
    become_torchrun(2)
    config, _, _ = config_from_args(get_args_parser().parse_args(started[0][3:]))
    parameters = RendezvousParameters("c10d", "localhost:0", "test", 1, 1, **config.rdzv_configs)
    assert get_rendezvous_handler(parameters).settings.keep_alive_interval == timedelta(days=1)


def test_cores_are_those_that_may_be_used():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_torchrun_takes_no_short_key_of_the_yaml_unless_two_dashes_stand_before_the_script(capsys):
    """docs/how-to/one-node.md says so."""
    words = ["train.py", "hparams.yaml", "--n=4"]
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(words)
    assert "ambiguous option: --n=4 could match --nnodes" in capsys.readouterr().err
    assert get_args_parser().parse_args(["--", *words]).training_script_args == words[1:]
