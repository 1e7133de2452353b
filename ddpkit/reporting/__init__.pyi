from ddpkit.reporting.logged_values import (
    LoggedValues as LoggedValues,
)
from ddpkit.reporting.progress import (
    COLOURS as COLOURS,
)
from ddpkit.reporting.progress import (
    ProgressBar as ProgressBar,
)
from ddpkit.reporting.start_report import (
    Place as Place,
)
from ddpkit.reporting.start_report import (
    StartReport as StartReport,
)
from ddpkit.reporting.start_report import (
    clipping_row as clipping_row,
)
from ddpkit.reporting.start_report import (
    evaluation_row as evaluation_row,
)
from ddpkit.reporting.start_report import (
    loss_row as loss_row,
)
from ddpkit.reporting.start_report import (
    optimizer_row as optimizer_row,
)
from ddpkit.reporting.start_report import (
    place_rows as place_rows,
)
from ddpkit.reporting.start_report import (
    precision_row as precision_row,
)
from ddpkit.reporting.start_report import (
    records_row as records_row,
)
from ddpkit.reporting.start_report import (
    start_row as start_row,
)
