"""One page about one or several runs: what ``python -m ddpkit report`` reads, computes and
draws.
"""

from __future__ import annotations
