"""``python -m ddpkit diff``: where two runs part, and what of the step differs first."""

from __future__ import annotations

import json
import random

import pytest

from ddpkit.cli import main
from ddpkit.errors import ConfigError
from ddpkit.parts import chained
from ddpkit.see import run_diff
from tests.see.diff.planted import KINDS, Planted, draw, is_named, told, train


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run in which nothing is changed."""
    return train(tmp_path_factory.mktemp("plain"))


def lines_of(one, other):
    lines = []
    status = run_diff([str(one), str(other)], lines.append)
    return "\n".join(lines), status


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_difference_is_named(plain, tmp_path, kind):
    planted = draw(kind, random.Random(7))
    found, status = told(plain, train(tmp_path, planted))
    assert is_named(planted, found, status), (planted, found)


def test_equal_runs_are_equal(plain, tmp_path):
    text, status = lines_of(plain, train(tmp_path))
    assert status == 0
    assert "Equal to the last bit: all 12 optimizer steps that both have recorded" in text
    assert "Labels, options and versions of the two runs are the same." in text


def test_the_lines_name_step_module_and_meaning(plain, tmp_path):
    planted = Planted("gradient bit", 5, "gradients", "net.3", place=12)
    text, status = lines_of(plain, train(tmp_path, planted))
    assert status == 1
    assert "The runs differ at optimizer step 5; step 4 is equal." in text
    assert "First in it: gradients of net.3." in text
    assert "  loss       equal" in text
    assert "  gradients  differ: net.3\n" in text


def test_labels_and_options_that_forbid_equal_bits_are_told(plain, tmp_path):
    other = train(tmp_path / "a", Planted("dropout", 3))
    text, _ = lines_of(plain, changed(other, tmp_path / "b", labels={"torch": "1.0"}))
    assert "torch: " in text
    assert "and 1.0 (no equal bits can be expected)" in text
    assert "So the two runs cannot be expected to be equal." in text
    text, _ = lines_of(plain, train(tmp_path / "c", max_grad_norm=0.25))
    assert "--max_grad_norm: not given and 0.25 (it changes the numbers of a training)" in text
    assert "So the two runs are two different trainings." in text


def events_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def written(events, folder):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return folder


def changed(run, folder, step=None, **fields):
    """Write a run's log with other fields in its records, of one step or of all."""
    events = [
        {**event, **fields} if event["event"] == "hash" and step in {None, event["step"]} else event
        for event in events_of(run)
    ]
    return written(events, folder)


def test_a_record_that_was_changed_after_the_run_is_told(plain, tmp_path):
    forged = changed(plain, tmp_path / "run", step=4, weights="0" * 64)
    text, status = lines_of(forged, plain)
    assert status == 1
    assert "A: the record of step 4 does not fit to its own chain: it was changed after" in text


def test_a_record_that_was_taken_away_is_told_even_where_the_others_are_equal(plain, tmp_path):
    events = [event for event in events_of(plain) if event.get("step") != 4]
    text, status = lines_of(plain, written(events, tmp_path / "run"))
    assert status == 1
    assert "B: the record before that of step 5 is missing." in text
    assert "Equal to the last bit: all 11" in text


def test_a_run_that_ended_earlier_is_equal_so_far_and_the_other_has_more(plain, tmp_path):
    events = [event for event in events_of(plain) if event.get("step", 0) <= 9]
    text, status = lines_of(plain, written(events, tmp_path / "run"))
    assert status == 0
    assert "A has 3 further records after step 9, of steps that the other has not" in text


def test_rarer_records_are_not_taken_for_an_end(plain, tmp_path):
    rare = train(tmp_path, hash_every=5)
    only = [event for event in events_of(rare) if event.get("step") != 5]
    text, status = lines_of(plain, written(only, tmp_path / "one"))
    assert status == 1  # as a record is missing
    assert "Equal to the last bit: the one optimizer step that both have recorded, step 10." in text
    assert "A has 2 further records after step 10, of steps that the other has not" in text
    assert "or has another --hash_every." in text


