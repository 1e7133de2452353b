from ddpkit.data.likeness import (
    MOST_ITEMS as MOST_ITEMS,
    FirstItems as FirstItems,
    require_alike as require_alike,
)
from ddpkit.data.permutation import (
    Order as Order,
    mix as mix,
    mix_key as mix_key,
)
from ddpkit.data.recipe_samplers import (
    ConcatDatasetBatchSampler as ConcatDatasetBatchSampler,
    DistributedSamplerWrapper as DistributedSamplerWrapper,
    DynamicBatchSampler as DynamicBatchSampler,
    ReproducibleRandomSampler as ReproducibleRandomSampler,
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
