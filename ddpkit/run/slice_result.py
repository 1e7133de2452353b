"""What one slice has measured: the schema of its file, and of each entry in ``--json``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.step_times import PHASES
from ddpkit.strategies import chosen_by_own_option

if TYPE_CHECKING:
    from ddpkit.run_opts import RunOptions


@dataclass(frozen=True, kw_only=True)
class SliceResult:
    """Optimizer steps of one slice, measured. Lists have an entry for each rank; times are means
    over the steps.

    Attributes:
        way: ``single``, ``dp``, ``ddp``, ``fsdp``, ``zero1`` or the name of another strategy.
        size: number of processes; with ``dp``, of GPUs.
        world_size: number of processes.
        nodes: number of machines.
        hosts: their names.
        device: kind of device, such as ``"cpu"`` or ``"cuda"``.
        threads: of torch, in each process.
        cores: that the processes of the first machine may use.
        loader_workers: of each process.
        steps: that were measured.
        seconds: that they took on the main process.
        step_seconds: of each step, on the main process: the tenth, fiftieth and ninetieth
            percentile.
        samples: of a step.
        phases: seconds of each of :data:`~ddpkit.step_times.phases.PHASES`.
        transfer_seconds: of ``exchange``, what also the rank waits that comes last.
        last: share of the steps, 0 to 1, in which a rank came last to the exchange.
        core_waits: share of the time, 0 to 1, in which the main thread was ready to run and had no
            core.
        exchanged_bytes: of gradients, that a rank sends in a step.
        samples_per_step: as planned; None where a batch sampler or a stream decides.
        can_fix_step: whether ``global_batch_size`` can be used with this recipe.
        global_batch_size: the option.
        micro_batches: batches of a step on each process.
        options: run options that matter for speed and are not the default.
        checkpoint_bytes: that a checkpoint takes, about; 0: the recipe saves none.
        loader_rates: samples per second of the loader alone on each rank, by the number of workers;
            empty: not asked.
    """

    way: str
    size: int
    world_size: int
    nodes: int = 1
    hosts: list[str] = field(default_factory=list)
    device: str = "cpu"
    threads: int = 1
    cores: int = 1
    loader_workers: int = 0
    steps: int
    seconds: float
    step_seconds: list[float]
    samples: list[float]
    phases: list[dict[str, float]]
    transfer_seconds: float = 0.0
    last: list[float] = field(default_factory=list)
    core_waits: list[float] = field(default_factory=list)
    exchanged_bytes: int = 0
    samples_per_step: int | None = None
    can_fix_step: bool = True
    global_batch_size: int | None = None
    micro_batches: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    loader_rates: dict[str, list[float]] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.steps

    @property
    def samples_of_step(self) -> float:
        """Samples of all ranks in a step, as measured."""
        return sum(self.samples)

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second of training."""
        return self.samples_of_step / self.step

    def phase(self, name: str) -> float:
        """Return the seconds of a phase, the mean over the ranks."""
        return sum(times.get(name, 0.0) for times in self.phases) / len(self.phases)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Any, where: str) -> SliceResult:
        """Make the result of plain values.

        Args:
            values: as :meth:`as_dict` gives them; further keys are left out.
            where: file that they come from, for the error.

        Raises:
            ConfigError: they are no such values.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            found = cls(**{name: value for name, value in values.items() if name in known})
            is_sound = found.steps > 0 and found.seconds > 0 and _has_phases(found)
        except (AttributeError, TypeError) as error:
            raise _no_result(where) from error
        if not is_sound:
            raise _no_result(where)
        return found


def _has_phases(result: SliceResult) -> bool:
    """Return whether there are times of each rank, under known names."""
    are_known = all(set(times) == set(PHASES) for times in result.phases)
    return are_known and len(result.phases) == len(result.samples) == result.world_size


def _no_result(where: str) -> ConfigError:
    return ConfigError(
        f"{where} holds no result of `python -m ddpkit scale`. Give files that --json has written."
    )


def percentiles(values: list[float]) -> list[float]:
    """Return the tenth, fiftieth and ninetieth percentile.

    Args:
        values: at least one.

    Example:
        >>> percentiles([1.0, 2.0, 3.0])
        [1.0, 2.0, 3.0]
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    return [ordered[round(share * last)] for share in (0.1, 0.5, 0.9)]


def named_way(options: RunOptions, world_size: int) -> str:
    """Return the way in which a run with these options goes.

    Args:
        options: of the run.
        world_size: number of processes.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> named_way(RunOptions(), 2)
        'ddp'
    """
    if options.data_parallel_backend:
        return "dp"
    if world_size == 1:
        return "single"
    strategy = chosen_by_own_option(options) or str(options.strategy)
    return "ddp" if strategy == "auto" else strategy
