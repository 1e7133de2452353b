"""F7: whatever happens to the files of a checkpoint is noticed, or changes nothing."""

from __future__ import annotations

import random
import shutil
from collections import Counter

import pytest
import torch

from ddpkit.distributed import ddp_barrier, if_main_process
from ddpkit.errors import CheckpointError
from tests.cells import some_of
from tests.checkpointing.sharded_checkpoints import put_in_shards
from tests.faults.damage import (
    damage,
    delete,
    empty,
    files_of,
    flip_a_bit,
    grow,
    listing,
    restore,
    truncate,
)
from tests.faults.storage_tools import (
    Run,
    Warnings,
    forked,
    names,
    new_folder,
    obey_permissions,
    save,
)
from tests.rank_pool import RankPool

TRIALS = 1000
SHARDED_TRIALS = 300
STEPS = (1, 2, 3)  # the last is what gets damaged; what falls back finds the one before


@pytest.fixture(scope="module")
def zygote():
    """One process without threads; its forks are without the right to pass over permissions."""
    with RankPool(timeout=600) as pool:
        yield lambda function, *args: pool.run(forked, function, *args, world_size=1, init=False)[0]


class Random(Run):
    """A run with a random state, so that no two bits of it are alike by chance."""

    def stamp(self, step):
        generator = torch.Generator().manual_seed(step)
        for tensor in self.tensors():
            if tensor.is_floating_point():
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator))
        self.text.value = self.folder.value = step

    def state(self):
        return (
            [tensor.detach().clone() for tensor in self.tensors()],
            self.text.value,
            self.folder.value,
        )


def same(one, other):
    return one[1:] == other[1:] and all(
        torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)
    )


def make(folder, shards=0):
    """Save three steps; return their checkpoints and states by step, and a safe copy of the
    last.

    With shards so many ranks have written the model and the optimizer.
    """
    run = Random()
    checkpointer = run.checkpointer(folder / "save")
    states = {}
    for step in STEPS:
        save(run, checkpointer, step, name=str(step), num_to_keep=9)
        states[step] = run.state()
        if shards:
            put_in_shards(folder / "save" / f"CKPT+{step}", ["model", "optimizer"], shards)
    shutil.copytree(folder / "save" / "CKPT+3", folder / "pristine")
    return states


def fate(folder, states, changed, run, checkpointer):
    """Recover, and say whether the damage was "harmless" or "detected"; anything else raises."""
    with Warnings() as warned:
        found = checkpointer.recover_if_possible()
    step = found.meta["step"]
    assert found.meta["unixtime"] == 1000.0 + step
    assert same(run.state(), states[step]), f"what is loaded of step {step} is not what was saved"
    if step == 3:
        assert warned.texts == []
        return "harmless"
    assert step == 2, f"fell back to {step}"
    about = [text for text in warned.texts if str(folder / "save" / "CKPT+3") in text]
    assert len(about) == 1, warned.texts
    reason = about[0].partition("is damaged and passed over: ")[2]
    if changed != [folder / "save" / "CKPT+3"]:
        tops = {path.relative_to(folder / "save" / "CKPT+3").parts[0] for path in changed}
        # another one that is whole: then it seems to be the files that have changed
        if tops == {"manifest.json"}:
            tops |= {"fails its checksum", "bytes instead of"}
        assert any(top in reason for top in tops), f"the warning names none of {tops}: {reason}"
    assert len(reason) > 15, reason
    return "detected"


def fuzz(seed, trials, keep_every, shards=0):
    """Damage, recover and restore; return how often each kind was drawn and each fate came of
    it.
    """
    obey_permissions()
    draw = random.Random(seed)
    counts = Counter()
    with new_folder() as folder:
        states = make(folder, shards)
        victim = folder / "save" / "CKPT+3"
        for trial in range(trials):
            kind, changed = damage(draw, victim, folder / "save" / "CKPT+1")
            run = Random()
            checkpointer = run.checkpointer(folder / "save")
            try:
                outcome = fate(folder, states, changed, run, checkpointer)
            except BaseException as error:
                raise AssertionError(
                    f"trial {trial}: {kind} of {[path.name for path in changed]}"
                ) from error
            counts[kind, outcome] += 1
            if outcome == "detected" and trial % keep_every == 0:
                before = listing(victim)
                save(run, checkpointer, 4, name="4", num_to_keep=3)
                assert listing(victim) == before, f"trial {trial}: a damaged checkpoint was touched"
                assert names(folder / "save") == [f"CKPT+{step}" for step in (1, 2, 3, 4)]
                shutil.rmtree(folder / "save" / "CKPT+4")
            restore(victim, folder / "pristine")
    return counts


def judge(counts, trials):
    detected = sum(count for (_, outcome), count in counts.items() if outcome == "detected")
    harmless = sum(count for (_, outcome), count in counts.items() if outcome == "harmless")
    print(f"{trials} damages: {detected} detected, {harmless} harmless; {dict(counts)}")
    assert detected + harmless == trials
    assert harmless < 0.02 * trials  # such as two files alike in place of each other
    assert {kind for kind, outcome in counts if outcome == "harmless"} <= {
        "truncate",
        "swap_within",
        "swap_across",
    }