def test_records_that_are_rare_say_between_which_steps_and_from_where_to_look(plain, tmp_path):
    rare = train(tmp_path / "a", Planted("dropout", 6), hash_every=4)
    saved = [  # the one of step 4 was deleted, and that of step 6 has the difference in it
        {"event": "checkpoint", "path": f"elsewhere/save/CKPT+{step}", "optimizer_step": step}
        for step in (3, 4, 6)
    ]
    one = written([*saved, *events_of(plain)], tmp_path / "b")
    here = one / "save" / "CKPT+3"
    here.mkdir(parents=True)
    (one / "save" / "CKPT+6").mkdir()
    text, status = lines_of(one, rare)
    assert status == 1
    assert "The runs differ at optimizer step 8; step 4 is equal." in text
    assert "The steps between have no record" in text
    assert f"  A: from {here} (step 3)" in text
    assert "  B: from the beginning, as no checkpoint of step 4 or before it is there" in text
    assert "First in it" not in text
    (one / "save" / "CKPT+4").mkdir()  # right after the last equal step
    assert "CKPT+4 (step 4)" in lines_of(one, rare)[0]


def test_a_restart_that_has_not_repeated_its_steps_is_told(plain, tmp_path):
    first = [event for event in events_of(plain) if event.get("step", 0) <= 6]
    other = events_of(train(tmp_path / "other", Planted("dropout", 5)))
    again = [event for event in other if event["event"] == "fit" or event.get("step", 0) >= 5]
    text, status = lines_of(plain, written([*first, *again], tmp_path / "run"))
    assert status == 1
    assert "B: step 5 was recorded twice, with other loss and gradients and optimizer" in text


def test_runs_without_records_or_without_a_common_step_are_refused(plain, tmp_path):
    silent = train(tmp_path / "a", hash_every=0)
    with pytest.raises(ConfigError, match="the run was started without --hash_every"):
        lines_of(plain, silent)
    with pytest.raises(ConfigError, match="--hash_every=100, and has made fewer optimizer steps"):
        lines_of(plain, train(tmp_path / "rare", hash_every=100))
    empty = written([], tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"metrics.jsonl' has no record .* no training has begun"):
        lines_of(plain, empty)
    with pytest.raises(ConfigError, match=r"'c' has steps 5, 10, 'b' has steps 7"):
        lines_of(train(tmp_path / "c", hash_every=5), train(tmp_path / "b", hash_every=7))
    broken = written([{"event": "hash", "step": 1}], tmp_path / "d")
    with pytest.raises(ConfigError, match="an event 'hash' that ddpkit has not written"):
        lines_of(plain, broken)


def test_numbers_of_processes_matter_unless_both_runs_promise_the_same_bits(plain, tmp_path):
    alone = changed(plain, tmp_path / "alone", same_bits=True)
    events = [
        {**event, "world_size": 2} if event["event"] == "fit" else event
        for event in events_of(alone)
    ]
    two = written(events, tmp_path / "two")
    text, _ = lines_of(plain, two)
    assert "processes: 1 and 2 (no equal bits can be expected)" in text
    text, _ = lines_of(alone, two)
    assert "processes" not in text


def test_the_command_and_its_exit_status(plain, tmp_path, capsys):
    other = train(tmp_path, Planted("dropout", 3))
    assert main(["diff", str(plain), str(plain)]) == 0
    assert main(["diff", str(plain), str(other), "--json"]) == 1
    assert main(["diff", str(plain), str(tmp_path / "none")]) == 1
    captured = capsys.readouterr()
    assert '"first": "loss"' in captured.out
    assert "does not exist" in captured.err


def of_version_1(run, folder):
    """Write a run's log as the first version did: no average, no scheduler, another chain."""
    events = events_of(run)
    previous = ""
    for event in events:
        if event["event"] == "hash":
            for name in ("version", "average", "schedule"):
                del event[name]
            event["previous"] = previous
            previous = event["chain"] = chained(previous, event)
    return written(events, folder)


