"""The names of SpeechBrain's training core, and the module of ddpkit that answers each.

The table has the names of SpeechBrain 1.0 and 1.1. All other names stay SpeechBrain's.
"""

from __future__ import annotations

__all__ = ["PACKAGE", "TABLE", "ddpkit_module", "ddpkit_name"]

PACKAGE = "speechbrain"

# A module of SpeechBrain, a module of ddpkit that answers it, and names that are there; one row per
# line.
_ROWS = """
speechbrain ddpkit: Brain Stage RunOptions create_experiment_directory parse_arguments
speechbrain.core ddpkit: AMPConfig Brain RunOptions Stage create_experiment_directory parse_arguments
speechbrain.core ddpkit.dataloader: LoopedLoader SaveableDataLoader
speechbrain.core ddpkit.distributed: ddp_init_group is_distributed_initialized if_main_process run_on_main
speechbrain.core ddpkit.logger: get_logger
speechbrain.core ddpkit.optim: rm_vector_weight_decay
speechbrain.core ddpkit.precision: TorchAutocast
speechbrain.core ddpkit.profiler: prepare_profiler
speechbrain.core ddpkit.sampler: DistributedSamplerWrapper ReproducibleRandomSampler
speechbrain.utils ddpkit: seed_everything
speechbrain.utils.autocast ddpkit.precision: AMPConfig TorchAutocast fwd_default_precision
speechbrain.utils.checkpoints ddpkit.checkpoints: Checkpoint Checkpointer DEFAULT_LOAD_HOOKS DEFAULT_SAVE_HOOKS
speechbrain.utils.checkpoints ddpkit.checkpoints: DEFAULT_TRANSFER_HOOKS METAFNAME PARAMFILE_EXT average_checkpoints
speechbrain.utils.checkpoints ddpkit.checkpoints: average_state_dicts ckpt_recency
speechbrain.utils.checkpoints ddpkit.checkpoints: convert_torch_save_hooks_to_once_per_node get_default_hook
speechbrain.utils.checkpoints ddpkit.checkpoints: map_old_state_dict_weights torch_parameter_transfer torch_recovery
speechbrain.utils.checkpoints ddpkit.checkpoints: torch_save mark_as_saver mark_as_loader mark_as_transfer
speechbrain.utils.checkpoints ddpkit.checkpoints: register_checkpoint_hooks
speechbrain.utils.checkpoints ddpkit.distributed: ddp_barrier ddp_broadcast if_main_process main_process_only
speechbrain.utils.checkpoints ddpkit.distributed: once_per_node
speechbrain.utils.distributed ddpkit.distributed: ddp_all_reduce ddp_barrier ddp_broadcast ddp_init_group
speechbrain.utils.distributed ddpkit.distributed: ddp_prevent_block get_local_rank get_rank if_main_process
speechbrain.utils.distributed ddpkit.distributed: is_distributed_initialized is_local_rank_zero main_process_only
speechbrain.utils.distributed ddpkit.distributed: once_per_node rank_prefixed_message run_on_main run_once_per_node
speechbrain.utils.distributed ddpkit.device: infer_device
speechbrain.utils.epoch_loop ddpkit.epoch_loop: EpochCounter EpochCounterWithStopper
speechbrain.utils.logger ddpkit.logger: MultiProcessLoggerAdapter TqdmCompatibleStreamHandler format_order_of_magnitude
speechbrain.utils.logger ddpkit.logger: get_logger setup_logging
speechbrain.utils.logger ddpkit.experiment: get_environment_description
speechbrain.utils.metric_stats ddpkit.metric_stats: MetricStats
speechbrain.utils.optimizers ddpkit.optim: rm_vector_weight_decay
speechbrain.utils.parameter_transfer ddpkit.parameter_transfer: Pretrainer
speechbrain.utils.profiling ddpkit.profiler: prepare_profiler
speechbrain.utils.run_opts ddpkit.run_opts: RunOptions
speechbrain.utils.seed ddpkit.seed: seed_everything
speechbrain.utils.train_logger ddpkit.train_logger: FileTrainLogger ProgressSampleLogger TensorboardLogger TrainLogger
speechbrain.utils.train_logger ddpkit.train_logger: WandBLogger
speechbrain.dataio ddpkit:
speechbrain.dataio.batch ddpkit.batch: BatchsizeGuesser PaddedBatch PaddedData
speechbrain.dataio.dataloader ddpkit.dataloader: LoopedLoader SaveableDataLoader distributed_loader_specifics
speechbrain.dataio.dataloader ddpkit.dataloader: make_dataloader
speechbrain.dataio.sampler ddpkit.sampler: BalancingDataSampler ConcatDatasetBatchSampler DistributedSamplerWrapper
speechbrain.dataio.sampler ddpkit.sampler: DynamicBatchSampler ReproducibleRandomSampler
speechbrain.dataio.sampler ddpkit.sampler: ReproducibleWeightedRandomSampler
speechbrain.nnet.schedulers ddpkit.schedulers: CyclicLRScheduler LinearScheduler
speechbrain.nnet.schedulers ddpkit.schedulers: NewBobScheduler NoamScheduler ReduceLROnPlateau StepScheduler
speechbrain.nnet.schedulers ddpkit.schedulers: update_learning_rate
"""  # noqa: E501


def _table() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for row in _ROWS.strip().splitlines():
        modules, _, names = row.partition(":")
        module, home = modules.split()
        homes = table.setdefault(module, {})
        homes[home] = f"{homes.get(home, '')} {names}".strip()
    return table


#: For each module of SpeechBrain: the modules of ddpkit that answer it, and the names that each of
#: them answers.
TABLE = _table()

_HOMES = {
    f"{module}.{name}": f"{home}.{name}"
    for module, homes in TABLE.items()
    for home, names in homes.items()
    for name in names.split()
}


def ddpkit_module(module: str) -> str | None:
    """Return the module of ddpkit that answers most names of a module of SpeechBrain.

    Args:
        module: such as ``"speechbrain.utils.profiling"``.

    Returns:
        The module, or None where the table has none.

    Example:
        >>> ddpkit_module("speechbrain.utils.profiling")
        'ddpkit.profiler'
        >>> ddpkit_module("speechbrain.lobes")
    """
    return next(iter(TABLE.get(module, ())), None)


def ddpkit_name(name: str) -> str | None:
    """Return the name in ddpkit of what a name of SpeechBrain stands for, if ddpkit offers it.

    Args:
        name: a dotted name, as in an import or a YAML tag. It may go on inside a class.

    Returns:
        The dotted name, or None where the name stays SpeechBrain's.

    Example:
        >>> ddpkit_name("speechbrain.utils.checkpoints.Checkpointer")
        'ddpkit.checkpoints.Checkpointer'
        >>> ddpkit_name("speechbrain.core.AMPConfig.from_name")
        'ddpkit.AMPConfig.from_name'
        >>> ddpkit_name("speechbrain.dataio.dataio.read_audio")
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        home = _HOMES.get(".".join(parts[:end]))
        if home is not None:
            return ".".join([home, *parts[end:]])
    return None
