from ddpkit.base.accelerators import (
    accelerator_kind as accelerator_kind,
    count_devices as count_devices,
    current_index as current_index,
    own_first as own_first,
    parse_device as parse_device,
    use_deterministic_kernels as use_deterministic_kernels,
    widest_float as widest_float,
)
from ddpkit.base.articles import (
    kind_of as kind_of,
    with_article as with_article,
)
from ddpkit.base.attributes import (
    temporarily as temporarily,
)
from ddpkit.base.earlier_files import (
    EARLIER as EARLIER,
    earlier_folder as earlier_folder,
    earlier_folders as earlier_folders,
    move_to_earlier as move_to_earlier,
)
from ddpkit.base.failure_reason import (
    PLACE as PLACE,
    WAITED as WAITED,
    Reason as Reason,
    frames_of as frames_of,
    note_part as note_part,
    output_identity as output_identity,
    text_and_line as text_and_line,
)
from ddpkit.base.failure_report import (
    PROCESS as PROCESS,
    FailureReport as FailureReport,
)
from ddpkit.base.file_systems import (
    MOUNTS as MOUNTS,
    FileSystem as FileSystem,
    file_system_here as file_system_here,
    mounted_at as mounted_at,
)
from ddpkit.base.hang_table import (
    spans as spans,
    table as table,
)
from ddpkit.base.heartbeats import (
    beat_key as beat_key,
    latest_statuses as latest_statuses,
)
from ddpkit.base.nothing import (
    do_nothing as do_nothing,
)
from ddpkit.base.output_folder import (
    FULL as FULL,
    OUTPUT_EXAMPLE as OUTPUT_EXAMPLE,
    cannot_write as cannot_write,
    require_writable as require_writable,
    require_writable_file as require_writable_file,
    writing as writing,
)
from ddpkit.base.own_pipe import (
    is_read_here as is_read_here,
)
from ddpkit.base.parent_death import (
    dying_with_parent as dying_with_parent,
)
from ddpkit.base.plain_yaml import (
    dump_plain_yaml as dump_plain_yaml,
    load_plain_yaml as load_plain_yaml,
    to_plain as to_plain,
)
from ddpkit.base.position import (
    POSITION as POSITION,
    Position as Position,
    stage_of as stage_of,
)
from ddpkit.base.processes import (
    has_ended as has_ended,
    host_name as host_name,
    state_and_start as state_and_start,
    this_place as this_place,
)
from ddpkit.base.rank import (
    MPI_LAUNCHERS as MPI_LAUNCHERS,
    get_rank as get_rank,
    get_world_size as get_world_size,
    in_slurm_step as in_slurm_step,
    is_distributed_initialized as is_distributed_initialized,
    rank_if_known as rank_if_known,
    size as size,
)
from ddpkit.base.rank_status import (
    RankStatus as RankStatus,
)
from ddpkit.base.run_counters import (
    COUNTERS as COUNTERS,
    counters_of as counters_of,
    unwritten_skips as unwritten_skips,
)
from ddpkit.base.second_hand import (
    explained as explained,
    failure_behind as failure_behind,
    is_second_hand as is_second_hand,
)
from ddpkit.base.stage_data import StageData as StageData
from ddpkit.base.states import (
    DEFAULT_LOAD_HOOKS as DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS as DEFAULT_SAVE_HOOKS,
    DEFAULT_TRANSFER_HOOKS as DEFAULT_TRANSFER_HOOKS,
    HOOKS_OF_ROLE as HOOKS_OF_ROLE,
    OWN_PART as OWN_PART,
    LoadHook as LoadHook,
    MethodHook as MethodHook,
    SaveHook as SaveHook,
    StoredTensor as StoredTensor,
    TransferHook as TransferHook,
    children_of as children_of,
    first_row as first_row,
    gather_whole as gather_whole,
    inner_name as inner_name,
    is_sharded as is_sharded,
    local_part as local_part,
    map_named as map_named,
    map_values as map_values,
    mark_as_loader as mark_as_loader,
    mark_as_saver as mark_as_saver,
    mark_as_transfer as mark_as_transfer,
    register_checkpoint_hooks as register_checkpoint_hooks,
    replacing as replacing,
    sharded_like as sharded_like,
    unwrap as unwrap,
)
from ddpkit.base.user_frames import (
    is_library as is_library,
    line_of as line_of,
)
from ddpkit.base.user_line import (
    code_of as code_of,
    note_line_of as note_line_of,
)
from ddpkit.base.waiting_marks import (
    reads_device as reads_device,
    waits_for_ranks as waits_for_ranks,
)
from ddpkit.base.waits import (
    WAITS as WAITS,
    Watch as Watch,
    waiting as waiting,
)
