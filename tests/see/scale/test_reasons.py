"""The reason in a sentence: for each thing that can hold a size back, what, by how much and what to
try.
"""

from __future__ import annotations

import pytest

from ddpkit.see.scale.losses import losses_of
from ddpkit.see.scale.reasons import reason_of
from tests.see.scale.results import last_row, result

BASE = result(1)
WAITING = {"exchange": 32.0}
HALF = {"per_process": 24.0}

REASONS = {
    "gradients": (
        result(2, ranks=[WAITING] * 2, exchanged_bytes=50_400_000),
        (
            "ddp, 2 processes: 0.59x, 30 %. Slower than 1 process. 70 % of a step waits for "
            "gradients: 50.4 MB at 1.6 GB/s. Try --ddp_comm_hook=bf16, larger batches or "
            "accumulation (--grad_accumulation_factor)."
        ),
    ),
    "gradients that are rounded already": (
        result(
            2,
            ranks=[WAITING] * 2,
            exchanged_bytes=50_400_000,
            options={"ddp_comm_hook": "bf16"},
        ),
        "50.4 MB at 1.6 GB/s. Try larger batches or accumulation",
    ),
    "fsdp's gradients": (
        result(2, way="fsdp", ranks=[WAITING] * 2, exchanged_bytes=50_400_000),
        "Try --strategy=ddp, if the model fits, larger batches or accumulation",
    ),
    "small gradients": (
        result(2, ranks=[WAITING] * 2, exchanged_bytes=33_200),
        (
            "70 % of a step waits for gradients. They are small (33.2 kB), so each exchange costs "
            "time, and not its size."
        ),
    ),
    "an exchange of unknown size": (
        result(2, ranks=[WAITING] * 2),
        "70 % of a step waits for other processes.",
    ),
    "the loader": (
        result(2, ranks=[{"data": 20.0, "exchange": 5.0}, {"data": 25.0}]),
        (
            "59 % of a step waits for data (rank 1 most, 25 ms): the loader is the limit. Try "
            "num_workers=2 or more"
        ),
    ),
    "more loader workers than cores": (
        result(2, ranks=[{"data": 20.0}] * 2, loader_workers=4),
        "2 processes with 4 loader workers each share 8 cores. Try cheaper loading",
    ),
    "few loader workers": (
        result(2, ranks=[{"data": 20.0}] * 2, loader_workers=1),
        "Try more than num_workers=1, or data prepared beforehand.",
    ),
    "a late rank": (
        result(2, ranks=[{"exchange": 20.0}, {"forward": 24.0}], last=[0.02, 0.98]),
        (
            "60 % of a step waits for rank 1, the last one in 98 % of the steps: its forward "
            "phase takes 20 ms more than that of the others. Look at what it does there, and at "
            "its machine with `python -m ddpkit doctor`."
        ),
    ),
    "a late rank beside a slower exchange": (
        result(
            2,
            ranks=[{"exchange": 20.0}, {"move": 8.0, "exchange": 12.0}],
            last=[0.0, 1.0],
            transfer_seconds=0.012,
        ),
        (
            "Also, 24 % of a step waits for rank 1, the last one in 100 % of the steps: its move "
            "phase, which ends where the model is called, takes "
        ),
    ),
    "ranks that are late by turns": (
        result(2, ranks=[{"exchange": 20.0}] * 2, last=[0.5, 0.5], transfer_seconds=0.001),
        "57 % of a step waits for the slowest process, now this one, now that one.",
    ),
    "an optimizer that no process shares": (
        result(2, ranks=[{"optimizer": 13.0}] * 2, **HALF),
        (
            "51 % of a step is the optimizer's, which every process does for all parameters. Try "
            "--strategy=zero1"
        ),
    ),
    "the rest of the recipe": (
        result(2, ranks=[{"other": 13.0}] * 2),
        "50 % of a step is outside of data, forward, backward and optimizer: on_fit_batch_end",
    ),
    "batches that are too small": (
        result(2, **HALF),
        (
            "The batch is too small: a process has 24 samples in a step, and forward and backward "
            "pass take 2.0x as long per sample as with 48. Try a larger global batch; --weak "
            "shows what that gives."
        ),
    ),
    "slower computing": (
        result(2, device="cuda", ranks=[{"backward": 24.0}] * 2),
        (
            "Forward and backward pass take 2.3x as long per sample, with the same batch. "
            "Something is shared or throttled"
        ),
    ),
    "processes that wait for cores": (
        result(2, ranks=[{"backward": 24.0}] * 2, core_waits=[0.4, 0.35], loader_workers=8),
        (
            "The processes wait 40 % of the time for a core: 2 processes with 1 thread and 8 "
            "loader workers each on 8 cores. Try fewer processes"
        ),
    ),
    "processes that are late for want of cores": (
        result(2, ranks=[{"exchange": 20.0}] * 2, transfer_seconds=0.0, core_waits=[0.4, 0.4]),
        "The processes wait 40 % of the time for a core",
    ),
    "nothing": (
        result(2, ranks=[{"exchange": 0.5}] * 2),
        "ddp, 2 processes: 1.93x, 96 %, good. Nothing is lost that is worth a change.",
    ),
}


@pytest.mark.parametrize("cause", REASONS)
def test_the_reason_says_what_and_by_how_much_and_what_to_try(cause):
    found, words = REASONS[cause]
    assert words in reason_of(last_row(BASE, found))


def test_cores_that_one_process_has_used_before_are_no_gain():
    found = result(2, ranks=[{"forward": 3.5, "backward": 7.0}] * 2, threads=4, **HALF)
    assert reason_of(last_row(result(1, threads=8), found)) == (
        "ddp, 2 processes: 1.13x, 56 %. Forward and backward pass take 1.8x as long per sample: "
        "each process has 4 threads, and 1 process had 8 threads of the same 8 cores. More "
        "processes give these cores nothing new to do. Try more machines, or a GPU."
    )


def test_cores_that_other_programs_have_taken_before_are_not_blamed_on_the_processes():
    base = result(1, core_waits=[0.5])
    found = result(2, ranks=[{"backward": 24.0}] * 2, core_waits=[0.5] * 2)
    assert "for a core" not in reason_of(last_row(base, found))


def test_a_speed_up_that_cannot_be_is_doubted():
    row = last_row(result(1, ranks=[{"forward": 400.0}]), result(2))
    assert row.word == "doubtful"
    assert "held 1 process back" in reason_of(row)


def test_the_smallest_size_has_a_reason_only_where_it_waits_for_data():
    assert reason_of(last_row(BASE)) == ""
    assert reason_of(last_row(result(1, ranks=[{"data": 13.3}]))).startswith(
        "single, 1 process: 50 % of a step waits for data. Try num_workers=2"
    )


@pytest.mark.parametrize("cause", REASONS)
def test_the_account_of_losses_adds_up(cause):
    row = last_row(BASE, REASONS[cause][0])
    lost = row.slice.step - row.work * row.base.step
    assert losses_of(row).total == pytest.approx(lost)
