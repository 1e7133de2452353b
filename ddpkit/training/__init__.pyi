from ddpkit.training.accumulation import (
    Accumulation as Accumulation,
)
from ddpkit.training.context import (
    RunContext as RunContext,
)
from ddpkit.training.device_prefetch import (
    move_ahead as move_ahead,
)
from ddpkit.training.epoch_phase import (
    BETWEEN_PASSES as BETWEEN_PASSES,
    EpochPhase as EpochPhase,
)
from ddpkit.training.feed import (
    Feed as Feed,
)
from ddpkit.training.gathering import (
    StageBatches as StageBatches,
    gather_results as gather_results,
    is_divided as is_divided,
    on_cpu as on_cpu,
    row_count as row_count,
    rows_of as rows_of,
)
from ddpkit.training.kept_average import (
    KeptAverage as KeptAverage,
)
from ddpkit.training.loader_factory import (
    LoaderFactory as LoaderFactory,
)
from ddpkit.training.loop import (
    evaluate_epoch as evaluate_epoch,
    train_epoch as train_epoch,
)
from ddpkit.training.loss_meter import (
    LossMeter as LossMeter,
)
from ddpkit.training.losses import (
    backward as backward,
    one_number as one_number,
    sum_and_count as sum_and_count,
)
from ddpkit.training.metric_contents import (
    KeptMetrics as KeptMetrics,
    kept_metrics as kept_metrics,
    metrics_among as metrics_among,
)
from ddpkit.training.module_options import (
    checkpoint_blocks as checkpoint_blocks,
    compile_modules as compile_modules,
    has_cuda_graphs as has_cuda_graphs,
    recomputed as recomputed,
    require_module_keys as require_module_keys,
)
from ddpkit.training.passed_through import (
    FeedThrough as FeedThrough,
    PassedThrough as PassedThrough,
    cuda_graph_steps as cuda_graph_steps,
    first_of as first_of,
)
from ddpkit.training.progress import (
    Progress as Progress,
)
from ddpkit.training.recipe import (
    LoopHooks as LoopHooks,
    Recipe as Recipe,
    StepHooks as StepHooks,
)
from ddpkit.training.run_length import (
    RunLength as RunLength,
    count_epochs as count_epochs,
)
from ddpkit.training.same_data import (
    compare_samples as compare_samples,
    compared as compared,
    require_same_draw as require_same_draw,
    selected_facts as selected_facts,
)
from ddpkit.training.sample_counts import (
    Counts as Counts,
    counting as counting,
    counts_of as counts_of,
    length_of as length_of,
    size_of as size_of,
)
from ddpkit.training.sample_indices import SampleIndices as SampleIndices
from ddpkit.training.step_sizes import (
    BatchSizes as BatchSizes,
    batch_sizes as batch_sizes,
    micro_batches as micro_batches,
)
from ddpkit.training.stream_feed import (
    StreamFeed as StreamFeed,
)
from ddpkit.training.too_little_data import (
    check_train_data as check_train_data,
)
from ddpkit.training.train_step import (
    TrainStep as TrainStep,
)
from ddpkit.training.window import (
    Window as Window,
)
