"""The table of SpeechBrain's names: what ddpkit answers, and what it leaves."""

from __future__ import annotations

from importlib import import_module

import pytest

from ddpkit.porting import TABLE, ddpkit_module, ddpkit_name
from tests.porting import naming_table

NAMES = [
    (f"{module}.{name}", f"{home}.{name}")
    for module, homes in TABLE.items()
    for home, listed in homes.items()
    for name in listed.split()
]


@pytest.mark.parametrize(("theirs", "ours"), NAMES)
def test_a_name_of_the_table_leads_to_what_is_there(theirs, ours):
    home, _, name = ours.rpartition(".")
    assert hasattr(import_module(home), name)
    assert ddpkit_name(theirs) == ours


def test_a_name_has_one_home():
    assert len({theirs for theirs, _ in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("speechbrain.Brain", "ddpkit.Brain"),
        ("speechbrain.core.Stage", "ddpkit.Stage"),
        ("speechbrain.core.Stage.TRAIN", "ddpkit.Stage.TRAIN"),
        ("speechbrain.utils.distributed.infer_device", "ddpkit.device.infer_device"),
        ("speechbrain.utils.distributed.run_on_main", "ddpkit.distributed.run_on_main"),
        ("speechbrain.utils.autocast.AMPConfig.from_name", "ddpkit.precision.AMPConfig.from_name"),
        ("speechbrain.utils.seed_everything", "ddpkit.seed_everything"),
        ("speechbrain.utils.checkpoints", None),
        ("speechbrain.utils.checkpoints.no_such_name", None),
        ("speechbrain.utils.checkpoints.os", None),
        ("speechbrain.dataio.dataio.read_audio", None),
        ("speechbrain.nnet.losses.nll_loss", None),
        ("speechbrain", None),
        ("torch.nn.Linear", None),
        ("", None),
        (".", None),
    ],
)
def test_ddpkit_name(theirs, ours):
    assert ddpkit_name(theirs) == ours


def test_ddpkit_module():
    assert ddpkit_module("speechbrain.utils.autocast") == "ddpkit.precision"
    assert ddpkit_module("speechbrain.nnet.losses") is None
    assert ddpkit_module("speechbrain") == "ddpkit"


def test_the_page_shows_the_table():
    assert naming_table.parts()[1].strip() == naming_table.table().strip(), (
        "run python -m tests.porting.naming_table"
    )
