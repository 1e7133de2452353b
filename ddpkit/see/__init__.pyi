from ddpkit.see.diff.command import run_diff as run_diff
from ddpkit.see.doctor.command import (
    Request as Request,
    run_doctor as run_doctor,
)
from ddpkit.see.doctor.local_ranks import run_ranks as run_ranks
from ddpkit.see.estimate.command import run_estimate as run_estimate
from ddpkit.see.estimate.request import EstimateRequest as EstimateRequest
from ddpkit.see.lr_find.command import run_lr_find as run_lr_find
from ddpkit.see.lr_find.request import LrFindRequest as LrFindRequest
from ddpkit.see.report.page import (
    require_extra as require_extra,
    write_page as write_page,
    write_picture as write_picture,
)
from ddpkit.see.report.run_files import find_runs as find_runs
from ddpkit.see.report.run_report import read_run as read_run
from ddpkit.see.scale.command import (
    join_results as join_results,
    run_scale as run_scale,
)
from ddpkit.see.scale.request import (
    ScaleRequest as ScaleRequest,
)
