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

MIRRORS = in_room(
    "mirror",
    "tests/mirror",
    [
        Fault(
            "a checkpoint stands in the store before the files whose rows it counts",
            "MirrorRemote.put",
            "self._mirror.push()",
            "pass",
            tests="tests/mirror/test_recipe.py",
        ),
        Fault(
            "what the retention deletes stays in the store",
            "MirrorRemote.deleted",
            "self.has(name)",
            "False",
            tests="tests/mirror/test_checkpointer.py",
        ),
        Fault(
            "a checkpoint is deleted in the store before a later one is there",
            "_Queue.due",
            "number <= self.done",
            "True",
            tests="tests/mirror/test_kept.py",
        ),
        Fault(
            "of this machine and the store the later by the clock is gone on from",
            "Standing.order",
            "return self.step, self.time, self.is_here",
            "return 0, self.time, self.is_here",
            tests="tests/mirror/test_kept.py",
        ),
        Fault(
            "what another run has left on this machine is taken for this run's",
            "KeptRemote.is_of_another_run",
            "own is not None and there is not None and own != there",
            "False",
            tests="tests/mirror/test_kept.py",
        ),
        Fault(
            "a rehearsal writes into the store",
            "mirror_of",
            "travels and PARITY not in os.environ",
            "True",
            tests="tests/mirror/test_recipe.py",
        ),
    ],
)

FAULTS = [*LOCKS, *MIRRORS]
