from ddpkit.optim.clipping import StepResult as StepResult
from ddpkit.optim.factor_on_rates import RateFactor as RateFactor
from ddpkit.optim.fused import GPUS as GPUS
from ddpkit.optim.lr_scaling import (
    LrScaling as LrScaling,
    rate_factor as rate_factor,
)
from ddpkit.optim.making import (
    make_optimizer as make_optimizer,
    make_schedule as make_schedule,
    rm_vector_weight_decay as rm_vector_weight_decay,
)
from ddpkit.optim.parameters import (
    clone_gradients as clone_gradients,
    gradients as gradients,
    own_gradients as own_gradients,
    parameters_of as parameters_of,
    unscale as unscale,
    zero_gradients as zero_gradients,
)
from ddpkit.optim.pending_step import (
    LateStep as LateStep,
    PendingStep as PendingStep,
)
from ddpkit.optim.schedule import Schedule as Schedule
from ddpkit.optim.step import (
    drop_nonfinite as drop_nonfinite,
    multiply_gradients as multiply_gradients,
    take_late_step as take_late_step,
    take_step as take_step,
)
from ddpkit.optim.step_counters import StepCounters as StepCounters
