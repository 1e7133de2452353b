"""Predictions that each rank writes batch by batch: every sample once, complete files or none."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from ddpkit.brain import Brain
from ddpkit.dataloader import make_dataloader
from ddpkit.distributed import get_rank
from ddpkit.errors import ConfigError, MissingExtraError
from tests.disks import fill, mounted
from tests.ecosystem import needs
from tests.launching import Run, torchrun
from tests.recipes import linear, make, world_size

ROOT = Path(__file__).parents[2]
SIZES = (1, 3, 11)


def numbered(size):
    return [{"x": torch.ones(3, dtype=torch.float64), "number": number} for number in range(size)]


class Predicting(Brain):
    """Returns what tells a sample; fails where it is told to."""

    fails_at = None

    def compute_forward(self, batch, stage):
        numbers = batch["number"]
        if self.fails_at in numbers.tolist():
            raise ArithmeticError("a wrong sample")
        lengths = [torch.arange(number % 3) for number in numbers.tolist()]
        return {"square": numbers**2, "ragged": lengths}


def expected(size):
    return [
        {"index": number, "square": number**2, "ragged": list(range(number % 3))}
        for number in range(size)
    ]


def rows(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def predict(data, output, kwargs=None, fails_at=None, **options):
    brain = make(Predicting, net=linear(), **options)
    brain.fails_at = fails_at
    return brain.predict(data, output=output, loader_kwargs={"batch_size": 2, **(kwargs or {})})


def predict_sizes(folder, ending, kwargs):
    """Predict sets of several sizes: one file of each, and one of each rank."""
    paths = []
    for size in SIZES:
        paths += predict(numbered(size), folder / f"{size}{ending}", kwargs)
        paths += predict(numbered(size), folder / f"{size}" / f"*{ending}", kwargs)
    return paths


def predict_on_own_disk(folder):
    brain = make(Predicting, net=linear())
    own = folder / f"disk{get_rank()}"
    own.mkdir()
    with pytest.raises(ConfigError) as caught:
        brain.predict(numbered(5), output=own / "out.jsonl")
    return str(caught.value), brain.step, sorted(path.name for path in own.iterdir())


def test_one_file_on_disks_that_are_not_shared_is_refused_before_the_first_batch(ranks, tmp_path):
    for message, step, left in ranks.run(predict_on_own_disk, tmp_path):
        assert message.startswith("rank 1: ")
        assert "give a path with *, by which each process keeps its own file" in message
        assert (step, left) == (0, [])


def by_length(size):
    """Batches in another order than that of the set."""
    return [[number] for number in range(size - 1, -1, -1)]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("kwargs", [{}, {"shuffle": True}])
@pytest.mark.parametrize("ending", [".jsonl", pytest.param(".parquet", marks=needs("pyarrow"))])
def test_every_sample_is_written_once_in_the_order_of_the_set(
    ranks, tmp_path, world, kwargs, ending
):
    results = ranks.run(predict_sizes, tmp_path, ending, kwargs, world_size=world)
    for paths in results:
        assert paths == results[0], "the same on every rank"
    for size in SIZES:
        assert rows(tmp_path / f"{size}{ending}") == expected(size)
        own = sorted((tmp_path / str(size)).iterdir())
        names = [f"{rank:05d}-of-{world:05d}{ending}" for rank in range(world)]
        assert [path.name for path in own] == names, "and nothing else is left"
        found = [rows(path) for path in own]
        assert sorted(itertools.chain(*found), key=lambda row: row["index"]) == expected(size)
        assert all(part == sorted(part, key=lambda row: row["index"]) for part in found)
    assert {path.name for path in results[0]} >= {f"{size}{ending}" for size in SIZES}
    assert not [path for path in tmp_path.iterdir() if path.name[0] == "."]


def predict_by_batches(folder):
    kwargs = {"batch_sampler": by_length(7), "batch_size": 1}
    return predict(numbered(7), folder / "out.jsonl", kwargs, virtual_ranks=4)


@pytest.mark.slow
def test_batches_of_a_sampler_and_virtual_ranks(ranks, tmp_path):
    for world in (1, 2):
        ranks.run(predict_by_batches, tmp_path, world_size=world)
        assert rows(tmp_path / "out.jsonl") == expected(7)


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(numbered(self.size))


class Shards(Stream):
    """Divides itself, so that nobody knows the place of an item in the whole."""

    num_shards = 4
    number = 0
    parts = 1

    def shard(self, num_shards, index):
        mine = Shards(self.size)
        mine.number = index
        mine.parts = num_shards
        return mine

    def __iter__(self):
        return iter(numbered(self.size)[self.number :: self.parts])


def predict_streams(folder):
    predict(Stream(7), folder / "dealt.jsonl")
    predict(Shards(7), folder / "sharded.jsonl")
    predict(
        [
            {**row, "x": row["x"][None], "number": torch.tensor([row["number"]])}
            for row in numbered(5)
        ],
        folder / "whole.jsonl",
        {"batch_size": None},
    )


def test_of_a_stream_that_divides_itself_rows_have_no_index(ranks, tmp_path):
    ranks.run(predict_streams, tmp_path, world_size=2)
    assert rows(tmp_path / "dealt.jsonl") == expected(7)
    plain = [{name: row[name] for name in ("square", "ragged")} for row in expected(7)]
    assert rows(tmp_path / "sharded.jsonl") == plain[::2] + plain[1::2], "rank by rank"
    assert [row["square"] for row in rows(tmp_path / "whole.jsonl")] == [[k**2] for k in range(5)]


class Sized:
    """A dataset whose sampler yields an index together with a size."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return numbered(4)[index[0]]


