from ddpkit.reporting.display import (
    Place as Place,
    ProgressBar as ProgressBar,
    StartReport as StartReport,
    clipping_row as clipping_row,
    evaluation_row as evaluation_row,
    optimizer_row as optimizer_row,
    place_rows as place_rows,
    precision_row as precision_row,
    start_row as start_row,
)
from ddpkit.reporting.logged_values import (
    LoggedValues as LoggedValues,
)
