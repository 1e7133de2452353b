"""Ranks that see other files under the path of ``--init_from`` end together; a run that is killed
while it moves its checkpoints away begins from the same one again.
"""

from __future__ import annotations

import pytest
import torch

from ddpkit.checkpointing import WeightSource, storage
from ddpkit.distributed import get_rank, run_on_main
from ddpkit.run import initial_weights
from tests.contract import test_init_from as contract
from tests.ranks.test_init_from import Net, begun
from tests.recipes import Killed, SavesAfterTraining, assert_same, weights


def own_file(folder, kind):
    path = folder / "base.pt"
    if get_rank():  # as on another machine
        path = folder / "other" / "base.pt"
        path.parent.mkdir()
        if kind == "other":
            weights = torch.load(folder / "base.pt", weights_only=True)
            torch.save({name: value + 1 for name, value in weights.items()}, path)
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


@pytest.mark.slow
def test_killed_between_two_moves_it_begins_from_the_newest_again(tmp_path, monkeypatch):
    save = tmp_path / "save"
    for name, seed in (("z", 1), ("a", 2)):
        brain = contract.begun(contract.Net(seed=seed), None, folder=save)
        brain.modules.net.load_state_dict(contract.Net(seed=seed).state_dict())
        brain.checkpointer.save_checkpoint(name=name)

    class Dying(storage.FileOperations):
        moved = 0

        def rename(self, source, target):
            self.moved += source.name.startswith("CKPT+")
            if self.moved == 2:
                raise Killed
            super().rename(source, target)

    options = {"folder": save, "resume": "never"}
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FILES", Dying())
        with pytest.raises(Killed):
            contract.begun(contract.Net(seed=8), save, SavesAfterTraining, **options)
    assert [path.name for path in save.glob("CKPT+*")] == ["CKPT+a"]
    assert_same(weights(contract.begun(contract.Net(seed=9), save, **options)), weights(brain))
