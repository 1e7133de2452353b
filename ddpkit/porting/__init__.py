"""Moving recipes from SpeechBrain: where its names are in ddpkit, and what changes in a recipe's
files.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
