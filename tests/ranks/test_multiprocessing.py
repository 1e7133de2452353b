"""Ranks that ``multiprocessing`` has started: ``mp.spawn``, ``start_processes``, ``elastic_launch``
with a function.

Such a process ends without ``atexit``, or after it has waited for its children, and shows no hook
what ended it: only what has left ``fit`` or ``evaluate`` is known.
"""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.launching import Run, free_port, python, wait_until

SCRIPT = """
    import os, sys, time
    from pathlib import Path

    import torch
    import torch.multiprocessing as mp

    import ddpkit as sb

    HOW, FAULT, PORT = sys.argv[1:4]


    class Faulty(sb.Brain):
        def compute_forward(self, batch, stage):
            time.sleep(0.02)
            if (self.rank == 1 or "on all" in FAULT) and self.step == 5 and FAULT.endswith("in fit"):
                end()
            return self.modules.net(batch)

        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch).square().mean()


    def end():
        Path("fault").touch()
        if FAULT.startswith("raise"):
            raise ValueError("boom from the fault")
        sys.exit(0)


    def train(rank=None):
        if HOW == "fork, no variables":
            address = "tcp://127.0.0.1:" + PORT
            torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        elif rank is not None:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
        torch.manual_seed(0)
        sb.ddp_init_group({"device": "cpu"})
        brain = Faulty(
            {"net": torch.nn.Linear(1, 1)},
            lambda parameters: torch.optim.SGD(parameters, lr=0.001),
            run_opts={"device": "cpu", "noprogressbar": True},
        )
        loader = {"batch_size": 2, "num_workers": 1, "persistent_workers": True}
        data = torch.arange(400.0).view(-1, 1)
        if FAULT.endswith("in fit"):
            brain.fit(range(1, 50), data, train_loader_kwargs=loader)
        brain.fit(range(1, 2), data[:8], train_loader_kwargs=loader)
        if brain.rank == 1:
            end()
        brain.evaluate(data, test_loader_kwargs={"batch_size": 2})


    def start():
        if HOW == "elastic":
            from torch.distributed.launcher.api import LaunchConfig, elastic_launch

            config = LaunchConfig(
                1, 1, 2, run_id="test", rdzv_endpoint=f"127.0.0.1:{PORT}", rdzv_backend="c10d", max_restarts=0
            )
            elastic_launch(config, train)()
        else:
            mp.start_processes(train, nprocs=2, start_method=HOW.partition(",")[0])


    if __name__ == "__main__":
        start()
"""  # noqa: E501


def start(folder, how, fault):
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    cold = how == "spawn" and fault == "raise in fit"
    run = Run(python(str(script), how, fault, str(free_port())), folder, warm=not cold)
    assert wait_until((folder / "fault").exists, 90.0), run.err
    return run.wait(60.0)  # far from the hang timeout


def each(fork, cold):
    """Every fault with forked ranks; those that start cold take ten CPU seconds, so they have one,
    and later.
    """
    cases = [("fork", fault) for fault in fork] + [("fork, no variables", fork[0])]
    cases += [(how, fault) for how in ("spawn", "elastic") for fault in cold]
    return pytest.mark.parametrize(
        ("how", "fault"),
        [
            pytest.param(*case, marks=() if "fork" in case[0] else pytest.mark.slow)
            for case in cases
        ],
    )


@pytest.mark.slow
@each(["raise in fit", "raise on all in fit", "raise"], ["raise in fit"])
def test_ranks_of_multiprocessing_with_persistent_workers_end_after_a_failure(tmp_path, how, fault):
    run = start(tmp_path, how, fault)
    assert run.code != 0
    place = " in TRAIN of epoch 1 at step 5" if fault.endswith("in fit") else ""
    who = "rank [01]" if "all" in fault else "rank 1"
    if fault == "raise":  # multiprocessing shows nobody what ended it outside of fit
        assert re.search(
            "ValueError: boom from the fault|rank 1, which has come to its end",
            run.err,
        ), run.err
        return
    assert re.search(
        rf"{who} \([^ ]+, pid \d+\) failed.*{place}.*: ValueError: boom from the "
        r"fault",
        run.err,
    ), run.err
    assert "Connection closed" not in run.err


@pytest.mark.slow
@each(["exit in fit", "exit"], ["exit in fit"])
def test_a_rank_of_multiprocessing_that_leaves_early_is_named_at_once(tmp_path, how, fault):
    run = start(tmp_path, how, fault)
    assert run.code != 0
    if fault == "exit in fit":
        words = (
            r"rank 1 \([^ ]+, pid \d+\) failed first, in TRAIN .* at step 5, at train.py:\d+ in "
            r"end: SystemExit: 0"
        )
    else:
        words = "rank 0 waits at .* for rank 1, which has come to its end without making this call"
    assert re.search(words, run.err), run.err
    assert "disappeared" not in run.err
    assert "Connection closed" not in run.err
