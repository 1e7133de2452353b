"""Which loader a stage gets: made of a dataset, or a ready-made one that is divided over the
ranks.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from ddpkit.base import POSITION, temporarily
from ddpkit.data import require_dataset
from ddpkit.dataloader import (
    LoopedLoader,
    Sharding,
    deal_batches,
    default_seed,
    is_batches,
    reshard,
    shard,
)
from ddpkit.errors import ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from ddpkit.training.context import RunContext

logger = get_logger(__name__)


class LoaderFactory:
    """Makes the loader that gives this rank its part of a dataset, for a stage.

    Args:
        context: of the run; ``sorting`` in its hparams decides about shuffling.

    Ranks: local; alike on every rank.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> from ddpkit.run_opts import RunOptions
        >>> from ddpkit.strategies import Strategy
        >>> from ddpkit.training import Accumulation, Recipe, RunContext
        >>> options = RunOptions(device="cpu")
        >>> context = RunContext(
        ...     Recipe("Line"),
        ...     options,
        ...     Accumulation(options),
        ...     nn.ModuleDict(),
        ...     SimpleNamespace(),
        ...     Strategy(),
        ... )
        >>> factory = LoaderFactory(context)
        >>> len(factory.make(range(10), Stage.TRAIN, {"batch_size": 4}))
        3
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._divides_evaluation = False

    def make(
        self,
        dataset: Any,
        stage: Stage,
        loader_kwargs: dict[str, Any],
    ) -> Any:
        """Make the loader of a dataset.

        Args:
            dataset: map-style or iterable; or, without ``loader_kwargs``, anything else that yields
                batches.
            stage: TRAIN is divided over the ranks; VALID and TEST only with ``shard_evaluation``.
            loader_kwargs: as for :meth:`ddpkit.brain.Brain.make_dataloader`; may be changed.
        """
        is_read_again = stage is not Stage.TEST or bool(loader_kwargs)
        has_own_indices = any(
            loader_kwargs.get(name) is not None for name in ("sampler", "batch_sampler")
        )
        require_dataset(dataset, is_read_again=is_read_again, has_own_indices=has_own_indices)
        looped = loader_kwargs.pop("looped_nominal_epoch", None)
        if str(self.context.options.device).startswith("cuda") and (
            loader_kwargs or not is_batches(dataset)
        ):
            loader_kwargs.setdefault("pin_memory", True)
        if stage is Stage.TRAIN:
            loader_kwargs = self._by_sorting(dataset, loader_kwargs)
        loader: Any = shard(dataset, self._sharding(stage), **loader_kwargs)
        if looped is not None:
            self._require_fixed_length(stage)
            loader = LoopedLoader(loader, looped)
        return self._moved_ahead(loader)

    @contextlib.contextmanager
    def named(self, stage: Stage, set_name: str = "") -> Iterator[None]:
        """Return a context in which a loader is made: an error of the data names the stage, and the
        set if it has a name.
        """
        what = f"{stage.name} {set_name}".rstrip()
        try:
            with POSITION.at(f"making the loader of {what}"):
                yield
        except DataError as error:
            raise DataError(f"{what}: {error}") from error

    @staticmethod
    def is_loader(data: Any) -> bool:
        """Say whether what was given in the place of a dataset is a ready-made loader."""
        return isinstance(data, (DataLoader, LoopedLoader))

    @staticmethod
    def divides_in_place(data: Any) -> bool:
        """Say whether a ready-made loader stays the same object when it is divided."""
        return isinstance(data, LoopedLoader)

    @staticmethod
    def counts_batches(data: Any, loader_kwargs: Mapping[str, Any]) -> bool:
        """Say whether an epoch ends after a number of batches of each process, and not with the
        data.

        Args:
            data: as it was given to ``fit``.
            loader_kwargs: of its loader.
        """
        is_asked_for = loader_kwargs.get("looped_nominal_epoch") is not None
        return is_asked_for or isinstance(data, LoopedLoader)

    def adapt(self, loader: DataLoader[Any] | LoopedLoader, stage: Stage) -> Any:
        """Divide a ready-made loader over the ranks.

        Args:
            loader: as it was given to ``fit`` or ``evaluate``.
            stage: of the data.

        Raises:
            DataError: the loader cannot be divided.
        """
        if isinstance(loader, LoopedLoader):
            self._require_fixed_length(stage)
            adapt = reshard if isinstance(loader.loader, DataLoader) else deal_batches
            loader.loader = adapt(loader.loader, self._sharding(stage))
            return self._moved_ahead(loader)
        planned = reshard(loader, self._sharding(stage))
        if planned is not loader and not getattr(planned, "of_batches", False):
            logger.info(
                "%s: the ready-made loader is planned anew, with its dataset, order and sizes.",
                stage.name,
            )
        return self._moved_ahead(planned)

    def _moved_ahead(self, loader: Any) -> Any:
        """Return a loader, which with the option ``prefetch_to_device`` moves its batches to the
        GPU.
        """
        if self.context.options.prefetch_to_device:
            from ddpkit.training.device_prefetch import move_ahead  # which few runs need

            move_ahead(loader, str(self.context.options.device))
        return loader

    def dividing_evaluation(self) -> AbstractContextManager[None]:
        """Return a context in which VALID and TEST are divided over the ranks, whatever the option
        says.
        """
        return temporarily(self, _divides_evaluation=True)

    def _require_fixed_length(self, stage: Stage) -> None:
        """Refuse nominal epochs whose batches are another part of a step on another number of
        processes.
        """
        size = self.context.accumulation.micro_batch_size
        strategy = self.context.strategy
        is_divided = stage is Stage.TRAIN or self.context.options.shard_evaluation
        if is_divided and strategy.has_same_bits():
            raise ConfigError(
                "nominal epochs (looped_nominal_epoch, LoopedLoader) do not work with "
                f"{strategy.name}: they count batches of a process. Leave one of them out."
            )
        if stage is Stage.TRAIN and size is not None:
            raise ConfigError(
                f"micro_batch_size={size} lets the batches per step depend on the number of "
                "processes, and nominal epochs (looped_nominal_epoch, LoopedLoader) count "
                "batches: give grad_accumulation_factor instead."
            )

    def _by_sorting(self, dataset: Any, loader_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let ``hparams.sorting`` decide about shuffling where a recipe has it."""
        given = {"sampler", "batch_sampler"} & {
            key for key, value in loader_kwargs.items() if value is not None
        }
        is_ordered = isinstance(dataset, IterableDataset) or is_batches(dataset)
        if hasattr(self.context.hparams, "sorting") and not given and not is_ordered:
            return {**loader_kwargs, "shuffle": self.context.hparams.sorting == "random"}
        return loader_kwargs

    def _sharding(self, stage: Stage) -> Sharding:
        options = self.context.options
        division = self.context.strategy.division()
        if stage is Stage.TRAIN:
            size = self.context.accumulation.global_batch_size
            factor = self.context.accumulation.factor // division.each
            micro = 1 if size is None else factor
            return Sharding.of_this_rank(
                division,
                global_batch_size=size,
                micro_batches=micro,
            )
        if options.shard_evaluation or self._divides_evaluation:
            return Sharding.of_this_rank(
                division,
                keep_step=False,
                may_drop=False,
            )
        return Sharding(seed=default_seed(), may_drop=False)
