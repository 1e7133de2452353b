from ddpkit.run.brain_file import (
    BRAIN_FILE as BRAIN_FILE,
    EPOCH as EPOCH,
    NO_METRICS as NO_METRICS,
    OPTIMIZER_STEP as OPTIMIZER_STEP,
    STEP as STEP,
    beginning as beginning,
)
from ddpkit.run.early_values import (
    RUN as RUN,
    NotMade as NotMade,
    are_parts_made as are_parts_made,
)
from ddpkit.run.epoch_numbers import (
    last_epoch as last_epoch,
)
from ddpkit.run.epochs import (
    is_step_limit_reached as is_step_limit_reached,
    run_epochs as run_epochs,
)
from ddpkit.run.evaluation_sets import (
    EvaluationSets as EvaluationSets,
)
from ddpkit.run.lr_sweep import rates_between as rates_between
from ddpkit.run.misspelt_hooks import (
    warn_of_misspelt_hooks as warn_of_misspelt_hooks,
)
from ddpkit.run.prediction_path import (
    PredictionPath as PredictionPath,
)
from ddpkit.run.recipe_class import (
    adapt_class as adapt_class,
    given_or_of_class as given_or_of_class,
)
from ddpkit.run.run import (
    Run as Run,
)
from ddpkit.run.slice_hparams import (
    hparams_of_slice as hparams_of_slice,
)
from ddpkit.run.slice_result import (
    SliceResult as SliceResult,
)
from ddpkit.run.stage_loaders import (
    StageLoaders as StageLoaders,
)
from ddpkit.run.start_rows import (
    given_batch_size as given_batch_size,
)
