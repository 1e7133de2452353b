"""Faults in the requests to object stores, and in checkpoints there."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

FOLDER = "tests/checkpointing/test_object_folder.py"
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
        Fault(
            "a lock in a store that was replaced meanwhile is replaced again",
            "_is_taken_over",
            "_owner_of(objects, name) != holder",
            "False",
        ),
        Fault(
            "a run that was killed on this machine keeps its lock in a store",
            "Owner.is_gone",
            "self._is_of_this_machine and has_ended(self.pid, self.started)",
            "False",
        ),
        Fault(
            "a forked process keeps the lock of its parent in a store",
            "_hold_nothing",
            "_HELD.clear()",
            "pass",
        ),
    ],
)

REQUESTS = in_room(
    "object_store",
    "tests/object_store/test_failures.py",
    [
        Fault(
            "a request that is refused is made again and again",
            "may_pass",
            "isinstance(error, (*_LASTING, ValueError)) or is_refused(error) "
            "or lacks_credentials(error)",
            "False",
        ),
        Fault(
            "a password of a URL is shown",
            "shown_url",
            "_PASSWORD.sub('//', url).rstrip('/')",
            "url.rstrip('/')",
        ),
        Fault(
            "a short read of a store is taken",
            "Objects.read_range",
            "len(data) != asked",
            "False",
            FOLDER,
        ),
        Fault(
            "a request that may pass is made once",
            "repeated",
            "attempt == attempts or not may_pass(error)",
            "True",
            FOLDER,
        ),
    ],
)

CHECKPOINTS = in_room(
    "checkpointing",
    FOLDER,
    [
        Fault(
            "a checkpoint in a store exists before its files are there",
            "ObjectFolder.names",
            "size is not None",
            "True",
        ),
        Fault(
            "what replaces a checkpoint in a store is written over it",
            "ObjectFolder.put",
            "1 + max(others.values(), default=-1)",
            "0",
        ),
        Fault(
            "a checkpoint in a store is found by its listing alone",
            "ObjectFolder._candidates",
            "known |= read_index(self._objects) if index is None else index",
            "pass",
        ),
        Fault(
            "what a store has deleted for a checkpoint that was replaced stays",
            "ObjectFolder.put",
            "self._delete_folder(other)",
            "pass",
        ),
        Fault(
            "checksums of what comes from a store are not compared",
            "ObjectFolder._checksum_faults",
            "digests[f'{stored.folder}/{name}'] != stored.files[name]['sha256']",
            "False",
        ),
        Fault(
            "a damaged read of a store is not made again",
            "READS",
            "2",
            "1",
        ),
        Fault(
            "an upload that is going on is cleaned away",
            "ObjectFolder.clean",
            "kept |= self._going_on",
            "pass",
        ),
    ],
)

MIRRORS = in_room(
    "mirror",
    "tests/mirror",
    [
        Fault(
            "another machine goes on from an older checkpoint of the name",
            "MachineCopies.have",
            "self._digest(name) == manifest",
            "(self._folder / name).is_dir()",
            tests="tests/mirror/test_machine_copies.py",
        ),
        Fault(
            "another machine takes a damaged copy that it has",
            "MachineCopies.have",
            "not is_here or verify(self._folder / name, mode)",
            "not is_here",
            tests="tests/mirror/test_machine_copies.py",
        ),
        Fault(
            "copies of earlier starts stay on the disks of other machines",
            "MachineCopies._remove_old",
            "name.startswith(DIRECTORY_PREFIX) and name != wanted",
            "False",
            tests="tests/mirror/test_machine_copies.py",
        ),
        Fault(
            "another machine reads an older file of the name",
            "MachineCopies.have_file",
            "path.is_file() and file_sha256(path) == sha256",
            "path.is_file()",
            tests="tests/mirror/test_machine_copies.py",
        ),
        Fault(
            "a checkpoint stands in the store before the files whose rows it counts",
            "MirrorRemote.put",
            "self._mirror.push(self.lock)",
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

FAULTS = [*LOCKS, *REQUESTS, *CHECKPOINTS, *MIRRORS]
