from __future__ import annotations

import math
from collections import OrderedDict
from datetime import datetime, timezone
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given, strategies as st
from yaml.constructor import SafeConstructor

from ddpkit.base.plain_yaml import UnreadableValue, dump_plain_yaml, load_plain_yaml
from ddpkit.errors import CheckpointError


def round_trip(value):
    return load_plain_yaml(dump_plain_yaml(value))


UTC = timezone.utc


class Kind(IntEnum):
    A = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ((1, (2, 3)), [1, [2, 3]]),
        ({1}, [1]),
        (Path("a/b"), "a/b"),
        (Kind.A, 3),
        (OrderedDict(b=1, a=np.int8(2)), {"b": 1, "a": 2}),
        ({(1, 2): np.float64(3.0), np.int64(4): None}, {"(1, 2)": 3.0, 4: None}),
        (1e-5, 1e-5),
        (1e22, 1e22),
        (float("inf"), float("inf")),
        ("no", "no"),
        ("ünï\n\x07\udc80", "ünï\n\x07\\udc80"),
        (b"\x00\xff", b"\x00\xff"),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), datetime(2026, 1, 2, 3, tzinfo=UTC)),
        (True, True),
        (None, None),
    ],
)
def test_values_come_back_plain(value, expected):
    found = round_trip({"value": value})["value"]
    assert found == expected
    assert type(found) is type(expected)
    yaml.safe_load(dump_plain_yaml({"value": value}))  # readable by anybody


def test_nan_comes_back():
    assert math.isnan(round_trip({"loss": np.float32("nan")})["loss"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(0.1),
        torch.tensor([[0.1, float("nan")], [float("-inf"), 3.0]]),
        torch.tensor([0.1], dtype=torch.float64),
        torch.tensor([0.1, 2.0], dtype=torch.bfloat16),
        torch.tensor([0.1], dtype=torch.float16),
        torch.tensor([2**53 + 1]),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_tensors_come_back_as_tensors(tensor):
    found = round_trip({"t": tensor})["t"]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(tensor.detach()))


def test_what_has_no_plain_form_is_stored_as_text_with_a_warning(caplog):
    assert "object" in round_trip({"x": object()})["x"]
    assert "cannot be stored in YAML" in caplog.text


def test_what_older_libraries_wrote_is_understood():
    meta = {
        "loss": np.float64(0.25),
        "epoch": np.int64(7),
        "big": np.float32(1.5),
        "shape": (1, 2),
        "p": Path("/a/b"),
    }
    assert load_plain_yaml(yaml.dump(meta)) == {
        "loss": 0.25,
        "epoch": 7,
        "big": 1.5,
        "shape": (1, 2),
        "p": "/a/b",
    }
    assert isinstance(load_plain_yaml(yaml.dump({"t": torch.ones(2)}))["t"], UnreadableValue)


EVIL = [
    "!!python/object/apply:os.system ['touch {0}']",
    "!!python/object/apply:subprocess.check_output [[touch, {0}]]",
    "!!python/object/new:os.system ['touch {0}']",
    "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.PosixPath ['{0}']]",
    (
        "!!python/object/new:type {{args: [x, !!python/tuple [], {{extend: !!python/name:exec }}], "
        "listitems: ['{0}']}}"
    ),
    (
        "!!python/object/apply:numpy._core.multiarray.scalar [!!python/object/apply:numpy.dtype "
        "{{args: [O]}}, 'x']"
    ),
    "!!python/object/apply:numpy.dtype {{args: ['{0}'], state: [3, '<']}}",
    (
        "!!python/object/apply:numpy._core.multiarray.scalar [!!python/object/apply:os.getcwd [], "
        "!!binary AAAA]"
    ),
    "!new:pathlib.Path.touch ['{0}']",
    "!apply:os.mknod ['{0}']",
    "!!python/name:os.system",
    "!!python/module:antigravity",
]


@pytest.mark.parametrize("text", EVIL)
def test_nothing_executes(tmp_path, text):
    target = tmp_path / "touched"
    loaded = load_plain_yaml("a: " + text.format(target))
    assert isinstance(loaded["a"], UnreadableValue)
    assert not target.exists()


@pytest.mark.parametrize("poisoned", [yaml.SafeLoader, SafeConstructor])
def test_a_poisoned_safe_loader_changes_nothing(monkeypatch, poisoned):
    called = []

    def construct(loader, suffix, node):
        called.append(suffix)

    monkeypatch.setattr(poisoned, "yaml_multi_constructors", {"!": construct, "tag:": construct})
    monkeypatch.setattr(
        poisoned,
        "yaml_constructors",
        {None: lambda loader, node: called.append("x")},
    )
    assert yaml.safe_load("!new:x 3") is None
    assert len(called) == 1
    called.clear()
    assert load_plain_yaml("a: !new:x 3\nb: 2") == {"a": UnreadableValue("!new:x"), "b": 2}
    assert called == []


def test_reading_and_writing_leaves_yaml_as_it_was():
    round_trip({"t": torch.ones(1)})
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load("!tensor {dtype: float32, shape: [1], values: [1.0]}")
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load("!!python/tuple [1]")
    with pytest.raises(yaml.YAMLError):
        yaml.safe_dump(torch.ones(1))


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "\t",
        "a: !!int x",
        "a: !!int ''",
        "a: !!bool x",
        "a: !!timestamp x",
        "a: 2001-99-99",
        "? [1]\n: 2",
        "a: *b",
        "a: !tensor {dtype: load, shape: [1], values: [1]}",
        "a: !tensor {dtype: float32, shape: [1000000000000], values: [1]}",
        "a: !tensor 3",
        "a: !!python/object/apply:numpy.dtype 3",
        "\x00",
        "[" * 600,  # deeper than Python's stack
    ],
)
def test_text_that_is_no_yaml_is_one_kind_of_error(text):
    with pytest.raises(CheckpointError, match="^invalid YAML"):
        load_plain_yaml(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "a: [1\nb: 2\n",
            (
                r"while parsing a flow sequence .* expected ',' or '\]', but got ':' .* line 2, "
                r"column 2:.*"
            ),
        ),
        ("a: 1\nb: \x00", "unacceptable character #x0000: .*"),
        ("a: *b", "found undefined alias 'b' in .* line 1, column 4:.*"),
    ],
)
def test_text_that_is_no_yaml_is_told_with_its_line(text, words):
    with pytest.raises(CheckpointError, match=f"^invalid YAML: {words}$"):
        load_plain_yaml(text)