def test_a_record_of_before_is_compared_in_what_it_has(tmp_path):
    new = train(tmp_path / "new", ema_decay=0.9)
    old = of_version_1(new, tmp_path / "old")
    text, status = lines_of(old, new)
    assert status == 0
    assert "Equal to the last bit" in text
    assert "Not compared: averaged weights. The records of A are older than that" in text
    text, status = lines_of(changed(new, tmp_path / "b", step=5, weights="x"), old)
    assert status == 1
    assert "  weights    differ\n  averages   not compared" in text
    assert "The records of B are older" in text
    assert "Not compared" not in lines_of(old, old)[0]


def test_other_averages_of_equal_weights_are_named(tmp_path):
    one, other = (
        train(tmp_path / name, ema_decay=decay) for name, decay in (("a", 0.9), ("b", 0.8))
    )
    text, status = lines_of(one, other)
    assert status == 1
    assert "First in it: averages of head." in text
    assert "  weights    equal\n  averages   differ: head, net" in text


def test_a_record_of_a_newer_version_is_not_taken_for_a_changed_one(plain, tmp_path):
    text, _ = lines_of(plain, changed(plain, tmp_path / "a", step=3, version=99))
    assert "B: the record of step 3 was written by a newer version of ddpkit" in text
    assert "was changed after the run" not in text


def with_start(run, folder, **fields):
    """Write a run's log with an event of its start, as a recipe with a folder has one."""
    start = {
        "event": "start",
        "options": {},
        "yaml": {"sha256": "1"},
        "overrides": {"output_folder": str(folder)},
        "script": {"sha256": "1"},
    }
    return written([start | fields, *events_of(run)], folder)


def test_other_overrides_and_another_script_are_told(plain, tmp_path):
    one = with_start(plain, tmp_path / "a")
    text, _ = lines_of(one, with_start(plain, tmp_path / "b"))
    assert "Labels, options, overrides, the files of the recipe and versions of the two" in text
    other = with_start(
        plain,
        tmp_path / "c",
        overrides={"lr": "0.02"},
        script={"sha256": "2"},
    )
    text, _ = lines_of(one, other)
    assert "  --lr: not given and 0.02 (it may matter)" in text
    assert "  SHA-256 of the script: 1 and 2 (it may matter)" in text
    assert "output_folder" not in text
    assert "the same" not in text


def test_what_an_earlier_version_has_not_recorded_is_not_taken_for_a_difference(plain, tmp_path):
    one = with_start(plain, tmp_path / "a")
    events = events_of(one)
    for name in ("overrides", "script"):
        del events[0][name]
    text, _ = lines_of(one, written(events, tmp_path / "b"))
    assert "Labels, options and versions of the two runs are the same." in text


def test_a_log_without_its_start_is_not_taken_for_another_training(plain, tmp_path):
    one = with_start(plain, tmp_path / "a")
    events = [event for event in events_of(one) if event["event"] == "hash"]
    text, _ = lines_of(one, written(events, tmp_path / "b"))
    assert "Not compared: options and the number of processes. The log of one run has no" in text
    assert "Not compared: overrides, files of the recipe and versions." in text
    assert "None" not in text


def test_a_factor_that_follows_from_the_number_of_processes_is_no_other_option(plain, tmp_path):
    logs = []
    for factor in (4, 2):  # four virtual ranks on one process, and on two
        events = [
            {**event, "options": {"grad_accumulation_factor": factor}}
            if event["event"] == "fit"
            else event
            for event in events_of(plain)
        ]
        logs.append(written(events, tmp_path / f"{factor}"))
    assert "--grad_accumulation_factor" not in lines_of(*logs)[0]


def test_labels_of_a_run_that_went_on_elsewhere_are_those_of_the_step(plain, tmp_path):
    other = train(tmp_path / "a", Planted("dropout", 3))
    elsewhere = changed(other, tmp_path / "b", step=3, labels={"torch": "1.0"})
    text, _ = lines_of(plain, elsewhere)
    assert "and 1.0 in optimizer step 3 (no equal bits can be expected)" in text


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("hash", {"step": "x"}),
        ("hash", {"modules": 5}),
        ("hash", {"labels": None}),
        ("fit", {"options": 3}),
        ("fit", {"resumed_from": "a"}),
    ],
)
def test_a_damaged_event_is_named(plain, tmp_path, kind, fields):
    events = [
        {**event, **fields} if event["event"] == kind else event for event in events_of(plain)
    ]
    (name,) = fields
    with pytest.raises(ConfigError, match=f"an event '{kind}' that ddpkit has not written: {name}"):
        lines_of(plain, written(events, tmp_path / "a"))


