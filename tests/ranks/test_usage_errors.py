"""What a user mistypes is told in one sentence, once, with exit code 2, whoever has started the
ranks.
"""

from __future__ import annotations

import re
import sys

import pytest

from ddpkit.errors import ConfigError
from ddpkit.run_opts import parse_arguments
from tests.launching import Run, python, start_by_hand, torchrun

SCRIPT = """import os; from ddpkit.comm import group_end; from ddpkit.control import failure
failure.FIRST_WORD_SECONDS = group_end.FINAL_REPORT_SECONDS = 2.0 if "WRONG_ON" in os.environ else 60.0
import torch
import ddpkit
from ddpkit.distributed import ddp_barrier

hparams_file, run_opts, overrides = ddpkit.parse_arguments()
ddpkit.ddp_init_group(run_opts)
ddpkit.create_experiment_directory("out", hparams_file, overrides, save_env_desc=False)
if os.environ.get("RANK") == os.environ.get("WRONG_ON", "no rank"):
    run_opts["precision"] = "fp16"
checkpointer = ddpkit.checkpoints.Checkpointer("out/save")
brain = ddpkit.Brain({"net": torch.nn.Linear(1, 1)}, torch.optim.SGD, run_opts=run_opts, checkpointer=checkpointer)
brain.fit(range(1), [torch.ones(1)])
ddp_barrier()
"""  # noqa: E501

# What is wrong with the words, and what is said of it.
MISTAKES = {
    "an unknown option": (
        ["hparams.yaml", "--bogus=1"],
        ("--bogus is neither a run option nor a key"),
    ),
    "a wrong type": (
        ["hparams.yaml", "--debug_batches=many"],
        ("--debug_batches expects a whole number, got 'many'"),
    ),
    "a missing YAML": (["nowhere.yaml"], "There is no file 'nowhere.yaml'"),
    "no YAML": (["--debug"], "Give one hyperparameter YAML; found: none"),
    "a contradiction": (
        ["hparams.yaml", "--ckpt_interval_minutes=1", "--ckpt_interval_steps=1"],
        "are both set, and only one can be",
    ),
    "a module that is not there": (
        ["hparams.yaml", "--device=cpu", "--compile_module_keys=nett"],
        "compile_module_keys=['nett'] names 'nett', and the modules are: 'net'",
    ),
    "no reference": (
        ["hparams.yaml", "--device=cpu", "--lr_scaling=linear"],
        ("needs reference_batch_size"),
    ),
    "what the Brain refuses": (
        ["hparams.yaml", "--precision=fp16", "--device=cpu"],
        ("precision='fp16' does not work"),
    ),
    "no time": (
        ["hparams.yaml", "--time_limit=banana"],
        ("time_limit expects a length of time > 0, got 'banana'"),
    ),
    "no signal": (["hparams.yaml", "--stop_signals", "SIGFOO"], "'SIGFOO' is not a signal"),
    "no saving signal": (["hparams.yaml", "--save_signals", "SIGFOO"], "'SIGFOO' is not a signal"),
    "a part of the Brain": (
        ["hparams.yaml", "--device=cpu", "--ema_decay=2"],
        (
            "ema_decay=2.0 has to be at least 0 and less than 1, for example 0.999. (at "
            "train.py:13 in <module>)"
        ),
    ),
    "what fit refuses": (
        ["hparams.yaml", "--device=cpu", "--micro_batch_size=4"],
        (
            "or use batch_size and grad_accumulation_factor. (in fit, before the first stage, at "
            "train.py:14 in <module>)"
        ),
    ),
    "no checkpoint": (
        ["hparams.yaml", "--device=cpu", "--resume=always"],
        ("/always' is not a checkpoint"),
    ),
}
AT_PARSING = {
    "an unknown option",
    "a wrong type",
    "a missing YAML",
    "no YAML",
    "a contradiction",
    ("no time"),
} | {name for name in MISTAKES if name.endswith("signal")}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    return tmp_path


def own_lines(run):
    """Return the lines that a person reads, less those of loggers and of the experiment's start."""
    return [
        line
        for line in run.lines
        if not line.startswith(("Experiment folder", "Run options", "Brain: "))
    ]


@pytest.mark.corner
@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_process_says_one_sentence_and_exits_with_2(folder, mistake):
    words, said = MISTAKES[mistake]
    run = Run(python("train.py", *words), folder, warm=True).wait()
    assert run.code == 2
    lines = own_lines(run)
    assert lines[0].startswith("train.py: error: ")
    assert said in lines[0]
    assert len(lines) == 1, run.err
    assert (folder / "out").exists() == (mistake not in AT_PARSING)


def test_the_log_has_the_traceback_that_the_console_has_not(folder):
    words, said = MISTAKES["a part of the Brain"]
    run = Run(python("train.py", *words), folder, warm=True).wait()
    assert "Traceback" not in run.err
    log = (folder / "out" / "log.txt").read_text()
    assert f'File "{folder / "train.py"}", line 13' in log
    assert said.partition(" (")[0] in log


