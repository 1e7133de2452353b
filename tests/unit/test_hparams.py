"""`ddpkit.load_hparams`: what HyperPyYAML gives, and a sentence for each mistake that a recipe's
YAML can have.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from ruamel.yaml.loader import Loader

import ddpkit
from ddpkit.errors import ConfigError, FolderInUseError, MissingFileError
from ddpkit.run_opts import parse_arguments

OWN = """
from pathlib import Path

import torch

from ddpkit.errors import ConfigError, FolderInUseError


class Net(torch.nn.Module):
    def __init__(self, size, odd=False):
        super().__init__()
        if odd:
            self.check(size)

    def check(self, size):
        raise ValueError(f"size {size} is odd")


def made(size, *, depth=1):
    return torch.nn.Linear(size, depth)


def decorated(function):
    def wrapper(*words, **names):
        names.pop("more", None)
        return function(*words, **names)

    wrapper.__wrapped__ = function
    return wrapper


@decorated
def flexible(size):
    return size


def counted(name):
    path = Path(name)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return name


def fails(name):
    counted(name)
    raise RuntimeError("no data")


def in_use():
    raise FolderInUseError("another run is there")


def refused():
    raise ConfigError("size=3 is odd. Give an even one.")
"""
FILES = {
    "own.py": OWN,
    "lacking.py": "from own import counted\ncounted('imports')\nimport not_installed_anywhere\n",
    "in_circle/__init__.py": "from in_circle import nothing\n",
    "misspelt.py": "def f(:\n    pass\n",
    "ending.py": "raise SystemExit(3)\n",
    "wide.yaml": "size: 3\nnet: !new:torch.nn.Liner [!ref <size>, 1]\n",
    "outer.yaml": "size: 6\nhalf: !ref <size> / 2\n",
    "size.yaml": "size: 3\n",
    "odd.yaml": "size: 3\nnet: !ref <sise>\n",
    "open.yaml": "size: !PLACEHOLDER\nnet: !new:torch.nn.Linear [!ref <size>, 1]\n",
}


def mistakes_in(text):
    """Read mistakes: what a file holds, and what is said of it."""
    found = {}
    for part in text.split("\n=== ")[1:]:
        name, _, rest = part.partition("\n")
        held, _, said = rest.partition("--- said\n")
        found[name] = held, said.strip()
    return found


_LOADED, _, _SEEN = (
    (Path(__file__).parent / "hparams_mistakes.txt").read_text().partition("\n=== STATIC\n")
)
MISTAKES = mistakes_in(_LOADED)
STATIC = mistakes_in(_SEEN)
WITH_OVERRIDES = {
    "a key that is not there": (
        {"size": 1, "lrr": 2},
        (
            "the overrides: 'size' is no key of 'h.yaml'. Correct the name, or add the key to the "
            "file."
        ),
    ),
    "a misspelt key": (
        "lrr: 2",
        "the overrides: 'lrr' is no key of 'h.yaml'. Did you mean 'lr'? ...",
    ),
    "a reference to nothing": (
        "lr: !ref <nothing>",
        "the overrides, key 'lr': !ref <nothing> names nothing: ...",
    ),
    "a misspelt class": (
        "lr: !new:torch.nn.Liner [1, 1]",
        "the overrides, key 'lr': !new:torch.nn.Liner: ...",
    ),
    "a mapping for a number": ({"lr": {"a": 1}}, "the overrides, key 'lr': a mapping cannot ..."),
    "what is referred to is replaced": (
        {"model": 3},
        "h.yaml:4, key 'x': !ref <model[size]> names nothing: ...",
    ),
    "no mapping": ("- 1", "overrides='- 1' must be a mapping, or YAML text of `key: value` lines."),
    "no YAML": ("lr: [1", "overrides='lr: [1' is not valid YAML: ..."),
    "a key twice": ("lr: 1\nlr: 2", "the overrides, key 'lr': the key is there twice. ..."),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    before = set(sys.modules)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {file.partition(".")[0].partition("/")[0] for file in FILES}:
            del sys.modules[name]


def load(text, overrides=None):
    Path("h.yaml").write_text(text)
    return ddpkit.load_hparams("h.yaml", overrides)


def agrees(found, said, folder):
    """Say whether a message has the parts around each "..."."""
    first, *others = said.replace("FOLDER", str(folder)).split("...")
    if not others:
        return found == first
    rest = found.removeprefix(first) if found.startswith(first) else None
    return rest is not None and all(part.strip() in rest for part in others)


@pytest.mark.parametrize("mistake", [*MISTAKES, *STATIC])
def test_a_mistake_is_one_sentence_with_file_line_and_key(folder, mistake):
    text, said = {**MISTAKES, **STATIC}[mistake]
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert agrees(str(caught.value), said, folder), str(caught.value)


@pytest.mark.parametrize("mistake", WITH_OVERRIDES)
def test_a_mistake_in_overrides_is_told_as_theirs(folder, mistake):
    overrides, said = WITH_OVERRIDES[mistake]
    with pytest.raises(ConfigError) as caught:
        load("lr: 1\nmodel:\n  size: 2\nx: !ref <model[size]>\n", overrides)
    assert agrees(str(caught.value), said, folder), str(caught.value)


@pytest.mark.parametrize("mistake", STATIC)
def test_the_command_line_tells_mistakes_that_nothing_has_to_be_loaded_for(folder, mistake):
    """Recipes that load the file by themselves hear of them, too."""
    text, said = STATIC[mistake]
    (folder / "h.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse_arguments(["h.yaml", "--device=cpu"])
    assert agrees(str(caught.value), said, folder), str(caught.value)


def test_the_command_line_loads_nothing_and_leaves_the_rest_to_the_recipe(folder):
    """The recipe may replace more values, and may have files to include elsewhere."""
    text = (
        "x: !apply:own.fails [calls]\ny: !new:lacking.Net\nz: !PLACEHOLDER\ninner: "
        "!include:elsewhere.yaml\n"
    )
    (folder / "h.yaml").write_text(text + "deep: !ref <inner[x]>\nlr: 1\nrate: !ref <lr>\n")
    parse_arguments(["h.yaml", "--device=cpu", "--lr=3"])
    assert "own" not in sys.modules
    assert not (folder / "calls").exists()


def test_a_missing_file_is_told():
    with pytest.raises(
        MissingFileError,
        match="There is no file 'nowhere.yaml' to read hyperparameters from",
    ):
        ddpkit.load_hparams("nowhere.yaml")


def test_what_a_file_calls_is_called_once_also_where_it_fails(folder):
    with pytest.raises(ConfigError):
        load("a: !apply:own.counted [ones]\nb: !apply:own.fails [calls]\n")
    assert (folder / "ones").read_text() == "x"
    assert (folder / "calls").read_text() == "x"
    with pytest.raises(ConfigError):
        load("a: !new:lacking.Net\n")
    assert (folder / "imports").read_text() == "x"


def test_the_cause_is_the_exception_itself():
    with pytest.raises(ConfigError) as caught:
        load("net: !new:own.Net {size: 3, odd: True}\n")
    assert type(caught.value.__cause__) is ValueError
    assert caught.traceback[-1].name == "construct"


def test_a_failure_that_is_no_mistake_keeps_its_class():
    with pytest.raises(FolderInUseError, match="another run is there"):
        load("x: !apply:own.in_use\n")


def test_no_mistake_is_seen_where_there_is_none():
    """Each can look like one."""
    loaded = load(
        "lr: 0.1\n"
        "same: !ref <lr>\n"
        "again: !ref <same> * 2\n"
        "name: <nothing>\n"
        "opt: !name:torch.optim.SGD\n  lr: !ref <lr>\n"
        "flexible: !name:own.flexible\n  more: 1\n"
        "called: !apply:own.flexible\n  size: 2\n  more: 1\n"
        "inner: !include:wide.yaml\n  size: 4\n  net: 1\n"
        "deep: !ref <inner[size]>\n"
        "outer: !include:outer.yaml\n"
        "size: !ref <outer[half]>\n"
        "made: !applyref:sorted [[2, 1]]\n"
        "pair: (1, 2)\n"
        "base: &base {a: 1, b: 2}\n"
        "derived:\n  <<: *base\n  b: 3\n"
        "merged: !ref <derived[a]>\n"
        "inside: {1: one, '1': text}\n"
        "__hidden: !apply:own.counted [hidden]\n"
    )
    assert loaded["again"] == 0.2
    assert loaded["called"] == 2
    assert loaded["deep"] == 4
    assert loaded["size"] == 3
    assert loaded["pair"] == (1, 2)
    assert loaded["derived"] == {"a": 1, "b": 3}
    assert loaded["name"] == "<nothing>"
    assert loaded["opt"].keywords == {"lr": 0.1}
    assert "__hidden" not in loaded


RECIPE = """
size: 3
folder: !ref results/<size>
net: !new:torch.nn.Linear
  in_features: !ref <size>
  out_features: 1
