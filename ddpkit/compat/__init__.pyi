from ddpkit.compat.arrivals import (
    call_at_arrival as call_at_arrival,
)
from ddpkit.compat.blocking_waits import (
    TellsWaitsOfBuffers as TellsWaitsOfBuffers,
    tell_waits_of_fsdp as tell_waits_of_fsdp,
)
from ddpkit.compat.exiting import before_pools_end as before_pools_end
from ddpkit.compat.first_calls import (
    CallNotice as CallNotice,
)
from ddpkit.compat.forked_devices import (
    is_lost_by_fork as is_lost_by_fork,
)
from ddpkit.compat.forkservers import (
    kill_when_terminated as kill_when_terminated,
    own_forkserver as own_forkserver,
)
from ddpkit.compat.memory_history import (
    record_memory_history as record_memory_history,
    stop_memory_history as stop_memory_history,
    write_memory_history as write_memory_history,
)
from ddpkit.compat.random_streams import (
    look_at_random_streams as look_at_random_streams,
)
from ddpkit.compat.recorded_events import (
    ProfileEvent as ProfileEvent,
    profile_events as profile_events,
)
from ddpkit.compat.recorded_peaks import (
    RecordedPeaks as RecordedPeaks,
    StepPeaks as StepPeaks,
    peaks_of_trace as peaks_of_trace,
)
from ddpkit.compat.speechbrain_marks import (
    speechbrain_hook as speechbrain_hook,
)
from ddpkit.compat.streams import (
    is_split_by_node as is_split_by_node,
    loses_items as loses_items,
    show_worker as show_worker,
    shuffle_digest as shuffle_digest,
)
from ddpkit.compat.torch_inside import (
    GradientOrder as GradientOrder,
    add_all as add_all,
    all_groups as all_groups,
    back_propagate as back_propagate,
    base_store as base_store,
    bytes_held_by as bytes_held_by,
    default_store as default_store,
    expect_backward_pass as expect_backward_pass,
    forget_compiled as forget_compiled,
    forget_unchecked_sparse_tensors as forget_unchecked_sparse_tensors,
    has_compiled_code as has_compiled_code,
    has_gradient_hooks as has_gradient_hooks,
    is_compiled as is_compiled,
    is_hooked_backward as is_hooked_backward,
    is_recompile_limit as is_recompile_limit,
    multiply_all as multiply_all,
    norm_of_all as norm_of_all,
    norm_of_norms as norm_of_norms,
    norms_of_each as norms_of_each,
    refused_sparse_tensor as refused_sparse_tensor,
    requiring_compiled_code as requiring_compiled_code,
    show_order as show_order,
    timeout_of as timeout_of,
    version_of as version_of,
    waits_for_gradients as waits_for_gradients,
    watches_all_steps as watches_all_steps,
    without_weak_references as without_weak_references,
)
