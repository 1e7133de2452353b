from ddpkit.launch.child_processes import (
    mark_rank_process as mark_rank_process,
    refuse_child_of_rank as refuse_child_of_rank,
    without_launch as without_launch,
)
from ddpkit.launch.estimate import become_estimate as become_estimate
from ddpkit.launch.launcher_variables import (
    NPROC as NPROC,
    PARITY as PARITY,
    is_notebook_rank as is_notebook_rank,
)
from ddpkit.launch.launchers import (
    LOOPBACK as LOOPBACK,
    NO_LAUNCHER as NO_LAUNCHER,
    LaunchInfo as LaunchInfo,
    derived_port as derived_port,
    find_launch as find_launch,
    node_by_rank as node_by_rank,
)
from ddpkit.launch.notebook import notebook_launch as notebook_launch
from ddpkit.launch.nproc import (
    become_torchrun as become_torchrun,
    cores as cores,
    count_processes as count_processes,
)
from ddpkit.launch.own_ranks import (
    open_store as open_store,
    rank_variables as rank_variables,
)
from ddpkit.launch.platforms import (
    refuse_lonely_node as refuse_lonely_node,
)
from ddpkit.launch.slice_plan import (
    SLICE as SLICE,
    SlicePlan as SlicePlan,
    find_slice as find_slice,
    options_of_slice as options_of_slice,
)
