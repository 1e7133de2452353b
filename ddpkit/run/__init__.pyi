from ddpkit.run.parts import (
    Run as Run,
)
from ddpkit.run.resuming import (
    StepPlan as StepPlan,
)
