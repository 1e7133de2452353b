"""What the pages add to Sphinx: Markdown beside the HTML, a list of all, pictures in the page, and
links to other projects.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = """# Start

The first sentence, with a [link](page.md).

```{toctree}
:caption: Do

page
```
"""
PAGE = """# A page

```{index} ! something
```

One {py:class}`~torch.nn.Linear`, and a file:

```{literalinclude} script.py
:language: python
:start-at: "def"
```

![Many words](_build/pictures/drawings/shapes.svg)

```{eval-rst}
.. py:module:: ddpkit.errors
```
"""
SCRIPT = "import sys\n\ndef main():\n    return 1\n"
SVG = (
    '<svg class="drawing" xmlns="http://www.w3.org/2000/svg" role="img">\n'
    "<title>x</title>\n<path/></svg>\n"
)


@pytest.fixture
def extensions(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import extensions.inline_drawings
    import extensions.markdown_pages
    import extensions.outside_links

    return extensions


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "docs"
    (folder / "_build/pictures/drawings").mkdir(parents=True)
    for name, text in {
        "index.md": INDEX,
        "page.md": PAGE,
        "script.py": SCRIPT,
        "_build/pictures/drawings/shapes.svg": SVG,
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_page_as_markdown_has_what_it_includes(extensions, source):
    text, pictures = extensions.markdown_pages.markdown_of(PAGE, source / "page.md", 1)
    assert "```python\ndef main():\n    return 1\n```" in text
    assert "![Many words](../_images/shapes.svg)" in text
    assert "One `Linear`, and a file:" in text
    assert "### ddpkit.errors.ConfigError" in text
    assert "{" not in text.partition("### ")[0]
    assert pictures == [source / "_build/pictures/drawings/shapes.svg"]


def test_an_option_of_an_included_file_that_is_not_known_is_an_error(extensions, source):
    with pytest.raises(ValueError, match="end-at"):
        extensions.markdown_pages.included(source / "script.py", {"end-at": "x"})


def test_a_long_first_paragraph_is_cut_after_a_sentence(extensions):
    summary = extensions.markdown_pages.summary_of
    assert summary("# Title\n\nShort, **bold** and [linked](x.md).\n\nMore.") == (
        "Short, bold and linked."
    )
    assert summary("# Title\n\n```sh\nls\n\nls\n```\n\nProse.") == "Prose."
    assert summary("# Title\n\n" + "Ten letters. " * 30).endswith("letters.")


def test_links_to_other_projects_are_asked_for(extensions, tmp_path):
    mapping = extensions.outside_links.mapping
    assert mapping("") == {}
    assert mapping("web")["torch"] == ("https://docs.pytorch.org/docs/stable/", None)
    with pytest.raises(SystemExit, match=r"neither 'web' nor a folder with one of torch\.inv"):
        mapping(str(tmp_path))
    (tmp_path / "torch.inv").touch()
    assert mapping(str(tmp_path)) == {
        "torch": ("https://docs.pytorch.org/docs/stable/", str(tmp_path / "torch.inv"))
    }


def write_list(path):
    """A list of names in the form of Sphinx's objects.inv."""
    head = b"# Sphinx inventory version 2\n# Project: torch\n# Version: 1\n"
    head += b"# The remainder of this file is compressed using zlib.\n"
    path.write_bytes(head + zlib.compress(b"torch.nn.Linear py:class 1 nn.html#$ -\n"))


# what myst-parser asks of a newer Sphinx than it knows
@pytest.mark.filterwarnings("ignore:'myst_parser:Warning")
@pytest.mark.slow
def test_a_built_site_has_all_of_it(extensions, source, tmp_path):
    from sphinx.cmd.build import build_main

    write_list(tmp_path / "torch.inv")
    links = extensions.outside_links.mapping(str(tmp_path))
    names = "myst_parser", "sphinx.ext.intersphinx"
    own = "extensions.inline_drawings", "extensions.markdown_pages"
    (source / "conf.py").write_text(
        f"project = 'tried'\nextensions = {[*names, *own]!r}\nhtml_theme = 'basic'\n"
        f"intersphinx_mapping = {links!r}\n",
        encoding="utf-8",
    )
    html = tmp_path / "html"
    assert build_main(["-q", "-n", "-W", "-b", "html", str(source), str(html)]) == 0
    page = (html / "page.html").read_text(encoding="utf-8")
    assert '<svg class="drawing"' in page
    assert 'aria-label="Many words"' in page
    assert "<title>x</title>" not in page
    assert 'href="https://docs.pytorch.org/docs/stable/nn.html#torch.nn.Linear"' in page
    assert (html / "page.md").is_file()
    assert (html / "_images" / "shapes.svg").read_text(encoding="utf-8") == SVG
    llms = (html / "llms.txt").read_text(encoding="utf-8")
    assert llms == (
        "# tried\n\n> The first sentence, with a link.\n\n## Do\n\n"
        "- [A page](page.md): One `Linear`, and a file:\n"
    )


def test_the_blocks_that_pages_have_are_known(extensions):
    pages = [path for path in DOCS.rglob("*.md") if "_build" not in path.parts]
    found = {
        name
        for path in pages
        for name in re.findall(
            r"^(?:`{3,}|:{3,})\{([\w-]+)\}", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert found == {"eval-rst", "index", "literalinclude", "note", "toctree"}
