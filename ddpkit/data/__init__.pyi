from ddpkit.data.likeness import (
    FEW_ITEMS as FEW_ITEMS,
    MOST_ITEMS as MOST_ITEMS,
    FirstItems as FirstItems,
    require_alike as require_alike,
    summarize as summarize,
)
from ddpkit.data.loader_arguments import require_loader_arguments as require_loader_arguments
from ddpkit.data.plan import (
    CHUNK as CHUNK,
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
from ddpkit.data.selection import selection_facts as selection_facts
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
    stream_loader as stream_loader,
    worker_key as worker_key,
)
from ddpkit.data.unusable import require_dataset as require_dataset
from ddpkit.data.worker_copies import WorkerCopies as WorkerCopies
