from ddpkit.data.likeness import (
    MOST_ITEMS as MOST_ITEMS,
)
from ddpkit.data.likeness import (
    FirstItems as FirstItems,
)
from ddpkit.data.likeness import (
    Sketch as Sketch,
)
from ddpkit.data.likeness import (
    require_alike as require_alike,
)
from ddpkit.data.likeness import (
    sketch as sketch,
)
from ddpkit.data.likeness import (
    warn_if_alike as warn_if_alike,
)
from ddpkit.data.permutation import (
    Order as Order,
)
from ddpkit.data.permutation import (
    mix as mix,
)
from ddpkit.data.permutation import (
    mix_key as mix_key,
)
from ddpkit.data.recipe_samplers import (
    BalancingDataSampler as BalancingDataSampler,
)
from ddpkit.data.recipe_samplers import (
    ConcatDatasetBatchSampler as ConcatDatasetBatchSampler,
)
from ddpkit.data.recipe_samplers import (
    DistributedSamplerWrapper as DistributedSamplerWrapper,
)
from ddpkit.data.recipe_samplers import (
    DynamicBatchSampler as DynamicBatchSampler,
)
from ddpkit.data.recipe_samplers import (
    ReproducibleRandomSampler as ReproducibleRandomSampler,
)
from ddpkit.data.recipe_samplers import (
    ReproducibleWeightedRandomSampler as ReproducibleWeightedRandomSampler,
)
from ddpkit.data.sharded_loader import (
    DECIDED as DECIDED,
)
from ddpkit.data.sharded_loader import (
    DEFAULT_SEED as DEFAULT_SEED,
)
from ddpkit.data.sharded_loader import (
    SaveableDataLoader as SaveableDataLoader,
)
from ddpkit.data.sharded_loader import (
    Sharding as Sharding,
)
from ddpkit.data.sharded_loader import (
    deal_batches as deal_batches,
)
from ddpkit.data.sharded_loader import (
    default_seed as default_seed,
)
from ddpkit.data.sharded_loader import (
    first_samples as first_samples,
)
from ddpkit.data.sharded_loader import (
    plan_of as plan_of,
)
from ddpkit.data.sharded_loader import (
    reshard as reshard,
)
from ddpkit.data.sharded_loader import (
    set_epoch as set_epoch,
)
from ddpkit.data.sharded_loader import (
    shard as shard,
)
from ddpkit.data.stream_position import (
    StreamPosition as StreamPosition,
)
from ddpkit.data.stream_position import (
    is_stateful as is_stateful,
)
from ddpkit.data.stream_position import (
    one_by_one as one_by_one,
)
from ddpkit.data.streams import (
    StreamLoader as StreamLoader,
)
from ddpkit.data.streams import (
    StreamShard as StreamShard,
)
from ddpkit.data.streams import (
    guess_batch_size as guess_batch_size,
)
from ddpkit.data.streams import (
    is_batches as is_batches,
)
from ddpkit.data.streams import (
    is_ordered as is_ordered,
)
from ddpkit.data.streams import (
    is_sharded as is_sharded,
)
