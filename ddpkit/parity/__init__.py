"""``--check_parity W``: do W real processes get the gradients of one? Imported only where the
option is given.
"""

from __future__ import annotations

from ddpkit.parity.check import check_parity

__all__ = ["check_parity"]
