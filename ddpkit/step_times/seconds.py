"""What the ranks learn, about once a second, of the steps since the last time."""

from __future__ import annotations

from dataclasses import dataclass, field

#: So many measured windows travel one by one with a sync: medians hide what differs between
#: windows.
SINGLE_WINDOWS = 8


@dataclass(frozen=True, kw_only=True)
class SecondOfSteps:
    """The measured steps between two syncs of the ranks. Lists have an entry for each rank.

    Attributes:
        epoch: its number.
        step: batches of the epoch so far.
        optimizer_step: updates since the run began.
        seconds: wall time since the last sync, on the main process.
        windows: optimizer steps that were measured, the same ones on all ranks; at least 1.
        batches_per_window: batches of a measured window, on average.
        world_size: number of ranks.
        phases: seconds per window of each of :data:`~ddpkit.step_times.phases.PHASES`, and
            ``"step"``, their sum: medians over the measured windows.
        samples: samples per window.
        tokens: counts of ``(loss_sum, count)`` per window; None where the recipe returns means.
        sizes: elements of the first tensor of a batch, per window: padded lengths show here.
        memory: bytes: ``"rss"`` of the process, on GPUs also ``"allocated"``, ``"reserved"`` and
            ``"peak"`` of torch's allocator.
        host_seconds: time of a window on the host; on a GPU ``phases`` has the device's.
        is_host_bound: share of the measured windows, 0 to 1, whose end the GPU had reached when the
            host came there; 0 on a CPU.
        exchanged_bytes: of gradients that this rank sends per window; 0 in one process.
        gradient_norm: of the last optimizer step whose norm is known; None before the first.
        learning_rate: of the first group of the first optimizer; None without an optimizer.
        loss: mean training loss of the epoch so far; NaN where nothing counts.
        host_names: of each rank's machine; empty where that is not known.
        single_sizes: ``sizes`` of each of the last measured windows, at most
            :data:`SINGLE_WINDOWS`: a list for each rank, of the same windows on all of them. None
            where they did not travel.
        single_own: likewise the seconds of ``"step"`` without ``"exchange"``.
        single_exchange: likewise those of ``"exchange"``.
        core_waits: share of the time, 0 to 1, in which the rank's main thread was ready to run and
            had no core: other threads and processes had them all. None where that is not known.
        gpu_clocks: ``"share"`` of the GPU's highest clock, 0 to 1, at which it runs, and
            ``"reasons"``, a sum of bits of NVML that say why it is not faster. None without such
            GPUs.
        host_loads: ``"load"``, the load average of the rank's machine in the last minute, and
            ``"cores"``, how many it has. None where a system does not tell.

    Ranks: local; equal on all ranks.

    Example:
        >>> from ddpkit.step_times import PHASES, STEP
        >>> times = {**dict.fromkeys(PHASES, 0.125), STEP: 0.875}
        >>> second = SecondOfSteps(
        ...     epoch=1, step=8, optimizer_step=8, seconds=1.0, windows=8, world_size=1,
        ...     phases=[times], samples=[4.0], sizes=[12.0], memory=[{"rss": 1e8}],
        ... )
        >>> second.samples_per_second
        4.571428571428571
    """

    epoch: int
    step: int
    optimizer_step: int
    seconds: float
    windows: int
    world_size: int
    phases: list[dict[str, float]]
    samples: list[float]
    sizes: list[float]
    memory: list[dict[str, float]]
    batches_per_window: float = 1.0
    tokens: list[float] | None = None
    host_seconds: list[float] = field(default_factory=list)
    is_host_bound: list[float] = field(default_factory=list)
    exchanged_bytes: int = 0
    gradient_norm: float | None = None
    learning_rate: float | None = None
    loss: float | None = None
    host_names: tuple[str, ...] = ()
    single_sizes: list[list[float]] | None = None
    single_own: list[list[float]] | None = None
    single_exchange: list[list[float]] | None = None
    core_waits: list[float] | None = None
    gpu_clocks: list[dict[str, float]] | None = None
    host_loads: list[dict[str, float]] | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: of the slowest rank."""
        return max(phase["step"] for phase in self.phases)

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second of a step."""
        return sum(self.samples) / max(self.step_seconds, 1e-9)

    @property
    def tokens_per_second(self) -> float | None:
        """Counts of all ranks per second of a step; None where there are none."""
        if self.tokens is None:
            return None
        return sum(self.tokens) / max(self.step_seconds, 1e-9)
