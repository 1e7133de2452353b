from ddpkit.checkpointing.async_save import (
    BackgroundSave as BackgroundSave,
)
from ddpkit.checkpointing.async_save import (
    wait_for_folder as wait_for_folder,
)
from ddpkit.checkpointing.folder import (
    CheckpointFolder as CheckpointFolder,
)
from ddpkit.checkpointing.folder import (
    Collected as Collected,
)
from ddpkit.checkpointing.folder import (
    SaveRequest as SaveRequest,
)
from ddpkit.checkpointing.folder import (
    check_file_name as check_file_name,
)
from ddpkit.checkpointing.folder import (
    on_main as on_main,
)
from ddpkit.checkpointing.folder import (
    run_savers as run_savers,
)
from ddpkit.checkpointing.hooks import (
    DEFAULT_LOAD_HOOKS as DEFAULT_LOAD_HOOKS,
)
from ddpkit.checkpointing.hooks import (
    DEFAULT_SAVE_HOOKS as DEFAULT_SAVE_HOOKS,
)
from ddpkit.checkpointing.hooks import (
    DEFAULT_TRANSFER_HOOKS as DEFAULT_TRANSFER_HOOKS,
)
from ddpkit.checkpointing.hooks import (
    LoadHook as LoadHook,
)
from ddpkit.checkpointing.hooks import (
    SaveHook as SaveHook,
)
from ddpkit.checkpointing.hooks import (
    TransferHook as TransferHook,
)
from ddpkit.checkpointing.hooks import (
    find_load_hook as find_load_hook,
)
from ddpkit.checkpointing.hooks import (
    find_save_hook as find_save_hook,
)
from ddpkit.checkpointing.hooks import (
    find_transfer_hook as find_transfer_hook,
)
from ddpkit.checkpointing.hooks import (
    get_default_hook as get_default_hook,
)
from ddpkit.checkpointing.hooks import (
    map_old_state_dict_weights as map_old_state_dict_weights,
)
from ddpkit.checkpointing.hooks import (
    plain_key as plain_key,
)
from ddpkit.checkpointing.hooks import (
    safe_load as safe_load,
)
from ddpkit.checkpointing.hooks import (
    saves_on_every_rank as saves_on_every_rank,
)
from ddpkit.checkpointing.hooks import (
    torch_parameter_transfer as torch_parameter_transfer,
)
from ddpkit.checkpointing.hooks import (
    torch_recovery as torch_recovery,
)
from ddpkit.checkpointing.hooks import (
    torch_save as torch_save,
)
from ddpkit.checkpointing.index import (
    DIRECTORY_PREFIX as DIRECTORY_PREFIX,
)
from ddpkit.checkpointing.index import (
    META_NAME as META_NAME,
)
from ddpkit.checkpointing.index import (
    SUFFIX as SUFFIX,
)
from ddpkit.checkpointing.index import (
    Checkpoint as Checkpoint,
)
from ddpkit.checkpointing.index import (
    DamageLedger as DamageLedger,
)
from ddpkit.checkpointing.index import (
    ImportanceKey as ImportanceKey,
)
from ddpkit.checkpointing.index import (
    Predicate as Predicate,
)
from ddpkit.checkpointing.index import (
    Retention as Retention,
)
from ddpkit.checkpointing.index import (
    Selection as Selection,
)
from ddpkit.checkpointing.index import (
    average_checkpoints as average_checkpoints,
)
from ddpkit.checkpointing.index import (
    average_state_dicts as average_state_dicts,
)
from ddpkit.checkpointing.index import (
    ckpt_recency as ckpt_recency,
)
from ddpkit.checkpointing.index import (
    damage_of as damage_of,
)
from ddpkit.checkpointing.index import (
    is_code as is_code,
)
from ddpkit.checkpointing.index import (
    ranked as ranked,
)
from ddpkit.checkpointing.index import (
    read_checkpoint as read_checkpoint,
)
from ddpkit.checkpointing.loading import (
    LoadMode as LoadMode,
)
from ddpkit.checkpointing.loading import (
    load_recoverables as load_recoverables,
)
from ddpkit.checkpointing.rank_states import (
    RankStates as RankStates,
)
from ddpkit.checkpointing.run_lock import (
    FolderLock as FolderLock,
)
from ddpkit.checkpointing.run_lock import (
    Holder as Holder,
)
from ddpkit.checkpointing.run_lock import (
    holder as holder,
)
from ddpkit.checkpointing.snapshot import (
    SnapshotMemory as SnapshotMemory,
)
from ddpkit.checkpointing.storage import (
    MANIFEST_NAME as MANIFEST_NAME,
)
from ddpkit.checkpointing.storage import (
    VerifyMode as VerifyMode,
)
from ddpkit.checkpointing.storage import (
    discard_staging as discard_staging,
)
from ddpkit.checkpointing.storage import (
    read_text as read_text,
)
from ddpkit.checkpointing.storage import (
    verify as verify,
)
