"""A save in any hook on two ranks, by all of them or by the main process alone, ends as if never
stopped.
"""

from __future__ import annotations

import pytest

from tests.contract.test_saves_in_hooks import AVERAGED, HOOKS, script
from tests.recipes import assert_same, weights


def run_script(folder, options):
    brain = script(folder, **options)
    average = None if brain.ema is None else brain.ema.state_dict()
    return weights(brain), average, brain.reported


def assert_ranks_go_on(ranks, folder, saves_in, at, *, is_alone, options):
    stop = {"saves_in": saves_in, "at": at, "is_alone": is_alone}
    whole = ranks.run(run_script, folder / "whole", options)
    ranks.run(run_script, folder / "stopped", {**options, **stop})
    for found, expected in zip(
        ranks.run(run_script, folder / "stopped", options),
        whole,
        strict=True,
    ):
        assert_same(found[0], expected[0])
        if expected[1] is not None:
            assert_same(found[1], expected[1])
        assert found[2].items() <= expected[2].items()


STREAM = {"is_stream": True, "batch_size": 2}
SHARED = {**AVERAGED, "shard_evaluation": True, "batch_size": 2}
# Where a place in the data of the training is saved these are a stream, and elsewhere the
# evaluation is divided.
IN_TRAINING = [
    "on_stage_start TRAIN",
    "on_fit_batch_start",
    "TRAIN batch",
    "optimizers_step",
    "on_fit_batch_end",
    "on_stage_end TRAIN",
]
ALONE = ["on_stage_end TRAIN", "on_stage_end VALID", "evaluate_batch", "between epochs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves_in", "is_alone", "options"),
    [
        ("VALID batch", True, {**AVERAGED, "batch_size": 2}),
        *((hook, False, STREAM if hook in IN_TRAINING else SHARED) for hook in HOOKS),
        *((hook, True, STREAM if hook in IN_TRAINING else SHARED) for hook in ALONE),
    ],
)
def test_a_save_in_any_hook_of_two_ranks(ranks, tmp_path, saves_in, is_alone, options):
    at = min(HOOKS[saves_in], 4)
    if options.get("shard_evaluation") and saves_in in {
        "VALID batch",
        "evaluate_batch",
        "TEST batch",
    }:
        at = 1
    if saves_in == "predict_batch":
        at = 1
    assert_ranks_go_on(ranks, tmp_path, saves_in, at, is_alone=is_alone, options=options)
