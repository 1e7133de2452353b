from ddpkit.strategies.base import (
    NO_CONTEXT as NO_CONTEXT,
    Strategy as Strategy,
    batch_norms as batch_norms,
    blocks_of as blocks_of,
    is_on_meta as is_on_meta,
    modules_on_device as modules_on_device,
    refuse_shared_parameters as refuse_shared_parameters,
    refuse_with as refuse_with,
    take_device as take_device,
)
from ddpkit.strategies.choice import (
    check_strategy as check_strategy,
    choose_strategy as choose_strategy,
    make_strategy as make_strategy,
)
