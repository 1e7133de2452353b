"""Peaks and advice from given figures: which moment is the peak, what fits, and what is said."""

from __future__ import annotations

import pytest

from ddpkit.see.estimate.advice import NO_MEMORY, advice
from ddpkit.see.estimate.figures import USABLE, MemoryEstimate
from ddpkit.see.estimate.table import report

GB = 1e9


def row(strategy, processes, **changed):
    """A rank of a model with 4 GB of weights, and Adam."""
    whole = {"weights": 4 * GB, "gradients": 4 * GB, "optimizer": 8 * GB}
    others = ("buffers", "averages", "exchange", "after_backward", "in_step")
    return {
        "strategy": strategy,
        "processes": processes,
        "samples": 8,
        "micro_batches": 1,
        "is_chosen": strategy == "ddp" or processes == 1,
        "is_like_one_process": strategy != "local_sgd",
        "refused": "",
        **whole,
        **dict.fromkeys(others, 0.0),
        "step_share": 1.0,
        "keeps_gradients": strategy == "ddp",
        **changed,
    }


def left_out(strategy, processes, why, *, is_chosen=False):
    """What a strategy says that cannot run on so many processes."""
    return {
        "strategy": strategy,
        "processes": processes,
        "is_chosen": is_chosen,
        "impossible": why,
    }


def estimate(memory=None, *, is_line=True, per_sample=1 * GB, processes=(2,), **changed):
    lines = {
        "fresh": {"fixed": 4 * GB, "per_sample": 0.5 * GB},
        "kept": {"fixed": 0.0, "per_sample": per_sample},
        "step": {"fixed": 4 * GB, "per_sample": 0.0},
    }
    rows = [
        row("single", 1),
        row("ddp", 2),
        row("zero1", 2, optimizer=4 * GB, keeps_gradients=True, step_share=0.5),
        row("local_sgd", 2, weights=0.1 * GB),
        left_out("single", 2, "it is for one process"),
    ]
    result = {
        "device": "cpu",
        "device_name": "cpu",
        "device_memory": None,
        "samples": 8,
        "gradients": 4 * GB,
        "is_line": is_line,
        "lines": lines,
        "options": {"strategy": "auto"},
        "rows": rows,
        "unknown": ["data_parallel"],
        "remarks": ["Said by the rehearsal."],
        **changed,
    }
    return MemoryEstimate("train.py hparams.yaml", result, list(processes), memory)


def test_the_peak_is_in_the_passes_or_in_the_step():
    single, ddp, zero1, _ = estimate().rows
    # weights and states, and gradients that come while activations go: 12 + max(4 + 4, 8)
    assert single.peak() == pytest.approx(20 * GB)
    assert single.moments(8) == {"backward": 20 * GB, "step": 20 * GB}
    assert ddp.peak() == pytest.approx(24 * GB)  # gradients stay: 12 + 4 + 8
    assert ddp.moment == "backward"
    assert ddp.peak(1) == pytest.approx(20 * GB)
    assert ddp.moments(1) == {"backward": 17 * GB, "step": 20 * GB}
    assert zero1.moments(8)["step"] == pytest.approx(14 * GB)


def test_the_largest_micro_batch_is_the_last_that_fits():
    _, ddp, *_ = estimate().rows
    memory = 24 * GB / USABLE
    largest = ddp.largest(memory)
    assert largest == 8
    assert ddp.peak(largest) <= USABLE * memory < ddp.peak(largest + 1)
    assert ddp.largest(4 * GB) == 0
    _, flat, *_ = estimate(per_sample=0.0).rows
    assert flat.largest(memory) is None


def test_what_fits_is_said_with_the_room_that_is_left():
    said = advice(estimate(32 * GB))
    assert said.startswith("Fits under ddp on 2 processes: 24.0 GB of 32.0 GB; ")
    assert said.endswith("batches of a process may have 12 samples.")


def test_what_does_not_fit_is_said_with_all_that_does():
    said = advice(estimate(23 * GB))
    room = "24.0 GB, and 20.7 GB of 23.0 GB are free"
    assert said.startswith(f"Does not fit under ddp on 2 processes: {room}. ")
    assert "What does: a batch_size of 4; or zero1 on 2 processes, 20.0 GB." in said
    whole = {"strategy": "auto", "global_batch_size": 16}
    assert "What does: --micro_batch_size=4; or zero1" in advice(estimate(23 * GB, options=whole))
    assert "local_sgd" not in said  # it trains otherwise
    assert "activation_checkpointing" not in said  # activations are a third


