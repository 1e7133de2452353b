"""Imports and dotted names in Python: each name goes where it is, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpkit.porting import port_python


def ported(text):
    """Port a text; a second time changes nothing."""
    new, _ = port_python(text)
    assert port_python(new)[0] == new
    return new


# Pairs of texts, before and after.
PAIRS = [
    case.split("----\n")
    for case in (Path(__file__).parent / "imports.txt").read_text().split("====\n")
]


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=[old.splitlines()[0] for old, _ in PAIRS])
def test_a_name_goes_where_it_is(old, new):
    assert ported(old) == new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "def f():\n\timport speechbrain as sb\n\treturn sb.Stage, sb.x\n",
            "def f():\n\timport ddpkit\n\timport speechbrain as sb\n\treturn ddpkit.Stage, sb.x\n",
        ),
        (
            "import speechbrain as sb\r\nx = 'é', sb.x, sb.Stage  # é\r\n",
            "import ddpkit\r\nimport speechbrain as sb\r\nx = 'é', sb.x, ddpkit.Stage  # é\r\n",
        ),
        (
            "import speechbrain as sb\n\x0cx = '\u2028', sb.core.Stage",
            "import ddpkit\n\x0cx = '\u2028', ddpkit.Stage",
        ),
    ],
)
def test_tabs_and_ends_of_lines_stay(old, new):
    assert ported(old) == new


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import os\nsb.Stage\n",
        "import speechbrain as sb\n",
        "import speechbrain as sb\nsb.nnet.CNN, f(sb.utils.checkpoints)\n",
        "from .speechbrain import Stage\nfrom . import speechbrain\nspeechbrain.Stage\n",
        "import notspeechbrain.core\nnotspeechbrain.core.Stage\n",
        "import ddpkit\nddpkit.Stage\n",
        "import speechbrain as sb\nx: 'a text' = 'sb.Stage'  # type: sb.Stage\n",
        "'''speechbrain.core.Brain'''\n# speechbrain.core.Brain\n",
        "from speechbrain.utils.train_logger import TensorBoardLogger\n",
        "import speechbrain as sb\ndef f(x: 'list[sb.Stage]'): ...\n",
    ],
)
def test_what_is_not_ddpkits_stays_as_it_is(text):
    assert port_python(text) == (text, [])


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("from speechbrain.core import *\n", 1, "`from speechbrain.core import *` is left"),
        (
            "try:\n    import speechbrain as sb\nexcept E:\n    sb = None\nsb.Stage\n",
            5,
            ("`sb` is bound more than once"),
        ),
        ("def f():\n    global sb\n    import speechbrain as sb\nsb.x\n", 0, ""),
        ("import speechbrain as sb\ndef f(sb): return sb.Stage\n", 2, "once: `sb.Stage` is left"),
        ("import speechbrain as sb\n[sb.Stage for sb in ()]\n", 2, "`sb` is bound more than once"),
        (
            "import speechbrain as sb\nsb.Stage\nclass A:\n    sb = 1\n",
            2,
            ("`sb` is bound more than once"),
        ),
        (
            "import speechbrain as sb\nsb.Stage\nimport sbsv as sb\n",
            2,
            ("`sb` is bound more than once"),
        ),
        (
            (
                "import torch\nfrom speechbrain.utils.logger import (\n    get_logger,  # "
                "ours\n    a,\n)\n"
            ),
            2,
            "a list of imports with comments, for several modules, is left: write it by hand",
        ),
        (
            "import speechbrain as sb\n(sb # c\n .Stage)\n",
            2,
            ("`sb.Stage` is left: write it in one piece"),
        ),
    ],
)
def test_what_is_left_is_told(text, line, told):
    new, notes = port_python(text)
    assert new == text
    if told:
        [note] = notes
        assert note.lines == (line,)
        assert told in note.text


def test_what_is_no_python_is_refused():
    for text in ("def f(:\n", "import speechbrain\n  x\n"):
        with pytest.raises(SyntaxError):
            port_python(text)


def test_warnings_of_python_are_not_told():
    assert ported('"\\d"\n') == '"\\d"\n'
