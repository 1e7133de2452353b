from ddpkit.strategies.base import (
    Strategy as Strategy,
)
from ddpkit.strategies.batch_norm_layers import (
    batch_norms as batch_norms,
)
from ddpkit.strategies.choice import (
    check_strategy as check_strategy,
    choose_strategy as choose_strategy,
    chosen_by_own_option as chosen_by_own_option,
    chosen_for as chosen_for,
    make_strategy as make_strategy,
)
from ddpkit.strategies.entries import (
    blocks_of as blocks_of,
    modules_on_device as modules_on_device,
    refuse_shared_parameters as refuse_shared_parameters,
    take_device as take_device,
)
from ddpkit.strategies.loading import (
    new_strategy as new_strategy,
)
from ddpkit.strategies.meta_modules import (
    is_on_meta as is_on_meta,
)
from ddpkit.strategies.names import (
    problem_with as problem_with,
    register as register,
    registered as registered,
    registered_names as registered_names,
    unregister as unregister,
)
from ddpkit.strategies.option_refusals import (
    refuse_with as refuse_with,
)
from ddpkit.strategies.rank_memory import (
    RankMemory as RankMemory,
    RehearsedRun as RehearsedRun,
    divided_memory as divided_memory,
    whole_memory as whole_memory,
)
from ddpkit.strategies.rare_questions import (
    NO_CONTEXT as NO_CONTEXT,
)
from ddpkit.strategies.sending import (
    send_from_main as send_from_main,
)
from ddpkit.strategies.tensor_averages import (
    average_over_ranks as average_over_ranks,
)
