from ddpkit.compat.forkservers import (
    own_forkserver as own_forkserver,
)
from ddpkit.compat.random_streams import (
    look_at_random_streams as look_at_random_streams,
)
from ddpkit.compat.streams import (
    loses_items as loses_items,
    show_worker as show_worker,
    shuffle_digest as shuffle_digest,
)
from ddpkit.compat.torch_inside import (
    GradientOrder as GradientOrder,
    add_all as add_all,
    all_groups as all_groups,
    default_store as default_store,
    multiply_all as multiply_all,
    norm_of_all as norm_of_all,
    show_order as show_order,
    timeout_of as timeout_of,
    waits_for_gradients as waits_for_gradients,
    without_weak_references as without_weak_references,
)
