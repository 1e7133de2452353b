from ddpkit.data.likeness import (
    MOST_ITEMS as MOST_ITEMS,
    require_alike as require_alike,
)
from ddpkit.data.plan import (
    DealtBatchSampler as DealtBatchSampler,
    Order as Order,
    PlannedBatchSampler as PlannedBatchSampler,
    RankBatchSampler as RankBatchSampler,
    SamplingPlan as SamplingPlan,
    count_repeats as count_repeats,
    index_number as index_number,
    layers as layers,
    require_positive as require_positive,
    set_epoch_inside as set_epoch_inside,
)
from ddpkit.data.sharded_loader import (
    DECIDED as DECIDED,
    DEFAULT_SEED as DEFAULT_SEED,
    SaveableDataLoader as SaveableDataLoader,
    Sharding as Sharding,
    deal_batches as deal_batches,
    default_seed as default_seed,
    first_samples as first_samples,
    is_batches as is_batches,
    plan_of as plan_of,
    reshard as reshard,
    set_epoch as set_epoch,
    shard as shard,
)
from ddpkit.data.stream_position import (
    StreamPosition as StreamPosition,
    is_stateful as is_stateful,
    one_by_one as one_by_one,
)
from ddpkit.data.streams import (
    StreamLoader as StreamLoader,
    StreamShard as StreamShard,
    guess_batch_size as guess_batch_size,
    is_sharded as is_sharded,
)
