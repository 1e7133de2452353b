"""What is compared before ranks work together, and what they say when they differ; with made-up
ranks.
"""

from __future__ import annotations

import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

import ddpkit
from ddpkit.comm.agreement import (
    LARGEST_FILE_BYTES,
    MOST_FILES,
    MOST_SHOWN,
    code_facts,
    compare_over_store,
    describe_differences,
    file_digest,
    model_facts,
    process_label,
    recipe_facts,
    software_facts,
)
from ddpkit.errors import LaunchError, RankMismatchError
from tests.launching import Run, python

# -------------------------------------------------------------------------------------------- facts


def test_versions_are_those_that_run():
    facts = software_facts()
    assert facts["Python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert facts["torch"] == torch.__version__
    assert facts["ddpkit"] == ddpkit.__version__


def test_what_cannot_be_read_has_no_digest(tmp_path):
    """Neither is a reason to fail: a file that is gone or huge, a folder that is none."""
    huge = tmp_path / "huge.py"
    huge.write_bytes(b"#" * (LARGEST_FILE_BYTES + 1))
    fits = tmp_path / "fits.py"
    fits.write_bytes(b"#" * LARGEST_FILE_BYTES)
    assert [file_digest(str(path)) for path in (huge, tmp_path, tmp_path / "none.py", "\0")] == [
        ""
    ] * 4
    assert len(file_digest(str(fits))) == 8


def of_script(folder, script, *modules):
    """Run a script that imports modules of its folder; return the facts that it finds."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    for module in modules:
        (folder / module).parent.mkdir(exist_ok=True)
        (folder / module).write_text("class Net:\n    pass\n")
    run = Run(python("train.py"), folder, warm=True).wait()
    assert run.code == 0, run.err
    return eval(run.out)


FACTS = """
    from ddpkit.comm.agreement import recipe_facts

    class Mine:
        pass

    print(recipe_facts(Mine, "h.yaml"))
"""


def test_the_code_of_a_recipe_is_what_was_imported_and_is_no_library(tmp_path):
    (tmp_path / "h.yaml").write_text("lr: 1\n")
    names = ("nets.py", "parts/conv.py", "unused.py", "lib/site-packages/other.py")
    (tmp_path / "lib/site-packages").mkdir(parents=True)
    script = (
        "import sys; sys.path.append('lib/site-packages'); import nets, parts.conv, other, json, "
        "numpy\n"
    )
    facts = of_script(tmp_path, script + textwrap.dedent(FACTS), *names)
    recipe = {"script", "Brain", "hyperparameter file", "module nets", "module parts.conv"}
    assert {
        name for name in facts if not name.startswith(("module tests", "module __mp"))
    } == recipe
    assert facts["script"] == f"train.py (code {file_digest(str(tmp_path / 'train.py'))})"
    assert facts["Brain"] == "Mine"
    assert facts["module nets"].replace("nets", "conv") == facts["module parts.conv"]


def test_a_script_that_has_gone_is_not_compared(tmp_path):
    """It was started and deleted, or the working folder is another one now: that is no difference
    to other ranks.
    """
    facts = of_script(tmp_path, "import os; os.unlink('train.py')\n" + textwrap.dedent(FACTS))
    assert "script" not in facts
    (tmp_path / "elsewhere").mkdir()
    moved = of_script(tmp_path, "import os; os.chdir('elsewhere')\n" + textwrap.dedent(FACTS))
    assert "script" in moved


@pytest.mark.slow
def test_there_is_no_script_on_the_command_line_or_in_a_notebook(tmp_path):
    command = (
        "from ddpkit.comm.agreement import *; print(recipe_facts(type('Mine', (), {}), "
        "'none.yaml'))"
    )
    run = Run(python("-c", command), tmp_path).wait()
    assert run.out.strip() == "{'Brain': 'Mine'}", run.err


def test_no_more_files_than_can_be_read_in_a_moment(tmp_path, monkeypatch):
    for number in range(MOST_FILES + 5):
        path = tmp_path / f"part{number}.py"
        path.write_text("")
        monkeypatch.setitem(sys.modules, f"part{number}", type(sys)(f"part{number}"))
        monkeypatch.setattr(sys.modules[f"part{number}"], "__file__", str(path), raising=False)
    assert len(code_facts()) == MOST_FILES


def test_a_module_that_makes_its_attributes_when_asked_is_not_asked(monkeypatch):
    class Lazy(type(sys)):
        def __getattr__(self, name):
            raise RuntimeError(name)

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "nothing", None)
    assert recipe_facts(dict)["Brain"] == "dict"


# ----------------------------------------------------------------------------------------- messages


PLACES = [f"gpu0{rank} (pid {rank})" for rank in range(500)]


def test_differences_in_words():
    everybody = [
        {"option precision": "'bf16'", "train batches": "12"},
        {"option precision": "'bf16'", "train batches": "11"},
        {"option precision": "'bf16'", "train batches": "12", "train samples": "9"},
    ]
    assert describe_differences(everybody, PLACES).splitlines() == [
        "The ranks are not about to run the same training:",
        "  train batches: 12 on ranks 0, 2; 11 on rank 1",
        "  train samples: missing on ranks 0-1; 9 on rank 2",
        "  rank 0 is on gpu00 (pid 0); rank 1 is on gpu01 (pid 1); rank 2 is on gpu02 (pid 2)",
        "Start every rank with the same script, the same command line and the same data.",
    ]


@pytest.mark.parametrize(
    ("fact", "advice"),
    [
        ("torch", "Install the same versions on every machine"),
        ("script", "Give every machine the same files of code"),
        ("module nets", "Give every machine the same files of code"),
        ("hyperparameter file", "belongs on the command line: --name=value"),
    ],
)
def test_what_to_do(fact, advice):
    lines = describe_differences([{fact: "1"}, {fact: "2"}], PLACES).splitlines()
    assert lines[1] == f"  {fact}: 1 on rank 0; 2 on rank 1"
    assert advice in lines[3]
    assert lines[4].startswith("Start every rank with the same script")


def test_a_fact_that_a_rank_cannot_know_is_no_difference():
    known = {"script": "train.py", "module nets": "code 0a", "hyperparameter file": "content 1b"}
    assert describe_differences([{"torch": "2"}, {"torch": "2", **known}], PLACES) == ""
    assert describe_differences([{}, {"torch": "2"}], PLACES) != ""


def test_the_order_is_a_difference():
    one = torch.nn.Linear(1, 1)
    other = torch.nn.PReLU()
    facts = [model_facts({"a": one, "b": other}), model_facts({"b": other, "a": one})]
    assert (
        describe_differences(facts, PLACES)
        .splitlines()[1]
        .startswith("  the order of the parameters: ")
    )


def test_long_lists_are_cut():
    many = [{f"parameter {number}": str(rank % 2) for number in range(20)} for rank in range(40)]
    lines = describe_differences(many, PLACES).splitlines()
    assert len(lines) == MOST_SHOWN + 4
    assert lines[-3] == f"  and {20 - MOST_SHOWN} more"
    text = describe_differences([{"samples": str(rank)} for rank in range(500)], PLACES)
    assert len(text) < 1000
    assert "; and more" in text


# ----------------------------------------------------------------------------------- over the store


@pytest.fixture
def store():
    server = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    return lambda rank: (
        PrefixStore("one", server)
        if rank == 0
        else PrefixStore(
            "one",
            TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10)),
        )
    )


def compare(store, everybody, seconds=10.0):
    def one(rank):
        try:
            return compare_over_store(store(rank), rank, len(everybody), everybody[rank], seconds)
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(len(everybody)) as pool:
        return list(pool.map(one, range(len(everybody))))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_are_alike_go_on(store, world):
    assert compare(store, [{"torch": "2"}] * world) == [None] * world


def test_the_verdict_is_understood_whatever_else_another_version_tells(store):
    store(0).set("ddpkit/start/verdict", "ddpkit is 0.2 on rank 0")
    with pytest.raises(RankMismatchError, match=r"ddpkit is 0\.2 on rank 0"):
        compare_over_store(store(1), 1, 2, {"a": "1"}, 5.0)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_every_rank_raises_the_same(store, odd):
    everybody = [{"torch": "2.12" if rank == odd else "2.13"} for rank in range(3)]
    errors = compare(store, everybody)
    assert [type(error) for error in errors] == [RankMismatchError] * 3
    assert len(set(map(str, errors))) == 1
    assert f"2.12 on rank {odd}" in str(errors[0])
    assert f"rank {odd} is on {process_label()}" in str(errors[0])


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_come_is_named(rank, missing):
    with pytest.raises(
        LaunchError,
        match=f"rank {missing} joined the run and has not come further",
    ):
        compare_over_store(HashStore(), rank, 2, {"a": "1"}, 0.05)
