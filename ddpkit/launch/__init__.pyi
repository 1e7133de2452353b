from ddpkit.launch.launchers import (
    find_launch as find_launch,
)
from ddpkit.launch.spawning import (
    run_script as run_script,
    spawn as spawn,
)
from ddpkit.launch.variables import (
    LOOPBACK as LOOPBACK,
    PARITY as PARITY,
    LaunchInfo as LaunchInfo,
    derived_port as derived_port,
)
