"""Commands that read checkpoints and runs, of a URL."""

from __future__ import annotations

import pytest

from ddpkit.cli import ckpt, report
from tests.mirror.conftest import checkpoints_in, names_in, other_machine, train
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


@pytest.mark.parametrize("named", ["{name}", "latest", ""])
def test_ckpt_reads_every_byte_of_a_checkpoint_in_a_store(trained, capsys, named):
    url, name = trained
    before = names_in(url)
    assert ckpt.run(["verify", f"{url}/{named.format(name=name)}".rstrip("/")]) == 0
    assert name in capsys.readouterr().out
    other_machine()
    assert names_in(url) == before


def test_the_page_of_a_run_in_a_store(store, recipe, tmp_path):  # noqa: F811 -- a fixture
    run(recipe, f"--output_folder={store}", epochs=1)
    other_machine()
    assert report.run([store, "--output", str(tmp_path / "page.html")]) == 0
    assert "SGD" in (tmp_path / "page.html").read_text()
