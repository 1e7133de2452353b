"""The GPUs as torch sees them in this process."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TorchGpu:
    """A GPU by torch's number; ``uuid`` as the driver writes it, None if torch does not tell."""

    index: int
    name: str
    uuid: str | None
    compute_capability: tuple[int, int]
    memory_total: int


@dataclass(frozen=True)
class ByTorch:
    """What torch says of the GPUs.

    Attributes:
        version: of torch.
        cuda: that it was built for, such as ``"12.8"``; None: it cannot use NVIDIA's GPUs.
        hip: that it was built for; None: it cannot use AMD's GPUs.
        architectures: that it was built for, such as ``"sm_90"``.
        gpus: that this process sees.
        problem: why there are none, in torch's words.
        peers: whether GPU i reads the memory of GPU j: ``(i, j, can)``.
    """

    version: str = torch.__version__
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] = ()
    gpus: tuple[TorchGpu, ...] = ()
    problem: str | None = None
    peers: tuple[tuple[int, int, bool], ...] = ()


def ask_torch() -> ByTorch:
    """Ask torch; this takes a few hundred MB on each GPU that is asked about its peers."""
    cuda = torch.version.cuda
    hip = torch.version.hip
    if not torch.cuda.is_available():
        return ByTorch(cuda=cuda, hip=hip, problem=_why_none())
    count = torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    return ByTorch(
        cuda=cuda,
        hip=hip,
        architectures=tuple(torch.cuda.get_arch_list()),
        gpus=tuple(_gpu(index) for index in range(count)),
        peers=tuple((i, j, torch.cuda.can_device_access_peer(i, j)) for i, j in pairs),
    )


def _gpu(index: int) -> TorchGpu:
    properties = torch.cuda.get_device_properties(index)
    number = getattr(properties, "uuid", None)
    return TorchGpu(
        index=index,
        name=properties.name,
        uuid=None if number is None else f"GPU-{number}",
        compute_capability=(properties.major, properties.minor),
        memory_total=properties.total_memory,
    )


def _why_none() -> str:
    """Have torch say why it sees no GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same words as the error's
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # torch raises either
        return " ".join(str(error).split())
    return "it finds none"
