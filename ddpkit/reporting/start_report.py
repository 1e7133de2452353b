"""The block that a run prints before it starts: launcher, devices, batch, optimizer, and the checkpoint to start from.

::

    Training with ddpkit 0.1.0:
      launcher   torchrun, 2 nodes x 4 processes (gpu07, gpu08)
      devices    4 x cuda (NVIDIA H200) per node, backend nccl
      versions   Python 3.12, torch 2.13.0+cu130, numpy 2.3.1
      strategy   ddp: each process holds the whole model
      batch      8 processes x batch 4 x accumulation 1 = 32 samples per optimizer step; 15 steps, 480 samples per epoch
      per step   32 samples; one process has 4: --global_batch_size=4 keeps the training the same
      valid set  90 samples, 12 batches of 1 per process
      optimizer  AdamW, lr 0.002
      schedule   OneCycleLR, after each of 600 optimizer steps
      clipping   gradient norm at most 5.0 (--max_grad_norm)
      batch norm over the rows of all processes (--sync_batchnorm=auto)
      precision  bf16, evaluation fp32
      average    of the weights, decay 0.999, used in evaluation
      evaluation every rank its part of a set: count with ddpkit.metrics or Brain.gather
      records    log.txt and metrics.jsonl in results
      start      from results/save/CKPT+2026-11-21+04-20-12+00: 480 optimizer steps done, epoch 33 comes next
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpkit import __version__
from ddpkit.base import MPI_LAUNCHERS, host_name
from ddpkit.logger import get_logger, shown_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpkit.launch import LaunchInfo

logger = get_logger(__name__)

MOST_SHOWN = 4

_LAUNCHERS = {
    "slurm": "srun",
    "environment": "plain variables (RANK, WORLD_SIZE)",
    **{name: one.program for name, one in MPI_LAUNCHERS.items()},
}
# How a field of a batch is called that says how long its samples are, where they were padded.
_LENGTHS = re.compile(r"(^|_)(lengths?|lens?|attention_mask|padding_mask|pad_mask|batch_sizes)$", re.IGNORECASE)
_DEEPEST, _MOST_PARTS = 2, 8  # so far a batch is looked into
_FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    Attributes:
        node: number of its node, as the launcher counts.
        host: name of the node.
        device: such as ``"cuda (NVIDIA H200)"``.

    Ranks: local.

    Example:
        >>> Place(0, "gpu07", "cuda (NVIDIA H200)").host
        'gpu07'
    """

    node: int
    host: str
    device: str

    @classmethod
    def here(cls, node: int, device: str) -> Place:
        """Return the place of this process.

        Args:
            node: number of its node.
            device: such as ``"cuda:1"``.
        """
        kind = str(device).partition(":")[0]
        if kind == "cuda":
            kind = f"cuda ({torch.cuda.get_device_name(device)})"
        elif kind == "cpu":
            threads = torch.get_num_threads()
            kind = f"cpu ({threads} thread{'' if threads == 1 else 's'})"
        return cls(node, host_name(), kind)


def place_rows(
    places: Sequence[Place], info: LaunchInfo, backend: str | None, versions: Mapping[str, str]
) -> dict[str, str]:
    """Return the rows about the launcher, the devices and the versions.

    Args:
        places: of all ranks.
        info: what the launcher says of this process.
        backend: of the process group; None without one.
        versions: of Python, torch and numpy, by name.

    Returns:
        The rows ``launcher``, ``devices`` and ``versions``.

    Ranks: local.

    Example:
        >>> from ddpkit.launch.launchers import LaunchInfo
        >>> places = [Place(0, "a", "cpu"), Place(0, "a", "cpu"), Place(1, "b", "cpu"), Place(1, "b", "cpu")]
        >>> versions = {"Python": "3.12", "torch": "2.13.0", "numpy": "2.4.6"}
        >>> rows = place_rows(places, LaunchInfo("torchrun", 0, 0, 4, 2, restart_count=1), "gloo", versions)
        >>> rows["launcher"]
        'torchrun (restart 1), 4 processes on 2 nodes (a, b)'
        >>> rows["devices"]
        '4 x cpu, backend gloo'
    """
    nodes = Counter((place.node, place.host) for place in places)
    devices = Counter(place.device for place in places).items()
    words = " and ".join(kind if len(places) == 1 else f"{number} x {kind}" for kind, number in devices)
    return {
        "launcher": f"{_launcher(info, backend)}, {_sizes(list(nodes.values()), [host for _, host in nodes])}",
        "devices": words + ("" if backend is None else f", backend {backend}"),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("Python", "torch", "numpy")),
    }


