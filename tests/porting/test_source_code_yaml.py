"""Names in the tags of a YAML file."""

from __future__ import annotations

import pytest
import yaml

from ddpkit.porting import port_yaml

NEW = "ddpkit.epoch_loop.EpochCounter"
OLD = "speechbrain.utils.epoch_loop.EpochCounter"


@pytest.mark.parametrize(
    "form",
    [
        "a: !new:NAME",
        "a: !new:NAME\n    limit: 2  # epochs\n",
        "a: !name:NAME {limit: 2}",
        "a: !apply:NAME [1]",
        "a: !applyref:NAME\n    - 1\n",
        "a: !module:NAME",
        "a: [1, !new:NAME {limit: 1}, {b: !new:NAME }]",
        "a: !!python/name:NAME",
        "a: !!python/object/apply:NAME [1]",
        "a: !<!new:NAME> {}",
        "a: &x !new:NAME {}\nb: *x",
        "a: !new:NAME &x {}",
        "- - !new:NAME\n  - !new:NAME",
        "é: é\r\na: !new:NAME\r\n",
    ],
)
def test_a_tag_is_renamed_wherever_it_stands(form):
    new = port_yaml(form.replace("NAME", OLD))
    assert new == form.replace("NAME", NEW)
    assert port_yaml(new) == new


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"# a: !new:{OLD}",
        f"a: 1 # !new:{OLD}",
        f'a: "!new:{OLD}"',
        f"a: '!new:{OLD}'",
        f"a: b !new:{OLD}",
        f"a: |\n  !new:{OLD}\n",
        f"a: >-\n  x\n  b: !new:{OLD}\n",
        f"a: {OLD}",
        "a: !new:speechbrain.lobes.features.Fbank {n_mels: 40}",
        "a: !new:speechbrain.utils.epoch_loop.NoSuchCounter",
        "a: !new:myspeechbrain.utils.epoch_loop.EpochCounter",
        "a: !ref <speechbrain.utils.epoch_loop.EpochCounter>",
        "a: !new:speechbrain",
        "a: !module:speechbrain.utils.checkpoints",
    ],
)
def test_all_else_stays(text):
    assert port_yaml(text) == text


def test_what_is_no_yaml_is_refused():
    with pytest.raises(yaml.YAMLError):
        port_yaml("a: !new:b\n  - 'c")
