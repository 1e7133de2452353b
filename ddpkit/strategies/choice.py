"""Which strategy the launch and the options ask for. Only that one is loaded.

To add a strategy: its class in a file of this package (what it overrides: ``strategies/base.py``);
its name among the choices of the option ``strategy`` in ``options/table.py``, or an option of its
own there; its line in :func:`choose_strategy`; and the options that do not go with it in
``NOT_WITH``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit import distributed
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.options import RUN_OPTIONS
from ddpkit.strategies.base import Strategy
from ddpkit.strategies.option_refusals import is_given, refuse_with

if TYPE_CHECKING:
    from ddpkit.run_opts import RunOptions
    from ddpkit.training import Accumulation

logger = get_logger(__name__)

_ROUNDED = {"check_parity": "it would compare gradients that were rounded"}
_WAY = "choose one of them"
_SWITCHES = ("gradient_as_bucket_view", "broadcast_buffers")  # also set where they are off
_OF_DDP = (
    "ddp_comm_hook",
    "static_graph",
    "bucket_cap_mb",
    *_SWITCHES,
    *(f"{name}=False" for name in _SWITCHES),
)
_DDPS = dict.fromkeys(_OF_DDP, "it is DDP's")
NOT_WITH: dict[str, dict[str, str]] = {  # options that are given together -> others -> why not
    "ddp_comm_hook=fp16": _ROUNDED,
    "ddp_comm_hook=bf16": _ROUNDED,
    "ddp_comm_hook=powersgd": {
        **_ROUNDED,
        "find_unused_parameters": "it compresses every gradient in every step",
        "static_graph": "DDP rebuilds its buckets too late",
        "precision=fp16": "what is left over of a step would have its scale",
        "skip_nonfinite_grads": "what is not finite would stay in what is left over",
    },
    "ddp_comm_hook=post_local_sgd": {
        "strategy=fsdp": "each process needs the whole state of the optimizers",
        "strategy=zero1": "each process needs the whole state of the optimizers",
        "virtual_ranks": "the answer depends on the number of processes",
        "data_parallel_backend": "it is for several processes",
        "check_parity": "the answer depends on the number of processes",
        "precision=fp16": "each process would have a scale of its own",
        "ema_decay": "the averages would differ between processes",
        "skip_nonfinite_grads": "each process would drop different gradients",
        "find_unused_parameters": "each process would use different parameters",
        "static_graph": "DDP would go on averaging gradients",
        "local_sgd_period=None": (
            "it needs the optimizer steps between two averages, such as --local_sgd_period=8"
        ),
    },
    "virtual_ranks": {
        "data_parallel_backend": "it divides each batch over GPUs",
        "check_parity": "it compares with a batch that is not divided",
        "precision=fp16": "the range of fp16 needs a scale (use bf16)",
        "sync_batchnorm": "each virtual rank has batch statistics of its own",
        **_DDPS,
        **dict.fromkeys(("strategy=ddp", "strategy=fsdp", "strategy=zero1"), _WAY),
    },
    "data_parallel_backend": dict.fromkeys(
        ("strategy=single", "strategy=ddp", "strategy=fsdp", "strategy=zero1"),
        _WAY,
    ),
    "strategy=fsdp": {
        **_DDPS,
        "sync_batchnorm=False": "use --strategy=ddp",
        "find_unused_parameters": "all ranks gather a block together, so each must use it",
        "skip_nonfinite_grads": "each rank sees a part of a gradient only",
        "precision=fp16": "the range of fp16 needs a scale (use bf16)",
    },
    "strategy=fsdp fsdp_param_dtype=bf16": _ROUNDED,
    "sync_batchnorm=False": {
        "evaluate_ema": ("the averages of batch statistics would differ between processes")
    },
    "evaluate_ema": {"ema_decay=None": "it evaluates averaged weights"},
    "static_graph": {
        "find_unused_parameters": ("in a static graph every step uses the same parameters")
    },
}
NOT_WITH_FIT_BATCH = {
    "ddp_comm_hook=post_local_sgd": (
        "it may step past optimizers_step(), which counts the steps to the next average"
    ),
    "fsdp_whole_gradients": "it may step whenever it likes",
}


def choose_strategy(
    options: RunOptions,
    accumulation: Accumulation | None = None,
    *,
    has_own_fit_batch: bool = False,
) -> Strategy:
    """Choose the strategy from the launch and the options.

    Args:
        options: of the run.
        accumulation: of the run, for strategies that ask how many batches make a step; None: as
            the options say.
        has_own_fit_batch: whether the recipe has its own ``fit_batch``.

    Raises:
        ConfigError: the options cannot work together, or on so many processes.

    Ranks: local; alike on all ranks.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> choose_strategy(RunOptions(device="cpu", virtual_ranks=6)).shards
        6
    """
    _warn_of_unused(options)
    check_strategy(options, has_own_fit_batch=has_own_fit_batch)
    if options.virtual_ranks is not None:
        from ddpkit.strategies.virtual_ranks import VirtualRanks

        return VirtualRanks(str(options.device), options.virtual_ranks, is_strict=has_own_fit_batch)
    if options.data_parallel_backend:
        from ddpkit.strategies.data_parallel import DataParallel

        return DataParallel(str(options.device))
    if not distributed.is_distributed_initialized():
        return Strategy()
    if options.strategy == "fsdp":
        from ddpkit.strategies.fsdp import FSDP  # loads torch.distributed.fsdp: not for the others

        return FSDP(options)
    from ddpkit.strategies.ddp import DDP
    from ddpkit.strategies.local_sgd import LocalSGD
    from ddpkit.strategies.zero1 import Zero1

    if options.ddp_comm_hook == "post_local_sgd":
        return LocalSGD(options, accumulation)
    kind = Zero1 if options.strategy == "zero1" else DDP
    return kind(options, accumulation, has_own_fit_batch=has_own_fit_batch)


def check_strategy(options: RunOptions, *, has_own_fit_batch: bool = False) -> None:
    """Refuse options that cannot work together, or on so many processes.

    Args:
        options: of the run.
        has_own_fit_batch: whether the recipe has its own ``fit_batch``.

    Raises:
        ConfigError: naming the options.

    Ranks: local; alike on all ranks.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> check_strategy(RunOptions(evaluate_ema=True))
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: evaluate_ema needs --ema_decay: it evaluates averaged weights.
    """
    _refuse_number(options)
    _refuse_pairs(options, has_own_fit_batch=has_own_fit_batch)


def make_strategy(device: str) -> Strategy:
    """Choose the strategy from the launch, for a loop of one's own: DDP where there is a process
    group.

    Args:
        device: of this process.

    Example:
        >>> make_strategy("cpu").name
        'one device'
    """
    from ddpkit.run_opts import RunOptions

    return choose_strategy(RunOptions(device=device))


def _warn_of_unused(options: RunOptions) -> None:
    """Warn of options without effect because a required option is missing. In the YAML they may
    stand unused.
    """
    for needed in dict.fromkeys(filter(None, (row.needs for row in RUN_OPTIONS.values()))):
        own = [
            name
            for name, row in RUN_OPTIONS.items()
            if row.needs == needed and options[name] != row.default
        ]
        if not (
            any(is_given(options, word) for word in needed.split())
            or options.overridden_args.isdisjoint(own)
        ):
            advice = needed.partition(" ")[0]
            main = advice.partition("=")[0]
            words = "Without effect, as %s=%s: %s. Give --%s, too."
            logger.warning(
                words,
                main,
                options[main],
                ", ".join(own),
                advice,
            )


def _refuse_number(options: RunOptions) -> None:
    """Refuse a strategy, or virtual ranks, for another number of processes than there are."""
    number = options.virtual_ranks
    world_size = distributed.get_world_size()
    if options.strategy == "single" and world_size > 1:
        raise ConfigError(
            f"strategy='single' is for one process, and a launcher has started {world_size}, each "
            "of which would train a model of its own. Start one: python train.py hparams.yaml "
            "--strategy=single; or leave --strategy out."
        )
    if number is not None and number % world_size:
        able = " or ".join(str(divisor) for divisor in range(1, number + 1) if not number % divisor)
        raise ConfigError(
            f"virtual_ranks={number} cannot be divided over {world_size} processes: it must be a "
            f"multiple of their number. Start {able} processes, or give another --virtual_ranks, "
            "which is another training."
        )


def _refuse_pairs(options: RunOptions, *, has_own_fit_batch: bool) -> None:
    """Refuse options that do not go with others, with a group of processes, or with a ``fit_batch``
    of the recipe.
    """
    if distributed.is_distributed_initialized():
        refuse_with(
            "a group of processes",
            options,
            {"data_parallel_backend": ("it is for one process")},
        )
    if has_own_fit_batch:
        refuse_with("a fit_batch of the recipe", options, NOT_WITH_FIT_BATCH)
    for chosen, reasons in NOT_WITH.items():
        if all(is_given(options, name) for name in chosen.split()):
            refuse_with(chosen, options, reasons)
