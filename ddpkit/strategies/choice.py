"""Chooses the strategy that the launch and the options ask for. Only that one is loaded.

To add a strategy: its class in a file of this package (what it overrides: ``strategies/base.py``,
where options that do not go with it are refused by ``check``), and its line in
``strategies/names.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit import distributed
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.options import RUN_OPTIONS
from ddpkit.strategies.loading import new_strategy
from ddpkit.strategies.names import AUTO, DDP, SINGLE, Registered, registered
from ddpkit.strategies.option_refusals import is_given, refuse_with
from ddpkit.training import Accumulation

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.base import Strategy

logger = get_logger(__name__)

_BOUND = "_is_bound_to_a_run"
NOT_TOGETHER: dict[str, dict[str, str]] = {  # an option -> others -> why not, in any strategy
    "sync_batchnorm=False": {
        "evaluate_ema": ("the averages of batch statistics would differ between processes")
    },
    "evaluate_ema": {"ema_decay=None": "it evaluates averaged weights"},
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
        >>> choose_strategy(RunOptions(device="cpu", strategy="single")).name
        'one device'
    """
    _warn_of_unused(options)
    check_strategy(options, has_own_fit_batch=has_own_fit_batch)
    several = distributed.is_distributed_initialized()
    strategy = new_strategy(_chosen(options, several=several))
    if not (strategy.runs_alone() or several):
        strategy = new_strategy(SINGLE)
    if vars(strategy).get(_BOUND, False):
        raise ConfigError(
            f"strategy={strategy!r}: the object is the strategy of another Brain already. Make one "
            "for each, or give the class, in the YAML by !name: instead of !new:."
        )
    vars(strategy)[_BOUND] = True
    strategy.bind(
        options,
        accumulation or Accumulation(options),
        has_own_fit_batch=has_own_fit_batch,
    )
    return strategy


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
        ddpkit.errors.ConfigError: evaluate_ema=True needs --ema_decay: it evaluates averaged
        weights.
    """
    own = {
        name: known
        for name, known in registered().items()
        if known.chosen_by and is_given(options, known.chosen_by)
    }
    given = options.strategy
    _require_own_option(given, own)
    asked = _asked(given, own)
    for strategy in asked + _looking(options, asked):
        new_strategy(strategy).check(options, has_own_fit_batch=has_own_fit_batch)
    _refuse_two(options, own)
    for chosen, reasons in NOT_TOGETHER.items():
        if is_given(options, chosen):
            refuse_with(
                chosen,
                options,
                reasons,
            )


def chosen_by_own_option(options: RunOptions) -> str:
    """Return the name of the strategy that an option of its own chooses; empty if none is given.

    Args:
        options: of the run.

    Ranks: local.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> chosen_by_own_option(RunOptions(ddp_comm_hook="post_local_sgd"))
        'local_sgd'
    """
    for name, known in registered().items():
        if known.chosen_by and is_given(options, known.chosen_by):
            return name
    return ""


def chosen_for(options: RunOptions, processes: int) -> str:
    """Return the name of the strategy that a launch of so many processes would get.

    Args:
        options: of the run.
        processes: number of them.

    Returns:
        A name, ``"module:Class"``, or what an object says of itself.

    Ranks: local.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> chosen_for(RunOptions(), 1), chosen_for(RunOptions(), 2)
        ('single', 'ddp')
    """
    value = _chosen(options, several=processes > 1)
    if processes == 1 and not new_strategy(value).runs_alone():
        return SINGLE
    return value if isinstance(value, str) else repr(value)


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


def _chosen(options: RunOptions, *, several: bool) -> Any:
    """Return what the option ``strategy`` would say, if options of single strategies chose none."""
    own = chosen_by_own_option(options)
    if own:
        together = registered()[own].together
        return together.get(options.strategy, own) if isinstance(options.strategy, str) else own
    if options.strategy != AUTO:
        return options.strategy
    return DDP if several else SINGLE


def _asked(given: Any, own: Mapping[str, Registered]) -> list[Any]:
    """Return the strategies whose options these are: those that options of their own have chosen,
    and the one that is given, or what is chosen where both are given.
    """
    both = [
        known.together[given]
        for known in own.values()
        if isinstance(given, str) and given in known.together
    ]
    if both:
        chosen = [name for name, known in own.items() if given not in known.together]
        return [*chosen, *both]
    return [*own] if given == AUTO else [*own, given]


def _looking(options: RunOptions, asked: Collection[Any]) -> list[Any]:
    """Return the strategies that look at options of theirs, also where they are not chosen: what
    cannot work on several processes is told on one.
    """
    return [
        name
        for name, known in registered().items()
        if name not in asked and any(is_given(options, option) for option in known.checks)
    ]


def _require_own_option(given: Any, own: Collection[str]) -> None:
    """Refuse the name of a strategy that an option of its own chooses, without this option."""
    known = registered().get(given) if isinstance(given, str) else None
    if known is not None and known.chosen_by and given not in own:
        raise ConfigError(
            f"strategy={given!r} needs --{known.chosen_by}, which chooses it. Give that option; "
            "--strategy may be left out then."
        )


def _refuse_two(options: RunOptions, own: Mapping[str, Registered]) -> None:
    """Refuse a strategy beside another that an option of its own chooses."""
    for name, known in own.items():
        able = [*known.beside, *known.together]
        if options.strategy not in (AUTO, name, *able):
            refuse_with(
                known.chosen_by,
                options,
                {"strategy": f"{known.alone}{_also(able)}"},
            )


def _also(strategies: Sequence[str]) -> str:
    """Say which strategies an option goes with."""
    return f". It works with --strategy={' or '.join(strategies)}" if strategies else ""
