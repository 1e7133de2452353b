from ddpkit.training.compilation import (
    compile_modules as compile_modules,
)
from ddpkit.training.compilation import (
    require_module_keys as require_module_keys,
)
from ddpkit.training.feed import (
    Counts as Counts,
)
from ddpkit.training.feed import (
    Feed as Feed,
)
from ddpkit.training.feed import (
    Window as Window,
)
from ddpkit.training.gathering import (
    Seen as Seen,
)
from ddpkit.training.gathering import (
    gather_results as gather_results,
)
from ddpkit.training.gathering import (
    is_divided as is_divided,
)
from ddpkit.training.gathering import (
    on_cpu as on_cpu,
)
from ddpkit.training.gathering import (
    row_count as row_count,
)
from ddpkit.training.gathering import (
    rows_of as rows_of,
)
from ddpkit.training.loop import (
    LoopHost as LoopHost,
)
from ddpkit.training.loop import (
    Progress as Progress,
)
from ddpkit.training.loop import (
    evaluate_epoch as evaluate_epoch,
)
from ddpkit.training.loop import (
    one_number as one_number,
)
from ddpkit.training.loop import (
    sum_and_count as sum_and_count,
)
from ddpkit.training.loop import (
    train_epoch as train_epoch,
)
from ddpkit.training.lr_scaling import (
    LrScaling as LrScaling,
)
from ddpkit.training.lr_scaling import (
    require_reference as require_reference,
)
from ddpkit.training.sizes import (
    BatchSizes as BatchSizes,
)
from ddpkit.training.sizes import (
    RunLength as RunLength,
)
from ddpkit.training.sizes import (
    batch_sizes as batch_sizes,
)
from ddpkit.training.sizes import (
    count_epochs as count_epochs,
)
from ddpkit.training.sizes import (
    micro_batches as micro_batches,
)
from ddpkit.training.stage_batches import (
    First as First,
)
from ddpkit.training.stage_batches import (
    Profiled as Profiled,
)
from ddpkit.training.stage_batches import (
    compare_first_samples as compare_first_samples,
)
from ddpkit.training.stage_batches import (
    compared as compared,
)
from ddpkit.training.stage_batches import (
    counting as counting,
)
from ddpkit.training.stage_batches import (
    counts_of as counts_of,
)
from ddpkit.training.stage_batches import (
    length_of as length_of,
)
from ddpkit.training.stage_batches import (
    require_same_draw as require_same_draw,
)
from ddpkit.training.stage_batches import (
    size_of as size_of,
)
from ddpkit.training.strategy import (
    NOTHING as NOTHING,
)
from ddpkit.training.strategy import (
    Strategy as Strategy,
)
from ddpkit.training.strategy import (
    make_strategy as make_strategy,
)
from ddpkit.training.strategy import (
    modules_on_device as modules_on_device,
)
from ddpkit.training.strategy import (
    refuse_shared_parameters as refuse_shared_parameters,
)
from ddpkit.training.strategy import (
    take_device as take_device,
)
from ddpkit.training.strategy import (
    unwrap as unwrap,
)
from ddpkit.training.stream_feed import (
    StreamFeed as StreamFeed,
)
from ddpkit.training.train_step import (
    Recipe as Recipe,
)
from ddpkit.training.train_step import (
    StepHooks as StepHooks,
)
from ddpkit.training.train_step import (
    TrainStep as TrainStep,
)
