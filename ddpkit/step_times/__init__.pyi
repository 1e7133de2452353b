from ddpkit.step_times.phases import (
    BACKWARD as BACKWARD,
    DATA as DATA,
    EXCHANGE as EXCHANGE,
    FORWARD as FORWARD,
    MOVE as MOVE,
    OPTIMIZER as OPTIMIZER,
    OTHER as OTHER,
    PHASES as PHASES,
    STEP as STEP,
)
from ddpkit.step_times.seconds import (
    SecondOfSteps as SecondOfSteps,
)