def predict_with_sizes(folder):
    kwargs = {"sampler": [(number, 2) for number in range(4)]}
    predict(Sized(), folder / "out.jsonl", kwargs)


def test_where_a_sampler_yields_no_numbers_rows_have_no_index(ranks, tmp_path):
    ranks.run(predict_with_sizes, tmp_path, world_size=2)
    assert [row["square"] for row in rows(tmp_path / "out.jsonl")] == [0, 1, 4, 9]
    assert all("index" not in row for row in rows(tmp_path / "out.jsonl"))


def predict_undivided(folder):
    """A loader that the recipe makes itself, and that no rank divides."""

    class Own(Predicting):
        def make_dataloader(self, dataset, stage, ckpt_prefix=None, **kwargs):
            return make_dataloader(dataset, batch_size=2)

    brain = make(Own, net=linear())
    return brain.predict(numbered(5), output=folder / "*.jsonl")


def test_where_each_rank_has_all_samples_they_are_written_once(ranks, tmp_path):
    for paths in ranks.run(predict_undivided, tmp_path, world_size=2):
        assert [path.name for path in paths] == ["00000-of-00001.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["00000-of-00001.jsonl"]
    assert rows(tmp_path / "00000-of-00001.jsonl") == expected(5)


# -------------------------------------------------------------------------------- failures and ends


def test_a_rank_that_fails_ends_all_and_an_earlier_file_stays(ranks, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("earlier\n")
    outcomes = ranks.outcomes(predict, numbered(9), path, None, 6, world_size=2)
    assert not any(outcome.ok for outcome in outcomes)
    assert any("a wrong sample" in outcome.error for outcome in outcomes)
    assert path.read_text() == "earlier\n"
    ranks.run(predict, numbered(9), path, world_size=2)
    assert rows(path) == expected(9)
    assert [found.name for found in tmp_path.iterdir()] == ["out.jsonl"]


def test_what_a_killed_prediction_has_left_goes(tmp_path):
    """It had three processes, and was killed while they wrote."""
    for rank in range(3):
        left = tmp_path / ".part-each.jsonl.tmp" / f"rank-{rank:05d}"
        left.mkdir(parents=True)
        (left / "run-000000").write_text('{"index": 0, "square": 4')
    for rank in range(3):
        (tmp_path / f"part-{rank:05d}-of-00003.jsonl").write_text("of an earlier prediction")
    (tmp_path / "part-of-something.jsonl").write_text("another file")
    [path] = predict(numbered(5), tmp_path / "part-*.jsonl")
    assert rows(path) == expected(5)
    names = sorted(found.name for found in tmp_path.iterdir())
    assert names == ["part-00000-of-00001.jsonl", "part-of-something.jsonl"]


def predict_onto(folder, ending):
    return predict(numbered(4000), folder / f"out{ending}", {"batch_size": 100})


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".jsonl", pytest.param(".parquet", marks=needs("pyarrow"))])
def test_a_full_disk_ends_all_ranks_with_a_sentence(ranks, tmp_path, ending):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as folder:
        fill(folder, leave=8)
        outcomes = ranks.outcomes(predict_onto, folder, ending, world_size=2)
        assert not any(outcome.ok for outcome in outcomes)
        assert any("cannot be written: No space left" in outcome.error for outcome in outcomes)
        assert [path.name for path in folder.iterdir()] == ["filler"]


class Uneven(Predicting):
    """Each sample has entries in an order, and of types, that others have not."""

    def predict_batch(self, batch):
        return [self.row(number) for number in batch["number"].tolist()]

    def row(self, number):
        row = {"value": number if number < 4 else number + 0.5, "none": None if number % 2 else 1}
        return dict(sorted(row.items(), reverse=number % 2 == 0))


