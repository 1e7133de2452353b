"""Random numbers: one seed for initialisation, a stream of its own per rank and epoch, and states
to keep.

:func:`seed_everything` gives every rank the same seed, so that they build the same model.
``Brain.fit`` begins every epoch with :func:`seed_epoch_streams`, so that ranks do not draw the same
noise in dropout and augmentation, and so that a run that goes on after an epoch's end draws what
the run that was never stopped has drawn, whatever happened between. The streams come from a hash of
seed, rank and epoch: with a sum, rank 1 of seed 10 would repeat rank 0 of seed 11.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ddpkit.base import count_devices, get_rank, own_first, use_deterministic_kernels
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "global_seed",
    "mix",
    "mix_key",
    "own_randomness",
    "restore_rng_state",
    "rng_state",
    "seed_epoch_streams",
    "seed_everything",
    "seed_streams",
    "stream_seed",
]

logger = get_logger(__name__)

SEED_VARIABLES = ("DDPKIT_GLOBAL_SEED", "SB_GLOBAL_SEED")
# those with a random state per device
_ACCELERATORS: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu}
MAX_SEED = 2**32 - 1  # numpy takes nothing larger
_MASK64 = (1 << 64) - 1


def mix(value: int) -> int:
    """Scramble a 64-bit integer (the finaliser of SplitMix64, a bijection).

    Ranks: local.

    Example:
        >>> mix(1) == mix(1), mix(1) == mix(2)
        (True, False)
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mix_key(*parts: int) -> int:
    """Hash a few integers, in order, to one 64-bit key: (10, 2) and (11, 1) have nothing in common.

    Ranks: local.

    Example:
        >>> mix_key(10, 2) == mix_key(11, 1)
        False
    """
    key = 0
    for part in parts:
        key = mix(key ^ (part & _MASK64))
    return key


def seed_everything(seed: int = 0, verbose: bool = True, deterministic: bool = False) -> int:
    """Seed Python, numpy and torch (all devices) with the same number on every rank.

    Args:
        seed: whole number from 0 to 4294967295; one outside is replaced by 0, with a warning.
        verbose: log the seed.
        deterministic: also have torch use deterministic algorithms only, and raise where it has
            none.

    Returns:
        The seed that was used.

    Raises:
        ConfigError: ``seed`` is not a whole number.

    Ranks: local; call it on every rank with the same seed.

    State: the random states, ``DDPKIT_GLOBAL_SEED`` in the environment (child processes and
    samplers read it) and, if asked, torch's deterministic mode and ``CUBLAS_WORKSPACE_CONFIG``.

    Source: https://pytorch.org/docs/stable/notes/randomness.html

    Example:
        >>> seed_everything(7, verbose=False)
        7
        >>> first = torch.rand(())
        >>> _ = seed_everything(7, verbose=False)
        >>> bool(first == torch.rand(()))
        True
        >>> del os.environ["DDPKIT_GLOBAL_SEED"]  # leave nothing to the next example
    """
    number = _whole_number(seed, "seed")
    if not 0 <= number <= MAX_SEED:
        logger.warning("seed=%d is outside [0, %d]; 0 is used instead.", number, MAX_SEED)
        number = 0
    if verbose:
        logger.info("Seed: %d", number)
    os.environ[SEED_VARIABLES[0]] = str(number)
    _seed_python_and_numpy(number)
    # whether there is a GPU is not asked: processes forked after that could not use it
    torch.manual_seed(number)
    if deterministic:
        use_deterministic_kernels()
    return number


def global_seed() -> int | None:
    """Return the seed that :func:`seed_everything` has set, here or in the parent process; else
    None.

    Raises:
        ConfigError: ``DDPKIT_GLOBAL_SEED`` (or ``SB_GLOBAL_SEED``) in the environment is not a
            whole number.

    Ranks: local.

    Example:
        >>> _ = seed_everything(7, verbose=False)
        >>> global_seed()
        7
        >>> del os.environ["DDPKIT_GLOBAL_SEED"]  # leave nothing to the next example
    """
    for variable in SEED_VARIABLES:
        if os.environ.get(variable):
            return _whole_number(os.environ[variable], variable)
    return None


def seed_epoch_streams(
    base: int,
    epoch: int,
    optimizer_step: int,
    rank: int | None = None,
) -> int:
    """Begin an epoch of training: give this rank the random streams of that epoch.

    Args:
        base: the run's seed.
        epoch: of the training.
        optimizer_step: how many optimizer steps have been made before the epoch, so that an epoch
            of the same number in a second ``fit`` draws other numbers.
        rank: whose streams they are; None: this rank's.

    Returns:
        The 64-bit seed of this rank's torch stream.

    Ranks: local.

    State: the random states of Python, numpy and torch (all devices).

    Example:
        >>> first = seed_epoch_streams(7, 1, 0), torch.rand(1).item()
        >>> first == (seed_epoch_streams(7, 1, 0), torch.rand(1).item())
        True
    """
    stream = seed_streams(
        base,
        (get_rank() or 0) if rank is None else rank,
        epoch,
        optimizer_step,
    )
    # also those that are not in use yet, and such as have one state for all (mps)
    if torch.accelerator.is_available():
        torch.manual_seed(stream)
    return stream


