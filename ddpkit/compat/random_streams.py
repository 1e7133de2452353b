"""Tells whether Python's, numpy's or torch's global random streams have moved, by reading their
memory where that can be done.

Reason: a batch is asked about twice. Reading the states takes 30 us each time; copying a few words
of what the objects hold takes half of one. All three are Mersenne Twisters: a draw moves the place,
and after 624 draws every word has changed. So the place and eight words show a draw, but for one
chance in 2^256. numpy's twister has a public address; torch's generator holds its seed and then its
twister. It is tried on fresh generators before it is used; where it does not show every draw, the
states are read.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from typing import Any, cast

import numpy as np
import torch

_PYTHON = cast("Any", random.getstate).__self__
_WORDS = 624  # of 4 bytes, of a twister
_SHOWN = 4 * 9  # bytes: the place, and eight words beside it
_NORMALS = (torch.float32, torch.float64)
_TORCH_SEED = 0x5EED_0F_70_2C_11  # of a generator in whose memory it is looked for
_TORCH_HEADER = 256  # bytes, after which it has come
# from the seed on: the twister; whether a float, a double is kept
_TORCH_PARTS = (
    (16, _SHOWN),
    (2524, 1),
    (2536, 1),
)


def look_at_random_streams() -> Any:
    """Return something that is equal as long as no global stream has moved: Python's, numpy's and
    torch's on the CPU.

    Raises:
        TypeError: another bit generator is in the place of numpy's MT19937.

    Example:
        >>> before = look_at_random_streams()
        >>> (
        ...     look_at_random_streams() == before,
        ...     bool(np.random.rand()),
        ...     look_at_random_streams() == before,
        ... )
        (True, True, False)
    """
    numpy: Any = np.random
    bits = numpy.get_bit_generator()
    if type(bits) is not np.random.MT19937:
        raise TypeError(
            f"{type(bits).__name__} is in the place of numpy's global generator, and ddpkit seeds "
            "MT19937 for every sample. Leave np.random.set_bit_generator out; draw from "
            "np.random.default_rng(sample_seed())."
        )
    views = _memory_of_process(bits)
    if views:
        return _PYTHON.gauss_next, b"".join(views)
    _, words, *rest = numpy.get_state()
    return (
        random.getstate(),
        words.tobytes(),
        rest,
        torch.default_generator.get_state().numpy().tobytes(),
    )


# a property of the generator and the views cost more than the reading
@functools.lru_cache(maxsize=1)
def _memory_of_process(bits: Any) -> tuple[Any, ...]:
    """Return views of what this process's generators hold, with numpy's ``bits``; none where they
    do not show draws.
    """
    legacy: Any = np.random.get_state
    return (
        _memory(_PYTHON, legacy.__self__, bits, torch.default_generator)
        if _memory_shows_draws()
        else ()
    )


def _memory(
    python: Any,
    legacy: Any,
    bits: Any,
    torchs: Any,
) -> tuple[Any, ...]:
    """Return views of what the generators hold: Python's twister, numpy's kept numbers and its
    twister, torch's.
    """
    twister = bits.ctypes.state_address
    place = torchs._cdata + _torch_offset()  # noqa: SLF001 -- see the module
    header = object.__basicsize__
    parts = [
        (id(python) + header, _SHOWN),  # the place comes before the words
        (id(legacy) + header, np.random.RandomState.__basicsize__ - header),
        (twister + 4 * (_WORDS + 1) - _SHOWN, _SHOWN),  # and after them
        *((place + start, size) for start, size in _TORCH_PARTS),
    ]
    return tuple((ctypes.c_char * size).from_address(start) for start, size in parts)


@functools.cache
def _torch_offset() -> int:
    """Return where in a generator of torch's its seed and its twister are; -1 where the seed is not
    found.
    """
    generator: Any = torch.Generator().manual_seed(_TORCH_SEED)
    header = ctypes.string_at(generator._cdata, _TORCH_HEADER)  # noqa: SLF001 -- see the module
    return header.find(_TORCH_SEED.to_bytes(8, sys.byteorder))


@functools.cache
def _memory_shows_draws() -> bool:
    """Try on fresh generators whether their memory shows every draw, and nothing else."""
    if _torch_offset() < 0:
        return False
    python: Any = random.Random(1)
    bits = np.random.MT19937(1)
    legacy = np.random.RandomState(bits)
    torchs = torch.Generator()
    views = _memory(python, legacy, bits, torchs)

    def look() -> tuple[Any, ...]:
        return python.gauss_next, b"".join(views)

    normals = (lambda: python.gauss(0, 1)), legacy.standard_normal  # make two, and keep one
    of_torch = [
        lambda kind=kind: torch.empty(1, dtype=kind).normal_(generator=torchs) for kind in _NORMALS
    ]
    seeds = (lambda: python.seed(2)), (lambda: legacy.seed(2)), (lambda: torchs.manual_seed(2))
    single = (
        python.random,
        legacy.rand,
        lambda: torch.rand(1, generator=torchs),
        *normals,
        *of_torch,
    )
    of_python, of_numpy = (
        (lambda: python.getrandbits(32 * _WORDS)),
        (lambda: legacy.bytes(4 * _WORDS)),
    )
    # the place is the same again
    rounds = of_python, of_numpy, lambda: torch.rand(_WORDS, generator=torchs)
    for draw in (
        *single,
        *normals,
        *of_torch,
        *rounds,
        *seeds,
        *single,
    ):
        before = look()
        if look() != before or (draw(), look())[1] == before:
            return False
    return True
