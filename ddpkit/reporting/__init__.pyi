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
from ddpkit.reporting.loggers import (
    FileTrainLogger as FileTrainLogger,
    ProgressSampleLogger as ProgressSampleLogger,
    RunLog as RunLog,
    TensorboardLogger as TensorboardLogger,
    TrainLogger as TrainLogger,
    TrainLoggers as TrainLoggers,
    WandBLogger as WandBLogger,
    join_loggers as join_loggers,
    run_event as run_event,
    run_log as run_log,
    set_logged_values as set_logged_values,
    set_run_log as set_run_log,
)