def precision_row(training: Any, evaluation: Any, scaler: Any, modules: torch.nn.Module, *, trains: bool) -> str:
    """Return the number formats of training and evaluation, in words.

    Args:
        training: the context of the forward pass in training, with its ``dtype``.
        evaluation: likewise.
        scaler: of the gradients.
        modules: whose own dtype is the format where no other is asked for.
        trains: whether there is training.

    Ranks: local.

    Example:
        >>> from ddpkit.precision import Precision
        >>> numbers = Precision("bf16", "fp32", "cpu")
        >>> net = torch.nn.Linear(1, 1)
        >>> precision_row(numbers.training_ctx, numbers.evaluation_ctx, numbers.scaler, net, trains=True)
        'bf16, evaluation fp32'
    """
    own = {one.dtype for one in modules.parameters() if one.is_floating_point()}
    single = own.pop() if len(own) == 1 else torch.float32
    evaluated = _format(evaluation, single)
    if not trains:
        return evaluated
    trained = _format(training, single) + (" with scaled gradients" if scaler.is_enabled() else "")
    return trained if trained == evaluated else f"{trained}, evaluation {evaluated}"


def evaluation_row(world_size: int, *, divided: bool) -> str:
    """Return which part of a set each rank evaluates, in words; nothing for one process.

    Args:
        world_size: number of ranks.
        divided: the option ``shard_evaluation``.

    Ranks: local.

    Example:
        >>> evaluation_row(1, divided=True)
        ''
    """
    if world_size == 1:
        return ""
    if divided:
        return "every rank its part of a set: count with ddpkit.metrics or Brain.gather"
    return "every rank the whole set; --shard_evaluation divides it"


def memory_row(per_process: tuple[int, int] | None) -> str:
    """Return how large a batch of one process may be with ``auto_micro_batch``, in words.

    Args:
        per_process: samples of a full batch of one process, the smallest and the largest.

    Ranks: local.

    Example:
        >>> memory_row((5, 6))
        'at most 6 samples at a time on a process, half of that where it does not fit (--auto_micro_batch)'
    """
    most = "" if per_process is None else f"at most {max(per_process)} samples at a time on a process, "
    return f"{most}half of that where it does not fit (--auto_micro_batch)"


def strategy_row(chosen: str, asked: str) -> str:
    """Return what each process holds, in words.

    Args:
        chosen: name of the strategy, and what each process holds.
        asked: the option ``strategy``.

    Ranks: local.

    Example:
        >>> strategy_row("single: one process", "fsdp")
        'single: one process, where --strategy=fsdp changes nothing'
    """
    is_other = asked != "auto" and not chosen.startswith(asked)
    return f"{chosen}, where --strategy={asked} changes nothing" if is_other else chosen


def clipping_row(max_norm: float | None) -> str:
    """Return the norm to which gradients are clipped, in words.

    Args:
        max_norm: the option ``max_grad_norm``; None or <= 0: not at all.

    Ranks: local.

    Example:
        >>> clipping_row(5.0)
        'gradient norm at most 5.0 (--max_grad_norm)'
    """
    if max_norm is None or max_norm <= 0:
        return f"none, as max_grad_norm={max_norm} says"
    return f"gradient norm at most {max_norm} (--max_grad_norm)"


def optimizer_row(optimizers: Mapping[str, Any]) -> str:
    """Return the optimizers and their learning rates.

    Args:
        optimizers: by name.

    Ranks: local.

    Example:
        >>> groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.01, 0.1)]
        >>> optimizer_row({"opt_class": torch.optim.SGD(groups)})
        'SGD, lr 0.1, 0.01'
    """
    shown = []
    for name, optimizer in optimizers.items():
        rates = dict.fromkeys(f"{float(group['lr']):.6g}" for group in optimizer.param_groups if "lr" in group)
        words = type(optimizer).__name__ + (f", lr {', '.join(_shortened(list(rates)))}" if rates else "")
        shown.append(words if len(optimizers) == 1 else f"{name}: {words}")
    return "; ".join(_shortened(shown))


def records_row(files: Iterable[Any]) -> str:
    """Return the files of a run's log and numbers.

    Args:
        files: such as its log and its numbers.

    Ranks: local.

    Example:
        >>> records_row([Path("results/1/log.txt"), Path("results/1/metrics.jsonl")])
        'log.txt and metrics.jsonl in results/1'
    """
    paths = [Path(shown_path(file)) for file in files]
    if len(paths) > 1 and len({path.parent for path in paths}) == 1:
        return f"{' and '.join(path.name for path in paths)} in {paths[0].parent}"
    return " and ".join(map(str, paths))


def loss_row(batch: Any) -> str:
    """Return how to return a mean over tokens, if the samples of a batch have different lengths.

    Args:
        batch: as the loader yields it. Tensors on another device are not read.

    Returns:
        An empty string, unless a field is named like lengths or a padding mask and differs between samples.

    Ranks: local.

    Example:
        >>> loss_row({"tokens": torch.zeros(2, 3), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])})
        'one number, and samples differ in length (attention_mask): return a mean over tokens as (loss_sum, count)'
        >>> loss_row([torch.zeros(2, 3), torch.zeros(2)])
        ''
    """
    sign = _sign_of_lengths(batch, _DEEPEST)
    if not sign:
        return ""
    return f"one number, and samples differ in length ({sign}): return a mean over tokens as (loss_sum, count)"