modules: {net: !ref <net>, again: [!ref <net>]}
opt: !name:torch.optim.SGD
  lr: 0.1
weight: !ref <net.weight>
"""


CHANGES = [None, "", "size: 4\nopt: !name:torch.optim.Adam", {"size": 5, "modules": {"x": 1}}]


@pytest.mark.parametrize("overrides", CHANGES)
def test_it_gives_what_hyperpyyaml_gives(overrides):
    torch.manual_seed(1)
    found = load(RECIPE, overrides)
    torch.manual_seed(1)
    expected = load_hyperpyyaml(RECIPE, overrides)
    assert list(found) == list(expected)
    assert found["modules"]["net"] is found["net"]
    assert found["modules"]["again"] == [found["net"]]
    assert found["weight"] is found["net"].weight
    assert torch.equal(found["weight"], expected["weight"])
    for key in ("size", "folder"):
        assert found[key] == expected[key]
    assert str(found["opt"]) == str(expected["opt"])


def test_a_path_object_is_a_file_and_the_loader_of_everybody_stays_as_it_is(folder):
    """HyperPyYAML registers its tags on the class of loaders that it is given."""
    before = dict(Loader.yaml_multi_constructors)
    (folder / "h.yaml").write_text("a: !!python/tuple [1, 2]\nb: !new:own.Net [1]\n")
    assert ddpkit.load_hparams(folder / "h.yaml")["a"] == (1, 2)
    assert Loader.yaml_multi_constructors == before


def test_an_override_of_one_key_leaves_the_others_to_be_referred_to(folder):
    found = load("sizes: {first: 1, second: 2}\nown: !ref <sizes[second]>\n", "sizes: {first: 3}")
    assert found["own"] == 2
    assert found["sizes"]["first"] == 3
