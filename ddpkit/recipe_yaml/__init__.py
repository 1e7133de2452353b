"""A recipe's YAML file: keys with their lines, mistakes in words, and what HyperPyYAML makes of it.

What HyperPyYAML constructs comes from a new text, in which references are resolved and lines are
others. So the file is read twice: once as nodes, which know their lines, and once by HyperPyYAML.
Nothing is constructed or called twice.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
