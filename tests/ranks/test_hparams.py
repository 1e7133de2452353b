"""A mistake in a recipe's YAML is one sentence, with exit code 2, said by one rank whoever has
started them.
"""

from __future__ import annotations

import pytest

from tests.launching import Run, python, start_by_hand, torchrun

SCRIPT = """from ddpkit.comm import group_end; from ddpkit.control import failure
failure.FIRST_WORD_SECONDS = group_end.FINAL_REPORT_SECONDS = 60.0
import ddpkit

hparams_file, run_opts, overrides = ddpkit.parse_arguments()
ddpkit.ddp_init_group(run_opts)
hparams = ddpkit.load_hparams(hparams_file, overrides)
"""
YAML = """
seed: 1
net: !new:torch.nn.Linear
  in_features: 1
  out_feature: !ref <seed>
"""
SAID = (
    "hparams.yaml:5, key 'net[out_feature]': torch.nn.Linear takes no argument 'out_feature'. "
    "Did you mean 'out_features' or 'in_features'? It takes: in_features, out_features, bias, "
    "device, dtype."
)
COMMAND = ("train.py", "hparams.yaml", "--device=cpu")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hparams.yaml").write_text(YAML)
    return tmp_path


def test_one_process_says_one_sentence(folder):
    run = Run(python(*COMMAND), folder, warm=True).wait()
    assert run.code == 2
    assert run.lines == [f"train.py: error: {SAID}"]


def test_ranks_without_a_launcher_say_it_once(folder):
    ranks = [run.wait() for run in start_by_hand(python(*COMMAND), folder, 2, warm=True)]
    assert [run.code for run in ranks] == [2, 2]
    assert sum(run.err.count(SAID) for run in ranks) == 1, ranks[1].err
    assert "Traceback" not in ranks[0].err + ranks[1].err


@pytest.mark.slow
def test_torchrun_says_it_once_in_its_summary(folder):
    run = Run(torchrun(2, *COMMAND), folder, warm=True).wait()
    assert run.code == 1
    assert run.err.count(SAID) == 1, run.err
    assert f"traceback : train.py: error: {SAID}" in run.tail(5)
    assert "exitcode  : 2" in run.err


@pytest.mark.slow
def test_what_fails_on_one_rank_is_said_by_that_rank(folder):
    (folder / "own.py").write_text(
        "import os\n\n\ndef made():\n    if os.environ['RANK'] == '1':\n        raise OSError('no "
        "such disk')\n"
    )
    (folder / "hparams.yaml").write_text("data: !apply:own.made\n")
    (folder / "train.py").write_text(
        SCRIPT.replace("60.0", "2.0") + "ddpkit.distributed.ddp_barrier()\n"
    )
    run = Run(torchrun(2, *COMMAND), folder, warm=True).wait()
    assert run.code == 1
    said = "hparams.yaml:1, key 'data': own.made has failed: OSError: no such disk (at own.py:6"
    assert f"train.py: error on rank 1: {said}" in run.tail(25), run.err
