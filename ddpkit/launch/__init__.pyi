from ddpkit.launch.launchers import (
    find_launch as find_launch,
)
from ddpkit.launch.spawning import (
    run_script as run_script,
)
from ddpkit.launch.spawning import (
    spawn as spawn,
)
from ddpkit.launch.variables import (
    LOOPBACK as LOOPBACK,
)
from ddpkit.launch.variables import (
    PARITY as PARITY,
)
from ddpkit.launch.variables import (
    LaunchInfo as LaunchInfo,
)
from ddpkit.launch.variables import (
    derived_port as derived_port,
)
