"""What is kept and what is deleted: the newest N together with the best K."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from ddpkit.checkpointing.checkpoint import Checkpoint, ckpt_recency
from ddpkit.checkpointing.selection import Retention, deletable, ranked
from ddpkit.checkpoints import Checkpointer
from ddpkit.errors import ConfigError

LOSSES = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0]  # by time: the best is 1, then 3, then 4
BAD_COUNTS = [-1, 1.5, 2.0, "2", "True", None, np.bool_(True), np.float64(1)]


@pytest.fixture
def checkpointer(tmp_path):
    return Checkpointer(tmp_path / "save")


def save(checkpointer, **meta):
    meta.setdefault("n", len(checkpointer.list_checkpoints()))
    return checkpointer.save_checkpoint(meta={"unixtime": meta["n"], **meta})


def kept(checkpointer):
    return sorted(checkpoint.meta["n"] for checkpoint in checkpointer.list_checkpoints())


def train(checkpointer, losses=LOSSES, **how):
    """Save after each epoch as a recipe does, and return what is left after each."""
    left = []
    for n, loss in enumerate(losses):
        checkpointer.save_and_keep_only(meta={"n": n, "unixtime": n, "loss": loss}, **how)
        left.append(kept(checkpointer))
    return left


# ------------------------------------------------------------------------------------- the newest N


def test_the_newest_n_and_the_best_k(checkpointer):
    left = train(checkpointer, keep_recent=2, num_to_keep=1, min_keys=["loss"])
    assert left == [[0], [0, 1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 4, 5]]


def test_more_of_the_best_than_of_the_newest(checkpointer):
    assert train(checkpointer, keep_recent=1, num_to_keep=3, min_keys=["loss"])[-1] == [1, 3, 4, 5]


def test_the_newest_n_alone(checkpointer):
    assert train(checkpointer, keep_recent=3, num_to_keep=1)[-1] == [3, 4, 5]


def test_a_number_stands_for_the_newest_whatever_num_to_keep_is(checkpointer):
    assert train(checkpointer, keep_recent=2, num_to_keep=0, min_keys=["loss"])[-1] == [4, 5]


def test_true_is_as_before_and_not_the_number_one(checkpointer):
    assert train(checkpointer, keep_recent=True, num_to_keep=2)[-1] == [4, 5]


def test_one_is_a_number_and_not_true(checkpointer):
    assert train(checkpointer, keep_recent=1, num_to_keep=2, max_keys=["loss"])[-1] == [0, 5]


@pytest.mark.parametrize("off", [False, 0])
def test_without_the_newest_the_keys_decide(checkpointer, off):
    """What was just saved goes, if it is not among the best; without keys nothing goes."""
    assert train(checkpointer, keep_recent=off, num_to_keep=1, min_keys=["loss"])[-1] == [1]
    checkpointer.save_and_keep_only(meta={"n": 6, "unixtime": 6}, keep_recent=off)
    assert kept(checkpointer) == [1, 6]


def test_recency_among_the_keys_keeps_as_many_as_the_number_says(checkpointer):
    assert train(checkpointer, keep_recent=1, num_to_keep=2, importance_keys=[ckpt_recency])[
        -1
    ] == [5]
    checkpointer.delete_checkpoints(num_to_keep=0)
    assert train(checkpointer, keep_recent=False, num_to_keep=2, importance_keys=[ckpt_recency])[
        -1
    ] == [4, 5]


def test_what_was_just_saved_is_kept_by_any_number(checkpointer):
    for keep_recent in (1, 2, True):
        left = train(
            checkpointer,
            losses=[1.0, 2.0, float("nan")],
            keep_recent=keep_recent,
            min_keys=["loss"],
        )
        assert all(numbers[-1] == n for n, numbers in enumerate(left))
        checkpointer.delete_checkpoints(num_to_keep=0)


def test_nan_ranks_worst_beside_the_newest(checkpointer):
    left = train(
        checkpointer,
        losses=[3.0, float("nan"), 1.0, float("nan"), 2.0],
        keep_recent=2,
        min_keys=["loss"],
    )
    assert left == [[0], [0, 1], [1, 2], [2, 3], [2, 3, 4]]


def test_the_newest_count_only_where_the_predicate_holds(checkpointer):
    for n in range(6):
        save(checkpointer, kind="even" if n % 2 == 0 else "odd")
    checkpointer.save_and_keep_only(
        meta={"n": 6, "unixtime": 6, "kind": "even"},
        keep_recent=2,
        ckpt_predicate=lambda checkpoint: checkpoint.meta["kind"] == "even",
    )
    assert kept(checkpointer) == [1, 3, 4, 5, 6]


def test_damaged_checkpoints_are_neither_counted_nor_deleted(checkpointer):
    saved = [save(checkpointer, loss=loss) for loss in LOSSES]
    (saved[5].path / "CKPT.yaml").write_text("")
    checkpointer.delete_checkpoints(keep_recent=2, num_to_keep=1, min_keys=["loss"])
    assert kept(checkpointer) == [1, 3, 4]
    assert saved[5].path.exists()


# ----------------------------------------------------------------------------------- deleting alone


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({}, [5]),
        ({"keep_recent": 3}, [3, 4, 5]),
        ({"keep_recent": True, "num_to_keep": 2}, [4, 5]),
        ({"keep_recent": False, "num_to_keep": 2}, [4, 5]),  # the default key is the newest
        ({"keep_recent": 1, "num_to_keep": 3, "min_keys": ["loss"]}, [1, 3, 4, 5]),
        ({"keep_recent": 2, "num_to_keep": 0}, [4, 5]),
        ({"keep_recent": 2, "num_to_keep": 1, "importance_keys": [], "max_keys": ["loss"]}, [4, 5]),
        (
            {"keep_recent": True, "num_to_keep": 1, "importance_keys": (), "min_keys": ["loss"]},
            [1, 5],
        ),
        ({"importance_keys": None, "min_keys": ["loss"]}, [1]),
        ({"keep_recent": np.int64(2), "num_to_keep": np.int64(1), "min_keys": ["loss"]}, [1, 4, 5]),
    ],
)
def test_delete_checkpoints(checkpointer, how, left):
    for loss in LOSSES:
        save(checkpointer, loss=loss)
    checkpointer.delete_checkpoints(**how)
    assert kept(checkpointer) == left


@pytest.mark.parametrize("value", BAD_COUNTS)
def test_what_is_no_count_is_refused_before_anything_is_saved_or_deleted(checkpointer, value):
    save(checkpointer, loss=1.0)
    save(checkpointer, loss=2.0)
    for name, call in itertools.product(
        ("keep_recent", "num_to_keep"),
        (checkpointer.save_and_keep_only, checkpointer.delete_checkpoints),
    ):
        if isinstance(value, np.bool_) and name == "num_to_keep":
            continue
        with pytest.raises(ConfigError, match=f"{name}="):
            call(**{name: value})
    assert kept(checkpointer) == [0, 1]


# ------------------------------------------------------------------------------------ as a property


def brute_force(checkpoints, keep_recent, num_to_keep):
    """Say what must stay: plainly, from sorted lists."""
    by_time = sorted(checkpoints, key=lambda one: one.meta["unixtime"], reverse=True)
    numbers = [one for one in by_time if one.meta["loss"] == one.meta["loss"]]
    by_loss = sorted(numbers, key=lambda one: one.meta["loss"]) + [
        one for one in by_time if one not in numbers
    ]
    newest = num_to_keep if keep_recent is True else keep_recent
    stay = set(by_loss[:num_to_keep]) | set(by_time[: int(newest)])
    return {one.path.name for one in checkpoints if one not in stay}


@pytest.mark.parametrize("keep_recent", [False, True, 1, 2, 7])
@pytest.mark.parametrize("num_to_keep", [0, 1, 3, 9])
def test_every_choice_leaves_the_union(keep_recent, num_to_keep):
    for losses in itertools.permutations([1.0, 1.0, 2.0, float("nan"), 3.0]):
        checkpoints = [
            Checkpoint(Path(f"CKPT+{n}"), {"unixtime": n, "loss": x}, {})
            for n, x in enumerate(losses)
        ]
        retention = Retention(num_to_keep, min_keys=("loss",), keep_recent=keep_recent)
        found = {one.path.name for one in deletable(checkpoints, retention)}
        assert found == brute_force(checkpoints, keep_recent, num_to_keep)


def test_each_key_says_how_many_it_keeps():
    keys = {"importance_keys": (ckpt_recency, len), "max_keys": ("acc",), "min_keys": ("loss",)}
    found = Retention(2, **keys, keep_recent=5).selections()
    assert [(one.importance_key, one.max_key, one.min_key, number) for one, number in found] == [
        (len, None, None, 2),
        (None, "acc", None, 2),
        (None, None, "loss", 2),
        (ckpt_recency, None, None, 5),
    ]
    assert [number for _, number in Retention(2, **keys).selections()] == [2, 2, 2, 2]
    assert ranked([], found[0][0]) == []


@pytest.mark.parametrize("keys", [["los"], "ab"], ids=["misspelt", "a string"])
def test_a_key_that_the_meta_does_not_have_is_warned_of_once(checkpointer, keys, caplog):
    for loss in (1.0, 2.0):
        checkpointer.save_and_keep_only(meta={"loss": loss}, min_keys=keys)
    told = [one.getMessage() for one in caplog.records if "in the meta" in one.getMessage()]
    assert told == [
        (f"No {key!r} in the meta: by this key the checkpoint is not one of the best to keep.")
        for key in keys
    ]