def start_row(found: Path | None, folder: Any, resume: str, place: str, *, others: int = 0) -> str:
    """Return what training starts from, in words.

    Args:
        found: the checkpoint to resume from, or None.
        folder: the checkpoint folder; None without a checkpointer.
        resume: the option.
        place: the position of the run in that checkpoint.
        others: number of checkpoints in the folder that were not loaded.

    Ranks: local.

    Example:
        >>> start_row(None, "results/save", "auto", "")
        'from scratch: there is no checkpoint in results/save'
    """
    if found is not None:
        return f"from {shown_path(found)}: {place}"
    if folder is None:
        return "from scratch, and no checkpointer to save with"
    folder = shown_path(folder)
    if resume == "never":
        return f"from scratch, as --resume=never says; checkpoints go to {folder}"
    if others:
        return f"no checkpoint was loaded, of {others} in {folder}"
    return f"from scratch: there is no checkpoint in {folder}"


class StartReport:
    r"""Prints a block of rows on the main process, each row once as long as it stays the same.

    Attributes:
        said: rows that have been printed.

    Ranks: local; speaks on the main process.

    Example:
        >>> StartReport().block("Training", {"precision": "fp32", "evaluation": ""})
        'Training with ddpkit ...:\n  precision  fp32'
    """

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def announce(self, what: str, rows: Mapping[str, str]) -> None:
        """Print the rows that are new or have changed.

        Args:
            what: name of the work, such as ``"Training"``.
            rows: by name; an empty one is left out.
        """
        text = self.block(what, rows)
        if text:
            logger.announce("%s", text)

    def block(self, what: str, rows: Mapping[str, str]) -> str:
        """Return the text that :meth:`announce` prints, and remember its rows.

        Args:
            what: name of the work.
            rows: by name; an empty one is left out.
        """
        fresh = {name: value for name, value in rows.items() if value and self.said.get(name) != value}
        self.said |= fresh
        lines = [f"  {name:<10} {value}" for name, value in fresh.items()]
        return "\n".join([f"{what} with ddpkit {__version__}:", *lines]) if lines else ""


def _launcher(info: LaunchInfo, backend: str | None) -> str:
    if info.launcher == "none" and backend is not None:
        return "a process group that the script has started"
    restarts = f" (restart {info.restart_count})" if info.restart_count else ""
    return f"{_LAUNCHERS.get(info.launcher, info.launcher)}{restarts}"


def _sizes(sizes: list[int], hosts: list[str]) -> str:
    """Write ``"8 processes on 2 nodes (gpu07, gpu08)"``; where the nodes differ, ``"2 + 1 processes"``."""
    number = str(sum(sizes)) if len(set(sizes)) == 1 else " + ".join(_shortened(list(map(str, sizes))))
    processes = "one process" if number == "1" else f"{number} processes"
    where = ", ".join(_shortened(hosts))
    return f"{processes} on {where}" if len(sizes) == 1 else f"{processes} on {len(sizes)} nodes ({where})"


def _shortened(words: list[str]) -> list[str]:
    left = len(words) - MOST_SHOWN
    return words if left <= 0 else [*words[:MOST_SHOWN], f"and {left} more"]


def _format(context: Any, single: torch.dtype) -> str:
    dtype: Any = getattr(context, "dtype", "unknown")  # a recipe may have set a context of its own
    dtype = single if dtype is torch.float32 else dtype  # in which nothing is cast
    return _FORMATS.get(dtype, str(dtype).removeprefix("torch."))


def _sign_of_lengths(batch: Any, depth: int) -> str:
    """Return the name of a field that shows different lengths of samples, or an empty string."""
    fields = _fields(batch)
    for name, value in fields.items():
        if _LENGTHS.search(str(name)) and _varies(value):
            return str(name)
    signs = (_sign_of_lengths(value, depth - 1) for value in fields.values()) if depth else ()
    return next(filter(None, signs), "")


def _fields(batch: Any) -> Mapping[Any, Any]:
    """Return the parts of a batch by name or, in a list, by index."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, (list, tuple)):
        names = getattr(batch, "_fields", itertools.count())
        return dict(itertools.islice(zip(names, batch, strict=False), _MOST_PARTS))
    return getattr(batch, "__dict__", {})


def _varies(value: Any) -> bool:
    """Return whether lengths or a mask differ between samples; True for a tensor on another device."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return value.dim() > 0
        value = value.reshape(-1).tolist()
    is_numbers = isinstance(value, (list, tuple)) and all(isinstance(one, (int, float)) for one in value)
    return is_numbers and len(set(value)) > 1
