"""The checks, one file for each thing that is looked at. Their order:
``ddpkit/see/doctor/order.py``.
"""

from __future__ import annotations
