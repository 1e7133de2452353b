"""What a run shows and writes: start-up block, bar, train loggers, values of ``self.log``, ``metrics.jsonl``."""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
