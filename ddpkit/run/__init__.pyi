from ddpkit.run.parts import (
    FOLLOWED as FOLLOWED,
    Run as Run,
)
from ddpkit.run.state import (
    StepPlan as StepPlan,
)
from ddpkit.run.total_steps import (
    note_epoch as note_epoch,
)
