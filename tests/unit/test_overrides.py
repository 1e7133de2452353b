"""Wrong words on the command line: what was meant, what stands in the YAML there, and what to
write.
"""

from __future__ import annotations

import pytest
from hyperpyyaml import load_hyperpyyaml

from ddpkit.errors import ConfigError
from ddpkit.run_opts import parse_arguments

RECIPE = """lr: 0.1
batch_size: 4
number_of_epochs: 2
output_folder: results
shuffle: True
name: first
empty: null
cnn_channels: [1, 2]
optimizer: {name: sgd, momentum: 0.9}
net: !new:torch.nn.Linear
    in_features: 1
    out_features: 2
folder: !ref <output_folder>/<name>
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "hparams.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--learning_rate=1", "--lr"),
        ("--LR=1", "--lr"),
        ("--bs=3", "--batch_size"),
        ("--batch-size=3", "--batch_size"),
        ("--global-batch-size=3", "--global_batch_size"),
        ("--epochs=3", "--number_of_epochs"),
        ("--max_epochs=3", "--number_of_epochs"),
        ("--output-dir=x", "--output_folder"),
        ("--gradient_accumulation_steps=3", "--grad_accumulation_factor"),
        ("--clip=3", "--max_grad_norm"),
        ("--gpus=3", "--nproc"),
        ("--no-debug", "--debug"),
        ("--resume_from=x", "--resume"),
        ("--cnn_chanels=3", "--cnn_channels"),
    ],
)
def test_a_wrong_name_gets_the_one_that_was_meant(recipe, word, meant):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([recipe, word])
    assert f"; did you mean {meant}? Correct the name" in str(caught.value)


def test_a_name_that_is_an_option_and_a_key_is_listed_once(tmp_path):
    (path := tmp_path / "hparams.yaml").write_text("global_batch_size: 4\n")
    for word in ("--global-batch-size=3", "--global_batch_sise=3"):
        with pytest.raises(ConfigError) as caught:
            parse_arguments([str(path), word])
        assert str(caught.value).count("--global_batch_size") == 1


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("--lr=abc", "--lr='abc' is a text, and {} has a number there, 0.1: give a number."),
        ("--lr=0,001", "has a number there, 0.1: give a number"),
        ("--lr=None", "None is written --lr=null."),
        ("--batch_size=many", "has a whole number there, 4: give a whole number"),
        ("--shuffle=maybe", "has a switch there, True: give true or false"),
        ("--shuffle=no", "has a switch there, True: give true or false"),
        ("--cnn_channels=many", "has a list there: give a list, such as [a, b]"),
        (
            "--optimizer=adam",
            "has a mapping there: give the keys that change, such as {{key: value}}",
        ),
        (
            "--lr=",
            "--lr= has no value: give one, --lr=null for none, or --lr='\"\"' for an empty text.",
        ),
        ("--name=", "--name= has no value"),
        ("--max_grad_norm=", "--max_grad_norm needs a value, --max_grad_norm=X"),
        ("lr=0.2", "With two dashes: --lr=0.2."),
        ("-lr=0.2", "With two dashes: --lr=0.2."),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_the_yaml_has(recipe, word, words):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([recipe, word])
    assert words.format(recipe) in str(caught.value)


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("--lr=1e-3", "lr", 0.001),
        ("--lr=null", "lr", None),
        ("--lr='\"auto\"'", "lr", '"auto"'),
        ('--lr="auto"', "lr", "auto"),
        ("--lr=!ref <batch_size>", "lr", 4),
        ("--name=3", "name", 3),
        ('--name=""', "name", ""),
        ("--empty=words", "empty", "words"),
        ("--folder=elsewhere", "folder", "elsewhere"),
        ("--shuffle=false", "shuffle", False),
        ("--number_of_epochs=1.5", "number_of_epochs", 1.5),
    ],
)
def test_other_values_are_taken_as_they_are(recipe, word, key, value):
    assert load_hyperpyyaml(RECIPE, parse_arguments([recipe, word])[2])[key] == value


@pytest.mark.parametrize(
    ("word", "way", "key", "value"),
    [
        (
            "--optimizer.momentum=0.5",
            "--optimizer={momentum: 0.5}",
            "optimizer",
            {"name": "sgd", "momentum": 0.5},
        ),
        (
            "--net.out_features=3",
            "--net={out_features: 3}",
            "net",
            "Linear(in_features=1, out_features=3, bias=True)",
        ),
    ],
)
def test_a_key_inside_of_another_is_told_in_the_way_that_works(recipe, word, way, key, value):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([recipe, word])
    name, _, text = way.partition("=")
    assert f"{name}='{text}' changes it, and keeps the others" in str(caught.value)
    found = load_hyperpyyaml(RECIPE, parse_arguments([recipe, way])[2])[key]
    assert (found if isinstance(value, dict) else str(found)) == value


@pytest.mark.parametrize(
    "words",
    [
        ["--cnn_channels=[64,", "100,", "128]"],
        ["--cnn_channels", "[64,", "100,", "128]"],
        ["--cnn_channels=[64,", "100,", "128]", "--lr=1"],
        ["--cnn_channels=[", "64", ",100,", "128", "]"],
    ],
)
def test_a_list_that_the_shell_has_cut_at_its_blanks_is_joined(recipe, words):
    for order in ([recipe, *words], [*words, recipe]):
        assert load_hyperpyyaml(RECIPE, parse_arguments(order)[2])["cnn_channels"] == [64, 100, 128]


def test_a_mapping_that_the_shell_has_cut_is_joined(recipe):
    text = parse_arguments([recipe, "--optimizer={momentum:", "0.5,", "name:", "adam}"])[2]
    assert load_hyperpyyaml(RECIPE, text)["optimizer"] == {"name": "adam", "momentum": 0.5}


def test_a_list_without_an_end_swallows_no_file_and_no_option(recipe):
    for words in (
        ["--cnn_channels=[64,", "100,", recipe],
        [recipe, "--cnn_channels=[64,", "--lr=1"],
    ):
        with pytest.raises(ConfigError, match="the bracket at its beginning is not closed"):
            parse_arguments(words)
