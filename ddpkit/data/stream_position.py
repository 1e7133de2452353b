"""Stream position: read a stream with its own random numbers, and remember where each recent batch
began.

A loader reads a stream ahead of training. So the current position of the stream is not the position
to resume from, and its random numbers must not depend on other draws of the process.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ddpkit.compat import loses_items, show_worker
from ddpkit.data.plan import set_epoch_inside
from ddpkit.logger import get_logger
from ddpkit.seed import mix_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = get_logger(__name__)

END: Any = object()  # comes after the last item
READ = 0x57EA  # key of the random numbers of reading
KEPT_MARKS = 4  # no feed reads further ahead


def is_stateful(data: Any) -> bool:
    """Say whether a stream or a loader can tell where it is, and go on from there.

    Args:
        data: a dataset or a loader.

    Returns:
        True if it has ``state_dict`` and ``load_state_dict``, and no shuffle buffer of
        ``datasets``, which is in neither: then it is read again from the beginning of the epoch,
        which gives the same items.

    Example:
        >>> is_stateful([1, 2])
        False
    """
    has_both = callable(getattr(data, "state_dict", None)) and callable(
        getattr(data, "load_state_dict", None)
    )
    return has_both and not loses_items(data)


def tell_epoch(stream: Any, epoch: int) -> None:
    """Set the epoch of a stream or a loader and of its inner parts, if it is known.

    Args:
        stream: any.
        epoch: the next epoch; 0 if unknown.
    """
    if epoch:
        set_epoch_inside(stream, epoch)
        set_epoch_inside(getattr(stream, "dataset", None), epoch)


def one_by_one(items: Iterator[Any]) -> Iterator[Any]:
    """Yield an iterator's items without calling ``iter()`` on it, which makes some start over.

    Example:
        >>> list(one_by_one(iter("ab")))
        ['a', 'b']
    """
    while (item := next(items, END)) is not END:
        yield item


class Reading:
    """A context for reading a stream: random numbers of its own, and no loader's worker in sight.

    It can be entered again and again: the random numbers go on where they were.

    Args:
        key: seed of the random numbers.

    Example:
        >>> reading = Reading(3)
        >>> with reading:
        ...     first = random.random()
        >>> with Reading(3):
        ...     first == random.random()
        True
    """

    def __init__(self, key: int) -> None:
        self._shown: Any = None  # the loader's worker, which the stream does not see
        # what the process has in store: numpy draws normal numbers two at a time
        self._kept: Any = None
        self._python: Any = random.Random(key).getstate()
        self._numpy: Any = np.random.MT19937(key)
        self._torch = torch.Generator().manual_seed(key >> 1).get_state()

    def __enter__(self) -> None:
        self._shown = get_worker_info()
        show_worker(None)
        state = cast("Any", np.random).get_state(legacy=False)
        self._kept = state if state["has_gauss"] else None
        self._swap()

    def __exit__(self, *error: object) -> None:
        show_worker(self._shown)
        self._swap()
        if self._kept is not None:
            cast("Any", np.random).set_state(self._kept)

    def each(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield what an iterator gives, each asked for in this context."""
        while True:
            with self:
                item = next(items, END)
            if item is END:
                return
            yield item

    def state_dict(self) -> Any:
        """Return where the random numbers are, between two uses."""
        version, words, gauss = self._python
        numbers = self._numpy.state["state"]
        return {
            "python": [version, list(words), gauss],
            "numpy": [numbers["key"].tolist(), int(numbers["pos"])],
            "torch": self._torch.clone(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""
        version, words, gauss = state["python"]
        self._python = (version, tuple(words), gauss)
        key, position = state["numpy"]
        self._numpy.state = {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
        }
        self._torch = state["torch"]

    def _swap(self) -> None:
        """Swap the process's random states with the stored ones; numpy loses its cached normal
        number.
        """
        python = random.getstate()
        legacy = cast("Any", np.random)
        generator = torch.default_generator
        numbers = legacy.get_bit_generator()
        state = generator.get_state()
        random.setstate(self._python)
        legacy.set_bit_generator(self._numpy)
        generator.set_state(self._torch)
        self._python = python
        self._numpy = numbers
        self._torch = state


class Source:
    """A stream or a loader that is read with random numbers of its own, from its beginning or from
    a state.

    Args:
        whole: the user's own stream or loader.

    Attributes:
        may_be_used_up: whether it was told that it is at its end: it may then yield nothing, once.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        # what is being read: the whole, or what a stream has cut off for this process
        self._part = whole
        self._reading: Reading
        self._block = 0
        self._given: dict[str, Any] | None = None
        self.may_be_used_up = False

    def state_dict(self) -> dict[str, Any]:
        """Return where the reading is, between two items or batches: the stream's own state, and
        random streams.
        """
        return {
            "stream": copy.deepcopy(self._part.state_dict()) if is_stateful(self._part) else None,
            "block": self._block,
            "random": self._reading.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from a state."""
        self._given = state

    def _open(self, part: Any, reading: Reading) -> dict[str, Any]:
        """Put a stream where it was; return the state that it goes on from, empty at the
        beginning.
        """
        self._part = part
        self._reading = reading
        state = self._given or {}
        self._given = None
        if state.get("stream") is not None:
            part.load_state_dict(state["stream"])
        if state:
            reading.load_state_dict(state["random"])
        return state


class ReadApart(Source):
    """Reads a stream that divides itself, in this process.

    Args:
        whole: the stream.
        key: another one on every rank.

    Attributes:
        epoch: which comes.

    Example:
        >>> list(ReadApart([1, 2], key=3).read(lambda: iter([1, 2])))
        [1, 2]
    """

    mine = range(1)  # there are no shards of ours

    def __init__(self, whole: Any, key: int) -> None:
        super().__init__(whole)
        self.key = key
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes."""
        self.epoch = epoch
        tell_epoch(self.whole, epoch)

    def read(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Read to the end.

        Args:
            begin: starts torch's iteration over the stream.
        """
        reading = Reading(mix_key(self.key, self.epoch, READ))
        self._open(self.whole, reading)
        with reading:
            batches = begin()
        return reading.each(batches)


class StreamPosition:
    """Remembers where a stream was before each of the last few batches, so that a run can go on
    there.

    Batches are read ahead of the present batch, so the stream itself is further on.

    The state before a batch has one of two shapes, and :meth:`go_on` takes both:

    * before batch 0: ``{"begin": ...}`` with what the ``state_dict`` of the user's stream returned.
      Random numbers follow from the epoch there;
    * before a later batch: what :meth:`Source.state_dict` returned: ``"stream"`` (of the part that
      this process reads), ``"block"`` (the batch) and ``"random"`` (random numbers of the reading).

    Args:
        source: None where it cannot say where it is.

    Attributes:
        first: the batch that the next iteration begins with.
        are_wanted: whether positions will be asked for; it costs a state per batch.
    """

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._kept: deque[tuple[int, Any]] = deque(maxlen=KEPT_MARKS)
        self._given: Any = None
        self._read = 0
        self.first = 0
        self.are_wanted = False

    @property
    def whole(self) -> Any:
        """The user's own stream, or None where it cannot say where it is."""
        return None if self._source is None else self._source.whole

    def marked(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate, and remember where every batch began; from the place of :meth:`go_on`, if there
        is one.

        Args:
            begin: starts the iteration.
        """
        if self._source is None:
            return begin()
        is_asked = self.are_wanted or self.first or self._given or self._source.may_be_used_up
        return self._marked(self._source, begin) if is_asked else begin()

    def _marked(
        self,
        source: Source,
        begin: Callable[[], Iterator[Any]],
    ) -> Iterator[Any]:
        self._kept.clear()
        self._read = self.first
        self.first = 0
        state = self._given
        self._given = None
        if not self._read:
            state = {"begin": copy.deepcopy(source.whole.state_dict())}
        batches = begin()
        while True:
            batch = next(batches, END)
            is_used_up = batch is END and source.may_be_used_up
            source.may_be_used_up = False
            if is_used_up:
                batches = begin()
                batch = next(batches, END)
            if batch is END:
                return
            self._kept.append((self._read, state))
            self._read += 1
            yield batch
            state = source.state_dict()

    def around(self, number: int) -> dict[str, Any] | None:
        """Return where batch ``number`` of this epoch begins, and the one before it.

        A resumed run reads the batch before again: it may have to be repeated, and the stream may
        end after it, which no state of a stream tells.

        Args:
            number: from 0.

        Returns:
            ``"again"``: a number less than the given (or 0, if that is given), and the state there;
            ``"next"``: the state at the given one, or None if nothing was read there. Or None if
            neither is known. A state has one of the two shapes that the class describes.
        """
        before = [mark for mark in self._kept if mark[0] < max(number, 1)]
        if self._source is None or not before:
            return None
        return {
            "again": list(before[-1]),
            "next": next((mark[1] for mark in self._kept if mark[0] == number), None),
        }

    def want(self) -> None:
        """Remember from now on, if what the stream says of itself can be stored."""
        if self._source is None or self.are_wanted:
            return
        refused = _not_storable(self._source.whole.state_dict())
        if refused:
            logger.warning(
                "The state_dict of %s holds %s, which no checkpoint may hold. After a restart it "
                "is read again from the beginning of the epoch. Let it return numbers, strings, "
                "tensors and plain containers.",
                type(self._source.whole).__name__,
                refused,
            )
            self._source = None
        else:
            self.are_wanted = True

    def at_begin(self) -> Any:
        """Return the state that the stream had before the first batch of this epoch was read, or
        None.
        """
        states = [state for number, state in self._kept if not number]
        return states[0].get("begin") if states else None

    def at_end(self) -> Any:
        """Return the state that the stream carries into its next epoch, or None."""
        return None if self._source is None else copy.deepcopy(self._source.whole.state_dict())

    def go_on(self, number: int, state: Any) -> None:
        """Make the next iteration begin with batch ``number``.

        Args:
            number: from 0.
            state: the state there, as :meth:`around` gives it.
        """
        if "begin" in state:  # of batch 0; the other shape has "stream", "block" and "random"
            self.resume_after_end(state["begin"])
        elif self._source is not None:
            # which other ranks may have counted otherwise
            self._source.load_state_dict({**state, "block": number})
            self.first = number
            self._given = state

    def resume_after_end(self, state: Any) -> None:
        """Restore the state that the stream carries from one epoch into the next.

        Args:
            state: what :meth:`at_end` returned.
        """
        self.put_at(state)
        if self._source is not None:
            self._source.may_be_used_up = True

    def put_at(self, state: Any) -> None:
        """Put the stream where it was.

        Args:
            state: what :meth:`at_end` returned, at the end of an epoch or not.
        """
        if self._source is not None:
            self._source.whole.load_state_dict(state)


def _not_storable(state: Any) -> str:
    """Name the parts of a state that cannot be loaded without running code; empty if there are
    none.
    """
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(buffer)))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        return f"something that cannot be saved ({error})"