def seed_streams(seed: int, *place: int) -> int:
    """Seed the random streams of this process by :func:`stream_seed`, in microseconds.

    Not by ``torch.manual_seed``, which takes a hundred times as long where CUDA has not been used
    yet.

    Args:
        seed: of the run.
        place: numbers that name the streams.

    Returns:
        The 64-bit seed of torch's streams.

    Ranks: local.

    State: the random states of Python, numpy and torch, on the CPU and on the accelerators, once
    they are in use.

    Example:
        >>> first = seed_streams(7, 1), torch.rand(1).item()
        >>> first == (seed_streams(7, 1), torch.rand(1).item())
        True
    """
    stream = stream_seed(seed, *place)
    _seed_python_and_numpy(stream)
    torch.default_generator.manual_seed(stream)
    for module in _ACCELERATORS.values():
        if module.is_initialized():
            module.manual_seed_all(stream)
    return stream


def stream_seed(seed: int, *place: int) -> int:
    """Derive the seed of a stream from the run's seed and from where the stream is used.

    Args:
        seed: of the run.
        place: numbers that name the stream, such as rank and epoch.

    Returns:
        A 64-bit number; other places and other seeds give unrelated ones.

    Ranks: local.

    Example:
        >>> stream_seed(10, 1) == stream_seed(11, 0)
        False
    """
    text = ":".join(str(number) for number in ("ddpkit-stream", seed, *place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def rng_state() -> dict[str, Any]:
    """Read the random states of this process: Python, numpy, torch on the CPU and on the
    accelerator that it uses.

    Making the iterator of a ``DataLoader`` draws from torch's generator: restore after that.

    Returns:
        Copies that later draws do not change, as lists, numbers, strings and tensors, which load
        with ``weights_only=True``. ``python``: the result of ``random.getstate``, as lists.
        ``numpy``: the result of ``numpy.random.get_state``, the key as an int64 tensor of shape
        ``(624,)``. ``torch_cpu``: uint8 tensor. ``accelerators``: by kind (``"cuda"``, ``"xpu"``)
        the state of the current device, whatever its number: a resumed run may see other devices,
        or its own by another number. Without a process group the states of the other devices
        follow, for ``nn.DataParallel``. Empty while no accelerator has been used.

    Ranks: local; every rank has its own.

    Example:
        >>> state = rng_state()
        >>> first = torch.rand(3), random.random()
        >>> restore_rng_state(state)
        >>> torch.equal(first[0], torch.rand(3)), first[1] == random.random()
        (True, True)
    """
    version, words, gauss_next = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 -- the global state is what users draw from
    return {
        "python": [version, list(words), gauss_next],
        "numpy": {
            "bit_generator": str(legacy["bit_generator"]),
            "key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "torch_cpu": torch.get_rng_state(),
        "accelerators": {
            kind: [module.get_rng_state(index) for index in _own_first(kind, module)]
            for kind, module in _ACCELERATORS.items()
            if module.is_initialized()
        },
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Put the random states back.

    The current device gets the state of the one that was current. Of the others, if there are fewer
    now, the first get theirs.

    Args:
        state: what :func:`rng_state` returned.

    Raises:
        CheckpointError: the state does not fit the generators of this process.

    Ranks: local.
    """
    try:
        version, words, gauss_next = state["python"]
        random.setstate((version, tuple(words), gauss_next))
        numpy = state["numpy"]
        np.random.set_state(  # noqa: NPY002 -- the global state is what users draw from
            {
                **numpy,
                "state": {
                    "key": numpy["key"].cpu().numpy().astype(np.uint32),
                    "pos": numpy["pos"],
                },
            }
        )
        torch.set_rng_state(state["torch_cpu"].cpu())
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the saved random state does not fit this process: {error}. It was saved by another "
            "version of Python, numpy or torch; delete it to continue with fresh random numbers."
        ) from error
    for kind, states in state.get("accelerators", {}).items():
        present = _own_first(kind, _ACCELERATORS[kind]) if count_devices(kind) else []
        for device, device_state in zip(present, states, strict=False):
            _ACCELERATORS[kind].set_rng_state(device_state.cpu(), device)
        if len(present) < len(states):
            logger.warning_once(
                "The saved random state covers %d %s devices, here are %d; the rest is left out.",
                *(len(states), kind.upper(), len(present)),
            )


def _own_first(kind: str, module: Any) -> list[int]:
    """Return the device numbers of this process: the current device, and the others that
    ``nn.DataParallel`` uses.
    """
    numbers = own_first(f"{kind}:{module.current_device()}")
    return numbers[:1] if dist.is_available() and dist.is_initialized() else numbers


def _seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & MAX_SEED)  # noqa: NPY002 -- the global state is what users draw from


def _whole_number(value: Any, name: str) -> int:
    try:
        return int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}={value!r} is not a whole number. Give one from 0 to {MAX_SEED}."
        ) from error


@contextlib.contextmanager
def own_randomness(key: int, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Give code random numbers that follow from a key, and leave everybody else's as they were.

    Not ``torch.manual_seed``: it would seed the accelerators' streams as well, alike on every rank.

    Args:
        key: 64 bits.
        generators: more streams than the global ones of the CPU; each keeps the seed that it was
            given, as part of its own key.

    Ranks: local.

    State: the streams are put back at the end, also after an exception.

    Example:
        >>> with own_randomness(3):
        ...     first = random.random(), torch.rand(1).item()
        >>> with own_randomness(3):
        ...     first == (random.random(), torch.rand(1).item())
        True
    """
    python = random.getstate()
    legacy = np.random.get_state()  # noqa: NPY002 -- code that is not ours draws from it
    streams = {
        id(generator): generator for generator in (*generators, torch.default_generator)
    }.values()
    before = [(stream, stream.get_state()) for stream in streams]
    try:
        for stream in streams:
            given = 0 if stream is torch.default_generator else stream.initial_seed()
            stream.manual_seed(mix_key(key, given) >> 1)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 -- as above
        yield
    finally:
        for stream, state in before:
            stream.set_state(state)
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002 -- as above