def test_lines_that_cannot_be_read_are_told_and_are_no_difference(plain, tmp_path):
    one = written(events_of(plain), tmp_path / "a")
    log = one / "metrics.jsonl"
    log.write_text('{"event": "st' + "\n" + log.read_text())  # as a kill leaves it
    text, status = lines_of(plain, one)
    assert status == 0
    assert "B: 1 line of its log cannot be read, and is left out." in text


def test_a_run_that_is_compared_with_itself_is_told(plain):
    text, status = lines_of(plain, plain / "metrics.jsonl")
    assert status == 0
    assert "B: it is the very log that A is" in text


def restarted(run, folder, *calls):
    """Write a run's log as if it had been started again: each time after a step, with options."""
    events = []
    later = list(calls)
    for event in events_of(run):
        while later and event["event"] == "hash" and event["step"] > later[0][0]:
            after, fields = later.pop(0)
            start = {"event": "start", "options": {}, "overrides": {}, "yaml": None, "script": None}
            began = {"event": "fit", "world_size": 1, "options": {}, "optimizer_step": after}
            events += [start | fields, began | fields]
        events.append(event)
    return written(events, folder)


CLIPPED = {"options": {"max_grad_norm": 0.25}}


def test_other_options_of_a_start_in_between_are_told_with_its_steps(plain, tmp_path):
    other = restarted(plain, tmp_path / "a", (4, CLIPPED), (8, {}))
    text, _ = lines_of(plain, other)
    words = "--max_grad_norm: not given and 0.25 in optimizer {} (it changes the numbers"
    assert words.format("steps 5 to 8") in text
    assert "are the same" not in text
    differs = changed(other, tmp_path / "b", step=5, weights="0" * 64)
    text, _ = lines_of(plain, differs)  # the rest is after the difference
    assert words.format("step 5") in text
    assert "So the two runs are two different trainings." in text
    before = changed(other, tmp_path / "c", step=4, weights="0" * 64)
    assert "max_grad_norm" not in lines_of(plain, before)[0]
    twice = restarted(plain, tmp_path / "d", (2, CLIPPED), (3, {}), (5, CLIPPED), (7, {}))
    assert words.format("steps 3, 6 to 7") in lines_of(plain, twice)[0]


def test_a_start_between_two_records_is_compared_too(plain, tmp_path):
    rare = train(tmp_path / "rare", hash_every=4)
    between = restarted(rare, tmp_path / "a", (5, CLIPPED), (6, {}))
    text, _ = lines_of(plain, between)
    assert "0.25 in optimizer step 6 (" in text


def test_a_start_whose_steps_were_made_again_by_another_is_left_out(plain, tmp_path):
    again = restarted(plain, tmp_path / "a", (4, CLIPPED), (4, {}))
    assert "max_grad_norm" not in lines_of(plain, again)[0]


def test_overrides_files_and_processes_of_an_earlier_start_are_told(plain, tmp_path):
    first = {"overrides": {"lr": "0.02"}, "script": {"sha256": "1"}, "world_size": 2}
    logs = [
        restarted(plain, tmp_path / name, (0, fields), (6, {}))
        for name, fields in (("a", {}), ("b", first))
    ]
    text, _ = lines_of(*logs)
    assert "  --lr: not given and 0.02 in optimizer steps 1 to 6 (it may matter)" in text
    assert "  SHA-256 of the script: None and 1 in optimizer steps 1 to 6 (it may" in text
    assert "  processes: 1 and 2 in optimizer steps 1 to 6 (no equal bits can be expected)" in text
    assert text.index("processes: ") < text.index("--lr")
