"""What --help says of the parts in a YAML, and how the command line changes their arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpkit.command_line import help_text
from ddpkit.errors import ConfigError
from ddpkit.hparams import load_hparams
from ddpkit.parts import Part
from ddpkit.run_opts import parse_arguments
from ddpkit.strategies import Strategy

PAGE = Path(__file__).parents[2] / "docs/how-to/parts.md"


class Paced(Part):
    """Has arguments of each kind.

    Args:
        pace: how fast, in steps a second. More is said of it in
            a second sentence.
        where (str): a place, e.g. a room; else nowhere.
        **others: are ignored.
    """

    def __init__(self, pace, where="here", *, unsaid=None, **others):
        self.pace, self.where, self.unsaid, self.others = pace, where, unsaid, others


class Averaging(Strategy):
    """Averages.

    Args:
        every: steps.
    """

    def __init__(self, every=8):
        self.every = every


def printed(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        parse_arguments([*words, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert out.startswith(help_text())
    return out.removeprefix(help_text())


def test_help_lists_the_arguments_of_the_parts_of_this_yaml(capsys, tmp_path):
    file = tmp_path / "hparams.yaml"
    file.write_text(
        "pace: 3\n"
        f"own: !new:{__name__}.Paced\n  where: there\n  pace: 1\n"
        f"parts:\n  - !new:{__name__}.Paced\n    pace: !ref <pace>\n  - !ref <own>\n"
        f"strategy: !new:{__name__}.Averaging\n  every: 2\n"
    )
    first, second, strategy, advice = printed(capsys, str(file)).strip().split("\n\n")
    assert re.sub(r" {2,}", " ", first).splitlines() == [
        f"{__name__}.Paced, key 'parts[0]':",
        " pace --pace how fast, in steps a second [needed; here 3]",
        " where a place, e.g. a room [here]",
        " unsaid [None]",
    ]
    assert second.startswith(f"{__name__}.Paced, key 'own':")
    assert re.search(
        r"where --own='\{where: \.\.\.\}' +a place, e.g. a room \[here; here there\]", second
    )
    assert re.search(r"every +steps \[8; here 2\]$", strategy)
    assert advice.startswith("An argument without an option beside it is changed in the file.")


def test_a_wrong_argument_is_marked_and_there_is_no_hint_where_each_has_its_option(
    capsys, tmp_path
):
    file = tmp_path / "hparams.yaml"
    file.write_text(
        f"every: 2\nstrategy: !new:{__name__}.Averaging\n  every: !ref <every>\n  evry: 3\n"
    )
    assert re.sub(r" {2,}", " ", printed(capsys, str(file)).strip()).splitlines() == [
        f"{__name__}.Averaging, key 'strategy':",
        " every --every steps [8; here 2]",
        " evry no such argument",
    ]


@pytest.mark.parametrize(
    "text",
    ["seed: 1\n", "parts: [verb, noun]\n", "parts: !new:collections.OrderedDict\n", "parts: []\n"],
)
def test_help_says_nothing_of_what_is_no_part(capsys, tmp_path, text):
    (tmp_path / "hparams.yaml").write_text(text)
    assert printed(capsys, str(tmp_path / "hparams.yaml")) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parts: [!new:no_such.Part ]\n", "there is no module 'no_such'"),
        ("parts: [\n", "is not valid YAML"),
    ],
)
def test_help_is_shown_also_where_the_parts_cannot_be_read(capsys, tmp_path, text, words):
    file = tmp_path / "hparams.yaml"
    file.write_text(text)
    told = " ".join(printed(capsys, str(file)).split())
    assert told.startswith(f"The parts of {file} cannot be listed:")
    assert words in told


def test_a_file_that_is_not_there_is_told(capsys, tmp_path):
    told = " ".join(printed(capsys, "nope.yaml").split())
    assert told.startswith("The parts of nope.yaml cannot be listed: There is no file 'nope.yaml'")
    (tmp_path / "hparams.yaml").write_text("lr: 1\n")
    assert printed(capsys, str(tmp_path / "hparams.yaml"), "other.yaml") == ""


def test_the_page_shows_what_help_prints_and_its_yaml_is_changed_as_it_says(capsys, tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    early, own = (
        block
        for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        if "EarlyStopping" in block
    )
    file = tmp_path / "hparams.yaml"
    file.write_text(early)
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert shown in printed(capsys, str(file))
    _, _, overrides = parse_arguments([str(file), "--patience=9"])
    assert load_hparams(str(file), overrides)["parts"][0].patience == 9
    file.write_text(own)
    _, _, overrides = parse_arguments([str(file), "--stopper={patience: 5, warmup: 2}"])
    (stopper,) = load_hparams(str(file), overrides)["parts"]
    assert (stopper.metric, stopper.patience, stopper.warmup) == ("accuracy", 5, 2)


def test_a_wrong_argument_is_told_with_the_near_miss_and_those_that_there_are(tmp_path):
    file = tmp_path / "hparams.yaml"
    file.write_text("stopper: !new:ddpkit.parts.EarlyStopping\n  warmup: 1\n")
    overrides = parse_arguments([str(file), "--stopper={warmop: 2}"])[2]
    words = "takes no argument 'warmop'. Did you mean 'warmup'? It takes: metric, mode, patience,"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_hparams(str(file), overrides)
    for given, words in {
        "--warmop=2": "neither a run option nor a key",
        "--stopper.warmup=2": "--stopper='{warmup: 2}' changes it",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(words)):
            parse_arguments([str(file), given])


def test_an_item_of_a_list_is_not_changed_on_the_command_line(tmp_path):
    file = tmp_path / "hparams.yaml"
    file.write_text("parts:\n  - !new:ddpkit.parts.EarlyStopping\n    patience: 2\n")
    words = "an item of a list cannot be changed on the command line. Let its value refer to a key"
    with pytest.raises(ConfigError, match=words):
        parse_arguments([str(file), "--parts.0.patience=3"])
