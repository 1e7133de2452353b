"""Results and predictions on a GPU: they come back on the CPU, equal to what the CPU computes."""

from __future__ import annotations

import pytest
import torch

from ddpkit.metrics import Mean
from tests.gpu.test_brain import Classifier, make_data, make_net

pytestmark = pytest.mark.gpu


class Collect(Classifier):
    def compute_objectives(self, predictions, batch, stage):
        self.scores.append(predictions)
        self.mean.update(predictions)
        return super().compute_objectives(predictions, batch, stage)

    def on_stage_start(self, stage, epoch=None):
        self.scores, self.mean = [], Mean()


def results(**options):
    brain = Collect({"net": make_net(torch.float64)}, run_opts={"noprogressbar": True, **options})
    data = make_data(10, torch.float64)
    brain.evaluate(data, test_loader_kwargs={"batch_size": 4, "shuffle": True})
    gathered = brain.gather(torch.cat(brain.scores))
    mean = brain.mean.compute()
    outputs = brain.predict(data, loader_kwargs={"batch_size": 4})
    assert {one.device.type for one in [gathered, *outputs]} == {"cpu"}
    return gathered, torch.stack(outputs), torch.tensor(mean, dtype=torch.float64)


@pytest.mark.parametrize("data_parallel", [False, True])
def test_results_are_those_of_the_cpu(data_parallel):
    torch.testing.assert_close(
        results(data_parallel_backend=data_parallel),
        results(device="cpu"),
        rtol=0,
        atol=1e-9,
    )
