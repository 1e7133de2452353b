"""How an optimizer step is divided into micro-batches: what the options say, or what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.training.step_sizes import micro_batches

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.data import Division
    from ddpkit.run_opts import RunOptions


class Accumulation:
    """The three sizes of an optimizer step that are in use; the options stay as they were given.

    What is given may not be what is used: a factor follows from the sizes of batches, a run that
    goes on with another number of processes keeps its samples per step, and ``auto_micro_batch``
    finds what fits. An option that a recipe assigns later counts in the place of what has followed.

    Args:
        options: of the run.

    Ranks: local; alike on every rank.

    Example:
        >>> from ddpkit.data import Division
        >>> from ddpkit.run_opts import RunOptions
        >>> options = RunOptions(global_batch_size=64, micro_batch_size=8)
        >>> accumulation = Accumulation(options)
        >>> accumulation.choose_factor(Division(world_size=2))
        4
        >>> accumulation.factor, options.grad_accumulation_factor
        (4, 1)
    """

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._used: dict[str, tuple[Any, int]] = {}  # by option: as it was given, and what is used
        self._chosen: tuple[int, int] | None = None  # what was asked for, and what it came to
        self._shards = 1

    @property
    def factor(self) -> int:
        """Batches of each process per optimizer step; before ``fit``, as it was asked for."""
        asked: int = self._asked("grad_accumulation_factor")
        if self._chosen is not None and self._chosen[0] == asked:
            return self._chosen[1]
        return asked * self._shards  # a recipe has assigned another since

    @property
    def global_batch_size(self) -> int | None:
        """Samples of an optimizer step over all processes, or None."""
        size: int | None = self._asked("global_batch_size")
        return size

    @property
    def micro_batch_size(self) -> int | None:
        """Most samples at a time on a process, or None."""
        size: int | None = self._asked("micro_batch_size")
        return size

    def in_use(self) -> dict[str, int | None]:
        """Return the three sizes by the names of their options."""
        return {
            "grad_accumulation_factor": self.factor,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
        }

    def use(self, sizes: Mapping[str, int]) -> None:
        """Use other sizes than the given ones, as long as the given ones stay the same.

        Args:
            sizes: by the names of their options.
        """
        for name, size in sizes.items():
            self._used[name] = (self._options[name], size)
        if "grad_accumulation_factor" in sizes:
            self._chosen = None

    def choose_factor(self, division: Division) -> int:
        """Find out how many batches each process works on per optimizer step, when ``fit`` begins.

        Args:
            division: of the data.

        Returns:
            What :attr:`factor` is from now on.

        Raises:
            ConfigError: sizes that contradict each other.
        """
        asked = self._asked("grad_accumulation_factor")
        found = micro_batches(
            asked,
            self.micro_batch_size,
            self.global_batch_size,
            division.number,
        )
        self._shards = division.each
        return self.hold(found * division.each)

    def hold(self, factor: int) -> int:
        """Let so many batches make an optimizer step, until a recipe assigns others."""
        self._chosen = (self._asked("grad_accumulation_factor"), factor)
        return factor

    def _asked(self, name: str) -> Any:
        given = self._options[name]
        then, used = self._used.get(name, (given, given))
        return used if then == given else given
