from ddpkit.reporting.logged_values import (
    LoggedValues as LoggedValues,
)
from ddpkit.reporting.progress import (
    COLOURS as COLOURS,
    ProgressBar as ProgressBar,
)
from ddpkit.reporting.start_report import (
    Place as Place,
    StartReport as StartReport,
    clipping_row as clipping_row,
    evaluation_row as evaluation_row,
    loss_row as loss_row,
    optimizer_row as optimizer_row,
    place_rows as place_rows,
    precision_row as precision_row,
    records_row as records_row,
    start_row as start_row,
)
