"""``python -m ddpkit scale``: short slices of a recipe on one process and on several, side by side,
and why.
"""

from __future__ import annotations
