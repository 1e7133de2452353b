from ddpkit.step_times.core_waits import (
    CoreWaits as CoreWaits,
)
from ddpkit.step_times.device_peaks import (
    TF32 as TF32,
    device_peak as device_peak,
)
from ddpkit.step_times.flops import (
    FlopCounter as FlopCounter,
)
from ddpkit.step_times.gpu_clocks import (
    GpuClocks as GpuClocks,
)
from ddpkit.step_times.machine_load import (
    host_load as host_load,
)
from ddpkit.step_times.memory import (
    memory_use as memory_use,
)
from ddpkit.step_times.named_ranges import (
    RANGE as RANGE,
    NamedRanges as NamedRanges,
)
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
from ddpkit.step_times.rank_slots import (
    RankRow as RankRow,
    filled_slots as filled_slots,
    rows_of as rows_of,
)
from ddpkit.step_times.seconds import (
    SINGLE_WINDOWS as SINGLE_WINDOWS,
    SecondOfSteps as SecondOfSteps,
)
from ddpkit.step_times.speed_event import (
    speed_fields as speed_fields,
    spread as spread,
)
from ddpkit.step_times.step_timer import (
    StepTimer as StepTimer,
)
from ddpkit.step_times.verdicts import (
    Verdict as Verdict,
    VerdictFinder as VerdictFinder,
    words_of_no_verdict as words_of_no_verdict,
)
from ddpkit.step_times.window_times import (
    WindowTimes as WindowTimes,
    summarized as summarized,
)
