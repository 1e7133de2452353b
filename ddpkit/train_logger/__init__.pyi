from ddpkit.reporting.run_log import (
    RunLog as RunLog,
    run_event as run_event,
    set_run_log as set_run_log,
)
from ddpkit.reporting.sample_logger import ProgressSampleLogger as ProgressSampleLogger
from ddpkit.train_logger.csv_table import CSVTrainLogger as CSVTrainLogger
from ddpkit.train_logger.foreign import as_train_logger as as_train_logger
from ddpkit.train_logger.interface import TrainLogger as TrainLogger
from ddpkit.train_logger.json_lines import JSONLTrainLogger as JSONLTrainLogger
from ddpkit.train_logger.mlflow import MLflowLogger as MLflowLogger
from ddpkit.train_logger.several import (
    TrainLoggers as TrainLoggers,
    join_loggers as join_loggers,
    log_places as log_places,
    loggers_of as loggers_of,
)
from ddpkit.train_logger.tensorboard import TensorboardLogger as TensorboardLogger
from ddpkit.train_logger.text_file import FileTrainLogger as FileTrainLogger
from ddpkit.train_logger.trackio import TrackioLogger as TrackioLogger
from ddpkit.train_logger.wandb import WandBLogger as WandBLogger
