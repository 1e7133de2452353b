"""What a run shows on the screen: the block before it starts, and the progress bar.

::

    Training with ddpkit 0.1.0:
      launcher   torchrun, 8 processes on 2 nodes (gpu07, gpu08)
      devices    8 x cuda (NVIDIA H200), backend nccl
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
      start      from results/save/CKPT+2026-11-21+04-20-12+00: 480 optimizer steps done, epoch 33 comes next

The bar is the main process's only, on stderr, refreshed by time; without a terminal it is a log line now and then. The
only module that imports tqdm.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from ddpkit import __version__
from ddpkit.base import host_name
from ddpkit.logger import get_logger, shown_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from ddpkit.launch import LaunchInfo

logger = get_logger(__name__)

MOST_SHOWN = 4
LINE_SECONDS = 30.0
# tqdm's own, less its rate in batches: the rate that is shown is samples/s, and all of it fits into 80 columns.
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
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
    hosts = [host for _, host in dict.fromkeys((place.node, place.host) for place in places)]
    where = ", ".join(_shortened(hosts))
    where = where if len(hosts) == 1 else f"{len(hosts)} nodes ({where})"
    restarts = f" (restart {info.restart_count})" if info.restart_count else ""
    processes = "one process" if len(places) == 1 else f"{len(places)} processes"
    devices = Counter(place.device for place in places).items()
    words = " and ".join(kind if len(places) == 1 else f"{number} x {kind}" for kind, number in devices)
    return {
        "launcher": f"{info.launcher}{restarts}, {processes} on {where}",
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
    if resume == "never" or others:
        return f"from scratch: no checkpoint in {folder} was loaded (--resume={resume})"
    return f"from scratch: there is no checkpoint in {folder}"


class StartReport:
    """Prints a block of rows on the main process, each row once as long as it stays the same.

    Attributes:
        said: rows that have been printed.

    Ranks: local; speaks on the main process.

    Example:
        >>> report = StartReport()
        >>> report.announce("Training", {"precision": "fp32", "evaluation": ""})
        >>> report.said
        {'precision': 'fp32'}
    """

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def announce(self, what: str, rows: Mapping[str, str]) -> None:
        """Print the rows that are new or have changed.

        Args:
            what: name of the work, such as ``"Training"``.
            rows: by name; an empty one is left out.
        """
        fresh = {name: value for name, value in rows.items() if value and self.said.get(name) != value}
        self.said |= fresh
        if fresh:
            lines = [f"  {name:<10} {value}" for name, value in fresh.items()]
            logger.announce("%s", "\n".join([f"{what} with ddpkit {__version__}:", *lines]))


def _shortened(words: list[str]) -> list[str]:
    left = len(words) - MOST_SHOWN
    return words if left <= 0 else [*words[:MOST_SHOWN], f"and {left} more"]


def _format(context: Any, single: torch.dtype) -> str:
    dtype: Any = getattr(context, "dtype", "unknown")  # a recipe may have set a context of its own
    dtype = single if dtype is torch.float32 else dtype  # in which nothing is cast
    return _FORMATS.get(dtype, str(dtype).removeprefix("torch."))


class ProgressBar:
    """Shows how far a stage has come; told so about once a second, never once a step.

    Args:
        label: such as ``"epoch 3 train"``.
        total: steps of the stage; None when unknown.
        initial: steps done already.
        enable: False shows nothing at all.
        colour: tqdm's name of a colour, or None.

    Attributes:
        partial: the numbers told so far are of this process's part only: the loss is not shown.

    Ranks: main only; make it with ``enable=False`` on the others.

    Example:
        >>> with ProgressBar("epoch 1 train", total=10, enable=False) as bar:
        ...     bar.show(5, loss=0.5, samples=40)
    """

    def __init__(
        self, label: str, total: int | None, *, initial: int = 0, enable: bool = True, colour: str | None = None
    ) -> None:
        self.label, self.total, self.initial = label, total, initial
        self.enable = enable
        self.partial = False
        self._started = self._last_line = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if enable and sys.stderr is not None and sys.stderr.isatty():
            self._bar = tqdm(
                total=total,
                initial=initial,
                desc=label,
                colour=colour,
                dynamic_ncols=True,
                bar_format=BAR if total else None,
                unit="batch",
                file=sys.stderr,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def show(self, step: int, loss: float | None = None, samples: float = 0.0) -> None:
        """Show the state of the stage.

        Args:
            step: steps done.
            loss: mean over all ranks so far; None leaves it out.
            samples: samples seen since the bar began, over all ranks.
        """
        if not self.enable:
            return
        loss = None if self.partial else loss
        now = time.monotonic()
        rate = samples / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            facts = {} if loss is None else {"loss": f"{loss:.4g}"}
            self._bar.set_postfix({**facts, "samples/s": tqdm.format_sizeof(rate)}, refresh=False)
            self._bar.refresh()
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            logger.info("%s", self._line(step, loss, rate, now))

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, step: int, loss: float | None, rate: float, now: float) -> str:
        parts = [f"{self.label}: batch {step}" + (f"/{self.total}" if self.total else "")]
        if loss is not None:
            parts.append(f"loss {loss:.4g}")
        parts.append(f"{tqdm.format_sizeof(rate)} samples/s")
        done = step - self.initial
        if self.total and done > 0:
            left = (now - self._started) / done * (self.total - step)
            parts.append(f"{tqdm.format_interval(left)} left")
        return ", ".join(parts)
