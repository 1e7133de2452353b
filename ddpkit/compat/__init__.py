"""The few places where ddpkit looks into what other packages keep to themselves.

Each is a function with its reason. It looks only where the inside is as expected, has a way through the public API that
is taken otherwise, and is tested both ways.
"""

from __future__ import annotations

from ddpkit.compat.forkservers import forkserver_of_its_own
from ddpkit.compat.process_groups import all_groups, default_store, timeout_of
from ddpkit.compat.random_streams import look_at_random_streams

__all__ = [
    "all_groups",
    "default_store",
    "forkserver_of_its_own",
    "look_at_random_streams",
    "timeout_of",
]