def test_a_strategy_that_the_options_refuse_is_not_advised():
    found = estimate(23 * GB)
    for one in found.result["rows"]:
        if one["strategy"] == "zero1":
            one["refused"] = "strategy=zero1 does not work with something."
    assert "zero1" not in advice(found)
    assert "! zero1, 2 processes: strategy=zero1 does not work with something." in report(found)


@pytest.mark.parametrize("memory", [None, 48 * GB])
@pytest.mark.parametrize("is_impossible", [True, False])
def test_a_strategy_of_the_recipe_that_cannot_run_does_not_fit(memory, is_impossible):
    found = estimate(memory)
    rows = found.result["rows"]
    if is_impossible:
        rows[1] = left_out("ddp", 2, "3 samples cannot be divided.", is_chosen=True)
    else:
        rows[1]["refused"] = "3 samples cannot be divided."
    said = advice(found)
    assert said.startswith("Cannot run under ddp on 2 processes: 3 samples cannot be divided.")
    assert "Fits" not in said
    fits = "What runs, and fits: zero1 on 2 processes, 20.0 GB."
    assert (fits in said) is (memory is not None)
    assert found.as_dict()["refusal"] == "3 samples cannot be divided."


def test_what_cannot_run_elsewhere_says_nothing_of_the_number_that_is_meant():
    found = estimate(48 * GB, processes=(2, 3))
    found.result["rows"].append(left_out("ddp", 3, "it cannot be", is_chosen=True))
    assert advice(found).startswith("Fits under ddp on 2 processes")
    assert found.as_dict()["refusal"] is None


def test_what_is_left_out_is_counted():
    rows = [left_out("odd", 1, "it is odd"), left_out("odd", 3, "it is odd")]
    found = estimate()
    found.result["rows"] += [*rows, left_out("alone", 1, "it is not there")]
    said = report(found)
    assert "Left out, odd on 1, 3 processes: it is odd." in said
    assert "Left out, alone on 1 process: it is not there." in said


def test_activations_that_are_most_of_it_can_be_computed_again():
    assert "--activation_checkpointing" in advice(estimate(60 * GB, per_sample=7 * GB))
    given = {"strategy": "auto", "activation_checkpointing": ["Block"]}
    found = estimate(60 * GB, per_sample=7 * GB, options=given)
    assert "--activation_checkpointing" not in advice(found)


def test_nothing_fits():
    said = advice(estimate(1 * GB))
    assert said.endswith("None of the strategies does on these numbers of processes.")


def test_without_memory_there_is_no_verdict():
    said = report(estimate())
    assert said.endswith(NO_MEMORY)
    assert "fits" not in said.splitlines()[2]
    assert "--memory=24GB" in NO_MEMORY


def test_a_strategy_that_does_not_say_is_unknown():
    found = estimate(24 * GB, processes=(2,))
    found.result["rows"][1]["is_chosen"] = False
    assert advice(found) == "The strategy of the recipe does not say what it takes on 2 processes."
    assert "Not known, as the strategy does not say: data_parallel." in report(found)


def test_batches_that_change_have_no_largest_size():
    found = estimate(32 * GB, is_line=False, samples=None)
    said = report(found)
    assert "up to" not in said
    assert "batches of a process may have" not in said
    assert all("largest_micro_batch" not in one for one in found.as_dict()["rows"])


def test_the_table_has_a_row_for_each_rank_and_says_what_is_left_out():
    lines = report(estimate(23 * GB)).splitlines()
    assert lines[0].endswith("memory of each process. Rehearsed on the CPU with 8 samples.")
    heads = "micro-batch weights gradients optimizer activations peak fits up to"
    assert lines[2].split() == heads.split()
    assert [line.split()[0] for line in lines[3:7]] == ["single,", "ddp,", "zero1,", "local_sgd,"]
    assert "Left out, single on 2 processes: it is for one process." in lines
    assert "Said by the rehearsal." in lines


def test_the_figures_for_programs_have_the_same_peaks():
    values = estimate(23 * GB).as_dict()
    ddp = values["rows"][1]
    assert ddp["peak"] == pytest.approx(24 * GB)
    assert ddp["peak_is_in"] == "backward"
    assert ddp["fits"] is False
    assert ddp["largest_micro_batch"] == 4
    assert values["impossible"][0]["impossible"] == "it is for one process"
