"""Has a global random stream moved? Read from its generator's memory where that can be done.

Reason: a batch is asked about twice. Reading the states takes 5 us (Python) and 25 us (numpy) each time, together about
70 us for every batch; a look at what each draw changes takes less than one. What is looked at was read in CPython's
``_randommodule.c`` and numpy's ``mt19937.h`` and ``mtrand.pyx``, and is tried on fresh generators before it is used.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np

__all__ = ["watch_numpy_stream", "watch_python_stream"]


def watch_python_stream() -> Callable[[], Any]:
    """Make a function that returns something that is equal as long as the state of Python's stream is.

    Ranks: local.

    Example:
        >>> look = watch_python_stream()
        >>> before = look()
        >>> look() == before, bool(random.random()), look() == before
        (True, True, False)
    """
    if not _memory_shows_draws():
        return random.getstate
    owner: Any = cast("Any", random.getstate).__self__
    place, words = _python_twister(owner)
    return lambda: (place.value, words.value, owner.gauss_next)


def watch_numpy_stream() -> Callable[[], Any]:
    """Make a function that returns something that is equal as long as the state of numpy's legacy stream is.

    Ranks: local.

    Example:
        >>> look = watch_numpy_stream()
        >>> before = look()
        >>> look() == before, bool(np.random.rand()), look() == before
        (True, True, False)
    """
    return _NumpyMemory().look if _memory_shows_draws() else _numpy_state


class _NumpyMemory:
    """numpy's Mersenne twister, and what its legacy stream has drawn in store. Another bit generator is read."""

    def __init__(self) -> None:
        owner: Any = cast("Any", np.random.get_state).__self__
        self._body = _body_of(owner, np.random.RandomState)
        self._bits: Any = None
        self._twister: Any = None

    def look(self) -> Any:
        bits = cast("Any", np.random).get_bit_generator()
        if bits is not self._bits:
            self._bits = bits  # held, so that what is looked at stays alive
            self._twister = _numpy_twister(bits) if type(bits) is np.random.MT19937 else None
        return _numpy_state() if self._twister is None else (self._twister.value, self._body())


def _numpy_state() -> Any:
    return _comparable(cast("Any", np.random).get_state(legacy=False))


def _comparable(state: dict[str, Any]) -> Any:
    """Turn numpy's dictionary of a state into something that ``==`` compares."""
    return tuple(
        (name, _comparable(value) if isinstance(value, dict) else _plain(value))
        for name, value in sorted(state.items())
    )


def _plain(value: Any) -> Any:
    """Turn an array into bytes; other values compare by themselves, also whole numbers of more than 64 bits."""
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _body_of(owner: object, kind: Any) -> Callable[[], bytes]:
    """Return what reads the memory of an object, without its header, as far as ``kind`` lays it out."""
    header: int = object.__basicsize__
    return functools.partial(ctypes.string_at, id(owner) + header, kind.__basicsize__ - header)


def _python_twister(owner: object) -> tuple[ctypes.c_uint64, ctypes.c_uint64]:
    """Return a look at the memory of Python's Mersenne twister: its place in its words, and the first three of these.

    A draw moves the place; when all words are used up they are made anew; and of a seed the first word tells nothing.
    """
    begin = id(owner) + object.__basicsize__
    return ctypes.c_uint64.from_address(begin), ctypes.c_uint64.from_address(begin + 8)


def _numpy_twister(bits: Any) -> ctypes.c_uint64:
    """Return a look at the memory of numpy's Mersenne twister: the last of its words, and its place in them."""
    return ctypes.c_uint64.from_address(bits.ctypes.state_address + 4 * 623)


@functools.cache
def _memory_shows_draws() -> bool:
    """Try on fresh generators whether looking at their memory shows every draw, and shows nothing else."""
    python, bits = random.Random(1), np.random.MT19937(1)
    legacy = np.random.RandomState(bits)
    python_words, numpy_words = _python_twister(python), _numpy_twister(bits)
    body = _body_of(legacy, np.random.RandomState)
    cases: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: [words.value for words in python_words], python.random),
        (lambda: python_words[0].value, lambda: python.getrandbits(32 * 624)),  # all words: the place is the same again
        (lambda: [words.value for words in python_words], lambda: python.seed(2)),
        (lambda: [words.value for words in python_words], lambda: python.seed(3)),
        (lambda: numpy_words.value, lambda: legacy.seed(2)),
        (lambda: numpy_words.value, lambda: legacy.seed(3)),
        (lambda: numpy_words.value, legacy.standard_normal),  # makes two, and keeps one
        (lambda: numpy_words.value, lambda: legacy.bytes(4 * 624)),
        (body, legacy.standard_normal),  # the one kept
    ]
    shown = []
    for look, draw in cases:
        before = look()
        shown.append(look() == before)
        draw()
        shown.append(look() != before)
    return all(shown)
