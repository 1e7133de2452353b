"""Reading a stream with random numbers of its own, and remembering where each of the last batches began.

What is not asked for by position is read ahead of what has been used of it. So where a stream is now is not where a run
must go on, and what it draws at random must not depend on what the process draws meanwhile.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import random
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from ddpkit.data.permutation import mix_key
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = get_logger(__name__)

END: Any = object()  # what comes after the last item
READ = 0x57EA  # what random numbers are for
KEPT_MARKS = 4  # no feed reads further ahead


def is_stateful(data: Any) -> bool:
    """Say whether a stream or a loader can tell where it is, and go on from there.

    Args:
        data: a dataset or a loader.

    Returns:
        True if it has ``state_dict`` and ``load_state_dict``.

    Ranks: local.

    Example:
        >>> is_stateful([1, 2])
        False
    """
    return _can_be_called(getattr(data, "state_dict", None)) and _can_be_called(
        getattr(data, "load_state_dict", None), None
    )


def _can_be_called(method: Any, *arguments: Any) -> bool:
    """Say whether a method takes these arguments and needs no others, as torch's and torchdata's do."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # one in C tells nothing
        return True
    return True


class Reading:
    """A context for reading a stream: random numbers of its own, if it has a key, and no loader's worker in sight.

    It can be entered again and again: the random numbers go on where they were.

    Args:
        key: what the random numbers follow from; None leaves them to the process.

    Ranks: local.

    Example:
        >>> reading = Reading(3)
        >>> with reading:
        ...     first = random.random()
        >>> with Reading(3):
        ...     first == random.random()
        True
    """

    def __init__(self, key: int | None = None) -> None:
        self._key = key
        self._shown: Any = None
        self._kept: Any = None  # what the process has in store: numpy draws normal numbers two at a time
        if key is not None:
            self._python: Any = random.Random(key).getstate()
            self._numpy: Any = np.random.MT19937(key)
            self._torch = torch.Generator().manual_seed(key >> 1).get_state()

    def __enter__(self) -> None:
        self._shown, torch_worker._worker_info = torch_worker._worker_info, None  # noqa: SLF001 -- no other way to it
        if self._key is not None:
            state = cast("Any", np.random).get_state(legacy=False)
            self._kept = state if state["has_gauss"] else None
            self._swap()

    def __exit__(self, *error: object) -> None:
        torch_worker._worker_info, self._shown = self._shown, None  # noqa: SLF001 -- as above
        if self._key is not None:
            self._swap()
            kept, self._kept = self._kept, None
            if kept is not None:
                cast("Any", np.random).set_state(kept)

    def state_dict(self) -> Any:
        """Return where the random numbers are, between two uses."""
        if self._key is None:
            return None
        version, words, gauss = self._python
        numbers = self._numpy.state["state"]
        return {
            "python": [version, list(words), gauss],
            "numpy": [numbers["key"].tolist(), int(numbers["pos"])],
            "torch": self._torch.clone(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""
        if self._key is None or state is None:
            return
        version, words, gauss = state["python"]
        self._python = (version, tuple(words), gauss)
        key, position = state["numpy"]
        self._numpy.state = {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
        }
        self._torch = state["torch"]

    def _swap(self) -> None:
        """Exchange the process's states and those kept here; numpy loses the normal number that it has in store."""
        python, legacy, generator = random.getstate(), cast("Any", np.random), torch.default_generator
        numbers, state = legacy.get_bit_generator(), generator.get_state()
        random.setstate(self._python)
        legacy.set_bit_generator(self._numpy)
        generator.set_state(self._torch)
        self._python, self._numpy, self._torch = python, numbers, state


class ReadApart:
    """Reads a stream that divides itself, in this process, with random numbers of its own.

    Args:
        dataset: the stream.
        key: another one on every rank.

    Attributes:
        epoch: which comes.
        has_state: whether the stream can say where it is.

    Ranks: local.

    Example:
        >>> list(ReadApart([1, 2], key=3).read(lambda: iter([1, 2])))
        [1, 2]
    """

    def __init__(self, dataset: Any, key: int) -> None:
        self.dataset, self.key, self.epoch = dataset, key, 1
        self.has_state = is_stateful(dataset)
        self._reading = Reading()
        self._goes_on: dict[str, Any] | None = None

    @property
    def whole(self) -> Any:
        """The user's own stream."""
        return self.dataset

    @staticmethod
    def numbered(state: dict[str, Any], number: int) -> dict[str, Any]:  # noqa: ARG004 -- nothing is counted here
        """Return a state for a number of batches."""
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream is, between two batches, and its random numbers."""
        return {"stream": copy.deepcopy(self.dataset.state_dict()), "random": self._reading.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on from a state."""
        self._goes_on = state

    def read(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Read to the end.

        Args:
            begin: starts torch's iteration over the stream.
        """
        reading = self._reading = Reading(mix_key(self.key, self.epoch, READ))
        state, self._goes_on = self._goes_on, None
        if state is not None:
            self.dataset.load_state_dict(state["stream"])
            reading.load_state_dict(state["random"])
        with reading:
            batches = begin()
        while True:
            with reading:
                batch = next(batches, END)
            if batch is END:
                return
            yield batch


class Bookmarks:
    """Remembers where a stream was before each of the last few batches, so that a run can go on there.

    Batches are read ahead of the one that is worked on, so that where the stream is now is further on.

    Args:
        source: has ``state_dict``, ``load_state_dict``, ``numbered``, which writes into a state how many batches there
            were, and ``whole``, the user's own stream; None where that cannot say where it is.

    Attributes:
        first: the batch that the next iteration begins with.
        are_wanted: whether somebody will ask; it costs a state per batch.

    Ranks: local.

    Example:
        >>> Bookmarks(None).around(3) is None
        True
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._kept: deque[tuple[int, Any]] = deque(maxlen=KEPT_MARKS)
        self._given: Any = None
        self._read = 0
        self._may_be_used_up = False
        self.first = 0
        self.are_wanted = False

    @property
    def whole(self) -> Any:
        """The user's own stream, or None where it cannot say where it is."""
        return None if self._source is None else self._source.whole

    def marked(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate, and remember where every batch began; from the place of :meth:`go_on`, if there is one.

        Args:
            begin: starts the iteration.
        """
        nobody_asks = not (self.are_wanted or self.first or self._given or self._may_be_used_up)
        return begin() if self._source is None or nobody_asks else self._marked(begin)

    def _marked(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self._kept.clear()
        self._read, self.first = self.first, 0
        state, self._given = self._given, None
        if not self._read:
            state = {"begin": copy.deepcopy(self._source.whole.state_dict())}
        may_be_used_up, self._may_be_used_up = self._may_be_used_up, False
        batches = begin()
        while True:
            batch = next(batches, END)
            if batch is END and may_be_used_up:
                batches = begin()
                batch = next(batches, END)
            may_be_used_up = False
            if batch is END:
                return
            self._kept.append((self._read, state))
            self._read += 1
            yield batch
            state = self._now()

    def _now(self) -> Any:
        return self._source.state_dict()

    def around(self, number: int) -> dict[str, Any] | None:
        """Return where batch ``number`` of this epoch begins, and the one before it.

        Who goes on reads the one before again: it may have to be repeated, and what comes after it may be the end,
        which no stream's state tells.

        Args:
            number: from 0.

        Returns:
            ``"again"``: a number less than the given, and the state there; ``"next"``: the state at the given one, or
            None if nothing was read there. Or None if neither is known.
        """
        before = [mark for mark in self._kept if mark[0] < number]
        if self._source is None or not before:
            return None
        return {"again": list(before[-1]), "next": next((mark[1] for mark in self._kept if mark[0] == number), None)}

    def want(self) -> None:
        """Remember from now on, if what the stream says of itself can be stored."""
        if self._source is None or self.are_wanted:
            return
        refused = _not_storable(self._source.whole.state_dict())
        if refused:
            logger.warning(
                "The state_dict of %s holds %s, which no checkpoint may hold. After a restart it is read again from "
                "the beginning of the epoch. Let it return numbers, strings, tensors and plain containers.",
                type(self._source.whole).__name__,
                refused,
            )
            self._source = None
        else:
            self.are_wanted = True

    def at_end(self) -> Any:
        """Return what the stream takes over into its next epoch, or None."""
        return None if self._source is None else copy.deepcopy(self._source.whole.state_dict())

    def go_on(self, number: int, state: Any) -> None:
        """Have the next iteration begin with batch ``number``.

        Args:
            number: from 0.
            state: the state there.
        """
        if "begin" in state:
            self.go_on_after_end(state["begin"])
            return
        self._source.load_state_dict(self._source.numbered(state, number))
        self.first, self._given = number, state

    def go_on_after_end(self, state: Any) -> None:
        """Give the stream back what it takes over from one epoch into the next.

        Args:
            state: what :meth:`at_end` returned.
        """
        self._source.whole.load_state_dict(state)
        self._may_be_used_up = True


def _not_storable(state: Any) -> str:
    """Say what in a state could not be loaded again without running code; empty if all can."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(buffer)))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        return f"something that cannot be saved ({error})"
