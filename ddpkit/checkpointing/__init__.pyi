from ddpkit.checkpointing.arrival import (
    all_ranks_come as all_ranks_come,
)
from ddpkit.checkpointing.async_save import (
    BackgroundSave as BackgroundSave,
    SnapshotMemory as SnapshotMemory,
)
from ddpkit.checkpointing.averaging import (
    average_checkpoints as average_checkpoints,
    average_state_dicts as average_state_dicts,
    is_code as is_code,
)
from ddpkit.checkpointing.base_weights import (
    BASE as BASE,
    base_of as base_of,
    other_base as other_base,
)
from ddpkit.checkpointing.broadcast import (
    LoadMode as LoadMode,
    load_recoverables as load_recoverables,
)
from ddpkit.checkpointing.checkpoint import (
    DIRECTORY_PREFIX as DIRECTORY_PREFIX,
    OWN_META as OWN_META,
    SAVED_AT as SAVED_AT,
    SUFFIX as SUFFIX,
    Checkpoint as Checkpoint,
    ckpt_recency as ckpt_recency,
    ends_epoch as ends_epoch,
)
from ddpkit.checkpointing.fetching import (
    fetch_on_each_machine as fetch_on_each_machine,
    fetch_what_is_named as fetch_what_is_named,
)
from ddpkit.checkpointing.file_loading import (
    is_in_shards as is_in_shards,
    load_lazily as load_lazily,
    safe_load as safe_load,
)
from ddpkit.checkpointing.fingerprinting import (
    fingerprints as fingerprints,
)
from ddpkit.checkpointing.folder import (
    CheckpointFolder as CheckpointFolder,
    run_savers as run_savers,
)
from ddpkit.checkpointing.hook_lookup import (
    find_load_hook as find_load_hook,
    find_save_hook as find_save_hook,
    find_transfer_hook as find_transfer_hook,
    get_default_hook as get_default_hook,
    saves_on_every_rank as saves_on_every_rank,
)
from ddpkit.checkpointing.hooks import (
    recover as recover,
    torch_parameter_transfer as torch_parameter_transfer,
    torch_recovery as torch_recovery,
    torch_save as torch_save,
    whole_state_dict as whole_state_dict,
    whole_states as whole_states,
)
from ddpkit.checkpointing.links import (
    behind_link as behind_link,
    target_of as target_of,
)
from ddpkit.checkpointing.main_work import (
    checkpoint_work_on_main as checkpoint_work_on_main,
)
from ddpkit.checkpointing.module_state import (
    copies_what_it_loads as copies_what_it_loads,
)
from ddpkit.checkpointing.object_folder import ObjectFolder as ObjectFolder
from ddpkit.checkpointing.places import PLACES as PLACES
from ddpkit.checkpointing.reading import (
    DamageLog as DamageLog,
    read_checkpoint as read_checkpoint,
)
from ddpkit.checkpointing.remote import (
    NO_REMOTE as NO_REMOTE,
    REMOTES as REMOTES,
    Remote as Remote,
    lock_of as lock_of,
)
from ddpkit.checkpointing.save_report import (
    Retained as Retained,
    SaveListener as SaveListener,
    SaveReport as SaveReport,
)
from ddpkit.checkpointing.save_request import (
    SaveRequest as SaveRequest,
    check_checkpoint_name as check_checkpoint_name,
    check_recoverable_name as check_recoverable_name,
)
from ddpkit.checkpointing.selection import (
    ImportanceKey as ImportanceKey,
    Predicate as Predicate,
    Retention as Retention,
    Selection as Selection,
    ranked as ranked,
    words_of_keys as words_of_keys,
)
from ddpkit.checkpointing.shard_saving import (
    ShardSaving as ShardSaving,
    require_shared_folder as require_shared_folder,
)
from ddpkit.checkpointing.shard_states import (
    ShardedState as ShardedState,
    gathered_states as gathered_states,
    sharded_states as sharded_states,
)
from ddpkit.checkpointing.shard_writing import NOT_SHARED_BY_SAVERS as NOT_SHARED_BY_SAVERS
from ddpkit.checkpointing.state_names import (
    loose_key as loose_key,
    map_old_state_dict_weights as map_old_state_dict_weights,
    plain_key as plain_key,
)
from ddpkit.checkpointing.storage import (
    MANIFEST_NAME as MANIFEST_NAME,
    META_NAME as META_NAME,
    STAGING_PREFIX as STAGING_PREFIX,
    FolderLock as FolderLock,
    VerifyMode as VerifyMode,
    file_sha256 as file_sha256,
    read_text as read_text,
    verify as verify,
)
from ddpkit.checkpointing.trained_only import (
    TrainedOnly as TrainedOnly,
)
from ddpkit.checkpointing.weight_files import (
    UPDATES_OF_AVERAGE as UPDATES_OF_AVERAGE,
    read_weights as read_weights,
)
from ddpkit.checkpointing.weight_source import (
    WeightSource as WeightSource,
    find_weights as find_weights,
    source_now as source_now,
)
from ddpkit.checkpointing.weight_streaming import (
    stream_safetensors as stream_safetensors,
    stream_torch as stream_torch,
)
from ddpkit.checkpointing.weights_by_name import (
    Misfits as Misfits,
    load_by_name as load_by_name,
    load_without_base as load_without_base,
    nothing_fits as nothing_fits,
    shape_text as shape_text,
)
