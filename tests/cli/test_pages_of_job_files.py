"""The commands that the pages on Kubernetes and SkyPilot show, as a reader types them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

import ddpkit.parts
from ddpkit.cli import main

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
COMMAND = re.compile(
    r"^python -m ddpkit ((?:kubernetes|skypilot) (?:.*\\\n)*.*?) > \S+$", re.MULTILINE
)


@pytest.mark.parametrize(("page", "number"), [("kubernetes", 3), ("skypilot", 2)])
def test_each_command_of_a_page_writes_a_file(page, number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "hparams.yaml"):
        (tmp_path / name).touch()
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    commands = COMMAND.findall(text)
    assert len(commands) == number
    for command in commands:
        assert main(shlex.split(command.replace("\\\n", ""))) == 0
        assert list(yaml.safe_load_all(capsys.readouterr().out))


def test_the_yaml_of_the_page_makes_the_part(tmp_path):
    text = (PAGES / "kubernetes.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "hparams.yaml").write_text(block)
    [part] = ddpkit.load_hparams(tmp_path / "hparams.yaml", "")["parts"]
    assert isinstance(part, ddpkit.parts.KubeflowProgress)