def predict_uneven(folder, ending, sizes):
    for size in sizes:
        output = folder / f"{world_size()}-{size}{ending}"
        make(Uneven, net=linear()).predict(
            numbered(7), output=output, loader_kwargs={"batch_size": size}
        )


def content(path):
    if path.suffix == ".jsonl":
        return path.read_text()
    import pyarrow.parquet as pq

    return pq.read_table(path)


@pytest.mark.parametrize("ending", [".jsonl", pytest.param(".parquet", marks=needs("pyarrow"))])
def test_a_file_is_the_same_on_any_number_of_ranks(ranks, tmp_path, ending):
    worlds, sizes = ((1, 2, 3), (1, 2, 3)) if ending == ".parquet" else ((1, 2), (2,))
    for world in worlds:
        ranks.run(predict_uneven, tmp_path, ending, sizes, world_size=world)
    first, *others = sorted(tmp_path.iterdir())
    assert rows(first)[:2] == [
        {"index": 0, "value": 0, "none": 1},
        {"index": 1, "value": 1, "none": None},
    ]
    for path in others:
        assert content(path) == content(first), path.name


def predict_unequal(folder):
    class Unequal(Predicting):
        def predict_batch(self, batch):
            return {f"on_{get_rank()}": batch["number"]}

    with pytest.raises(
        ValueError, match="outputs of rank 1 do not go into one file with those of the ranks before"
    ):
        make(Unequal, net=linear()).predict(numbered(4), output=folder / "out.parquet")
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("world", [pytest.param(2, marks=needs("pyarrow"))])
def test_ranks_with_other_columns_are_told(ranks, tmp_path, world):
    assert ranks.run(predict_unequal, tmp_path, world_size=world)[0] in ([], [".out.parquet.tmp"])


SCRIPT = """
    import os, signal, sys

    import torch

    import ddpkit as sb

    class Squares(sb.Brain):
        def predict_batch(self, batch):
            if "dies" in sys.argv and sb.distributed.get_rank() == 1 and batch[0] > 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return {"square": batch**2}

    options = {"device": "cpu", "noprogressbar": True}
    sb.ddp_init_group(options)
    brain = Squares({"net": torch.nn.Linear(1, 1)}, run_opts=options)
    brain.predict(range(9), output="out.jsonl", loader_kwargs={"batch_size": 2})
"""


@pytest.mark.slow
@pytest.mark.launch
def test_a_killed_prediction_leaves_no_file_and_begins_anew(tmp_path):
    (tmp_path / "predict.py").write_text(textwrap.dedent(SCRIPT))
    command = [*torchrun(2), "predict.py"]
    killed = Run([*command, "dies"], tmp_path, name="killed", warm=True).wait()
    assert killed.code != 0
    assert not (tmp_path / "out.jsonl").exists()
    again = Run(command, tmp_path, name="again", warm=True).wait()
    assert again.code == 0, again.tail()
    assert [row["square"] for row in rows(tmp_path / "out.jsonl")] == [k**2 for k in range(9)]
    assert not (tmp_path / ".out.jsonl.tmp").exists()


def test_the_script_of_the_page_runs(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs/how-to/large-predictions.md").read_text(encoding="utf-8")
    [script] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "page", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["7 rows, the last: 6 number 6 2", "parts/00000-of-00001.jsonl"]


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (3, "output=3 is no path"),
        ("", "output='' does not say how to write"),
        (".", r"must end in .jsonl or .parquet"),
        ("out.csv", r"must end in .jsonl or .parquet"),
        ("out", r"must end in .jsonl or .parquet"),
        ("*/out.jsonl", r"at most one \* in the name of the file"),
        ("*-*.jsonl", r"at most one \* in the name of the file"),
        ("folder.jsonl", "cannot be written: it is a folder"),
        ("file/out.jsonl", "cannot be written: Not a directory"),
        ("file/*.jsonl", "cannot be written: Not a directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, output, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=words):
        predict(numbered(2), output, fails_at=0)


def test_parquet_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install pyarrow"):
        predict(numbered(2), tmp_path / "out.parquet", fails_at=0)


def predict_distributed(folder):
    data = numbered(5)
    loader = torch.utils.data.DataLoader(data, sampler=DistributedSampler(data))
    with pytest.raises(ConfigError, match="DistributedSampler, which repeats samples"):
        make(Predicting, net=linear()).predict(loader, output=folder / "out.jsonl")
    return world_size()


def test_a_loader_that_repeats_samples_is_refused(ranks, tmp_path):
    assert ranks.run(predict_distributed, tmp_path, world_size=2) == [2, 2]
