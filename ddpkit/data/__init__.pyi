from ddpkit.data.batch_size_guess import guess_batch_size as guess_batch_size
from ddpkit.data.dealt_batches import DealtBatchSampler as DealtBatchSampler
from ddpkit.data.joint_sets import JointSets as JointSets
from ddpkit.data.loader_arguments import require_loader_arguments as require_loader_arguments
from ddpkit.data.loader_epoch import (
    set_epoch as set_epoch,
)
from ddpkit.data.loader_plan import (
    SingleIndices as SingleIndices,
    plan_in as plan_in,
    plan_of as plan_of,
)
from ddpkit.data.loader_positions import (
    PLACES as PLACES,
    begin_at as begin_at,
    has_own_file as has_own_file,
    keep_states as keep_states,
    places_after_call as places_after_call,
    places_of as places_of,
    resume_after_call as resume_after_call,
    resume_after_end as resume_after_end,
    resume_at as resume_at,
    state_at as state_at,
    state_at_begin as state_at_begin,
    state_at_end as state_at_end,
    stream_state as stream_state,
    unread_places as unread_places,
)
from ddpkit.data.looped_loader import (
    LoopedLoader as LoopedLoader,
    inner_loader as inner_loader,
)
from ddpkit.data.mixed_sets import MixedSets as MixedSets
from ddpkit.data.named_sets import NamedSets as NamedSets
from ddpkit.data.plan import (
    CHUNK as CHUNK,
    Order as Order,
    SamplingPlan as SamplingPlan,
    nested_samplers as nested_samplers,
    require_positive as require_positive,
    set_epoch_inside as set_epoch_inside,
)
from ddpkit.data.planned_batches import PlannedBatchSampler as PlannedBatchSampler
from ddpkit.data.rank_batches import RankBatchSampler as RankBatchSampler
from ddpkit.data.repeats import count_repeats as count_repeats, index_number as index_number
from ddpkit.data.sample_comparison import (
    FEW_ITEMS as FEW_ITEMS,
    MOST_ITEMS as MOST_ITEMS,
    FirstItems as FirstItems,
    require_alike as require_alike,
    summarize as summarize,
)
from ddpkit.data.saveable_loader import (
    SaveableDataLoader as SaveableDataLoader,
)
from ddpkit.data.selection import selection_facts as selection_facts
from ddpkit.data.sharding import (
    DEFAULT_SEED as DEFAULT_SEED,
    Division as Division,
    Sharding as Sharding,
    default_seed as default_seed,
)
from ddpkit.data.stream_kinds import is_sharded as is_sharded
from ddpkit.data.stream_position import (
    StreamPosition as StreamPosition,
    is_stateful as is_stateful,
    one_by_one as one_by_one,
)
from ddpkit.data.stream_shard import StreamShard as StreamShard
from ddpkit.data.streams import (
    StreamLoader as StreamLoader,
    stream_loader as stream_loader,
    worker_key as worker_key,
)
from ddpkit.data.unusable import require_dataset as require_dataset
from ddpkit.data.worker_copies import WorkerCopies as WorkerCopies
