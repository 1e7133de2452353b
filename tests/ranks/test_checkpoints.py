from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit import checkpoints
from ddpkit.checkpointing import DamageLog
from ddpkit.checkpoints import (
    Checkpointer,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from ddpkit.comm import mailbox
from ddpkit.distributed import if_main_process, run_on_main
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, MainCheckpointError
from tests import speechbrain_marks
from tests.recipes import QUIET, Regression, Value, linear, points, sgd, weights


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir() if not path.is_symlink())


def save_and_load(folder):
    value = Value(dist.get_rank() + 10)
    checkpointer = Checkpointer(folder, {"value": value})
    saved = checkpointer.save_checkpoint(meta={"tensor": torch.ones(2)})
    loaded = checkpointer.recover_if_possible()
    return (
        saved.path,
        loaded == saved,
        value.value,
        [c.path for c in checkpointer.list_checkpoints()],
    )


def test_all_ranks_get_the_checkpoint_and_load_the_state_of_main(ranks, tmp_path):
    results = ranks.run(save_and_load, tmp_path)
    assert results[0] == results[1]
    path, same, value, listed = results[0]
    assert same
    assert value == 10
    assert listed == [path]
    assert '"world_size": 2' in (path / "manifest.json").read_text()


class Part:
    """Has a number of which each rank holds a part."""

    def __init__(self, part):
        self.part = part

    def state_dict(self):
        return {"part": self.part}

    def load_state_dict(self, state):
        self.part = state["part"]


def save_what_is_divided(folder):
    part = Part(dist.get_rank() + 10)
    whole = Value(3)
    checkpointer = Checkpointer(folder, {"part": part, "whole": whole})
    asked = []

    def whole_states(objects):
        asked.append(sorted(objects))
        total = torch.tensor(part.part)
        dist.all_reduce(total)
        return {"part": Part(total.item())}

    checkpointer.divided_states = whole_states
    checkpointer.save_checkpoint()
    checkpointer.recover_if_possible()
    return part.part, asked


def test_states_that_are_divided_over_the_ranks_are_made_whole_before_a_save(ranks, tmp_path):
    assert ranks.run(save_what_is_divided, tmp_path) == [(21, [["part", "whole"]])] * 2


def count_handovers(folder):
    posts = []
    real = mailbox.Mailbox.post
    mailbox.Mailbox.post = lambda self, site, *args: (posts.append(site), real(self, site, *args))[
        1
    ]
    try:
        counts = []
        for number in (1, 5):
            checkpointer = Checkpointer(folder, {f"v{n}": Value(n) for n in range(number)})
            checkpointer.save_and_keep_only(num_to_keep=2)
            counts.append(len(posts))
            posts.clear()
    finally:
        mailbox.Mailbox.post = real
    return counts


def test_one_hand_over_per_checkpoint_and_none_per_file(ranks, tmp_path):
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


@pytest.mark.costly
def test_calls_of_main_alone_hang_nobody_and_mix_up_nothing(ranks, tmp_path):
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


def test_a_save_that_fails_on_main_fails_on_all_and_the_next_one_works(ranks, tmp_path):
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
    real = DamageLog.scan
    if dist.get_rank() == 1:
        DamageLog.scan = lambda self, folder, *mode: real(self, folder, *mode)[:1]
    try:
        loaded = checkpointer.recover_if_possible()
        checkpointer.delete_checkpoints(num_to_keep=2)
    finally:
        DamageLog.scan = real
    return loaded.meta["n"], value.value


def test_main_decides_what_is_loaded_and_deleted(ranks, tmp_path):
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


def test_no_rank_starts_from_scratch_when_all_is_damaged(ranks, tmp_path):
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
        message = str(error)
        kind = type(error)
    dist.barrier()
    left = names(folder)
    dist.barrier()
    del checkpointer.recoverables["odd"]
    checkpointer.save_checkpoint()
    return message, left, kind


def test_a_saver_that_fails_on_one_rank_fails_on_all_and_names_it(ranks, tmp_path):
    kinds = []
    for message, left, kind in ranks.run(fail_per_rank, tmp_path):
        kinds.append(kind)
        assert "rank 1: saving the recoverable 'odd': OSError: [Errno 28] No space left" in message
        assert left == []
    assert kinds == [CheckpointError, MainCheckpointError]
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
    keys = sorted(checkpoints.safe_load(Path(folder, "latest", "model.ckpt")))
    return keys, torch.equal(plain.weight, before), torch.equal(again.module.weight, before)


def test_a_model_in_ddp_is_stored_unwrapped_and_loads_anywhere(ranks, tmp_path):
    assert ranks.run(through_ddp, tmp_path) == [(["bias", "weight"], True, True)] * 2


def save_as_speechbrain(folder, rank_variable):
    library = speechbrain_marks.main_only_module()
    mark = speechbrain_marks.mark
    main_process_only = library.main_process_only

    class Outside(speechbrain_marks.Scheduler):
        @mark("saver")
        @main_process_only
        def save(self, path):
            path.write_text(str(self.rate))

    class Inside(speechbrain_marks.Scheduler):
        @mark("saver")
        def save(self, path):
            library.broadcast(path.write_text(str(self.rate)))

    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, speechbrain_marks.DISTRIBUTED, library)
        patch.setenv("RANK", str(rank)) if rank_variable else patch.delenv("RANK", raising=False)
        objects = {"outside": Outside(rank + 1), "inside": Inside(rank + 1)}
        checkpointer = Checkpointer(folder, objects)
        if if_main_process():
            checkpointer.save_checkpoint()
        checkpointer.recover_if_possible()
        alone = [one.rate for one in objects.values()]
        for one in objects.values():
            one.rate = rank + 5
        checkpointer.save_checkpoint()
        checkpointer.recover_if_possible()
        return alone, [one.rate for one in objects.values()], library.MAIN_PROC_ONLY


