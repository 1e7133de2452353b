"""Puts a picture of :mod:`drawings` into the page itself: there it has the colours of the page's
theme, which a picture in a file of its own cannot know.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

#: From the folder of the pages.
FOLDER = "_build/pictures/drawings/"


def inlined(svg: str, alternative: str) -> str:
    """Return a picture for the text of a page, with other words for those who do not see it."""
    without_title = re.sub(r"<title>.*?</title>\n", "", svg)
    return without_title.replace(
        ' role="img"', f' role="img" aria-label="{escape(alternative)}"', 1
    )


class InlineDrawings(SphinxPostTransform):
    """Replaces images by their text."""

    default_priority = 200
    formats = ("html",)

    def run(self, **_: Any) -> None:
        for node in list(self.document.findall(nodes.image)):
            if node["uri"].startswith(FOLDER):
                svg = Path(self.env.srcdir, node["uri"]).read_text(encoding="utf-8")
                text = inlined(svg, node.get("alt", ""))
                node.replace_self(nodes.raw("", text, format="html"))


def setup(app: Any) -> dict[str, Any]:
    app.add_post_transform(InlineDrawings)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
