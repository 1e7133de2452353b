"""Ranks that see other files under the path of ``--init_from`` end together."""

from __future__ import annotations

import pytest
import torch

from ddpkit.checkpointing import WeightSource
from ddpkit.distributed import get_rank, run_on_main
from ddpkit.run import initial_weights
from tests.ranks.test_init_from import Net, begun


def own_file(folder, kind):
    path = folder / "base.pt"
    if get_rank():  # as on another machine
        path = folder / "other" / "base.pt"
        path.parent.mkdir()
        if kind == "other":
            torch.save(Net().state_dict(), path)
    run_on_main(lambda: None)
    return path


def begin_from_own_file(folder, kind):
    path = own_file(folder, kind)
    given = str(folder / "base.pt")
    with pytest.MonkeyPatch.context() as patch:
        # stands for two disks: each rank opens its own file
        patch.setattr(initial_weights, "_found_on_main", lambda *_: WeightSource(path))
        begun(given)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("other", "file base.pt of init_from"),
        pytest.param("gone", "base.pt cannot be read", marks=pytest.mark.slow),
    ],
)
def test_a_file_that_a_rank_cannot_read_or_reads_otherwise_ends_all(ranks, tmp_path, kind, words):
    torch.save(Net().state_dict(), tmp_path / "base.pt")
    outcomes = ranks.outcomes(begin_from_own_file, tmp_path, kind, world_size=2)
    assert not any(one.ok for one in outcomes)
    assert all(words in one.error for one in outcomes)
