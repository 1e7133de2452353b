"""Two ranks on machines with a mirror each: what is divided over them, and what each saves."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddpkit.checkpointing import run_savers
from ddpkit.checkpoints import Checkpointer, whole_state_dict
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.run import prediction_files, shared_folder
from tests.mirror.conftest import Dead, Trained, names_in, other_machine, points, sgd
from tests.recipes import QUIET, Regression

EPOCHS = 3


@contextlib.contextmanager
def own_machine(folder):
    """Have this rank be on a machine with a disk of its own."""
    rank = dist.get_rank()
    disk = folder / f"disk{rank}"
    disk.mkdir(parents=True)
    with (
        mock.patch.dict(os.environ, TMPDIR=str(disk)),
        mock.patch("tempfile.tempdir", None),
        mock.patch.object(shared_folder, "this_place", return_value=(f"node{rank}", "", "")),
        mock.patch.object(prediction_files, "this_place", return_value=(f"node{rank}", "", "")),
    ):
        try:
            yield disk
        finally:
            other_machine()


class DiesLate(Trained):
    dies_in = 2


def brain_of(checkpointer, kind=Trained, **options):
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    net.double()
    counter = EpochCounter(EPOCHS)
    if checkpointer is not None:
        checkpointer.add_recoverables({"net": net, "counter": counter})
    given = {**QUIET, "global_batch_size": 4, **options}
    return kind({"net": net}, sgd(momentum=0.5), None, given, checkpointer), counter


def whole(brain):
    state = whole_state_dict(brain.modules.net)
    return None if state is None else torch.cat([tensor.flatten() for tensor in state.values()])


def stop_and_go_on(folder, options):
    """Train, die in the second epoch, and go on on two other machines; return where each rank has
    read the checkpoint, and the weights.
    """
    url = f"file://{folder}/store/run"
    with own_machine(folder / "first"):
        brain, counter = brain_of(Checkpointer(url), DiesLate, **options)
        with pytest.raises(Dead):
            brain.fit(counter, points(8))
    with own_machine(folder / "second") as disk:
        checkpointer = Checkpointer(url)
        brain, counter = brain_of(checkpointer, **options)
        brain.fit(counter, points(8))
        loaded = checkpointer.last_loaded
        is_own = loaded.is_relative_to(disk)
        return loaded.name, is_own, brain.optimizer_step, whole(brain)


def uninterrupted(options):
    brain, counter = brain_of(None, Regression, **options)
    brain.fit(counter, points(8))
    return brain.optimizer_step, whole(brain)


@pytest.mark.costly
@pytest.mark.parametrize(
    "strategy",
    ["fsdp", pytest.param("zero1", marks=pytest.mark.exhaustive)],
)
def test_what_is_divided_goes_up_whole_and_each_machine_reads_its_own_copy(
    ranks, tmp_path, strategy
):
    options = {"strategy": strategy}
    expected, _ = ranks.run(uninterrupted, options)
    found = ranks.run(stop_and_go_on, tmp_path, options)
    assert len({name for name, *_ in found}) == 1
    assert [is_own for _, is_own, *_ in found] == [True, True]
    assert {steps for *_, steps, _ in found} == {expected[0]}
    assert torch.equal(found[0][3], expected[1])
    kept = names_in(f"file://{tmp_path}/store/run")
    assert any(name.endswith("/optimizer.ckpt") for name in kept)
    assert not [name for name in kept if name.endswith(".safetensors")]


class PerRank:
    """Writes a file on each rank."""


def save_per_rank(obj, path):
    path.mkdir(parents=True, exist_ok=True)
    (path / f"rank{dist.get_rank()}").write_text("")


save_per_rank.save_on_main_only = False


def with_saver(checkpointer):
    checkpointer.add_recoverable("per_rank", PerRank(), lambda *args: None, save_per_rank)
    return checkpointer


def refused(brain, counter):
    with pytest.raises(ConfigError) as caught:
        brain.fit(counter, points(8))
    return str(caught.value), brain.optimizer_step


def start_in_mirrors(folder, debug):
    with own_machine(folder):
        checkpointer = with_saver(Checkpointer(f"file://{folder}/store/run"))
        return refused(*brain_of(checkpointer, debug=debug))


@pytest.mark.parametrize(
    ("debug", "where"),
    [(False, "store/run. What"), (True, "for --debug. What")],
)
def test_a_saver_on_every_rank_is_refused_by_name_before_training(ranks, tmp_path, debug, where):
    for words, steps in ranks.run(start_in_mirrors, tmp_path, debug):
        assert "'per_rank' cannot be saved: its saver runs on every rank" in words
        assert "each of the 2 machines has a folder of its own" in words
        assert where in words
        assert steps == 0


def start_on_own_disks(folder):
    own = folder / str(dist.get_rank())
    own.mkdir()
    return refused(*brain_of(with_saver(Checkpointer(own))))


def test_a_saver_on_every_rank_is_refused_where_the_disks_are_of_each_machine(ranks, tmp_path):
    for words, steps in ranks.run(start_on_own_disks, tmp_path):
        assert "'per_rank' cannot be saved: rank 1: " in words
        assert "whose own disk it would be on" in words
        assert "all machines must share the folder" in words
        assert steps == 0


def test_a_hook_does_not_make_the_folder_of_another_machine(tmp_path):
    hooks = {"per_rank": save_per_rank}
    with pytest.raises(CheckpointError, match="'per_rank': .*which another rank has made, is not"):
        run_savers(hooks, {"per_rank": None}, tmp_path / "theirs", made_by_another_rank=True)
    assert list(tmp_path.iterdir()) == []


def start_on_one_machine(folder):
    checkpointer = with_saver(Checkpointer(f"file://{folder}/store/run"))
    try:
        brain, counter = brain_of(checkpointer)
        brain.fit(counter, points(8))
        return brain.optimizer_step
    finally:
        other_machine()


def test_on_one_machine_the_files_of_all_ranks_go_up(ranks, tmp_path):
    assert ranks.run(start_on_one_machine, tmp_path) == [6, 6]
    kept = [name for name in names_in(f"file://{tmp_path}/store/run") if "/per_rank.ckpt/" in name]
    assert {name.rpartition("/")[2] for name in kept} == {"rank0", "rank1"}


def predict_in_mirrors(folder, name):
    with own_machine(folder):
        checkpointer = Checkpointer(f"file://{folder}/store/run")
        brain, _ = brain_of(checkpointer, Forward)
        with pytest.raises(ConfigError) as caught:
            brain.predict(points(8), output=checkpointer.checkpoints_dir / name)
        return str(caught.value), brain.batches


class Forward(Trained):
    batches = 0

    def compute_forward(self, batch, stage):
        self.batches += 1
        return super().compute_forward(batch, stage)


@pytest.mark.parametrize("name", ["out.jsonl", "part-*.jsonl"])
def test_a_prediction_into_mirrors_of_several_machines_is_refused_before_its_first_batch(
    ranks, tmp_path, name
):
    found = ranks.run(predict_in_mirrors, tmp_path, name)
    assert {batches for _, batches in found} == {0}
    for message, _ in found:
        assert "each of the 2 machines has a folder of its own that mirrors the store" in message
