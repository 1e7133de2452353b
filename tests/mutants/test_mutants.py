"""The tool that plants faults, and whether its list fits to the code of today."""

from __future__ import annotations

import ast
import hashlib
import shlex
import subprocess
import sys
import textwrap
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.mutants import __main__ as command
from tests.mutants.fault import Fault
from tests.mutants.planting import DoesNotApply, find, plant
from tests.mutants.record import complaint, read_record, write_record
from tests.mutants.rooms import all_faults
from tests.mutants.trial import BROKEN, CAUGHT, HUNG, ROOT, SURVIVED, Verdict

TOY = '''\
"""A toy."""

LIMIT = 3


class Counter:
    def add(self, number):
        if number < LIMIT:  # not too many
            self.total = (self.total
                          + number)
        return self.total


def doubled(numbers):
    found = []
    for number in numbers:
        found.append(2 * number)
    return found
'''


@pytest.fixture
def package(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    return tmp_path


def test_every_fault_of_the_list_fits_to_the_code():
    errors = []
    for fault in all_faults():
        try:
            find(fault, ROOT / "ddpkit")
        except DoesNotApply as error:
            errors.append(str(error))
        ast.parse(textwrap.dedent(fault.planted))
    assert not errors, "\n".join(errors)


def test_the_record_has_each_fault_once_and_its_tests_are_there():
    faults = all_faults()
    names = Counter(fault.name for fault in faults)
    assert [name for name, number in names.items() if number > 1] == []
    assert list(read_record()) == list(names), "run: python -m tests.mutants --new --record"
    words = {word for fault in faults for word in shlex.split(fault.tests) if "/" in word}
    assert [word for word in sorted(words) if not _is_there(word)] == []


def _is_there(word):
    """Say whether a file is there, and a test that is named in it."""
    file, _, name = word.partition("::")
    path = ROOT / file
    return path.exists() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))


def test_every_package_has_faults_and_most_are_caught():
    rooms = {fault.room for fault in all_faults()}
    packages = {path.parent.name for path in (ROOT / "ddpkit").glob("*/__init__.py")}
    assert packages - rooms == {"speechbrain"}  # its tests need SpeechBrain itself
    kinds = Counter(verdict.kind for verdict in read_record().values())
    assert kinds[CAUGHT] >= 150
    assert set(kinds) <= {CAUGHT, SURVIVED}


def test_an_expression_is_planted_however_it_is_laid_out(package):
    fault = Fault(
        "a number is taken away",
        "Counter.add",
        "self.total + number",
        "self.total - number",
    )
    text = plant(fault, package).text
    assert "(self.total - number)" in text
    assert "# not too many" in text


def test_statements_are_planted_with_their_indentation(package):
    text = "found.append(2 * number)"
    planted = "if number:\n    found.append(2 * number)"
    lines = plant(Fault("zeros are lost", "doubled", text, planted), package).text.splitlines()
    assert "        if number:" in lines
    assert "            found.append(2 * number)" in lines


def test_a_constant_of_a_module_is_found_by_its_name(package):
    assert "LIMIT = (4)" in plant(Fault("the limit is another", "LIMIT", "3", "4"), package).text


def test_a_text_that_is_gone_is_told_with_the_fault(package):
    fault = Fault("the counter forgets", "Counter.add", "self.sum", "0", room="toys")
    with pytest.raises(
        DoesNotApply,
        match=r"(?s)'the counter forgets' \(toys\).*is not found.*Rewrite",
    ):
        plant(fault, package)


def test_a_text_that_is_there_twice_is_told_with_its_lines(package):
    fault = Fault("a variable is another", "doubled", "found", "numbers")
    with pytest.raises(DoesNotApply, match=r"(?s)is found 2 times:.*toy.py:17"):
        plant(fault, package)


def test_what_is_no_python_where_it_is_planted_is_told(package):
    fault = Fault("a condition is a statement", "Counter.add", "number < LIMIT", "pass")
    with pytest.raises(DoesNotApply, match="is no Python there"):
        plant(fault, package)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [(CAUGHT, SURVIVED, "now: survived"), (CAUGHT, HUNG, "now: hung"), (SURVIVED, SURVIVED, "")],
)
def test_what_was_caught_and_is_not_is_complained_about(before, now, words):
    fault = Fault("a fault", "here", "x", "y", "tests/a.py")
    told = complaint(fault, Verdict(now), Verdict(before, ["tests/a.py::test"]))
    assert (words in told) if words else not told


def test_a_record_is_read_as_it_was_written_in_the_order_of_the_list(tmp_path):
    faults = [Fault(name, "x", "1", "2", room="toys") for name in ("one fault", "another")]
    verdicts = {
        "another": Verdict(CAUGHT, ["t.py::test[a b]", "u.py::test"]),
        "one fault": Verdict(SURVIVED),
    }
    write_record(faults, verdicts, tmp_path / "record.tsv")
    found = read_record(tmp_path / "record.tsv")
    assert list(found) == ["one fault", "another"]
    assert found["another"] == verdicts["another"]


def test_a_word_that_chooses_no_fault_ends_with_the_rooms():
    with pytest.raises(SystemExit, match=r"--only='nowhere' is no room.*optim"):
        command.chosen(all_faults(), ["nowhere"])


def test_tests_that_cannot_run_are_told_with_the_end_of_what_pytest_wrote(capsys):
    trial = SimpleNamespace(fault=Fault("a fault", "here", "x", "y", "tests/a.py"), began=0.0)
    output = "collecting\n" * 50 + "ImportError: no module has this name\n"
    command.tell(trial, Verdict(BROKEN, [], output), show=False)
    told = capsys.readouterr().out
    assert "| ImportError: no module has this name" in told
    assert told.count("collecting") == command.LINES_OF_A_REASON - 1


@pytest.mark.exhaustive
def test_a_planted_fault_is_caught_and_taken_back():
    """As a user runs it: a worker of pytest, which has run much, is no process to fork from."""
    words = ["--only", "the linear scheduler reaches its end", "--jobs", "1"]
    before = _digest_of_package()
    run = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 caught" in run.stdout
    assert _digest_of_package() == before


def _digest_of_package():
    sources = sorted((ROOT / "ddpkit").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
