"""A profile of several processes: a file of each, the wait for the others as a range, and figures
of the first.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from tests.recipes import make, points


def profile_of_rank(folder):
    """Train with a profile; return what was logged."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("ddpkit.profiler")
    before = log.level
    log.addHandler(handler)
    log.setLevel("INFO")
    try:
        options = {"profile_training": True, "profile_warmup": 1, "profile_steps": 3}
        make(hparams={"output_folder": folder}, **options).fit([1], points(16))
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return lines


@pytest.mark.costly
def test_each_rank_writes_a_trace_with_its_wait_for_the_others_and_the_first_tells_of_its_own(
    ranks,
    tmp_path,
):
    first, *others = ranks.run(profile_of_rank, str(tmp_path))
    assert not any(others)
    (text,) = first
    assert f"Each of the {len(others) + 1} processes has written a file beside it" in text
    assert "the figures here are of rank 0" in text
    assert "exchange " in text
    for rank in range(len(others) + 1):
        (trace,) = Path(tmp_path, "profiler_logs").glob(f"rank{rank}.*.pt.trace.json")
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        found = Counter(one.get("name") for one in events if one.get("ph") == "X")
        assert found["ddpkit: exchange"] >= 3
        assert found["ddpkit: backward"] >= 3