TEXTS = st.one_of(st.text("aeoynstfAEN0123456789_./+-", max_size=45), st.text(max_size=20))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
)


@pytest.mark.slow
@given(st.dictionaries(TEXTS, VALUES, max_size=4))
@example(
    {
        "no": "yes",
        "off": "1e3",
        "1": ".5",
        "a": "2026-01-02",
        "b": "0x1F",
        "c": "1_000",
        "d": "~",
        "e": "-",
    }
)
@example(
    {
        "a": 1e22,
        "b": -0.0,
        "c": 5e-324,
        "d": float("-inf"),
        "e": 1 << 63,
        "f": "a/b.c",
        "g": {},
        "h": [],
        "i": "",
    }
)
@example(
    {
        "null": None,
        "True": "null",
        "k": "Null",
        "m": ".nan",
        "n": "---",
        "o": "...",
        "p": "12e03",
        "q": "+",
    }
)
@example({"a": "it stopped..."})
@example(
    {
        "a": "x: y",
        "b": "#",
        "c": "- 1",
        "d": "{a",
        "e": "line\nline",
        "f": "\u2028\U0001f600\x7f",
        "=": "<<",
        "<<": "=",
    }
)
def test_what_is_written_is_read_as_it_was(value):
    found = load_plain_yaml(dump_plain_yaml(value))
    assert repr(found) == repr(value)  # and not ==: a NaN is not itself, and True is 1


def test_a_line_of_the_file_is_an_entry():
    value = {
        "unixtime": 1e9,
        "end-of-epoch": True,
        "WER": 3.5,
        "of": [1, 2.0, "x y"],
        "by": {"a": 1, "b": None},
    }
    lines = [
        "unixtime: 1000000000.0",
        "end-of-epoch: true",
        "WER: 3.5",
        "of: [1, 2.0, x y]",
        ("by: {a: 1, b: null}"),
    ]
    assert dump_plain_yaml(value).splitlines() == lines
