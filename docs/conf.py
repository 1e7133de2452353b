"""How Sphinx builds these pages: ``make docs``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

os.environ["DDPKIT_SPEECHBRAIN"] = "0"  # importing ddpkit.speechbrain changes nothing here

from extensions import outside_links

import ddpkit

project = "ddpkit"
author = "the ddpkit authors"
copyright = "the ddpkit authors; Apache License 2.0"
version = release = ddpkit.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "extensions.inline_drawings",
    "extensions.markdown_pages",
]
# What makes pages nicer to use and no warning: a check (`make docs-check`) does without.
EXTENSIONS_OF_THE_SITE = ["sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "recorded_runs", "decisions/template.md"]
nitpicky = True
# References to ddpkit's own names must resolve. Those to other projects lead somewhere only if a
# build is told where their lists of names are: it needs no network.
intersphinx_mapping = outside_links.mapping(os.environ.get(outside_links.VARIABLE, ""))
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
# The colours of the logo; the theme has more.
COLOURS = {
    "light_css_variables": {
        "color-brand-primary": "#0f766e",
        "color-brand-content": "#0f766e",
        "color-brand-visited": "#5b4a9c",
    },
    "dark_css_variables": {
        "color-brand-primary": "#4fd1c1",
        "color-brand-content": "#4fd1c1",
        "color-brand-visited": "#b9a7f5",
    },
}
html_static_path = ["_static"]
html_css_files = ["ddpkit.css"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_copy_source = False
html_show_sphinx = False
# The button of a block copies its commands, without prompts and without what they print.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """Draw the pictures, anew at each build."""
    import draw_report
    import draw_scale
    import drawings

    if app.config.html_theme == "furo":
        app.config.html_theme_options = COLOURS
        for extension in EXTENSIONS_OF_THE_SITE:
            app.setup_extension(extension)
    pictures = Path(__file__).resolve().parent / "_build" / "pictures"
    draw_report.draw(pictures / "report.png")
    draw_scale.draw(pictures / "scale.svg")
    drawings.draw_all(pictures / "drawings")
    return {"parallel_read_safe": True}
