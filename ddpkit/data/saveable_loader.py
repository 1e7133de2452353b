"""A loader that is saved as the number of batches it has yielded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.augmentation import KeyedSampler, Place, keyed_loader
from ddpkit.base import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.control import start_loading
from ddpkit.data.loader_plan import plan_of
from ddpkit.data.plan import set_epoch_inside
from ddpkit.data.sharding import default_seed
from ddpkit.data.worker_copies import WorkerCopies
from ddpkit.logger import get_logger
from ddpkit.seed import global_seed, mix_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = get_logger(__name__)


@register_checkpoint_hooks
class SaveableDataLoader(DataLoader[Any]):
    """A ``DataLoader`` that is saved as the number of batches it has yielded, and continues after
    them.

    Random augmentation is keyed on (seed, epoch, sample), by :mod:`ddpkit.augmentation`: it is the
    same on any number of workers and ranks, and after a recovery.

    The batches skipped after a recovery are not loaded if the sampler is ours, as it is in every
    loader that this module makes: the sampler leaves them out. Of another one they are loaded and
    dropped.

    Args:
        args: as for ``torch.utils.data.DataLoader``.
        kwargs: likewise.

    Attributes:
        yielded: batches handed out in this iteration, with those skipped; None before the first.
        worker_copies: what persistent workers know of the dataset.
        passed_through: what the batches pass through before they are handed out, which may read
            ahead; or None.

    Ranks: local.

    Example:
        >>> loader = SaveableDataLoader(range(4), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator()
        super().__init__(*args, **kwargs)
        self.yielded: int | None = None
        self.passed_through: Callable[[Iterator[Any]], Iterator[Any]] | None = None
        self.worker_copies = WorkerCopies()
        self._skip = 0  # batches to leave out of the next iteration
        # torch's loader that is iterated: it has the same data, and keyed random numbers
        self._keyed: DataLoader[Any] | None = None
        self._place = Place(default_seed())  # for batches that no plan of ours deals out
        self.set_epoch(1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and worker seeds the next iteration follows."""
        self._place.seed = default_seed()
        self._place.epoch = epoch
        if self.generator is not None:
            self.generator.manual_seed(mix_key(global_seed() or 0, epoch) >> 1)
        set_epoch_inside(self.sampler if self.batch_sampler is None else self.batch_sampler, epoch)

    def skip_next(self, batches: int) -> None:
        """Leave out the first ``batches`` batches of the next iteration, without loading them."""
        self._skip = batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip = self._skip
        self._skip = 0
        self.yielded = skip
        plan = plan_of(self)
        if plan is not None:
            plan.skip = skip  # before the workers are started, which ask for their first batches
        inner = self._begin()
        if skip and plan is None:
            inner = itertools.islice(inner, skip, None)
        return self._counted(inner if self.passed_through is None else self.passed_through(inner))

    def _begin(self) -> Iterator[Any]:
        """Start torch's iterator, of a loader like this one whose randomness is keyed (but for a
        stream).
        """
        if self.persistent_workers:
            self.worker_copies.compare(self.dataset)
        if isinstance(self.dataset, IterableDataset):
            return start_loading(self, super().__iter__)
        if self._keyed is None or not self.persistent_workers:
            plan = plan_of(self)
            batched = self.batch_sampler is not None
            position = self._place if plan is None else plan
            batches = KeyedSampler(
                cast("Any", self.batch_sampler if batched else self.sampler),
                position,
                batched=batched,
            )
            options = {"generator": self.generator, "batched": batched, "epoch": position.epoch}
            self._keyed = keyed_loader(self, batches, **options)
        return start_loading(self._keyed)

    def _counted(self, inner: Iterator[Any]) -> Iterator[Any]:
        # what DataLoader does with a written attribute costs more than to count
        own = self.__dict__
        for number, batch in enumerate(inner, (self.yielded or 0) + 1):
            own["yielded"] = number
            yield batch

    @mark_as_saver
    def save(self, path: str | Path) -> None:
        """Write the number of batches yielded, or None before the first iteration."""
        # a script that saves by itself may give the name as text
        Path(path).write_text(str(self.yielded), encoding="utf-8")

    @mark_as_loader
    def load(self, path: str | Path, end_of_epoch: bool) -> None:
        """Continue after the saved number of batches; start afresh after an end-of-epoch
        checkpoint.

        Once the loader has been iterated nothing is loaded: the checkpoint is then wanted for its
        weights.

        For the training loader of a Brain this number does not count. The Brain calls
        :meth:`skip_next` as each pass begins, later than this, with the batches of its own
        ``brain.ckpt`` in the present batch size. It counts for a loader of one's own loop.
        """
        if self.yielded is not None:
            logger.debug(
                "The loader has been iterated before: its place in the checkpoint is ignored."
            )
            return
        text = Path(path).read_text(encoding="utf-8").strip()
        if not end_of_epoch and text not in {"", "None"}:
            self.skip_next(int(text))

    @property
    def _speechbrain_recovery_skip_to(self) -> int | None:
        return self._skip or None

    def _speechbrain_save(self, path: str | Path) -> None:
        self.save(path)

    def _speechbrain_load(self, path: str | Path, end_of_epoch: bool) -> None:
        self.load(path, end_of_epoch)
