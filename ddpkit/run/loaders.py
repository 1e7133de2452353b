"""Which loader the Brain makes of what a recipe gives it: how it is divided, ordered and saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from ddpkit.control.rank_status import POSITION
from ddpkit.data.streams import is_batches, is_ordered
from ddpkit.dataloader import (
    LoopedLoader,
    SaveableDataLoader,
    Sharding,
    deal_batches,
    default_seed,
    reshard,
    shard,
)
from ddpkit.distributed import get_world_size, run_on_main
from ddpkit.errors import ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.run.ending import Ending
from ddpkit.training.batch_sizes import micro_batches
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = get_logger(__name__)


class Loaders(Ending):
    """The half of the Brain that makes loaders.

    Attributes:
        train_sampler: what deals the training batches out, once a training loader has been made.

    Ranks: local; alike on every rank.

    Example:
        >>> issubclass(Loaders, Ending)
        True
    """

    train_sampler: Any
    _dividing = False
    _accumulation: tuple[int, int] | None = None  # what a recipe asked for, and what that came to

    def _accumulate_over(self, world_size: int) -> int:
        """Return how many batches each process works on per optimizer step, on so many processes.

        Args:
            world_size: number of ranks.

        Raises:
            ConfigError: sizes that contradict each other.
        """
        asked = self.grad_accumulation_factor
        if self._accumulation is not None and self._accumulation[1] == asked:
            asked = self._accumulation[0]  # `fit` has written what it came to into the option
        options = self.run_opts.copy()
        options.grad_accumulation_factor = asked
        found = micro_batches(options, world_size)
        self._accumulation = (asked, found)
        return found

    def _keep_global_batch(self, train_set: Any, loader_kwargs: Mapping[str, Any]) -> None:
        """Where a checkpoint of another number of processes is resumed, take steps of as many samples as those did.

        Args:
            train_set: as given to ``fit``.
            loader_kwargs: likewise.

        Raises:
            ConfigError: so many processes cannot take such steps.
        """
        before = None if self.global_batch_size is not None else run_on_main(self._pace_before)
        if before is None:
            return
        is_looped = isinstance(train_set, LoopedLoader) or loader_kwargs.get("looped_nominal_epoch") is not None
        options = before.on(get_world_size(), is_looped=is_looped)
        self._asked_pace = before if options else None
        for name, value in options.items():
            setattr(self, name, value)
        if options:
            logger.announce(
                "%d process(es) go on with what %d saved: %s keeps the samples of an optimizer step.",
                get_world_size(),
                before.world_size,
                ", ".join(f"{name}={value}" for name, value in options.items()),
            )

    def make_dataloader(
        self, dataset: Any, stage: Stage, ckpt_prefix: str | None = "dataloader-", **loader_kwargs: Any
    ) -> Any:
        """Make the loader that gives this rank its part of a dataset.

        Args:
            dataset: map-style or iterable; or, without ``loader_kwargs``, anything else that yields batches.
            stage: TRAIN is divided over the ranks; VALID and TEST only with ``shard_evaluation``.
            ckpt_prefix: the loader is saved under this and the stage's name; None: not at all.
            loader_kwargs: as for ``torch.utils.data.DataLoader`` (``batch_size`` counts per process), and
                ``looped_nominal_epoch``. On a GPU ``pin_memory`` is on unless it is given: without it, a batch that is
                moved with ``non_blocking=True`` is waited for.
        """
        looped = loader_kwargs.pop("looped_nominal_epoch", None)
        if self.device.startswith("cuda") and (loader_kwargs or not is_batches(dataset)):
            loader_kwargs.setdefault("pin_memory", True)
        if stage is Stage.TRAIN:
            loader_kwargs = self._train_loader_specifics(dataset, loader_kwargs)
        loader: Any = shard(dataset, self._sharding(stage), **loader_kwargs)
        if stage is Stage.TRAIN:
            self.train_sampler = getattr(loader, "batch_sampler", None)
        if looped is not None:
            self._require_fixed_length(stage)
            loader = LoopedLoader(loader, looped)
        saveable = isinstance(loader, (SaveableDataLoader, LoopedLoader))
        if self.checkpointer is not None and ckpt_prefix is not None and saveable:
            self.checkpointer.add_recoverable(ckpt_prefix + stage.name, loader)
        return loader

    def _require_fixed_length(self, stage: Stage) -> None:
        """Refuse nominal epochs whose batches are another part of a step on another number of processes."""
        if stage is Stage.TRAIN and self.micro_batch_size is not None:
            raise ConfigError(
                f"micro_batch_size={self.micro_batch_size} makes the number of batches per step depend on the number "
                "of processes, and nominal epochs (looped_nominal_epoch, LoopedLoader) count batches. Give "
                "grad_accumulation_factor instead of micro_batch_size."
            )

    def _train_loader_specifics(self, dataset: Any, loader_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let ``hparams.sorting`` decide about shuffling where a recipe has it."""
        given = {"sampler", "batch_sampler"} & {key for key, value in loader_kwargs.items() if value is not None}
        if hasattr(self.hparams, "sorting") and not given and not is_ordered(dataset):
            return {**loader_kwargs, "shuffle": self.hparams.sorting == "random"}
        return loader_kwargs

    def _sharding(self, stage: Stage) -> Sharding:
        if stage is Stage.TRAIN:
            return Sharding(
                self.rank,
                get_world_size(),
                seed=default_seed(),
                global_batch_size=self.global_batch_size,
                micro_batches=1 if self.global_batch_size is None else self.grad_accumulation_factor,
            )
        if self.shard_evaluation or self._dividing:
            return Sharding(self.rank, get_world_size(), keep_step=False, seed=default_seed())
        return Sharding(seed=default_seed())

    def _loader(self, data: Any, stage: Stage, loader_kwargs: Mapping[str, Any]) -> Any:
        """Make the loader of a stage; an error says of which."""
        try:
            with POSITION.at(f"making the loader of {stage.name}"):
                return self._loader_of(data, stage, loader_kwargs)
        except DataError as error:
            raise DataError(f"{stage.name}: {error}") from error

    def _loader_of(self, data: Any, stage: Stage, loader_kwargs: Mapping[str, Any]) -> Any:
        if data is None:
            return None
        if isinstance(data, LoopedLoader):
            self._require_fixed_length(stage)
            if isinstance(data.loader, DataLoader):
                data.loader = reshard(data.loader, self._sharding(stage))
            else:
                data.loader = deal_batches(data.loader, self._sharding(stage))
            if stage is Stage.TRAIN and self.checkpointer is not None:
                self.checkpointer.add_recoverable("dataloader-TRAIN", data)
            return data
        if isinstance(data, DataLoader):
            loader = reshard(data, self._sharding(stage))
            if isinstance(loader, DataLoader) and loader is not data:
                logger.info("%s: the ready-made loader is planned anew, with its dataset, order and sizes.", stage.name)
            return loader
        return self.make_dataloader(data, stage=stage, **loader_kwargs)
