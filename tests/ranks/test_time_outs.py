"""A rank that comes to a collective past its limit of time is named in what a user of torchrun
reads.
"""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.launching import Run, torchrun

SCRIPT = """
    import os, time
    import torch
    import ddpkit

    class B(ddpkit.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.square().mean()

        def on_stage_end(self, stage, stage_loss, epoch=None):
            if ddpkit.if_main_process() and stage == ddpkit.Stage.VALID:
                time.sleep(60)

    hparams, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    brain = B({"net": torch.nn.Linear(1, 1)}, lambda own: torch.optim.SGD(own, lr=0.1), run_opts=run_opts)
    brain.fit([1, 2], torch.ones(8, 1), torch.ones(8, 1))
"""  # noqa: E501


@pytest.mark.slow
def test_torchrun_shows_who_was_late(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "hparams.yaml").write_text("a: 1\n")
    words = ["train.py", "hparams.yaml", "--device=cpu", "--distributed_timeout_minutes=0.05"]
    run = Run(torchrun(2, *words), tmp_path, warm=True).wait()
    assert run.code == 1
    assert "Timed out waiting 3000ms" in run.err, "what torch said"
    said, _, summary = run.err.partition("ChildFailedError")
    for told in (said, summary):
        assert re.search(r"rank 1 \(.*\) waited 3 s \(--distributed_timeout_minutes=0.05\)", told)
        assert "for rank 0 (" in told
        assert "which is in VALID of epoch 1, at train.py:15 in on_stage_end" in told
    assert "failed first" not in run.err