@pytest.mark.parametrize("seed", some_of(range(4), range(2)))
def test_every_damage_is_detected_or_harmless(zygote, seed):
    counts = zygote(fuzz, seed, TRIALS // 4, 10)
    judge(counts, TRIALS // 4)
    assert len({kind for kind, _ in counts}) == 12


@pytest.mark.parametrize("shards", [2, 3])
def test_every_damage_of_a_checkpoint_in_shards_is_detected_or_harmless(zygote, shards):
    counts = zygote(fuzz, 50 + shards, SHARDED_TRIALS // 2, 10, shards)
    judge(counts, SHARDED_TRIALS // 2)
    assert {"swap_within", "swap_across", "truncate", "flip_a_bit", "delete"} <= {
        kind for kind, outcome in counts if outcome == "detected"
    }


# ---------------------------------------------------------------------------------- nothing is left


@pytest.mark.parametrize("change", [empty, delete, truncate, flip_a_bit])
def test_where_none_is_whole_a_run_does_not_start_from_scratch(tmp_path, change):
    states = make(tmp_path)
    draw = random.Random(5)
    for step in STEPS:
        change(draw, tmp_path / "save" / f"CKPT+{step}" / "optimizer.ckpt", None)
    before = listing(tmp_path / "save")
    run = Random()
    untouched = run.state()
    with pytest.raises(CheckpointError) as raised:
        run.checkpointer(tmp_path / "save").recover_if_possible()
    for step in STEPS:
        assert f"CKPT+{step}: optimizer.ckpt" in str(raised.value)
    assert same(run.state(), untouched)
    assert listing(tmp_path / "save") == before
    assert len(states) == 3


def test_what_is_left_of_a_removed_checkpoint_is_no_reason_to_start_from_scratch(tmp_path):
    make(tmp_path)
    for step in STEPS:
        for path in files_of(tmp_path / "save" / f"CKPT+{step}"):
            if path.name != "model.ckpt":
                path.unlink()
    with pytest.raises(CheckpointError, match="CKPT.yaml"):
        Random().checkpointer(tmp_path / "save").recover_if_possible()


# ------------------------------------------------------------------------------ how closely to look


@pytest.mark.parametrize(
    ("change", "mode", "noticed"),
    [
        (empty, "size", True),
        (delete, "size", True),
        (truncate, "size", True),
        (grow, "size", True),
        (flip_a_bit, "size", False),
        (flip_a_bit, "full", True),
        (truncate, "off", False),
        (empty, "off", False),
    ],
)
def test_how_closely_files_are_verified(tmp_path, change, mode, noticed):
    make(tmp_path)
    draw = random.Random(3)
    for _ in range(5):
        path = change(draw, tmp_path / "save" / "CKPT+3" / "optimizer.ckpt", None)[0]
        checkpointer = Random().checkpointer(tmp_path / "save")
        checkpointer.verify_mode = mode
        found = checkpointer.find_checkpoint()
        assert (found.path.name == "CKPT+2") == noticed
        # nothing is found out before it is loaded, and then it is an error that names the file
        if mode == "off":
            with pytest.raises(CheckpointError, match="optimizer.ckpt"):
                checkpointer.recover_if_possible()
        if not path.exists():
            break
        restore(tmp_path / "save" / "CKPT+3", tmp_path / "pristine")


# -------------------------------------------------------------------------------------------- ranks


def choose_often(folder, times):
    """Damage and recover; return for each time what was chosen, what is held then, and what was
    warned of.
    """
    draw = random.Random(11)
    victim = folder / "save" / "CKPT+3"
    older = folder / "save" / "CKPT+1"
    outcomes = []
    for _ in range(times):
        kind = damage(draw, victim, older)[0] if if_main_process() else None
        ddp_barrier()
        run = Random()
        with Warnings() as warned:
            found = run.checkpointer(folder / "save").recover_if_possible()
        values = torch.cat([tensor.flatten().double() for tensor in run.tensors()]).tolist()
        outcomes.append(
            (
                found.path.name,
                run.text.value,
                values,
                sum("CKPT+3" in text for text in warned.texts),
                kind,
            )
        )
        ddp_barrier()
        if if_main_process():
            restore(victim, folder / "pristine")
    return outcomes


def test_all_ranks_choose_the_same_one(ranks, tmp_path):
    make(tmp_path)
    main, other = ranks.run(choose_often, tmp_path, 30)
    for mine, its in zip(main, other, strict=True):
        assert mine[:3] == its[:3], mine[4]
        assert mine[3] == (mine[0] == "CKPT+2"), "main says so, once"
        assert its[3] == 0
    assert sum(name == "CKPT+2" for name, *_ in main) > 20