@pytest.mark.parametrize("rank_variable", [True, False])
def test_savers_under_speechbrain_s_main_process_only_hang_nobody(ranks, tmp_path, rank_variable):
    assert ranks.run(save_as_speechbrain, tmp_path, rank_variable) == [([1, 1], [5, 5], 0)] * 2


def saved_by_each(folder, asynchronous, every_rank):
    def saver(obj, path):
        path.with_name(f"{path.name}.{dist.get_rank()}").write_text("")

    saver.save_on_main_only = not every_rank
    checkpointer = Checkpointer(folder, {"value": Value()})
    checkpointer.add_recoverable("odd", Value(), custom_save_hook=saver)
    checkpointer.asynchronous = asynchronous
    saved = checkpointer.save_checkpoint({"loss": 0.5})
    checkpointer.wait()
    return saved, saved == checkpointer.find_checkpoint()


@pytest.mark.costly
@pytest.mark.parametrize("every_rank", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_checkpoint_returns_the_checkpoint_on_every_rank(
    ranks,
    tmp_path,
    asynchronous,
    every_rank,
):
    (saved, is_newest), other = ranks.run(saved_by_each, tmp_path, asynchronous, every_rank)
    assert is_newest
    assert saved.meta["loss"] == 0.5
    assert other == (saved, True)


class Text:
    """Saved through a hook of its own, which broadcasts nothing."""

    text = ""

    @speechbrain_marks.mark("saver")
    def _save(self, path):
        path.write_text(self.text)

    @speechbrain_marks.mark("loader")
    def _load(self, path, end_of_epoch):
        self.text = f"{path.parent.name}/{path.name}: {path.read_text()}"


class OnOwnDisk(Checkpointer):
    """Rank 1 stands for a host that has no such folder."""

    def _load(self, checkpoint):
        if dist.get_rank() == 1:
            path = Path("/nowhere", checkpoint.path.name)
            files = {name: path / file.name for name, file in checkpoint.paramfiles.items()}
            checkpoint = checkpoint._replace(path=path, paramfiles=files)
        super()._load(checkpoint)


def resume_on_own_disks(folder, converts):
    model = torch.nn.Linear(2, 1)
    text = Text()
    torch.nn.init.constant_(model.weight, dist.get_rank() + 1.0)
    text.text = f"of rank {dist.get_rank()}"
    checkpointer = OnOwnDisk(folder, {"model": model, "text": text})
    checkpointer.save_checkpoint(name="a")
    if converts:
        checkpoints.convert_torch_save_hooks_to_once_per_node()
    try:
        checkpointer.recover_if_possible()
        checkpointer.load_checkpoint(checkpointer.find_checkpoint())
    except CheckpointError as error:
        return str(error)
    finally:
        checkpoints.Checkpointer.load_mode = "all"
    return model.weight.tolist(), text.text


@pytest.mark.costly
def test_nodes_that_do_not_share_the_folder_get_its_files_from_rank_0(ranks, tmp_path):
    assert (
        ranks.run(resume_on_own_disks, tmp_path / "a", True)
        == [([[1.0, 1.0]], ("CKPT+a/text.ckpt: of rank 0"))] * 2
    )


PIECE = 16 << 20  # bytes that are sent at a time


class Large(torch.nn.Module):
    """Is saved in a file of two pieces."""

    def __init__(self, step):
        super().__init__()
        self.register_buffer("table", torch.arange(PIECE // 4 + 1000, dtype=torch.int32) * step)


def resume_a_large_file(folder):
    model = Large(step=1 + dist.get_rank())
    checkpointer = OnOwnDisk(folder, {"model": model})
    checkpointer.load_mode = "broadcast"
    checkpointer.save_checkpoint(name="a")
    checkpointer.recover_if_possible()
    return torch.equal(model.table, Large(step=1).table)


@pytest.mark.costly
def test_a_file_that_is_sent_in_several_pieces_is_whole_on_every_rank(ranks, tmp_path):
    assert ranks.run(resume_a_large_file, tmp_path) == [True, True]


def test_without_the_word_for_it_such_a_node_says_what_it_lacks(ranks, tmp_path):
    _, lacking = ranks.run(resume_on_own_disks, tmp_path / "a", False)
    assert lacking.startswith("cannot load /nowhere/CKPT+a/model.ckpt")


class Stopping(Regression):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.stops and self.step == 3:
            raise KeyboardInterrupt


def train_on_own_disks(folder, stops):
    checkpoints.convert_torch_save_hooks_to_once_per_node()
    net = linear()
    counter = EpochCounter(1)
    checkpointer = OnOwnDisk(folder, {"net": net, "counter": counter})
    options = {**QUIET, "ckpt_interval_steps": 2}
    brain = Stopping({"net": net}, sgd(momentum=0.9), None, options, checkpointer)
    brain.stops = stops
    try:
        brain.fit(counter, points(20), train_loader_kwargs={"batch_size": 2, "shuffle": True})
    except KeyboardInterrupt:
        assert stops
    finally:
        checkpoints.Checkpointer.load_mode = "all"
    return brain.optimizer_step, weights(brain)["net.weight"].tolist()


@pytest.mark.costly
def test_a_run_goes_on_exactly_where_only_rank_0_s_node_has_the_folder(ranks, tmp_path):
    whole = ranks.run(train_on_own_disks, tmp_path / "whole", False)
    assert ranks.run(train_on_own_disks, tmp_path / "stopped", True)[0][0] == 3
    assert ranks.run(train_on_own_disks, tmp_path / "stopped", False) == whole
