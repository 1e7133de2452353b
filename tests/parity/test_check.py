"""``--check_parity`` as it is typed: real processes of a script, its exit code, and what stays as
it was.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.launching import Run, python, torchrun

SCRIPT = """
    import random, sys
    import torch
    from torch import nn
    import ddpkit
    from ddpkit.checkpoints import Checkpointer

    class Line(ddpkit.Brain):
        def compute_forward(self, batch, stage):
            if MODE == "hangs" and random.random() < 0.5:
                return self.modules.net[2](self.modules.net[0](batch[0]))
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            loss = nn.functional.mse_loss(predictions, batch[1], reduction="sum" if MODE == "sum" else "mean")
            if MODE == "fails":
                assert ddpkit.distributed.get_world_size() == 1, "not on several"
            return loss

    class OwnNorm(nn.BatchNorm1d):
        def forward(self, rows):
            return super().forward(rows)

    MODE = sys.argv.pop(1)
    param_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    ddpkit.create_experiment_directory("results", save_env_desc=False)
    if MODE == "leaves" and ddpkit.distributed.get_world_size() > 1:
        sys.exit()
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()  # without a seed
    inputs = torch.linspace(-1, 1, 28, dtype=torch.float64).reshape(14, 2) ** 2
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    checkpointer = Checkpointer("results/save", {"net": net})
    def schedule(optimizer, total_steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps)
    brain = Line({"net": net}, lambda p: torch.optim.SGD(p, lr=0.1), None, run_opts, checkpointer, schedule)
    brain.fit(range(1, 3), data, train_loader_kwargs={"batch_size": 3})
    print("after fit")
"""  # noqa: E501


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "hparams.yaml").write_text("mode: holds\n")
    return lambda mode, *words, **env: Run(
        python("train.py", mode, "hparams.yaml", *words),
        tmp_path,
        env,
        warm=True,
    ).wait(180)


def test_a_script_that_holds_ends_well_and_with_fit(script, tmp_path):
    """The weights have no seed, and the processes get them all the same."""
    run = script("holds", "--check_parity=2")
    assert run.code == 0, run.err
    assert (
        "Parity holds: 2 processes and one with the joined batch have the same gradients."
        in run.err
    )
    assert not run.out, "the script goes on after fit"
    assert not list((tmp_path / "results" / "save").glob("*"))
    assert (tmp_path / "results" / "metrics.jsonl").read_text().count('"start"') == 1


@pytest.mark.slow
def test_a_sum_ends_with_its_cause_and_an_exit_code(script):
    run = script("sum", "--check_parity=2")
    assert run.code == 1
    assert "ParityError: Parity does not hold: 2 processes and one" in run.err
    assert "The loss is not a mean over the samples of a batch" in run.err


@pytest.mark.slow
def test_processes_that_fail_where_one_does_not(script):
    run = script("fails", "--check_parity=2")
    assert run.code == 1
    assert (
        "ParityError: parity does not hold: 2 processes fail where one process has made a step. "
        "They said last:"
    ) in run.err
    assert "AssertionError: not on several" in run.err


@pytest.mark.slow
def test_processes_that_leave_out_the_call_of_fit(script):
    run = script("leaves", "--check_parity=2")
    assert run.code == 1
    assert (
        "parity does not hold: 2 processes end without this call of fit where one process has "
        "made a step"
    ) in run.err


@pytest.mark.slow
def test_ranks_that_take_different_ways_by_chance_end(script):
    """They would wait for each other for ever; the one process tells how long they may."""
    run = script("hangs", "--check_parity=4")
    assert run.code == 1
    assert (
        "ParityError: parity does not hold: 4 processes fail where one process has made a step"
    ) in run.err


@pytest.mark.slow
def test_several_processes_are_told_to_be_one(script, tmp_path):
    run = Run(
        torchrun(2, "train.py", "holds", "hparams.yaml", "--check_parity=4"),
        tmp_path,
        warm=True,
    ).wait()
    assert run.code == 1
    assert (
        "check_parity=4 starts the processes itself, and a launcher has started 2. Start one:"
        in run.err
    )


def test_code_that_is_in_no_file_cannot_be_started_again(tmp_path):
    (tmp_path / "hparams.yaml").write_text("mode: holds\n")
    command = python("-c", textwrap.dedent(SCRIPT), "holds", "hparams.yaml", "--check_parity=2")
    run = Run(command, tmp_path, warm=True).wait()
    assert run.code == 2
    assert "Put the code into a file, and start that with --check_parity." in run.err


def test_nothing_of_it_is_imported_without_the_option(tmp_path):
    code = (
        "import ddpkit, sys; ddpkit.Brain().evaluate; print([name for name in sys.modules if "
        "'parity' in name])"
    )
    (tmp_path / "train.py").write_text(code)
    run = Run(python("train.py"), tmp_path, warm=True).wait()
    assert (run.code, run.out) == (0, "[]\n"), run.err
