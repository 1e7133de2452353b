from ddpkit.checkpointing.async_save import (
    BackgroundSave as BackgroundSave,
    SnapshotMemory as SnapshotMemory,
)
from ddpkit.checkpointing.folder import (
    DIRECTORY_PREFIX as DIRECTORY_PREFIX,
    SUFFIX as SUFFIX,
    Checkpoint as Checkpoint,
    CheckpointFolder as CheckpointFolder,
    DamageLedger as DamageLedger,
    ImportanceKey as ImportanceKey,
    Predicate as Predicate,
    Retention as Retention,
    SaveRequest as SaveRequest,
    Selection as Selection,
    average_checkpoints as average_checkpoints,
    average_state_dicts as average_state_dicts,
    check_file_name as check_file_name,
    checkpoint_work_on_main as checkpoint_work_on_main,
    ckpt_recency as ckpt_recency,
    is_code as is_code,
    ranked as ranked,
    read_checkpoint as read_checkpoint,
    run_savers as run_savers,
)
from ddpkit.checkpointing.hooks import (
    find_load_hook as find_load_hook,
    find_save_hook as find_save_hook,
    find_transfer_hook as find_transfer_hook,
    get_default_hook as get_default_hook,
    map_old_state_dict_weights as map_old_state_dict_weights,
    plain_key as plain_key,
    safe_load as safe_load,
    saves_on_every_rank as saves_on_every_rank,
    torch_parameter_transfer as torch_parameter_transfer,
    torch_recovery as torch_recovery,
    torch_save as torch_save,
    whole_state_dict as whole_state_dict,
    whole_states as whole_states,
)
from ddpkit.checkpointing.rank_states import (
    LoadMode as LoadMode,
    RankStates as RankStates,
    all_ranks_come as all_ranks_come,
    load_recoverables as load_recoverables,
)
from ddpkit.checkpointing.storage import (
    MANIFEST_NAME as MANIFEST_NAME,
    META_NAME as META_NAME,
    FolderLock as FolderLock,
    VerifyMode as VerifyMode,
    read_text as read_text,
    verify as verify,
)
