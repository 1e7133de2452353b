from ddpkit.run.parts import (
    Run as Run,
)
from ddpkit.run.state import (
    StepPlan as StepPlan,
)
