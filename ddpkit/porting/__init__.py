"""What is there for recipes of SpeechBrain: where its names are in ddpkit, who answers them in a
recipe that runs as it is, and what changes in the files of a recipe that moves.

Nothing else in ddpkit imports this package, but for the switch :mod:`ddpkit.speechbrain`.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
