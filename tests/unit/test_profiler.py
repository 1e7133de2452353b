"""A profiler that records the steps asked for and writes one trace per rank."""

from __future__ import annotations

import json

import pytest
import torch

from ddpkit.profiler import prepare_profiler


@pytest.mark.filterwarnings("ignore:Profiler clears events at the end of each cycle")
def test_it_writes_one_trace_after_the_last_step(tmp_path):
    seen = []
    with prepare_profiler(profile_warmup=1, profile_steps=2, logdir=tmp_path) as profiler:
        for _ in range(5):
            torch.ones(3).sum()
            profiler.step()
            seen.append(len(list(tmp_path.rglob("*.json"))))
    assert seen == [0, 0, 1, 1, 1]
    (trace,) = (tmp_path / "profiler_logs").iterdir()
    assert trace.name.startswith("rank0.")
    assert trace.name.endswith(".pt.trace.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::sum" in names


def test_nothing_is_made_before_it_is_used(tmp_path):
    prepare_profiler(logdir=tmp_path / "later")
    assert not (tmp_path / "later").exists()


@pytest.mark.filterwarnings("ignore:Profiler clears events at the end of each cycle")
def test_it_says_what_took_most_time_and_where_the_trace_is(tmp_path, caplog):
    caplog.set_level("INFO")
    matrix = torch.ones(300, 300)
    with prepare_profiler(profile_warmup=1, profile_steps=2, logdir=tmp_path) as profiler:
        for _ in range(4):
            matrix.mm(matrix)
            profiler.step()
    (trace,) = (tmp_path / "profiler_logs").iterdir()
    first, how, title, head, *rows = caplog.messages[-1].splitlines()
    assert first == f"Profile of 2 batches: {trace}"
    assert how == "Open it at https://ui.perfetto.dev, in chrome://tracing, or with TensorBoard."
    assert title == "What took the host's time, the largest first:"
    assert head.split() == ["operation", "calls", "ms", "share"]
    assert 2 <= len(rows) <= 10
    assert max(map(len, (how, title, head, *rows))) <= 80
    shares = {}
    for row in rows:
        *name, _, share = row.split()
        shares[name[0]] = float(share.rstrip("%"))
        assert name[0] != "aten::mm" or name[1] == "2"
    assert shares["aten::mm"] > 1
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert sum(shares.values()) <= 100.5
