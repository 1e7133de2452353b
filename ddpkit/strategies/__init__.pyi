from ddpkit.strategies.base import (
    NO_CONTEXT as NO_CONTEXT,
    Strategy as Strategy,
    refuse_with as refuse_with,
)
from ddpkit.strategies.choice import (
    choose_strategy as choose_strategy,
    make_strategy as make_strategy,
)
from ddpkit.strategies.modules import (
    batch_norms as batch_norms,
    blocks_of as blocks_of,
    is_on_meta as is_on_meta,
    modules_on_device as modules_on_device,
    refuse_shared_parameters as refuse_shared_parameters,
    take_device as take_device,
)
