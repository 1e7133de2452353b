"""F23: whole trainings with their output folder on a real S3 server, killed near their saves."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.s3_server import needs_s3

pytestmark = [pytest.mark.faults, pytest.mark.exhaustive, *needs_s3]

KILLS = int(os.environ.get("TRAINING_KILLS", "1"))  # of each kind
LIMIT_SECONDS = 600 + 60 * KILLS
ROOT = Path(__file__).resolve().parents[2]
ALWAYS_ZERO = ("other_weights", "other_rows", "damaged", "failed")


@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize("kind", ["store", "shards of two ranks"])
def test_a_training_that_is_killed_near_its_saves_ends_as_if_it_was_not(tmp_path, kind):
    seed = random.randrange(1 << 30)
    report = tmp_path / "report.json"
    words = ["--store=s3", f"--kinds={kind}", f"--kills={KILLS}", f"--seed={seed}"]
    command = [sys.executable, "-m", "tests.mirror.campaign", *words, f"--json={report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = f"seed {seed}: {done.stdout[-20000:]}{done.stderr[-5000:]}"
    print(said)
    assert done.returncode == 0, said
    found = json.loads(report.read_text())[kind]
    assert {name: found[name] for name in ALWAYS_ZERO} == dict.fromkeys(ALWAYS_ZERO, 0), said
    assert found["kills"] >= KILLS
    assert sum(found["places"].values()) == found["kills"]
