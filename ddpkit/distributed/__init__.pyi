from torch.distributed import ReduceOp as ReduceOp

from ddpkit.base.rank import (
    get_rank as get_rank,
    get_world_size as get_world_size,
    is_distributed_initialized as is_distributed_initialized,
)
from ddpkit.comm.mailbox import control_group as control_group
from ddpkit.distributed.child_environment import (
    environment_without_launch as environment_without_launch,
)
from ddpkit.distributed.collectives import (
    ddp_all_reduce as ddp_all_reduce,
    ddp_barrier as ddp_barrier,
    ddp_broadcast as ddp_broadcast,
)
from ddpkit.distributed.gradient_gathering import gather_with_gradient as gather_with_gradient
from ddpkit.distributed.group import ddp_init_group as ddp_init_group
from ddpkit.distributed.local_rank import (
    get_local_rank as get_local_rank,
    is_local_rank_zero as is_local_rank_zero,
)
from ddpkit.distributed.main_only_code import (
    alone as alone,
    ddp_prevent_block as ddp_prevent_block,
    require_all_ranks as require_all_ranks,
)
from ddpkit.distributed.main_work import (
    main_process_only as main_process_only,
    run_on_main as run_on_main,
)
from ddpkit.distributed.marked_sums import start_sum_over_ranks as start_sum_over_ranks
from ddpkit.distributed.next_rank import from_next_rank as from_next_rank
from ddpkit.distributed.node_work import (
    once_per_node as once_per_node,
    run_once_per_node as run_once_per_node,
)
from ddpkit.distributed.object_gathering import gather_objects as gather_objects
from ddpkit.distributed.ranks import (
    if_main_process as if_main_process,
    rank_prefixed_message as rank_prefixed_message,
)
from ddpkit.distributed.store_exchange import exchange as exchange
from ddpkit.distributed.sums import (
    sum_exactly as sum_exactly,
    sum_over_ranks as sum_over_ranks,
)
