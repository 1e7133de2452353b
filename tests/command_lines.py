"""Command lines as tests parse them: beside a small YAML file, without a launcher and without
GPUs.
"""

from __future__ import annotations

import pytest
from hyperpyyaml import load_hyperpyyaml

from ddpkit.run_opts import parse_arguments
from tests.pretended_devices import pretend_devices

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
YAML_TEXT = """\
seed: 1
lr: 0.1
name: first
url: x
optimizer: sgd
layers: [1, 2]
folder: !ref results/<seed>
danger: !apply:os.mkdir [PWNED]
flag: True
other_yaml: null
"""


@pytest.fixture(autouse=True)
def hparams_yaml(monkeypatch, tmp_path):
    for name in (*LAUNCHER, "TORCHELASTIC_ERROR_FILE", "SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    pretend_devices(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h.yaml").write_text(YAML_TEXT)


@pytest.fixture(name="gpus")
def gpus_fixture(monkeypatch):
    pretend_devices(monkeypatch, "cuda", cuda=4)


@pytest.fixture(name="launched")
def launched_fixture(monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)


def parse(*words):
    return parse_arguments(list(words))


def overrides(*words):
    """What the overrides of a command line mean to HyperPyYAML."""
    text = parse("h.yaml", *words)[2]
    safe = YAML_TEXT.replace("danger: !apply:os.mkdir [PWNED]\n", "")
    return load_hyperpyyaml(safe, text)
