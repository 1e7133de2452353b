from ddpkit.reporting.run_log import (
    RunLog as RunLog,
    run_event as run_event,
    set_run_log as set_run_log,
)
from ddpkit.reporting.sample_logger import ProgressSampleLogger as ProgressSampleLogger
from ddpkit.train_logger.interface import TrainLogger as TrainLogger
from ddpkit.train_logger.several import (
    TrainLoggers as TrainLoggers,
    join_loggers as join_loggers,
    log_places as log_places,
)
from ddpkit.train_logger.tensorboard import TensorboardLogger as TensorboardLogger
from ddpkit.train_logger.text_file import FileTrainLogger as FileTrainLogger
from ddpkit.train_logger.wandb import WandBLogger as WandBLogger
