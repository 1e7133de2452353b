"""How Sphinx builds these pages: ``make docs``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

os.environ["DDPKIT_SPEECHBRAIN"] = "0"  # importing ddpkit.speechbrain changes nothing here

import ddpkit

project = "ddpkit"
author = "the ddpkit authors"
copyright = "the ddpkit authors; Apache License 2.0"
version = release = ddpkit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "recorded_runs", "decisions/template.md"]
nitpicky = True
# References to ddpkit's own names must resolve. Those to other projects cannot: their inventories
# would have to be downloaded, and a build needs no network.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!ddpkit\b).*"),
    # private base classes and type variables
    (r"py:(class|obj)", r"ddpkit\.(\w+\.)*(_\w+|\w*T|[A-Z])"),
]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Imported for type checkers alone, and shown by the page of ddpkit.dataloader, too.
autodoc_type_aliases = {"Sharding": "ddpkit.dataloader.Sharding"}
autodoc_preserve_defaults = True
autodoc_use_type_comments = False  # there are none, and to look for them takes a tenth of the time
autodoc_default_options = {"members": True, "show-inheritance": True}

napoleon_google_docstring = True
napoleon_numpy_docstring = False
# an Attributes section beside documented methods would describe them twice
napoleon_use_ivar = True
napoleon_custom_sections = [
    ("Ranks", "notes_style"),
    ("State", "notes_style"),
    ("Source", "notes_style"),
]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# A block that names no language, as those in docstrings, is text: Python's colours would be noise.
highlight_language = "none"

html_theme = "furo"
html_title = f"ddpkit {release}"
html_copy_source = False
html_show_sphinx = False


def setup(_):
    """Draw the pictures of commands, anew at each build."""
    import draw_report
    import draw_scale

    pictures = Path(__file__).resolve().parent / "_build" / "pictures"
    draw_report.draw(pictures / "report.png")
    draw_scale.draw(pictures / "scale.svg")
    return {"parallel_read_safe": True}
