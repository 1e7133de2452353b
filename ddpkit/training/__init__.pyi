from ddpkit.training.feed import (
    BatchSizes as BatchSizes,
    Counts as Counts,
    Feed as Feed,
    FeedThrough as FeedThrough,
    LoaderFactory as LoaderFactory,
    PassedThrough as PassedThrough,
    RunLength as RunLength,
    StreamFeed as StreamFeed,
    batch_sizes as batch_sizes,
    check_train_data as check_train_data,
    compare_first_samples as compare_first_samples,
    compared as compared,
    count_epochs as count_epochs,
    counting as counting,
    counts_of as counts_of,
    cuda_graph_steps as cuda_graph_steps,
    first_of as first_of,
    length_of as length_of,
    micro_batches as micro_batches,
    move_ahead as move_ahead,
    profiled as profiled,
    require_same_draw as require_same_draw,
    size_of as size_of,
)
from ddpkit.training.gathering import (
    Seen as Seen,
    gather_results as gather_results,
    is_divided as is_divided,
    on_cpu as on_cpu,
    row_count as row_count,
    rows_of as rows_of,
)
from ddpkit.training.loop import (
    LoopHooks as LoopHooks,
    Progress as Progress,
    Window as Window,
    evaluate_epoch as evaluate_epoch,
    one_number as one_number,
    sum_and_count as sum_and_count,
    train_epoch as train_epoch,
)
from ddpkit.training.module_options import (
    checkpoint_blocks as checkpoint_blocks,
    compile_modules as compile_modules,
    has_cuda_graphs as has_cuda_graphs,
    require_module_keys as require_module_keys,
)
from ddpkit.training.train_step import (
    Recipe as Recipe,
    StepHooks as StepHooks,
    TrainStep as TrainStep,
)
