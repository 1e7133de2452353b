"""Which strategy the launch and the options ask for. Only that one is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit import distributed
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.run_opts import RUN_OPTIONS
from ddpkit.strategies.base import Strategy, refuse_with

if TYPE_CHECKING:
    from ddpkit.run_opts import RunOptions

logger = get_logger(__name__)

_ROUNDED = {"check_parity": "it would compare gradients that were rounded"}
NOT_WITH_HOOK: dict[str | None, dict[str, str]] = {
    "fp16": _ROUNDED,
    "bf16": _ROUNDED,
    "powersgd": {
        **_ROUNDED,
        "find_unused_parameters": "it compresses every gradient in every step",
        "static_graph": "DDP makes its buckets anew too late",
        "precision=fp16": "what is left over of a step would have its scale",
        "skip_nonfinite_grads": "what is not finite would stay in what is left over",
    },
    "post_local_sgd": {
        "strategy=fsdp": "each process needs the whole state of the optimizers",
        "strategy=zero1": "each process needs the whole state of the optimizers",
        "virtual_ranks": "the answer depends on the number of processes",
        "data_parallel_backend": "it is for several processes",
        "check_parity": "the answer depends on the number of processes",
        "precision=fp16": "each process would have a scale of its own",
        "ema_decay": "the averages would be others on each process",
        "skip_nonfinite_grads": "each process would drop other gradients",
        "find_unused_parameters": "each process would use other parameters",
        "static_graph": "DDP would go on averaging gradients",
    },
}
NOT_WITH_VIRTUAL_RANKS = {
    "data_parallel_backend": "it divides each batch over GPUs",
    "check_parity": "it compares with a batch that is not divided",
    "precision=fp16": "the range of fp16 needs a scale (use bf16)",
    "ddp_comm_hook": "it is DDP's",
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
    _warn_of_unused(options)
    _refuse_contradictions(options)
    _refuse_pairs(options)
    _refuse_with_local_sgd(options, decides_late=decides_late)
    if options.virtual_ranks is not None:
        from ddpkit.strategies.virtual_ranks import VirtualRanks

        return VirtualRanks(str(options.device), options.virtual_ranks, is_strict=decides_late)
    if not distributed.is_distributed_initialized():
        if not options.data_parallel_backend:
            return Strategy()
        from ddpkit.strategies.data_parallel import DataParallel

        return DataParallel(str(options.device))
    if options.strategy == "fsdp":
        from ddpkit.strategies.fsdp import FSDP  # loads torch.distributed.fsdp: not for the others

        return FSDP(options, decides_late=decides_late)
    if options.ddp_comm_hook == "post_local_sgd":
        from ddpkit.strategies.local_sgd import LocalSGD

        return LocalSGD(options)
    from ddpkit.strategies.ddp import DDP
    from ddpkit.strategies.zero1 import Zero1

    return (Zero1 if options.strategy == "zero1" else DDP)(options, decides_late=decides_late)


def make_strategy(device: str) -> Strategy:
    """Choose the strategy from the launch, for a loop of one's own: DDP where there is a process group.

    Args:
        device: of this process.

    Ranks: local.

    Example:
        >>> make_strategy("cpu").name
        'one device'
    """
    from ddpkit.run_opts import RunOptions

    return choose_strategy(RunOptions(device=device))


def _refuse_with_local_sgd(options: RunOptions, *, decides_late: bool) -> None:
    """Refuse post-local SGD without its options, and these without it."""
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


def _warn_of_unused(options: RunOptions) -> None:
    """Warn of options that were given without the one that they need. In the YAML they may wait for it."""
    for needed in dict.fromkeys(filter(None, (row.needs for row in RUN_OPTIONS.values()))):
        own = [name for name, row in RUN_OPTIONS.items() if row.needs == needed and options[name] != row.default]
        pairs = [word.partition("=") for word in needed.split()]
        given = [options[main] == value if value else (options[main] or "none") != "none" for main, _, value in pairs]
        if not (any(given) or options.overridden_args.isdisjoint(own)):
            main, advice = pairs[0][0], needed.partition(" ")[0]
            words = "Without effect, as %s=%s: %s. Give --%s, too."
            logger.warning(words, main, options[main], ", ".join(own), advice)


def _refuse_contradictions(options: RunOptions) -> None:
    """Refuse options that do not go together, or with the launch."""
    name, number, world_size = options.strategy, options.virtual_ranks, distributed.get_world_size()
    if name == "single" and world_size > 1:
        raise ConfigError(
            f"strategy='single' is for one process, and a launcher has started {world_size}, each of which would train "
            "a model of its own. Start one: python train.py hparams.yaml --strategy=single; or leave --strategy out."
        )
    if number is not None and number % world_size:
        able = ", ".join(str(one) for one in range(1, number + 1) if not number % one)
        raise ConfigError(
            f"virtual_ranks={number} cannot be divided over {world_size} processes: it must be a multiple of their "
            f"number. Start {able} processes, or give another --virtual_ranks, which is another training."
        )
    if options.static_graph and options.find_unused_parameters:
        raise ConfigError(
            "static_graph=True and find_unused_parameters=True contradict each other: the one says that every step "
            "uses the same parameters, the other that steps differ. Give --static_graph alone where a parameter is "
            "used in each step or in none, else --find_unused_parameters alone."
        )


def _refuse_pairs(options: RunOptions) -> None:
    """Refuse an option that does not go with a strategy, a hook, virtual ranks, or a BatchNorm of each process."""
    name, hook, number = options.strategy, options.ddp_comm_hook, options.virtual_ranks
    if distributed.is_distributed_initialized():
        refuse_with("a group of processes", options, {"data_parallel_backend": "it is for one process"})
    refuse_with(f"ddp_comm_hook={hook}", options, NOT_WITH_HOOK.get(hook, {}))
    if number is not None:
        refuse_with(f"virtual_ranks={number}", options, NOT_WITH_VIRTUAL_RANKS)
    elif options.sync_batchnorm is False:
        words = "the averages of batch statistics would be others on each process"
        refuse_with("sync_batchnorm=off", options, {"evaluate_ema": words})
    if name != "auto":
        others = ("data_parallel_backend",) if name == "single" else ("data_parallel_backend", "virtual_ranks")
        refuse_with(f"strategy={name!r}", options, dict.fromkeys(others, "each is a way of its own"))
    if name == "fsdp" and options.fsdp_param_dtype != "own":
        words = "it would compare gradients of rounded weights with those of the weights"
        refuse_with(f"fsdp_param_dtype={options.fsdp_param_dtype}", options, {"check_parity": words})
