"""An exception that ends several ranks: its traceback is read once, and one rank is the first."""

from __future__ import annotations

import json
import re
import textwrap

import pytest

from tests.launching import Run, python, start_by_hand, torchrun

SCRIPT = """
    import os, sys
    import torch
    import ddpkit

    def fail(rank):
        how = os.environ.get("HOW") or sys.argv[1]
        if how == "index":
            return torch.zeros(2)[5 + rank]
        if how == "chain":
            try:
                {}["a"]
            except KeyError as error:
                raise ValueError("boom") from error
        if how == "differ" and rank == 1:
            raise KeyError("other")
        raise ValueError("boom")

    class Faulty(ddpkit.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.square().mean()

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            fail(self.rank)

    if any(word.startswith("--nproc") for word in sys.argv):
        ddpkit.parse_arguments()
    ddpkit.ddp_init_group({"device": "cpu"})
    if "log" in sys.argv:
        ddpkit.create_experiment_directory("out")
    if "fit" in sys.argv:
        net = torch.nn.Linear(1, 1)
        brain = Faulty({"net": net}, lambda own: torch.optim.SGD(own, lr=0.1), run_opts={"device": "cpu"})
        brain.fit([1], torch.ones(8, 1), train_loader_kwargs={"batch_size": 2})
    fail(int(os.environ["RANK"]))
"""  # noqa: E501
BOOM = r"ValueError: boom"
TRACES = re.compile(r"^\[rank\d\]: Traceback", re.MULTILINE)  # of torchrun's own there is one more
FIRST = re.compile(
    r"^(?:ERROR: )?(?:\[rank: \d\] )?rank (\d) \([^ ]+, pid \d+\) failed first",
    re.MULTILINE,
)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "hparams.yaml").write_text("a: 1\n")
    return "train.py"


def of_ranks(run):
    """Return what the ranks said, and torchrun's closing summary."""
    said, _, summary = run.err.partition("ChildFailedError")
    return said, summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ["same"]),
        pytest.param(2, ["chain"], marks=pytest.mark.slow),
        pytest.param(3, ["same", "fit"], marks=pytest.mark.slow),
        pytest.param(2, ["same", "log"], marks=pytest.mark.slow),
        pytest.param(4, ["chain", "fit", "log"], marks=pytest.mark.slow),
    ],
)
def test_the_same_exception_on_all_ranks_is_read_once(tmp_path, script, ranks, words):
    run = Run(torchrun(ranks, script, *words), tmp_path, warm=True).wait()
    assert run.code == 1
    said, summary = of_ranks(run)
    first = FIRST.findall(said)
    assert len(first) == 1, "one rank is the first"
    assert len(TRACES.findall(said)) == 1 + ("chain" in words), (
        "and shows the traceback, with that of the cause"
    )
    others = ", ".join(str(rank) for rank in range(ranks) if str(rank) != first[0])
    spans = {
        "0, 1": "0-1",
        "1, 2": "1-2",
        "0, 1, 2": "0-2",
        "1, 2, 3": "1-3",
        "0, 2, 3": "0, 2-3",
        "0, 1, 3": "0-1, 3",
    }
    assert f"The same on rank{'s' if ranks > 2 else ''} {spans.get(others, others)}." in said
    assert said.count("ValueError: boom") == 2, "in the traceback, and with the place"
    assert said.count("Uncaught") == ("log" in words)
    assert "Traceback" not in summary
    root = summary.partition("Root Cause")[2]
    assert f"rank      : {first[0]} " in root
    assert re.search(
        rf"\[rank{first[0]}\]: rank {first[0]} .* failed first, .*: {BOOM}\n=+\s*\Z",
        root,
    ), "last"


@pytest.mark.slow
def test_with_nproc_it_is_the_same(tmp_path, script):
    run = Run(
        python(script, "hparams.yaml", "--nproc=2"),
        tmp_path,
        {"HOW": "same"},
        warm=True,
    ).wait()
    said, summary = of_ranks(run)
    assert run.code == 1
    assert len(TRACES.findall(said)) == len(FIRST.findall(said)) == 1
    assert "The same on rank" in said
    assert "Traceback" not in summary


@pytest.mark.slow
def test_another_exception_on_another_rank_is_told_beside_the_first(tmp_path, script):
    run = Run(torchrun(2, script, "differ", "fit", "log"), tmp_path, warm=True).wait()
    said, summary = of_ranks(run)
    first, other = (0, 1) if FIRST.findall(said) == ["0"] else (1, 0)
    errors = ["ValueError: boom", "KeyError: 'other'"]
    assert len(TRACES.findall(said)) == 1
    line = (
        rf"rank {other} .* failed after rank {first} .*, with another traceback \((\S+)\), in "
        r"TRAIN of"
    )
    found = re.search(
        line + rf" epoch 1 at step 1, at train.py:\d+ in fail: {errors[other]}\n",
        said,
    )
    assert found, said
    log = (tmp_path / found[1]).read_text()
    kind = errors[other].partition(":")[0]
    assert f"in fail\n    raise {kind}" in log, "the log of that rank has all of it"
    assert errors[first] in run.tail(2)
    for error in errors:
        assert error in summary


@pytest.mark.slow
def test_the_same_line_with_another_message_is_one_line(tmp_path, script):
    run = Run(torchrun(2, script, "index"), tmp_path, warm=True).wait()
    said, _ = of_ranks(run)
    assert len(TRACES.findall(said)) == 1
    assert (
        len(
            re.findall(
                r"with the same traceback and another message, at .*: IndexError: index [56] is",
                said,
            )
        )
        == 1
    )


def test_ranks_with_a_terminal_each_tell_it_in_each(tmp_path, script):
    runs = start_by_hand(python(script, "same"), tmp_path, 2, warm=True)
    said = [run.wait().err for run in runs]
    first, other = said if FIRST.search(said[0]) else reversed(said)
    assert first.count("Traceback") == 1
    assert "Traceback" not in other
    place = r"at train.py:\d+ in fail: ValueError: boom"
    assert re.search(rf"rank \d \(.*\) failed first, {place}\s*\Z", first)
    assert re.search(
        rf"rank \d \(.*\) failed after rank \d \(.*\), with the same traceback, {place}\s*\Z",
        other,
    )


@pytest.mark.slow
def test_without_a_file_another_traceback_is_printed(tmp_path, script):
    runs = start_by_hand(python(script, "differ"), tmp_path, 2, warm=True)
    said = [run.wait().err for run in runs]
    assert [one.count("Traceback") for one in said] == [1, 1]
    assert sum("with another traceback (above), at train.py:" in one for one in said) == 1


@pytest.mark.slow
def test_where_torchrun_hides_what_ranks_write_its_summary_has_the_traceback(tmp_path, script):
    command = torchrun(2, "--redirects=3", "--log-dir=logs", script, "same")
    run = Run(command, tmp_path, warm=True).wait()
    said, summary = of_ranks(run)
    assert not TRACES.search(said)
    assert summary.count("Traceback") == 1
    reports = [
        json.loads(path.read_text()) for path in tmp_path.glob("logs/*/attempt_0/*/error.json")
    ]
    assert len(reports) == 2
    for report in reports:
        assert report["message"]["extraInfo"]["traceback"].startswith("Traceback")


@pytest.mark.slow
def test_each_attempt_of_torchrun_shows_its_traceback(tmp_path, script):
    run = Run(torchrun(2, "--max-restarts=1", script, "same"), tmp_path, warm=True).wait()
    said, summary = of_ranks(run)
    assert len(TRACES.findall(said)) == said.count("The same on rank") == 2
    assert "Traceback" not in summary
