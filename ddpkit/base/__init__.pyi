from ddpkit.base.failure_report import (
    PLACE as PLACE,
    PROCESS as PROCESS,
    FailureReport as FailureReport,
    Reason as Reason,
    explained as explained,
    is_second_hand as is_second_hand,
    text_and_line as text_and_line,
)
from ddpkit.base.files import (
    replacing as replacing,
)
from ddpkit.base.marks import (
    DEFAULT_LOAD_HOOKS as DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS as DEFAULT_SAVE_HOOKS,
    DEFAULT_TRANSFER_HOOKS as DEFAULT_TRANSFER_HOOKS,
    HOOKS_OF_ROLE as HOOKS_OF_ROLE,
    LoadHook as LoadHook,
    MethodHook as MethodHook,
    SaveHook as SaveHook,
    TransferHook as TransferHook,
    mark_as_loader as mark_as_loader,
    mark_as_saver as mark_as_saver,
    mark_as_transfer as mark_as_transfer,
    register_checkpoint_hooks as register_checkpoint_hooks,
)
from ddpkit.base.plain_yaml import (
    dump_plain_yaml as dump_plain_yaml,
    load_plain_yaml as load_plain_yaml,
    to_plain as to_plain,
)
from ddpkit.base.process_probe import (
    has_ended as has_ended,
    kill_later as kill_later,
    state_and_start as state_and_start,
)
from ddpkit.base.rank import (
    MPI_LAUNCHERS as MPI_LAUNCHERS,
    get_rank as get_rank,
    get_world_size as get_world_size,
    in_slurm_step as in_slurm_step,
    is_distributed_initialized as is_distributed_initialized,
    rank_if_known as rank_if_known,
    size as size,
    this_place as this_place,
)
from ddpkit.base.rank_status import (
    POSITION as POSITION,
    Position as Position,
    RankStatus as RankStatus,
    host_name as host_name,
    is_library as is_library,
    line_of as line_of,
    spans as spans,
    stage_of as stage_of,
    table as table,
    temporarily as temporarily,
)
from ddpkit.base.signals import (
    LAST_WORDS_SECONDS as LAST_WORDS_SECONDS,
    REPEAT_SECONDS as REPEAT_SECONDS,
    SignalListener as SignalListener,
    signal_named as signal_named,
)
from ddpkit.base.states import (
    children_of as children_of,
    gather_whole as gather_whole,
    inner_name as inner_name,
    is_sharded as is_sharded,
    local_part as local_part,
    map_values as map_values,
    sharded_like as sharded_like,
    unwrap as unwrap,
)
