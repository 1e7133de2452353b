"""Which strategy the launch and the options ask for. Only that one is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit import distributed
from ddpkit.errors import ConfigError
from ddpkit.strategies.base import Strategy
from ddpkit.strategies.ddp_options import DDPOptions

if TYPE_CHECKING:
    from ddpkit.run_opts import RunOptions

NOT_WITH_POWERSGD = {
    "find_unused_parameters": "it compresses every gradient in every step",
    "static_graph": "DDP makes its buckets anew too late",
    "precision": "what is left over of a step would have its scale",
    "skip_nonfinite_grads": "what is not finite would stay in what is left over",
}
NOT_WITH_LOCAL_SGD = {
    "strategy": "each process needs the whole state of the optimizers",
    "virtual_ranks": "the answer depends on the number of processes",
    "data_parallel_backend": "it is for several processes",
    "check_parity": "the answer depends on the number of processes",
    "precision": "each process would have a scale of its own",
    "ema_decay": "the averages would be others on each process",
    "skip_nonfinite_grads": "each process would drop other gradients",
    "find_unused_parameters": "each process would use other parameters",
    "static_graph": "DDP would go on averaging gradients",
}


def choose_strategy(options: RunOptions, *, decides_late: bool = False) -> Strategy:
    """Choose the strategy from the launch and the options.

    Args:
        options: of the run.
        decides_late: whether the recipe has its own ``fit_batch``.

    Raises:
        ConfigError: the options cannot work together, or on so many processes.

    Ranks: local; alike on all ranks.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> choose_strategy(RunOptions(device="cpu", virtual_ranks=6)).shards
        6
    """
    number, device, world_size = options.virtual_ranks, str(options.device), distributed.get_world_size()
    _refuse_with_local_sgd(options, decides_late=decides_late)
    _refuse_contradictions(options.strategy, options, world_size)
    if options.strategy == "fsdp" and distributed.is_distributed_initialized():
        from ddpkit.strategies.fsdp import FSDP  # loads torch.distributed.fsdp: not for the others

        return FSDP(options, decides_late=decides_late)
    if options.ddp_comm_hook == "post_local_sgd" and distributed.is_distributed_initialized():
        from ddpkit.strategies.local_sgd import LocalSGD

        return LocalSGD(options)
    if number is None:
        return make_strategy(
            device,
            name=options.strategy,
            data_parallel=options.data_parallel_backend,
            ddp=_ddp_options(options),
            decides_late=decides_late,
        )
    if number % world_size:
        able = ", ".join(str(one) for one in range(1, number + 1) if not number % one)
        raise ConfigError(
            f"virtual_ranks={number} cannot be divided over {world_size} processes: it must be a multiple of their "
            f"number. Start {able} processes, or give another --virtual_ranks, which is another training."
        )
    refused = {
        "data_parallel_backend": options.data_parallel_backend,
        "check_parity": options.check_parity is not None,
        "precision=fp16, whose range needs a scale (use bf16)": options.precision == "fp16",
        f"ddp_comm_hook={options.ddp_comm_hook}, which is DDP's": options.ddp_comm_hook is not None,
    }
    for name in (name for name, is_given in refused.items() if is_given):
        raise ConfigError(f"virtual_ranks={number} does not work with {name}. Leave one of them out.")
    from ddpkit.strategies.virtual_ranks import VirtualRanks

    return VirtualRanks(device, number, is_strict=decides_late)


def _ddp_options(options: RunOptions) -> DDPOptions:
    """Return what the run says of DDP; refuse what its other options rule out."""
    hook, is_off = options.ddp_comm_hook, options.sync_batchnorm is False
    why = NOT_WITH_POWERSGD if hook == "powersgd" else {}
    refused = [name for name in why if options[name] is True or options[name] == "fp16"]
    if hook is not None and options.check_parity is not None:
        refused, why = ["check_parity"], {"check_parity": "it would compare gradients that were rounded"}
    if refused:
        given = f"{refused[0]}={options[refused[0]]}"
        raise ConfigError(f"ddp_comm_hook={hook} does not work with {given}: {why[refused[0]]}. Leave one of them out.")
    if is_off and options.evaluate_ema:
        raise ConfigError(
            "sync_batchnorm=off does not work with evaluate_ema: the averages of batch statistics would be others on "
            "each process. Leave one of them out."
        )
    return DDPOptions.of(options)


def _refuse_with_local_sgd(options: RunOptions, *, decides_late: bool) -> None:
    """Refuse what does not go with post-local SGD, and its options without it."""
    hook, own = options.ddp_comm_hook, ("local_sgd_start", "local_sgd_period")
    given = [name for name in own if options[name] is not None]
    if hook != "post_local_sgd":
        if given:
            words = f"{given[0]}={options[given[0]]} needs --ddp_comm_hook=post_local_sgd, got ddp_comm_hook={hook}."
            raise ConfigError(f"{words} Give both, or leave both out.")
        return
    if options.local_sgd_period is None:
        words = "needs --local_sgd_period, the number of optimizer steps between two averages of the weights"
        raise ConfigError(f"ddp_comm_hook={hook} {words}: such as --local_sgd_period=8.")
    if decides_late:
        raise ConfigError(
            f"ddp_comm_hook={hook} does not work with a fit_batch of the recipe: it may step past optimizers_step(), "
            "which counts the steps to the next average. Leave one of them out."
        )
    harmless = {"None", "False", "auto", "ddp", "single", "fp32", "bf16"}
    for name, why in NOT_WITH_LOCAL_SGD.items():
        if str(options[name]) not in harmless:  # ema_decay=0 is not False
            words = f"does not work with {name}={options[name]}: {why}. Leave one of them out."
            raise ConfigError(f"ddp_comm_hook={hook} {words}")


def _refuse_contradictions(name: str, options: RunOptions, world_size: int) -> None:
    """Refuse a strategy that does not fit the launch or the other options."""
    if name == "auto":
        return
    if name == "single" and world_size > 1:
        raise ConfigError(
            f"strategy='single' is for one process, and a launcher has started {world_size}, each of which would train "
            "a model of its own. Start one: python train.py hparams.yaml --strategy=single; or leave --strategy out."
        )
    if name == "fsdp" and options.check_parity is not None and options.fsdp_param_dtype != "own":
        raise ConfigError(
            f"check_parity={options.check_parity} does not work with fsdp_param_dtype={options.fsdp_param_dtype}: it "
            "would compare gradients of rounded weights with those of the weights. Leave fsdp_param_dtype out."
        )
    for other in ("data_parallel_backend", *(() if name == "single" else ("virtual_ranks",))):
        if options[other]:
            raise ConfigError(f"strategy={name!r} does not work with {other}={options[other]}. Leave one of them out.")


def make_strategy(
    device: str,
    *,
    name: str = "auto",
    distributed_launch: bool | None = None,
    data_parallel: bool = False,
    ddp: DDPOptions | None = None,
    decides_late: bool = False,
) -> Strategy:
    """Choose the strategy from the launch and the options.

    Args:
        device: of this process.
        name: ``auto``, ``ddp`` or ``zero1``; ``fsdp`` needs more options, see :func:`choose_strategy`.
        distributed_launch: whether a launcher started several processes; None: whether there is a process group.
        data_parallel: the option ``data_parallel_backend``.
        ddp: the run options of DDP.
        decides_late: passed on to DDP.

    Raises:
        ConfigError: both at once, DataParallel without a GPU, or another name.

    Ranks: local.

    Example:
        >>> make_strategy("cpu").name
        'one device'
    """
    if distributed_launch is None:
        distributed_launch = distributed.is_distributed_initialized()
    if distributed_launch and data_parallel:
        raise ConfigError(
            "data_parallel_backend=True is for one process, and a launcher has started "
            f"{distributed.get_world_size()} processes. Use one of:\n"
            "    python train.py hparams.yaml --data_parallel_backend\n"
            "    torchrun --standalone --nproc_per_node=N train.py hparams.yaml"
        )
    if distributed_launch:
        from ddpkit.strategies.ddp import DDP
        from ddpkit.strategies.zero1 import Zero1

        kinds: dict[str, type[DDP]] = {"auto": DDP, "ddp": DDP, "zero1": Zero1}
        if name not in kinds:
            raise ConfigError(f"make_strategy makes one of {', '.join(kinds)}, got {name!r}. A Brain makes the others.")
        return kinds[name](device, options=ddp, decides_late=decides_late)
    if data_parallel:
        from ddpkit.strategies.data_parallel import DataParallel

        return DataParallel(device)
    return Strategy()
