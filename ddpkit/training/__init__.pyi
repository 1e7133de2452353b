from ddpkit.training.epoch_phase import (
    BETWEEN_PASSES as BETWEEN_PASSES,
    EpochPhase as EpochPhase,
)
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
    compare_samples as compare_samples,
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
    selected_facts as selected_facts,
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
    evaluate_epoch as evaluate_epoch,
    train_epoch as train_epoch,
)
from ddpkit.training.losses import (
    one_number as one_number,
    sum_and_count as sum_and_count,
)
from ddpkit.training.module_options import (
    checkpoint_blocks as checkpoint_blocks,
    compile_modules as compile_modules,
    has_cuda_graphs as has_cuda_graphs,
    recomputed as recomputed,
    require_module_keys as require_module_keys,
)
from ddpkit.training.progress import (
    Progress as Progress,
)
from ddpkit.training.recipe import (
    LoopHooks as LoopHooks,
    Recipe as Recipe,
    StepHooks as StepHooks,
)
from ddpkit.training.train_step import (
    TrainStep as TrainStep,
)
from ddpkit.training.window import (
    Window as Window,
)
