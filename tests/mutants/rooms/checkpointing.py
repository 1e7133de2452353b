"""Faults in saving, finding and loading checkpoints."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

STORAGE = "tests/checkpointing/test_storage.py tests/checkpointing/test_storage_hashing.py"
LOCK = "tests/checkpointing/test_storage_lock.py"
CHECKPOINTER = "tests/checkpointing/test_checkpointer.py"
ASYNC = "tests/checkpointing/test_async_save.py tests/checkpointing/test_async_save_memory.py"
HOOKS = "tests/checkpointing/test_hooks.py"
RANKS = "tests/ranks/test_checkpoints.py"

FAULTS = in_room(
    "checkpointing",
    CHECKPOINTER,
    [
        Fault(
            "files of a checkpoint are not synced before it gets its name",
            "_seal",
            "FILES.sync_file(path)",
            "pass",
            f"{STORAGE} tests/checkpointing/test_storage_faults.py",
        ),
        Fault(
            "the manifest is not synced before the checkpoint gets its name",
            "_seal",
            "FILES.sync_file(staging / MANIFEST_NAME)",
            "pass",
            f"{STORAGE} tests/checkpointing/test_storage_faults.py",
        ),
        Fault(
            "the folder is not synced after a checkpoint has its name",
            "_publish",
            "FILES.sync_directory(final.parent)",
            "pass",
            f"{STORAGE} tests/checkpointing/test_storage_faults.py",
        ),
        Fault(
            "a checkpoint gets its name before its manifest is written",
            "commit_staging",
            "_seal(staging, world_size, digests)\nbefore_rename()\n_publish(staging, final)",
            "before_rename()\n_publish(staging, final)\n_seal(final, world_size, digests)",
            STORAGE,
        ),
        Fault(
            "the checkpoint that is replaced does not come back when the save fails",
            "_publish",
            "if replaces:\n    FILES.rename(replaced, final)",
            "pass",
            f"{STORAGE} tests/checkpointing/test_storage_faults.py",
        ),
        Fault(
            "a save that failed leaves its files behind",
            "cleaned_on_error",
            "FILES.remove_tree(staging)",
            "pass",
            STORAGE,
        ),
        Fault(
            "a full disk is not told as one",
            "save_error",
            "cause is not None and cause.errno in {errno.ENOSPC, errno.EDQUOT}",
            "False",
            f"{STORAGE} {CHECKPOINTER}",
        ),
        Fault(
            "checksums are not compared",
            "_fault",
            "mode == 'full' and file_sha256(path, piece_bytes, FILE_THREADS) != entry['sha256']",
            "False",
            STORAGE,
        ),
        Fault(
            "sizes of files are not compared",
            "_fault",
            "size != entry['size']",
            "False",
            STORAGE,
        ),
        Fault(
            "a manifest may name files outside of the checkpoint",
            "_fault",
            "PurePosixPath(name).is_absolute() or '..' in PurePosixPath(name).parts",
            "False",
            STORAGE,
        ),
        Fault(
            "a manifest that was changed passes",
            "_read_manifest",
            "stated != _manifest_digest(manifest) or not complete",
            "not complete",
            STORAGE,
        ),
        Fault(
            "a checkpoint that has lost its manifest passes",
            "verify",
            "META_MARK in read_text(directory / META_NAME)",
            "False",
            STORAGE,
        ),
        Fault(
            "of each piece the first block alone is hashed",
            "_piece_digest",
            "size -= count",
            "size = 0",
            "tests/checkpointing/test_storage_hashing.py",
        ),
        Fault(
            "a run whose lock was taken away goes on saving",
            "_Hold.require",
            "not is_own",
            "False",
            LOCK,
        ),
        Fault(
            "a forked process keeps the lock of its parent",
            "_forget",
            "_HELD.clear()",
            "pass",
            "tests/faults/test_run_lock.py -k forked_child_holds_nothing -m faults",
        ),
        Fault(
            "what a save that was killed has left is not removed",
            "FolderLock.clean",
            "remove_directory(self.folder / name)",
            "pass",
            f"{STORAGE} {LOCK} {CHECKPOINTER}",
        ),
        Fault(
            "the lock is given back while another save holds it",
            "FolderLock.release",
            "not hold.count",
            "True",
            LOCK,
        ),
        Fault(
            "checkpoints are listed from the worst to the best",
            "ranked",
            "sorted(filter(selection.counts, checkpoints), key=order, reverse=True)",
            "sorted(filter(selection.counts, checkpoints), key=order)",
        ),
        Fault(
            "min_key takes the checkpoint with the largest value",
            "Selection.importance",
            "None if value is None else -value",
            "value",
        ),
        Fault(
            "a value that is not a number counts as the best",
            "ranked",
            "(0, 0, *newest) if value is None else (1, value, *newest)",
            "(2, 0, *newest) if value is None else (1, value, *newest)",
        ),
        Fault(
            "one checkpoint too many is deleted",
            "deletable",
            "order[:number]",
            "order[:number - 1]",
        ),
        Fault(
            "the best of one key is deleted as it is not that of the other",
            "deletable",
            "checkpoint not in protected",
            "checkpoint not in order[:number]",
            "tests/checkpointing/test_selection_deletion.py "
            "tests/checkpointing/test_checkpointer.py",
        ),
        Fault(
            "keep_recent keeps nothing",
            "Retention.selections",
            "[(Selection(importance_key=ckpt_recency), newest)] if self.keep_recent else []",
            "[]",
        ),
        Fault(
            "a checkpoint that is damaged is taken",
            "DamageLog.is_whole",
            "return not faults",
            "return True",
            f"{CHECKPOINTER} tests/checkpointing/test_selection_deletion.py",
        ),
        Fault(
            "damaged checkpoints count among those that are kept",
            "CheckpointFolder.delete",
            "each.path not in log.reasons and log.is_whole(each, 'size')",
            "True",
            f"{CHECKPOINTER} tests/checkpointing/test_selection_deletion.py",
        ),
        Fault(
            "a run starts from scratch where no checkpoint is whole",
            "CheckpointFolder.find",
            "not found and limit != 0 and (order or (self.damage_log.reasons and (not readable)))",
            "False",
        ),
        Fault(
            "a clock that was set back makes a new checkpoint the older one",
            "SaveRequest.all_meta",
            "max(time.time(), math.nextafter(after, math.inf))",
            "time.time()",
        ),
        Fault(
            "two saves in one second get one name",
            "CheckpointFolder._new_path",
            "name not in used and (not os.path.lexists(self.lock.folder / name))",
            "name not in used",
        ),
        Fault(
            "after a save in the background the folder stays locked",
            "CheckpointFolder._commit_and_release",
            "self.lock.release()",
            "pass",
            ASYNC,
        ),
        Fault(
            "a save in the background writes the weights of later steps",
            "CheckpointFolder._collect",
            """
            states = self.copy(states)
            is_copy = True
            """,
            "is_copy = True",
            ASYNC,
        ),
        Fault(
            "the error of a save in the background is lost",
            "BackgroundSave._run",
            "self._error = error",
            "pass",
            ASYNC,
        ),
        Fault(
            "a save does not wait for the one before it",
            "BackgroundSave.wait",
            "thread.join()",
            "pass",
            ASYNC,
        ),
        Fault(
            "tensors that share memory do not share it in a copy",
            "_storages",
            "found[id(storage)] = storage",
            "found[len(found)] = storage",
            ASYNC,
        ),
        Fault(
            "a copy is made though the memory is too small",
            "_require",
            "size and free is not None and (size + SPARE_BYTES > free)",
            "False",
            ASYNC,
        ),
        Fault(
            "an average leaves out the last state",
            "average_state_dicts",
            "total / count",
            "total / (count - 1 or 1)",
            f"{CHECKPOINTER} {HOOKS}",
        ),
        Fault(
            "a checkpoint file may run code",
            "safe_load",
            "torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)",
            "torch.load(path, map_location=map_location, weights_only=False, mmap=mapped)",
            HOOKS,
        ),
        Fault(
            "module states are saved with the names of their wrappers",
            "plain_key",
            "module is None or part != inner_name(module)",
            "True",
            f"{HOOKS} tests/strategies/test_strategies.py",
        ),
        Fault(
            "a transfer of weights that fits nothing is taken",
            "torch_parameter_transfer",
            "misfits.missing and len(misfits.missing) == len(inner.state_dict())",
            "False",
            f"{HOOKS} tests/unit/test_parameter_transfer.py",
        ),
        Fault(
            "a fused optimizer's checkpoint sets how the script's optimizer steps",
            "_for_optimizer",
            "{**old, 'fused': new['fused']}",
            "{**old}",
            HOOKS,
        ),
        Fault(
            "a recoverable without a file is passed over in silence",
            "_accept_missing",
            "optional or 'dataloader' in name",
            "True",
        ),
        Fault(
            "--resume=never loads a checkpoint",
            "Checkpointer.recover_if_possible",
            "self.resume == 'never' and (not any(asked))",
            "False",
            "tests/contract/test_other_saves.py tests/contract/test_new_run_from_weights.py",
        ),
        Fault(
            "checkpoints newer than the start stay where the run saves",
            "Checkpointer.set_aside",
            "ckpt_recency(checkpoint) > ckpt_recency(start)",
            "ckpt_recency(checkpoint) >= ckpt_recency(start)",
            "tests/run/test_choose_start.py tests/contract/test_other_saves.py",
        ),
        Fault(
            "objects that each rank saves are saved by the main process alone",
            "saves_on_every_rank",
            "not getattr(hook, 'save_on_main_only', True)",
            "False",
            f"{RANKS} {HOOKS}",
        ),
        Fault(
            "a failure to save on one rank leaves a checkpoint",
            "CheckpointFolder.finish",
            "if failures:\n    raise CheckpointError(failures)",
            "pass",
            f"{CHECKPOINTER} {RANKS}",
        ),
    ],
)
