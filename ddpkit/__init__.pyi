import collections.abc
import typing

from ddpkit import (
    augmentation as augmentation,
    batch as batch,
    brain as brain,
    checkpoints as checkpoints,
    cli as cli,
    command_line as command_line,
    dataloader as dataloader,
    device as device,
    distributed as distributed,
    ema as ema,
    epoch_loop as epoch_loop,
    errors as errors,
    experiment as experiment,
    hparams as hparams,
    logger as logger,
    metric_stats as metric_stats,
    metrics as metrics,
    optim as optim,
    overrides as overrides,
    parameter_transfer as parameter_transfer,
    parts as parts,
    precision as precision,
    profiler as profiler,
    run_opts as run_opts,
    sampler as sampler,
    schedulers as schedulers,
    seed as seed,
    syncbn as syncbn,
    train_logger as train_logger,
    types as types,
)
from ddpkit.brain import (
    Brain as Brain,
)
from ddpkit.distributed import (
    ddp_init_group as ddp_init_group,
    if_main_process as if_main_process,
    main_process_only as main_process_only,
    run_on_main as run_on_main,
)
from ddpkit.errors import (
    AuditError as AuditError,
    BatchError as BatchError,
    BucketingError as BucketingError,
    CheckpointError as CheckpointError,
    CheckpointUsageError as CheckpointUsageError,
    ConfigError as ConfigError,
    DataError as DataError,
    DdpkitError as DdpkitError,
    FolderInUseError as FolderInUseError,
    LaunchError as LaunchError,
    MainCheckpointError as MainCheckpointError,
    MainProcessError as MainProcessError,
    MissingExtraError as MissingExtraError,
    MissingFileError as MissingFileError,
    NonFiniteLossError as NonFiniteLossError,
    ObjectStoreError as ObjectStoreError,
    ObjectStoreUsageError as ObjectStoreUsageError,
    ParityError as ParityError,
    RankFailedError as RankFailedError,
    RankMismatchError as RankMismatchError,
    RunStopped as RunStopped,
)
from ddpkit.experiment import (
    create_experiment_directory as create_experiment_directory,
)
from ddpkit.hparams import (
    load_hparams as load_hparams,
)
from ddpkit.launch import (
    notebook_launch as notebook_launch,
)
from ddpkit.parts import (
    Part as Part,
)
from ddpkit.precision import (
    AMPConfig as AMPConfig,
)
from ddpkit.run_opts import (
    RunOptions as RunOptions,
    parse_arguments as parse_arguments,
)
from ddpkit.seed import (
    seed_everything as seed_everything,
)
from ddpkit.types import (
    FitResult as FitResult,
    Stage as Stage,
)

__version__: str

def _names_of_stub(package: str) -> collections.abc.Callable[[str], typing.Any]: ...
