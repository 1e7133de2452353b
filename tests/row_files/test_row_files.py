"""Rows in files: what an output becomes, rows in any order, and files that are merged."""

from __future__ import annotations

import contextlib
import functools
import json
import random

import numpy as np
import pytest
import torch

from ddpkit.errors import BatchError
from ddpkit.row_files import (
    JsonLines,
    ParquetRows,
    SortedWriter,
    merge_files,
    merging,
    sorted_writer,
)
from ddpkit.row_files.chunk import INDEX
from tests.ecosystem import needs

parquet = pytest.param(ParquetRows, marks=needs("pyarrow"))
FORMS = pytest.mark.parametrize("form", [JsonLines, parquet])


def read(form, path):
    """The rows of a file, as dicts."""
    if form is JsonLines:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def written(form, folder, batches, **options):
    """Write batches of (index, output); return the rows of the file."""
    folder.mkdir(exist_ok=True)
    with SortedWriter(form(**options), folder) as writer:
        for batch in batches:
            writer.add([index for index, _ in batch], [output for _, output in batch])
        path = writer.finish()
    assert [path] == list(folder.iterdir()), "nothing else is left"
    return read(form, path)


def batches_of(indices, size=3):
    rows = [(index, {"text": f"is {index}", "x": torch.arange(index % 4)}) for index in indices]
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def expected(indices):
    return [{INDEX: index, "text": f"is {index}", "x": list(range(index % 4))} for index in indices]


