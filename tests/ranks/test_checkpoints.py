from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit import checkpoints, handover
from ddpkit.checkpoint_records import DamageLedger
from ddpkit.checkpoints import (
    Checkpointer,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from ddpkit.distributed import if_main_process, run_on_main
from ddpkit.errors import CheckpointError, RankCheckpointError, RankFailedError


class Value:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def save_and_load(folder):
    value = Value(dist.get_rank() + 10)
    checkpointer = Checkpointer(folder, {"value": value})
    saved = checkpointer.save_checkpoint(meta={"tensor": torch.ones(2)})
    loaded = checkpointer.recover_if_possible()
    return saved.path, loaded == saved, value.value, [c.path for c in checkpointer.list_checkpoints()]


def test_all_ranks_get_the_checkpoint_and_load_the_state_of_main(ranks, tmp_path):
    results = ranks.run(save_and_load, tmp_path)
    assert results[0] == results[1]
    path, same, value, listed = results[0]
    assert same
    assert value == 10
    assert listed == [path]
    assert '"world_size": 2' in (path / "manifest.json").read_text()


def count_handovers(folder):
    posts = []
    real = handover.Handover.post
    handover.Handover.post = lambda self, site, *args: (posts.append(site), real(self, site, *args))[1]
    try:
        counts = []
        for number in (1, 5):
            checkpointer = Checkpointer(folder, {f"v{n}": Value(n) for n in range(number)})
            checkpointer.save_and_keep_only(num_to_keep=2)
            counts.append(len(posts))
            posts.clear()
    finally:
        handover.Handover.post = real
    return counts


def test_d25_one_hand_over_per_checkpoint_and_none_per_file(ranks, tmp_path):
    assert ranks.run(count_handovers, tmp_path) == [[1, 1], [0, 0]]


def one_sided(folder):
    checkpointer = Checkpointer(folder, {"value": Value()})
    if if_main_process():
        for n in range(3):
            checkpointer.save_and_keep_only(meta={"n": n}, num_to_keep=2)
        checkpointer.delete_checkpoints(num_to_keep=1)
        assert checkpointer.recover_if_possible().meta["n"] == 2
    found = checkpointer.find_checkpoint().meta["n"]
    checkpointer.save_checkpoint(meta={"n": 9})
    run_on_main(checkpointer.save_checkpoint, kwargs={"meta": {"n": 10}})
    return found, [ckpt.meta["n"] for ckpt in checkpointer.find_checkpoints(max_key="n")]


def test_d1_calls_of_main_alone_hang_nobody_and_mix_up_nothing(ranks, tmp_path):
    assert ranks.run(one_sided, tmp_path) == [(2, [10, 9, 2])] * 2


def fail_on_main(folder):
    def saver(obj, path):
        path.write_text("half")
        raise KeyError("gone")

    checkpointer = Checkpointer(folder)
    checkpointer.add_recoverable("value", Value(), custom_save_hook=saver)
    try:
        checkpointer.save_checkpoint()
    except CheckpointError as error:
        message = str(error)
    checkpointer.custom_save_hooks.clear()
    return message, checkpointer.save_checkpoint().path


def test_d2_a_save_that_fails_on_main_fails_on_all_and_the_next_one_works(ranks, tmp_path):
    (message, path), (other_message, other_path) = ranks.run(fail_on_main, tmp_path)
    assert "recoverable 'value': KeyError: 'gone'" in message
    assert "recoverable 'value': KeyError: 'gone'" in other_message
    assert path == other_path
    assert names(tmp_path) == [path.name]


def different_views(folder):
    """Rank 1 sees an older state of the folder, as on a file system that lags."""
    value = Value()
    checkpointer = Checkpointer(folder, {"value": value})
    for n in (1, 2, 3):
        value.value = n
        checkpointer.save_checkpoint(meta={"n": n, "unixtime": n})
    value.value = 0
    real = DamageLedger.scan
    if dist.get_rank() == 1:
        DamageLedger.scan = lambda self, folder, *mode: real(self, folder, *mode)[:1]
    try:
        loaded = checkpointer.recover_if_possible()
        checkpointer.delete_checkpoints(num_to_keep=2)
    finally:
        DamageLedger.scan = real
    return loaded.meta["n"], value.value


def test_k10_main_decides_what_is_loaded_and_deleted(ranks, tmp_path):
    assert ranks.run(different_views, tmp_path) == [(3, 3)] * 2
    assert len(names(tmp_path)) == 2


def all_damaged(folder):
    checkpointer = Checkpointer(folder, {"value": Value()})
    ckpt = checkpointer.save_checkpoint()
    if dist.get_rank() == 0:
        ckpt.paramfiles["value"].unlink()
    try:
        checkpointer.recover_if_possible()
    except CheckpointError as error:
        return "value.ckpt is missing" in str(error)
    return "loaded"


def test_k2_no_rank_starts_from_scratch_when_all_is_damaged(ranks, tmp_path):
    assert ranks.run(all_damaged, tmp_path) == [True, True]


@register_checkpoint_hooks(save_on_main_only=False)
class PerRank:
    """Saves one file per rank, into a folder."""

    def __init__(self):
        self.value = dist.get_rank() + 100

    @mark_as_saver
    def _save(self, path):
        path.mkdir(exist_ok=True)
        numbers = [None, None]
        dist.all_gather_object(numbers, self.value)  # a saver on every rank may use collectives
        (path / f"rank{dist.get_rank()}").write_text(str(numbers))

    @mark_as_loader
    def _load(self, path, end_of_epoch):
        self.value = (path / f"rank{dist.get_rank()}").read_text()


def save_per_rank(folder):
    per_rank = PerRank()
    checkpointer = Checkpointer(folder, {"per_rank": per_rank, "value": Value(3)})
    checkpointer.save_and_keep_only()
    checkpointer.save_and_keep_only()
    checkpointer.recover_if_possible()
    return per_rank.value, checkpointer.find_checkpoint().path


def test_a_saver_on_every_rank_is_complete_before_the_checkpoint_is(ranks, tmp_path):
    results = ranks.run(save_per_rank, tmp_path)
    assert results[0] == results[1]
    value, path = results[0]
    assert value == "[100, 101]"
    assert names(tmp_path) == [path.name]
    assert names(path / "per_rank.ckpt") == ["rank0", "rank1"]
    assert "per_rank.ckpt/rank1" in (path / "manifest.json").read_text()
    assert names(path) == ["CKPT.yaml", "manifest.json", "per_rank.ckpt", "value.ckpt"]


def fail_per_rank(folder):
    def saver(obj, path):
        path.mkdir(exist_ok=True)
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    saver.save_on_main_only = False
    checkpointer = Checkpointer(folder, {"value": Value()})
    checkpointer.add_recoverable("odd", object(), lambda *args: None, saver)
    try:
        checkpointer.save_checkpoint()
    except CheckpointError as error:
        message, kind = str(error), type(error)
    dist.barrier()
    left = names(folder)
    dist.barrier()
    del checkpointer.recoverables["odd"]
    checkpointer.save_checkpoint()
    return message, left, kind


def test_a_saver_that_fails_on_one_rank_fails_on_all_and_names_it(ranks, tmp_path):
    """Only where it failed is it at first hand: torchrun calls that rank the root cause."""
    kinds = []
    for message, left, kind in ranks.run(fail_per_rank, tmp_path):
        kinds.append((kind, issubclass(kind, RankFailedError)))
        assert "rank 1: saving the recoverable 'odd': OSError: [Errno 28] No space left" in message
        assert "rank 0" not in message
        assert left == []
    assert kinds == [(RankCheckpointError, True), (CheckpointError, False)]
    assert len(names(tmp_path)) == 1


def make_the_folder(folder):
    made = []
    real = Path.mkdir
    Path.mkdir = lambda self, *args, **kwargs: (made.append(self), real(self, *args, **kwargs))[1]
    try:
        Checkpointer(Path(folder) / "save")
    finally:
        Path.mkdir = real
    return len(made)


def test_only_main_makes_the_folder(ranks, tmp_path):
    on_main, on_other = ranks.run(make_the_folder, tmp_path)
    assert on_main > 0
    assert on_other == 0


def through_ddp(folder):
    torch.manual_seed(dist.get_rank())
    wrapped = DistributedDataParallel(nn.Linear(2, 1))
    before = wrapped.module.weight.clone()
    Checkpointer(folder, {"model": wrapped}).save_checkpoint()
    plain = nn.Linear(2, 1)
    Checkpointer(folder, {"model": plain}).recover_if_possible()
    again = DistributedDataParallel(nn.Linear(2, 1))
    Checkpointer(folder, {"model": again}).recover_if_possible()
    keys = sorted(checkpoints.safe_load(next(Path(folder).iterdir()) / "model.ckpt"))
    return keys, torch.equal(plain.weight, before), torch.equal(again.module.weight, before)


def test_a_model_in_ddp_is_stored_unwrapped_and_loads_anywhere(ranks, tmp_path):
    assert ranks.run(through_ddp, tmp_path) == [(["bias", "weight"], True, True)] * 2
