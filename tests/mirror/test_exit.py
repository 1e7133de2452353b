"""The last files of a run, whose store is asked through a pool of threads: at the end of the
interpreter such pools take no more work.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import Run, python

pytestmark = pytest.mark.launch

SCRIPT = """
import sys
from concurrent.futures import ThreadPoolExecutor

from fsspec.implementations.local import LocalFileSystem

plain = LocalFileSystem.pipe_file


def pipe_file(*arguments, **options):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(plain, *arguments, **options).result()


LocalFileSystem.pipe_file = pipe_file

from ddpkit.mirror import mirror_holding, mirror_of

folder = mirror_of(sys.argv[1])
mirror_holding(folder).begin()
(folder / "log.txt").write_text("the last line")
"""


def test_the_last_files_are_copied_before_pools_of_threads_end(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = python(str(tmp_path / "script.py"), f"file://{tmp_path}/bucket/run")
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    ended = Run(command, tmp_path, environment).wait(100)
    assert ended.code == 0, ended.err
    assert (tmp_path / "bucket/run/log.txt").read_text() == "the last line"
    assert not list(tmp_path.glob("ddpkit-mirrors-*/*/.not-copied"))
