"""How many processes are meant, how they begin, and what is refused before any is started."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading

import pytest

from ddpkit.errors import ConfigError, LaunchError, RankFailedError
from ddpkit.launch import spawning
from ddpkit.launch.process_monitor import Ending
from ddpkit.launch.spawning import count_processes, run_script, spawn
from ddpkit.run_opts import parse_arguments


@pytest.fixture
def machine(monkeypatch):
    def have(gpus, cores=4):
        monkeypatch.setattr(spawning, "accelerator_kind", lambda: "cuda" if gpus else "cpu")
        monkeypatch.setattr(spawning, "count_devices", lambda kind: gpus if kind == "cuda" else 1)
        monkeypatch.setattr(spawning, "cores", lambda: cores)

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
        ("3", None, 0, 3), (2, None, 8, 2), ("auto", None, 8, 8), ("auto", None, 0, 4), ("auto", "cpu", 8, 4),
        ("gpu", None, 8, 8), ("gpu", "cuda", 8, 8), ("cpu", None, 8, 4), ("AUTO", "cpu:0", 8, 4), (" 2 ", None, 0, 2),
    ],
)  # fmt: skip
def test_how_many(machine, asked, device, gpus, number):
    machine(gpus)
    assert count_processes(asked, device) == number


@pytest.mark.parametrize("asked", ["0", 0, "-1", -1, "x", "", "2.5", 2.5, True, None, "1e3", "²"])
def test_numbers_that_make_no_sense(machine, asked):
    with pytest.raises(
        ConfigError, match="nproc must be >= 1, got .* Give a number of processes, gpu .* cpu .* or auto"
    ):
        count_processes(asked)


def test_gpus_that_are_not_there(machine, caplog):
    with pytest.raises(ConfigError, match="no GPU was found or asked for"):
        count_processes("gpu")
    machine(8)
    with pytest.raises(ConfigError, match="no GPU was found or asked for"):
        count_processes("gpu", "cpu")
    with pytest.raises(ConfigError, match="nproc='9', but there are 8 GPUs.*--nproc=8 or less.*--device=cpu"):
        count_processes("9")
    assert not caplog.records
    assert count_processes("9", "cpu") == 9
    assert "9 processes share 4 processor cores" in caplog.text


# -------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("asked", "said"),
    [*((asked, f"nproc must be >= 1, got '{asked}'") for asked in ("0", "-1", "x")), ("gpu", "no GPU was found")],
)
def test_nproc_on_the_command_line(machine, monkeypatch, yaml, asked, said):
    words = [yaml, f"--nproc={asked}", "--device=cpu"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(ConfigError, match=said):
        parse_arguments()


def test_nproc_needs_a_value(yaml):
    with pytest.raises(ConfigError, match="--nproc needs a value. Write --nproc=N"):
        parse_arguments([yaml, "--nproc"])


def test_nproc_of_another_command_line_than_the_scripts(yaml):
    with pytest.raises(ConfigError, match="the one that was given to parse_arguments is another"):
        parse_arguments([yaml, "--nproc=2"])


def test_the_yaml_is_checked_before_anything_is_started(monkeypatch, yaml):
    monkeypatch.setattr(sys, "argv", ["train.py", yaml, "--nproc=2", "--learning_rate=3"])
    with pytest.raises(ConfigError, match="neither a run option nor a key"):
        parse_arguments()


def test_a_rank_does_not_start_ranks_again(monkeypatch, yaml):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "DDPKIT_SPAWNED_BY": "1"}.items():
        monkeypatch.setenv(name, value)
    hook = sys.excepthook
    try:
        _, run_opts, _ = parse_arguments([yaml, "--nproc=2", "--device=cpu"])
    finally:
        sys.excepthook = hook
    assert run_opts.distributed_launch
    assert "nproc" not in run_opts


@pytest.mark.parametrize("start", [lambda: run_script(2, "cpu"), lambda: spawn(os.getpid, 2)], ids=["--nproc", "spawn"])
def test_under_a_launcher(monkeypatch, machine, start):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="torchrun has started this one already, as rank 1 of 2") as caught:
        start()
    assert "TORCHELASTIC_RUN_ID" in str(caught.value)


def test_an_interactive_python_has_no_script(monkeypatch, machine):
    for name in spawning.NOT_SCRIPTS:
        monkeypatch.setattr(sys, "argv", [name])
        with pytest.raises(ConfigError, match="--nproc starts the running script again, and there is none"):
            run_script(2, "cpu")


# ------------------------------------------------------------------------------------------ what can be sent


def module_level():
    """For what other processes can import."""


class Notebook:
    """Looks like ``__main__`` in a notebook: without a file."""

    __spec__ = None


def test_what_other_processes_cannot_import_is_refused(monkeypatch):
    def cell():
        pass

    spawning._require_importable(module_level, (1, "x"))
    for function, args in ((lambda: 1, ()), (module_level, (threading.Lock(),))):
        with pytest.raises(ConfigError, match="or its arguments cannot be sent .* Put it at the top level of a file"):
            spawning._require_importable(function, args)
    cell.__module__, cell.__qualname__ = "__main__", "cell"
    monkeypatch.setitem(sys.modules, "__main__", Notebook())
    sys.modules["__main__"].cell = cell
    spawning._require_importable(module_level, ())
    with pytest.raises(ConfigError, match="cell is called in a notebook.*%%writefile"):
        spawning._require_importable(cell, ())


# ----------------------------------------------------------------------------------------- who was first


def values(failure, *said):
    contents = {rank: pickle.dumps(result) for rank, result in enumerate(said) if result is not ABSENT}
    return spawning._values(contents, [10, 11], failure)


ABSENT = object()
OWN = spawning._Failure(1, 5.0, "ValueError: boom", "Traceback ...", is_second_hand=False)
LATER = spawning._Failure(0, 6.0, "ValueError: late", "Traceback ...", is_second_hand=False)
SECOND = spawning._Failure(0, 4.0, "RankFailedError: rank 1 failed first", "Traceback ...", is_second_hand=True)


@pytest.mark.parametrize(
    ("zero", "one", "failure", "words"),
    [
        (SECOND, OWN, Ending(0, 10, 1), "rank 1 of 2 failed: ValueError: boom\n--- traceback of rank 1"),
        (LATER, OWN, Ending(0, 10, 1), "rank 1 of 2 failed: ValueError: boom"),
        (SECOND, ABSENT, Ending(1, 11, 137), "rank 1 of 2 (process 11) was killed by SIGKILL before"),
        (None, ABSENT, None, "rank 1 of 2 (process 11) ended before"),
        (None, OWN, Ending(1, 11, 1), "rank 1 of 2 failed: ValueError: boom"),
        (ABSENT, OWN, Ending(0, 10, 143), "rank 1 of 2 failed: ValueError: boom"),
        (ABSENT, ABSENT, Ending(1, 11, 3), "rank 1 of 2 (process 11) ended with exit code 3 before"),
        (SECOND, None, Ending(0, 10, 1), "rank 0 of 2 failed: RankFailedError: rank 1 failed first"),
    ],
)
def test_the_first_is_blamed(zero, one, failure, words):
    with pytest.raises(RankFailedError) as caught:
        values(failure, zero, one)
    assert str(caught.value).startswith(words)


def test_a_crash_after_the_values(caplog):
    with caplog.at_level(logging.WARNING):
        assert values(Ending(1, 11, 134), 3, None) == [3, None]
    assert "Rank 1 was killed by SIGABRT after it had returned its value." in caplog.text
