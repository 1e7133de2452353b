"""What an estimate says of a GPU is what its allocator counts in a training, within 15 percent."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch

from tests.gpu.test_ddp import COLD_SECONDS
from tests.launching import Run, python, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

WITHIN = 0.15
RECIPE = """
    import json, sys
    import torch
    import ddpkit
    from tests.memory_truth import BATCH, MEASURED, Net, Plain, adamw, rows

    class Told(Plain):
        def on_fit_batch_start(self, batch, should_step):
            if self.optimizer_step == MEASURED:
                torch.cuda.reset_peak_memory_stats()

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if self.optimizer_step == MEASURED + 1:
                print("PEAK", torch.cuda.max_memory_allocated(), flush=True)

    param_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    torch.manual_seed(1)
    brain = Told({"net": Net()}, adamw, run_opts=run_opts)
    brain.fit(range(1, 2), rows(5 * BATCH * 2), train_loader_kwargs={"batch_size": BATCH})
"""
STRATEGIES = [
    [],
    ["--strategy=zero1"],
    ["--strategy=fsdp"],
    ["--strategy=fsdp", "--fsdp_blocks=Block"],
]


@pytest.mark.parametrize("options", STRATEGIES, ids=" ".join)
def test_the_peak_of_a_gpu_is_as_estimated(tmp_path, options):
    processes = min(2, torch.cuda.device_count())
    (tmp_path / "train.py").write_text(textwrap.dedent(RECIPE))
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    words = ("train.py", "hparams.yaml", "--noprogressbar", *options)
    command = python(*words) if processes == 1 else torchrun(processes, *words)
    run = Run(command, tmp_path).wait(COLD_SECONDS)
    assert run.code == 0, run.err
    truth = max(int(line.split()[1]) for line in run.out.splitlines() if line.startswith("PEAK"))
    asked = ("-m", "ddpkit", "estimate", *words, f"--nproc={processes}", "--json=e.json")
    run = Run(python(*asked), tmp_path, name="estimate").wait(COLD_SECONDS)
    assert run.code == 0, run.err
    found = json.loads((tmp_path / "e.json").read_text())
    [row] = [row for row in found["rows"] if row["is_chosen"]]
    assert row["peak"] == pytest.approx(truth, rel=WITHIN)
