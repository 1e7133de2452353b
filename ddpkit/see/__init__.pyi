from ddpkit.see.doctor.command import (
    Request as Request,
    run_doctor as run_doctor,
)
from ddpkit.see.doctor.local_ranks import run_ranks as run_ranks
