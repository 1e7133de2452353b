"""The table of faults, in short: a few trials of every row that is about time, and what the table
says of a failure.
"""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from .table import ALL, COLD_SHARE, Table, main, parse
from .table_ends import END
from .table_rows import PLACES, ROWS
from .table_shown import ROOT, SHOWN
from .table_trials import Trial

SLACK_SECONDS = 20.0  # `make faults` measures; this sees to it that the rows are true
SHORT = [
    "--trials",
    "2",
    "--ends",
    "3",
    "--world_sizes",
    "2",
    "--jobs",
    "2",
    "--seed",
    "47",
    f"--slack={SLACK_SECONDS}",
]
# A process that is stopped, or holds the GIL, hears no SIGTERM, and torchrun waits for it for 30 s.
WAITS_FOR_TORCHRUN = re.compile(r'"kind": "(stop|gil)"(?!.*"(plain|worker)")')


@pytest.mark.parametrize("row", [*ROWS, "exit"])
def test_the_table_of_faults_in_short(row, capsys):
    code = main([*SHORT, "--rows", row])
    said = capsys.readouterr().out
    assert code == 0, said
    assert re.search(rf"^{row} .* passed$", said, re.MULTILINE), said


def test_kills_before_another_number_of_processes_goes_on_are_a_row(capfd):
    assert main(["--rows", "F20", "--kills", "2", "--seed", "1"]) == 0
    said = capfd.readouterr().out
    assert "another number of processes: 2 kills, 0 runs that differ." in said
    assert re.search(r"^F20 .*  2       2  .* passed; 0 runs differ$", said, re.MULTILINE), said


def test_all_rows_are_there():
    assert {*ROWS, *SHOWN, "exit"} == set(ALL)
    assert {f"F{number}" for number in range(1, 24)} <= set(ALL)


def test_what_shows_a_row_is_there():
    words = {word for row in SHOWN.values() for word in row.tests}
    assert words
    for word in sorted(words):
        file, _, name = word.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, word


def test_trials_are_drawn_from_the_seed_and_can_be_written_down(tmp_path):
    table = Table(parse(["--trials", "100", "--ends", "100"]), tmp_path, lambda facts: None)
    for row in (*ROWS, "exit"):
        trials = list(table.drawn(row))
        assert trials == list(table.drawn(row))
        assert [Trial.read(trial.text) for trial in trials] == trials
        assert len(set(trials)) > len(trials) / 2
        worlds = {2} if row == "exit" else {2, 3, 4}
        assert {trial.world_size for trial in trials} == worlds
        assert all(trial.rank < trial.world_size for trial in trials)
    assert {trial.where for trial in table.drawn("F1")} == set(PLACES)
    assert {trial.target for trial in table.drawn("F9")} == {"launcher", "rank", "all"}
    assert len(list(table.drawn("F12"))) == 3 * 100 / COLD_SHARE


def test_in_short_no_trial_takes_half_a_minute(tmp_path):
    table = Table(parse(SHORT), tmp_path, lambda facts: None)
    assert not [trial for trial in table.drawn("F11") if WAITS_FOR_TORCHRUN.search(trial.text)]
    assert WAITS_FOR_TORCHRUN.search(Trial("F11", kind="stop").text)
    assert not WAITS_FOR_TORCHRUN.search(Trial("F11", kind="stop", launcher="plain").text)


def test_a_trial_that_fails_is_told_with_what_does_it_again(tmp_path, capsys):
    """No run is gone before its fault."""
    lines = tmp_path / "lines"
    assert (
        main(
            [
                "--rows",
                "F1",
                "--trials",
                "1",
                "--world_sizes",
                "2",
                "--slack=-100",
                "--json",
                str(lines),
            ]
        )
        == 1
    )
    said = capsys.readouterr().out
    assert re.search(r"^F1 .* FAILED$", said, re.MULTILINE), said
    [text] = re.findall(
        r"^F1 FAILED: .*python -m tests.faults.table --replay '(.*)'$",
        said,
        re.MULTILINE,
    )
    trial, row = map(json.loads, lines.read_text().splitlines())
    assert Trial.read(text) == Trial(
        **{**trial["trial"], "options": tuple(trial["trial"]["options"])}
    )
    assert trial["problems"]
    assert (row["trials"], row["passed"], row["verdict"]) == (1, 0, "FAILED")
    assert main(["--replay", text, f"--slack={SLACK_SECONDS}"]) == 0
    assert capsys.readouterr().out.endswith("passed\n")


def test_a_run_that_ends_well_although_it_should_not_is_noticed(tmp_path):
    table = Table(parse([]), tmp_path, lambda facts: None)
    # where an exception is expected
    outcome = table.try_one(Trial("F1", kind="nan", where="loss", epochs=1))
    assert "exit codes [0]" in outcome.problems
    outcome = table.try_one(Trial("F1", kind="raise", where="forward", epoch=9))
    assert outcome.problems[0].startswith("the fault did not happen")


def test_what_is_left_in_shared_memory_is_noticed():
    from tests.faults import table_ends

    before = table_ends.segments()
    left = table_ends.SHARED / "torch_4194304_1_2"  # a number that no process has
    left.write_text("")
    try:
        assert set(table_ends.segments()) - set(before) == {left.name}
    finally:
        left.unlink()
    assert END.draw(Random(0), 2).workers == 2
