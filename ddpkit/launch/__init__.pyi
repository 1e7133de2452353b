from ddpkit.launch.launchers import (
    LOOPBACK as LOOPBACK,
    NPROC as NPROC,
    PARITY as PARITY,
    LaunchInfo as LaunchInfo,
    derived_port as derived_port,
    find_launch as find_launch,
)
from ddpkit.launch.nproc import (
    become_torchrun as become_torchrun,
)
