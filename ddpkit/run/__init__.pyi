from ddpkit.run.epoch_numbers import (
    last_epoch as last_epoch,
)
from ddpkit.run.parts import (
    FOLLOWED as FOLLOWED,
    Run as Run,
)
from ddpkit.run.slice_hparams import (
    hparams_of_slice as hparams_of_slice,
)
from ddpkit.run.slice_result import (
    SliceResult as SliceResult,
)
from ddpkit.run.start_rows import (
    given_batch_size as given_batch_size,
)
from ddpkit.run.step_plan import (
    StepPlan as StepPlan,
)
from ddpkit.run.total_steps import (
    note_epoch as note_epoch,
)
