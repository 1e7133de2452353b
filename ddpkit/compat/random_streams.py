"""Have Python's or numpy's global random streams moved? Read from their generators' memory where that can be done.

Reason: a batch is asked about twice. Reading both states takes 30 us each time; copying what the objects hold takes
one. numpy's twister has a public address. It is tried on fresh generators before it is used; where it does not show
every draw, the states are read.
"""

from __future__ import annotations

import ctypes
import functools
import random
from typing import Any, cast

import numpy as np

_PYTHON = cast("Any", random.getstate).__self__
_TWISTER_BYTES = 4 * 625


def look_at_random_streams() -> Any:
    """Return something that is equal as long as Python's and numpy's global streams have not moved.

    Raises:
        TypeError: another bit generator is in the place of numpy's MT19937.

    Ranks: local.

    Example:
        >>> before = look_at_random_streams()
        >>> look_at_random_streams() == before, bool(np.random.rand()), look_at_random_streams() == before
        (True, True, False)
    """
    numpy: Any = np.random
    bits = numpy.get_bit_generator()
    if type(bits) is not np.random.MT19937:
        raise TypeError(
            f"{type(bits).__name__} is in the place of numpy's global generator, and ddpkit seeds MT19937 for every "
            "sample. Leave np.random.set_bit_generator out; draw from np.random.default_rng(sample_seed())."
        )
    if _memory_shows_draws():
        body, legacy, twister = _memory(_PYTHON, numpy.get_state.__self__, bits)
        return body.raw, _PYTHON.gauss_next, legacy.raw, twister.raw
    _, words, *rest = numpy.get_state()
    return random.getstate(), words.tobytes(), rest


@functools.lru_cache(maxsize=1)  # made once per generator: a property of it and three views cost more than the reading
def _memory(python: Any, legacy: Any, bits: Any) -> tuple[Any, ...]:
    """Return views of what the generators hold: Python's twister, the numbers that numpy keeps, and its twister."""
    twister = (ctypes.c_char * _TWISTER_BYTES).from_address(bits.ctypes.state_address)
    return _body(python, random.Random.__base__), _body(legacy, np.random.RandomState), twister


def _body(owner: object, kind: Any) -> Any:
    """Return a view of an object's memory as far as its C type lays it out, without the header."""
    header = object.__basicsize__
    return (ctypes.c_char * (kind.__basicsize__ - header)).from_address(id(owner) + header)


@functools.cache
def _memory_shows_draws() -> bool:
    """Try on fresh generators whether their memory shows every draw, and nothing else."""
    python: Any = random.Random(1)
    bits = np.random.MT19937(1)
    legacy = np.random.RandomState(bits)
    views = _memory(python, legacy, bits)

    def look() -> tuple[Any, ...]:
        return (python.gauss_next, *(view.raw for view in views))

    normal = (lambda: python.gauss(0, 1)), legacy.standard_normal  # make two, and keep one
    for draw in (python.random, lambda: python.seed(2), *normal, *normal, lambda: legacy.seed(2), legacy.rand):
        before, same = look(), look()
        draw()
        if same != before or look() == before:
            return False
    return True
