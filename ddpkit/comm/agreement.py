"""Before training starts: do all ranks have the same model, options, optimizers and data? If not, say what differs.

The facts of every rank are compared over the store, before any collective could pair things that do not belong
together.
"""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ddpkit.base import POSITION
from ddpkit.comm.consistency import describe_differences, own_place
from ddpkit.distributed import exchange, get_world_size
from ddpkit.errors import CheckpointError, DataError, RankFailedError, RankMismatchError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

logger = get_logger(__name__)

T = TypeVar("T")

# A path, or what only the main process shows: a rank may have its own.
OWN_OF_EACH_RANK = frozenset(
    {"device", "local_rank", "param_file", "log_config", "noprogressbar", "tqdm_colored_bar", "tqdm_barcolor"}
)


def model_facts(modules: Mapping[str, nn.Module] | nn.ModuleDict) -> dict[str, str]:
    """Describe every parameter and buffer: shape, dtype and whether it is trained.

    Args:
        modules: such as a ``torch.nn.ModuleDict``.

    Returns:
        One entry per parameter or buffer, in order.

    Ranks: local.

    Example:
        >>> model_facts({"net": torch.nn.Linear(2, 1)})["parameter net.bias"]
        '(1,) torch.float32 trained'
    """
    facts = {}
    for entry, module in modules.items():
        for name, parameter in module.named_parameters():
            kind = "trained" if parameter.requires_grad else "frozen"
            facts[f"parameter {entry}.{name}"] = f"{tuple(parameter.shape)} {parameter.dtype} {kind}"
        for name, buffer in module.named_buffers():
            facts[f"buffer {entry}.{name}"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    return facts


def option_facts(options: Mapping[str, Any]) -> dict[str, str]:
    """Describe the run options that must be the same on every rank.

    Args:
        options: such as a ``RunOptions``.

    Returns:
        One entry per option.

    Ranks: local.

    Example:
        >>> option_facts({"device": "cpu", "precision": "bf16"})
        {'option precision': "'bf16'"}
    """
    names = [name for name in sorted(options.keys()) if name not in OWN_OF_EACH_RANK]
    return {f"option {name}": _shown(options[name]) for name in names}


def _shown(value: Any) -> str:
    """Write a value in words that are the same on every rank where the value is."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()  # it may be on a device of each rank's own
    elif isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def optimizer_facts(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, str]:
    """Describe the optimizers: class, and the settings of every parameter group.

    Args:
        optimizers: by name.

    Returns:
        One entry per setting.

    Ranks: local.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer_facts({"sgd": torch.optim.SGD([weight], lr=0.1)})["optimizer sgd group 0 lr"]
        '0.1'
    """
    facts = {}
    for name, optimizer in optimizers.items():
        facts[f"optimizer {name}"] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                shown = len(value) if key == "params" else value
                facts[f"optimizer {name} group {number} {key}"] = _shown(shown)
    return facts


def data_facts(name: str, loader: Any, batches: int | None, *, sharded: bool) -> dict[str, str]:
    """Describe what a loader gives: batches, samples, batch size and seed.

    Args:
        name: such as ``"train"``.
        loader: any loader, or None.
        batches: its number of batches, where it is known.
        sharded: whether the ranks must have the same number of batches.

    Returns:
        One entry per fact.

    Ranks: local.

    Example:
        >>> data_facts("train", [1, 2], 2, sharded=True)
        {'train batches': '2'}
    """
    facts = {}
    if sharded:
        facts[f"{name} batches"] = str(batches)
    sampler = getattr(loader, "batch_sampler", None)
    for attribute, words in (("batch_size", "batch size"), ("seed", "shuffling seed"), ("shuffle", "shuffling")):
        if hasattr(sampler, attribute) and hasattr(sampler, "count"):
            facts[f"{name} {words}"] = str(getattr(sampler, attribute))
    dataset = getattr(loader, "dataset", None)
    if hasattr(sampler, "count") and isinstance(dataset, Sized):  # else a recipe may give each rank a set of its own
        facts[f"{name} samples"] = str(len(dataset))
    return facts


def check_train_data(loader: Any, batches: int | None) -> None:
    """Refuse training data that makes no step.

    Args:
        loader: the training loader.
        batches: its number of batches, where it is known.

    Raises:
        DataError: no rank has a batch.

    Ranks: local; alike on every rank.

    Example:
        >>> check_train_data([1], 1)
    """
    plan = getattr(getattr(loader, "batch_sampler", None), "plan", None)
    if plan is not None and len(plan) > 0 and plan.num_samples < plan.world_size:
        logger.warning(
            "The training set has %d sample(s) for %d ranks: a rank without a sample repeats one with weight 0.",
            plan.num_samples,
            plan.world_size,
        )
    if batches == 0:
        detail = ""
        if plan is not None:
            detail = (
                f": {plan.num_samples} samples do not fill one global batch of {plan.global_batch_size} "
                f"({plan.batch_size} per process, {plan.world_size} process(es)), and drop_last=True leaves the rest "
                "out. Use a smaller batch_size, fewer processes, or drop_last=False"
            )
        raise DataError(f"the training loader yields no batch{detail}.")


def together(work: Callable[[], T]) -> T:
    """Do something on every rank; if it fails on one, fail on all, naming the rank, before anybody waits for it.

    Args:
        work: done by every rank by itself.

    Returns:
        What it returned on this rank.

    Raises:
        RankFailedError: it failed on another rank.
        Exception: it failed on this rank; the original exception.

    Ranks: collective (over the store).

    Example:
        >>> together(lambda: 3)
        3
    """
    values: list[T] = []
    own, failures = failures_of(lambda: values.append(work()))
    if own is not None:
        raise own
    if failures:
        raise RankFailedError(f"the run cannot start, because it failed elsewhere: {failures}")
    return values[0]


def failures_of(work: Callable[[], object], kind: type[Exception] = Exception) -> tuple[Exception | None, str]:
    """Do something on every rank, and tell every rank who failed.

    Args:
        work: done by every rank by itself.
        kind: of the exceptions that are told; others are raised at once.

    Returns:
        This rank's exception, or None, and the words of all ranks that failed; empty if none did.

    Ranks: collective (over the store).

    Example:
        >>> failures_of(lambda: 1 / 0)
        (ZeroDivisionError('division by zero'), 'rank 0: ZeroDivisionError: division by zero')
    """
    own: Exception | None = None
    words = ""
    try:
        work()
    except kind as error:  # raised by the caller, once the others know
        own = error
        words = "".join(traceback.format_exception_only(error)).strip()
        if isinstance(error, CheckpointError):
            words = str(error) or words  # they name the recoverable
    # One line for both outcomes: the line is part of the exchange's key.
    return own, "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(exchange(words)) if text)


@POSITION.at("comparing the ranks")
def require_agreement(facts: Mapping[str, str], *, about: Any = None, site: str | None = None) -> list[Any]:
    """Compare the facts of all ranks; raise if any differs.

    Args:
        facts: what must be the same everywhere, in words.
        about: what this rank tells of itself besides; it may differ.
        site: names the call where the ranks may come from different lines of a script; None: from the same one.

    Returns:
        ``about`` of every rank.

    Raises:
        RankMismatchError: on every rank, naming what differs and on which rank.

    Ranks: collective (over the store).

    Example:
        >>> require_agreement({"train batches": "12"}, about="here")
        ['here']
    """
    if get_world_size() == 1:
        return [about]
    values = exchange((_digest(facts), about), site)
    if len({digest for digest, _ in values}) > 1:
        everybody = exchange((dict(facts), own_place()), None if site is None else f"{site}, in detail")
        message = describe_differences([own for own, _ in everybody], [place for _, place in everybody])
        if message:
            raise RankMismatchError(message)
    return [one for _, one in values]


def _digest(facts: Mapping[str, str]) -> str:
    return hashlib.blake2b(repr(list(facts.items())).encode(), digest_size=16).hexdigest()
