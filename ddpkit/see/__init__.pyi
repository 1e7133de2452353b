from ddpkit.see.doctor.command import (
    Request as Request,
    run_doctor as run_doctor,
)
from ddpkit.see.doctor.local_ranks import run_ranks as run_ranks
from ddpkit.see.report.page import (
    require_extra as require_extra,
    write_page as write_page,
    write_picture as write_picture,
)
from ddpkit.see.report.run_files import find_runs as find_runs
from ddpkit.see.report.run_report import read_run as read_run