@FORMS
@pytest.mark.parametrize("buffer", [1, 200, 10**6])
@pytest.mark.parametrize("at_once", [2, 16])
def test_rows_in_any_order_become_a_file_that_ascends(form, tmp_path, monkeypatch, buffer, at_once):
    monkeypatch.setattr(sorted_writer, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(merging, "MOST_AT_ONCE", at_once)
    indices = list(range(40))
    random.Random(3).shuffle(indices)
    assert written(form, tmp_path, batches_of(indices)) == expected(range(40))


@FORMS
def test_rows_in_their_order_go_straight_into_one_file(form, tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_writer, "BUFFER_BYTES", 1)
    monkeypatch.setattr(sorted_writer, "merge_files", None)
    assert written(form, tmp_path, batches_of(range(1, 20))) == expected(range(1, 20))


@FORMS
@pytest.mark.parametrize("read_bytes", [1, 100, 1 << 20])
def test_files_are_merged_a_few_rows_at_a_time(form, tmp_path, monkeypatch, read_bytes):
    for module in (JsonLines, ParquetRows):
        monkeypatch.setattr(f"{module.__module__}.READ_BYTES", read_bytes)
    one = form()
    one.encode([0], [{"text": "", "x": torch.arange(1)}])  # of which an empty file has the columns
    sources = []
    for rank, indices in enumerate([range(0, 30, 3), range(1, 30, 3), [2, 1000], []]):
        sources.append(tmp_path / str(rank))
        with one.sink(sources[-1]) as sink:
            for batch in batches_of(indices, 2):
                sink.write(one.encode(*zip(*batch, strict=True)))
    merge_files(one, sources, tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert read(form, tmp_path / "whole") == expected(
        sorted([*range(0, 30, 3), *range(1, 30, 3), 2, 1000])
    )


@FORMS
def test_a_sample_that_comes_twice_is_written_twice(form, tmp_path):
    rows = written(form, tmp_path, [[(4, 0), (1, 1)], [(4, 2)]])
    assert rows == [
        {"index": 1, "output": 1},
        {"index": 4, "output": 0},
        {"index": 4, "output": 2},
    ]


@FORMS
def test_without_an_index_rows_stand_as_they_come(form, tmp_path):
    rows = [[(0, {"index": 7})], [(1, {"index": 3})]]
    assert written(form, tmp_path, rows, has_index=False) == [{"index": 7}, {"index": 3}]
    with pytest.raises(BatchError, match="the index of the sample has this name"):
        form().encode([0], [{"index": 7}])


@FORMS
def test_no_sample_at_all_is_a_file_without_rows(form, tmp_path):
    assert written(form, tmp_path, []) == []


OUTPUTS = {
    "number": torch.tensor(2),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "table": torch.arange(6.0).reshape(2, 3),
    "empty": torch.zeros(0, 3),
    "array": np.array([True, False]),
    "scalar": np.float32(0.5),
    "mixed": [torch.tensor(1), {"deep": (np.int64(3), "ä")}],
    "text": 'quoted "ä"\n',
    "none": None,
}
PLAIN = {
    "number": 2,
    "half": [1.5, -2.0],
    "table": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
    "empty": [],
    "array": [True, False],
    "scalar": 0.5,
    "mixed": [1, {"deep": [3, "ä"]}],
    "text": 'quoted "ä"\n',
    "none": None,
}


@pytest.mark.parametrize("name", OUTPUTS)
@FORMS
def test_tensors_and_arrays_become_lists(form, tmp_path, name):
    if form is ParquetRows and name == "mixed":
        pytest.skip("a list of Parquet has values of one type")
    [row] = written(form, tmp_path, [[(0, {"value": OUTPUTS[name]})]])
    assert row == {"index": 0, "value": PLAIN[name]}


@pytest.mark.parametrize(
    "output",
    [{"a": object()}, {"a": torch.tensor(1j)}, {3: 1}, {"a": {1, 2}}],
)
@FORMS
def test_what_cannot_be_written_is_refused(form, output):
    with pytest.raises(BatchError, match="predict_batch returned"):
        form().encode([0], [output])


@pytest.mark.parametrize("other", [{"b": 1}, {"a": 1, "b": 1}, {"a": "text"}, {"a": [1]}])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("form", [parquet])
def test_columns_of_other_names_or_types_are_refused(form, other, together):
    one = form()
    batches = [([0, 1], [{"a": 1}, other])] if together else [([0], [{"a": 1}]), ([1], [other])]
    for batch in batches[:-1]:
        one.encode(*batch)
    with pytest.raises(BatchError, match="cannot be written as Parquet"):
        one.encode(*batches[-1])


def uneven(index):
    """The output of a sample: entries whose types and order are not those of other samples."""
    table = torch.full((index % 3, 2), index, dtype=torch.float32)
    row = {
        "text": None if index % 4 else f"is {index}",
        "number": index if index < 9 else index + 0.5,
        "score": None if index % 5 == 1 else torch.tensor(index, dtype=torch.float32),
        "wide": torch.tensor(index, dtype=torch.int16 if index % 2 else torch.int32),
        "table": table if index % 4 else None,
        "words": [] if index % 2 else [{"b": index, "a": "x"}],
        "deep": {"z": index} if index % 3 else {"c": None, "z": 0.5, "a": [index]},
    }
    return dict(sorted(row.items(), reverse=index % 2 == 0))


def columns_of_all(forms):
    found = [form.columns() for form in forms if form.columns() is not None]
    return functools.reduce(lambda one, other: one.joined(other), found)


def table_of(form, folder, ranks):
    """Write the batches of each rank, and merge the files; return the table."""
    import pyarrow.parquet as pq

    folder.mkdir()
    forms = [form() for _ in ranks]
    with contextlib.ExitStack() as open_writers:
        writers = []
        for rank, (own, batches) in enumerate(zip(forms, ranks, strict=True)):
            (folder / str(rank)).mkdir()
            writers.append(
                open_writers.enter_context(SortedWriter(own, folder / str(rank))),
            )
            for batch in batches:
                writers[-1].add(batch, [uneven(index) for index in batch])
        for own in forms:
            own.adopt(columns_of_all(forms))
        merge_files(forms[0], [writer.finish() for writer in writers], folder / "whole")
    return pq.read_table(folder / "whole")


@pytest.mark.parametrize("form", [parquet])
@pytest.mark.parametrize("buffer", [1, 10**6])
def test_neither_batches_nor_ranks_change_the_columns(form, tmp_path, monkeypatch, buffer):
    monkeypatch.setattr(sorted_writer, "BUFFER_BYTES", buffer)
    whole = table_of(form, tmp_path / "whole", [[list(range(13))]])
    assert whole.column_names[0] == INDEX
    assert whole.column_names[1:] == list(uneven(0))
    types = {name: str(whole.schema.field(name).type) for name in whole.column_names}
    assert (types["number"], types["score"], types["wide"]) == ("double", "float", "int32")
    assert types["deep"] == "struct<c: null, z: double, a: list<element: int64>>"
    draw = random.Random(4)
    for trial in range(6):
        rest = draw.sample(range(13), 13)
        ranks = [[] for _ in range(1 + trial % 3)]
        while rest:
            size = draw.randint(1, 4)
            draw.choice(ranks).append(rest[:size])
            rest = rest[size:]
        assert table_of(form, tmp_path / str(trial), ranks).equals(whole)


@pytest.mark.parametrize("form", [parquet])
def test_dicts_that_are_all_empty_are_refused_in_a_sentence(form, tmp_path):
    with pytest.raises(BatchError, match="'deep' with no child field"):
        written(form, tmp_path, [[(0, {"deep": {}})]])
    assert written(form, tmp_path, [[(0, {"deep": {}}), (1, {"deep": {"a": 1}})]])[0] == {
        INDEX: 0,
        "deep": {"a": None},
    }


@pytest.mark.parametrize("form", [parquet])
def test_a_number_that_one_type_cannot_hold_is_refused(form, tmp_path):
    with pytest.raises(BatchError, match="One type has to hold all values of an entry"):
        written(form, tmp_path, [[(0, 2**53 + 1)], [(1, 0.5)]])


@pytest.mark.parametrize("form", [parquet])
def test_columns_in_another_order_are_the_same(form, tmp_path):
    rows = [[(0, {"a": 1, "b": "x"})], [(1, {"b": "y", "a": 2})]]
    assert [row["a"] for row in written(form, tmp_path, rows)] == [1, 2]


def test_without_the_package_parquet_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install pyarrow`, or write .jsonl"):
        ParquetRows()


@pytest.mark.parametrize("form", [parquet])
def test_what_was_read_of_a_file_does_not_stay_in_memory(form, tmp_path, monkeypatch):
    import pyarrow as pa

    monkeypatch.setattr("ddpkit.row_files.parquet.GROUP_BYTES", 1 << 18)
    most = {}
    for number in (20, 80):
        one = form()
        one.encode([0], [torch.zeros(256)])
        for rank in range(2):
            with one.sink(tmp_path / str(rank)) as sink:
                for batch in range(number):
                    indices = [2 * (100 * batch + row) + rank for row in range(100)]
                    sink.write(one.encode(indices, list(torch.randn(100, 256))))
        sources = [tmp_path / "0", tmp_path / "1"]
        sizes = [pa.total_allocated_bytes() for _ in merging._by_index(one, sources)]
        most[number] = max(sizes)
    assert most[80] < 1.3 * most[20], "files that are four times as long take no more memory"
