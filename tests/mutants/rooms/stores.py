"""Faults in the requests to object stores, and in checkpoints there."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

LOCK = "tests/object_store/test_lock.py"

LOCKS = in_room(
    "object_store",
    LOCK,
    [
        Fault(
            "a run that renews its lock in a store is taken over",
            "_Waiting.is_over",
            "self._seen is not None and self._seen[0] == holder and self._seen != seen",
            "False",
        ),
        Fault(
            "a lock in a store that was lost is given back",
            "_Hold.give_back",
            "_owner_of(self.objects, self.name) == self.owner",
            "True",
        ),
        Fault(
            "a lock in a store does not see that it was lost",
            "_Hold.require",
            "found != self.owner",
            "False",
        ),
    ],
)

FAULTS = LOCKS
