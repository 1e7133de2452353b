from ddpkit.comm.agreement import (
    SELECTED as SELECTED,
    data_facts as data_facts,
    failures_of as failures_of,
    model_facts as model_facts,
    on_every_rank as on_every_rank,
    optimizer_facts as optimizer_facts,
    option_facts as option_facts,
    recipe_facts as recipe_facts,
    require_agreement as require_agreement,
    software_facts as software_facts,
)
from ddpkit.comm.late_ranks import (
    await_late as await_late,
    start_patient_sum as start_patient_sum,
)
from ddpkit.comm.mailbox import (
    Outcome as Outcome,
    call_path as call_path,
    call_site as call_site,
    control_group as control_group,
    get_runtime as get_runtime,
    outside_frame as outside_frame,
    raise_as_reader as raise_as_reader,
)
from ddpkit.comm.ordered_sum import (
    BUCKET_BYTES as BUCKET_BYTES,
    OrderedSum as OrderedSum,
    bytes_in_sums as bytes_in_sums,
)
from ddpkit.comm.process_group import init_group as init_group
from ddpkit.comm.rendezvous import open_store as open_store
from ddpkit.comm.tensor_sums import (
    exchange_tensor as exchange_tensor,
    is_exchanged as is_exchanged,
    keep_alive as keep_alive,
    start_sum as start_sum,
)
from ddpkit.comm.time_limits import (
    AFTER_WATCH_SECONDS as AFTER_WATCH_SECONDS,
    limits_by_option as limits_by_option,
    longest_wait as longest_wait,
    shorten_timeout as shorten_timeout,
)
from ddpkit.comm.tree_sum import (
    TreeSum as TreeSum,
    add_tensors as add_tensors,
    subtrees_of as subtrees_of,
)