def test_the_line_is_that_of_the_users_code_which_fails_inside(folder):
    """A recipe's own function that makes the optimizer."""
    script = SCRIPT.replace("torch.optim.SGD", "make").replace(
        "brain =",
        "def make(parameters): raise ValueError('not yet')\nbrain =",
    )
    (folder / "train.py").write_text(script)
    run = Run(python("train.py", "hparams.yaml", "--device=cpu"), folder, warm=True).wait()
    assert run.code == 2
    assert run.tail(1).endswith(
        "ValueError: not yet (in fit, before the first stage, at train.py:13 in make)"
    )


RECIPE = """
class Recipe(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        if self.rank == 1 and self.step == 2:
            ddpkit.metrics.Accuracy().update(torch.ones(2), torch.ones(3))
        return predictions.sum()

brain = Recipe("""


@pytest.mark.slow
def test_a_fault_in_a_batch_of_one_rank_has_its_traceback(folder):
    """Also where the library calls it a ConfigError: it comes from the recipe's code."""
    script = SCRIPT.replace("brain = ddpkit.Brain(", RECIPE).replace(
        "range(1), [torch.ones(1)]",
        "[1], torch.ones(8, 1)",
    )
    (folder / "train.py").write_text(script)
    run = Run(torchrun(2, "train.py", "hparams.yaml", "--device=cpu"), folder, warm=True).wait()
    assert run.code == 1
    assert re.search(r'train.py", line \d+, in compute_objectives', run.err), run.err
    assert re.search(
        r"rank 1 .* failed first, in TRAIN of epoch 1 at step 2, at train.py:\d+ in "
        r"compute_objectives",
        run.err,
    )


@pytest.mark.parametrize(
    "mistake",
    [
        "what fit refuses",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("an unknown option", "what the Brain refuses", "a part of the Brain")
        ),
    ],
)
def test_torchrun_says_it_once_in_its_summary(folder, mistake):
    words, said = MISTAKES[mistake]
    run = Run(torchrun(2, "train.py", *words), folder, warm=True).wait()
    assert run.code == 1  # torchrun turns every code into 1
    assert run.err.count(said) == 1, run.err
    assert "exitcode  : 2" in run.err
    assert "traceback : train.py: error: " in run.tail(5)
    assert 'train.py", line' not in run.err
    assert len(own_lines(run)) < 55, run.err  # from 3.13 on Python underlines calls in tracebacks


def test_nproc_says_it_once_and_starts_nothing(folder):
    words, said = MISTAKES["an unknown option"]
    run = Run(python("train.py", *words, "--nproc=2"), folder, warm=True).wait()
    assert run.code == 2, run.err
    lines = own_lines(run)
    assert said in lines[0]
    assert len(lines) == 1, run.err


def test_nproc_says_what_its_ranks_refuse_in_torchruns_summary(folder):
    words, said = MISTAKES["what the Brain refuses"]
    run = Run(python("train.py", *words, "--nproc=2"), folder, warm=True).wait()
    assert run.code == 1, run.err
    assert run.err.count(said) == 1, run.err
    assert "traceback : train.py: error: " in run.tail(5)


def test_by_hand_it_is_said_by_the_first_of_the_group(folder):
    words, said = MISTAKES["what the Brain refuses"]
    ranks = [run.wait() for run in start_by_hand(python("train.py", *words), folder, 2, warm=True)]
    assert [run.code for run in ranks] == [2, 2], ranks[1].err
    assert sum(run.err.count(said) for run in ranks) == 1
    assert "Traceback" not in ranks[0].err + ranks[1].err


@pytest.mark.slow
def test_a_mistake_on_one_rank_is_said_by_that_rank(folder):
    command = torchrun(2, "train.py", "hparams.yaml", "--device=cpu")
    run = Run(command, folder, {"WRONG_ON": "1"}, warm=True).wait()
    assert run.code == 1
    assert "train.py: error on rank 1: precision='fp16' does not work" in run.tail(15), run.err


def test_whoever_inherits_the_launchers_variables_still_speaks(folder):
    """A script that a rank starts is nobody's rank: no launcher shows its error file."""
    (folder / "outer.py").write_text(
        "import subprocess, sys\n"
        "done = subprocess.run([sys.executable, 'train.py', 'hparams.yaml', '--bogus=1'])\n"
        "print('inner', done.returncode)\n"
    )
    run = Run(torchrun(1, "outer.py"), folder, warm=True).wait()
    assert run.code == 0, run.err
    assert "inner 2" in run.out
    assert "train.py: error: --bogus is neither a run option nor a key" in run.err


def test_a_caller_can_catch_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    hook = sys.excepthook
    with pytest.raises(ConfigError, match="--bogus is neither a run option nor a key"):
        parse_arguments(["hparams.yaml", "--bogus=1"])
    sys.excepthook = hook
