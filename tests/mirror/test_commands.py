"""Commands that read checkpoints and runs, of a URL."""

from __future__ import annotations

import re

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ddpkit.cli import ckpt, report, stored_checkpoints
from ddpkit.cli.checkpoint_commands import NOT_COPIED
from ddpkit.errors import CheckpointError
from ddpkit.mirror import copied_down
from tests.mirror.conftest import (
    Trained,
    checkpoints_in,
    folders_of_machine,
    names_in,
    other_machine,
    train,
)
from tests.mirror.test_recipe import recipe, run  # noqa: F401 -- a fixture


@pytest.fixture
def trained(store):
    train(store, 2)
    (name,) = checkpoints_in(store)
    other_machine()
    return store, name


def test_ckpt_lists_the_checkpoints_of_a_store(trained, capsys):
    url, name = trained
    assert ckpt.run(["ls", url]) == 0
    assert name in capsys.readouterr().out


class KeepsTwo(Trained):
    keeps = 2


@pytest.fixture
def two(store):
    """A folder of a store with two checkpoints."""
    train(store, 2, kind=KeepsTwo)
    other_machine()
    assert len(checkpoints_in(store)) == 2
    return store


@pytest.fixture
def read(monkeypatch):
    """The last parts of the names of all objects whose content is read, whole or in part."""
    names = []
    for method in ("cat_file", "_open"):
        plain = getattr(MemoryFileSystem, method)

        def noted(self, path, *args, plain=plain, **options):
            names.append(path.rpartition("/")[2])
            return plain(self, path, *args, **options)

        monkeypatch.setattr(MemoryFileSystem, method, noted)
    return names


def lines_of_ls(path, capsys):
    capsys.readouterr()
    assert ckpt.run(["ls", str(path)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("named", ["", "/latest", "/{name}"])
def test_ckpt_ls_of_a_store_reads_no_weights_and_says_what_it_says_of_the_copy(
    two, read, capsys, named
):
    url = two + named.format(name=checkpoints_in(two)[0])
    rows = lines_of_ls(url, capsys)
    assert set(read) <= {"manifest.json", "CKPT.yaml", "brain.ckpt", ".index.json", "latest"}
    assert {"manifest.json", "CKPT.yaml", "brain.ckpt"} <= set(read)
    for name in ("manifest.json", "CKPT.yaml", "brain.ckpt"):
        assert read.count(name) == len(rows) - 4 if not named else 1
    copy = copied_down(url)
    assert "net.ckpt" in read  # so weights would have been seen
    of_copy = lines_of_ls(copy, capsys)
    assert [row.replace(url, str(copy)) for row in rows] == of_copy
    assert len(rows) == (6 if not named else 5)
    assert " ok" in rows[1]
    assert "step" in rows[0]


def test_ckpt_show_of_a_store_reads_the_small_files_of_one_checkpoint(
    two, read, capsys, monkeypatch
):
    older, newer = checkpoints_in(two)
    monkeypatch.setattr(stored_checkpoints, "SMALL_BYTES", 900)
    assert ckpt.run(["show", two]) == 0
    out = capsys.readouterr().out
    assert newer in out
    assert f"folder    {two}" in out
    assert NOT_COPIED in out
    assert "net.ckpt" not in read
    assert folders_of_machine() == []
    assert ckpt.run(["show", f"{two}/{older}", "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "net.ckpt" in read
    assert NOT_COPIED not in out


def test_ckpt_ls_of_a_store_copies_nothing_to_the_machine(two, capsys):
    lines_of_ls(two, capsys)
    assert folders_of_machine() == []


def test_ckpt_ls_of_a_store_names_a_damaged_checkpoint_and_lists_the_other(two, capsys):
    older, newer = checkpoints_in(two)
    fsspec.filesystem("memory").pipe_file(f"{two}/{newer}/net.ckpt", b"short")
    rows = lines_of_ls(two, capsys)
    assert "damaged" in next(row for row in rows if row.startswith(newer))
    assert any("net.ckpt has 5 bytes instead of" in row for row in rows)
    assert " ok" in next(row for row in rows if row.startswith(older))
    assert any("1 damaged." in row for row in rows)


def test_ckpt_ls_leaves_out_what_is_deleted_meanwhile(two, capsys, monkeypatch):
    older, newer = checkpoints_in(two)
    plain = MemoryFileSystem.cat_file

    def deleted(self, path, *args, **options):
        if path.endswith(f"{older}/CKPT.yaml"):
            self.rm(path.rpartition("/")[0], recursive=True)
        return plain(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", deleted)
    rows = lines_of_ls(two, capsys)
    assert rows[1].startswith(newer)
    assert "1 checkpoint(s)" in rows[3]


@pytest.mark.parametrize("named", ["nothing", "CKPT+none", "latest"])
def test_ckpt_ls_of_what_is_not_in_the_store_says_so(store, named):
    with pytest.raises(CheckpointError, match=rf"no checkpoint in '{store}/{re.escape(named)}'"):
        ckpt.run(["ls", f"{store}/{named}"])


@pytest.mark.parametrize("named", ["{name}", "latest", ""])
def test_ckpt_reads_every_byte_of_a_checkpoint_in_a_store(trained, capsys, named):
    url, name = trained
    before = names_in(url)
    assert ckpt.run(["verify", f"{url}/{named.format(name=name)}".rstrip("/")]) == 0
    assert name in capsys.readouterr().out
    other_machine()
    assert names_in(url) == before


@pytest.mark.costly
def test_the_page_of_a_run_in_a_store(store, recipe, tmp_path):  # noqa: F811 -- a fixture
    run(recipe, f"--output_folder={store}", epochs=1)
    other_machine()
    assert report.run([store, "--output", str(tmp_path / "page.html")]) == 0
    assert "SGD" in (tmp_path / "page.html").read_text()
