"""What would run on the machine: how many processes, on which device, with which recipe and output
folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ddpkit.launch import LaunchInfo
from ddpkit.see.checkpoint_place import CheckpointPlace, place_of_checkpoints


@dataclass(frozen=True)
class PlannedRun:
    """The run that the machine is looked at for.

    Attributes:
        launch: the place of this process among all.
        device: ``"cpu"`` or the kind of accelerator, such as ``"cuda"``.
        output_folder: where the run would write; it need not be there yet.
        output_url: of a folder in a store, in which the run would keep that; empty: of a disk.
        ckpt_local: the option of that name; empty: not given.
        recipe: script, parameter file if it has one, and overrides of ``--recipe``; empty without.
        workers: loader processes of each rank; None where nothing says it.
        timeout: seconds after which a rank that does not answer is given up.
        with_pairs: whether pairs of ranks are measured even if all together are fast.
        is_cpu_asked: whether the command line says that the run is to be on the CPU.

    Example:
        >>> PlannedRun().processes_here
        1
    """

    launch: LaunchInfo = field(default_factory=LaunchInfo)
    device: str = "cpu"
    output_folder: Path = Path()
    output_url: str = ""
    ckpt_local: str = ""
    recipe: tuple[str, ...] = ()
    workers: int | None = None
    timeout: float = 120.0
    with_pairs: bool = False
    is_cpu_asked: bool = False

    @property
    def processes_here(self) -> int:
        """How many ranks are on this host."""
        return self.launch.local_world_size

    @property
    def checkpoints(self) -> CheckpointPlace:
        """Where the run would keep its checkpoints on this machine."""
        return place_of_checkpoints(self.output_url or str(self.output_folder), self.ckpt_local)

    @property
    def has_several_hosts(self) -> bool:
        """Whether there are ranks on other hosts."""
        return self.launch.world_size > self.launch.local_world_size

    @property
    def backend(self) -> str:
        """What ddpkit would take for collectives."""
        return "nccl" if self.device == "cuda" else "gloo"
