from ddpkit.compat.bucket_order import (
    GradientOrder as GradientOrder,
    show_order as show_order,
    waits_for_gradients as waits_for_gradients,
)
from ddpkit.compat.foreach import (
    add_all as add_all,
    multiply_all as multiply_all,
    norm_of_all as norm_of_all,
)
from ddpkit.compat.forkservers import (
    own_forkserver as own_forkserver,
)
from ddpkit.compat.process_groups import (
    all_groups as all_groups,
    default_store as default_store,
    timeout_of as timeout_of,
)
from ddpkit.compat.random_streams import (
    look_at_random_streams as look_at_random_streams,
)
from ddpkit.compat.streams import (
    loses_items as loses_items,
    show_worker as show_worker,
    shuffle_digest as shuffle_digest,
)
