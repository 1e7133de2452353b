"""``CUDA_VISIBLE_DEVICES``: which GPUs a process is left with, and what of the variable is wrong.

Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpkit.see.doctor.gpus.driver import Gpu

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Visible:
    """What is left of the GPUs of a machine.

    Attributes:
        gpus: the driver's numbers, as a process counts them; a MIG part stands for its GPU.
        mistakes: what of the variable means nothing here, in words.
    """

    gpus: list[int] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)


def visible_gpus(value: str | None, gpus: Sequence[Gpu]) -> Visible:
    """Read the variable as CUDA does: it takes GPUs up to the first word that means none.

    Args:
        value: of the variable; None: not set.
        gpus: all of the machine.

    Returns:
        The GPUs that are left, and what is wrong.

    Example:
        >>> visible_gpus("1,7", [Gpu(0), Gpu(1)])
        Visible(gpus=[1], mistakes=["'7': there are GPUs 0 to 1"])
        >>> visible_gpus("", [Gpu(0)]).gpus
        []
    """
    if value is None:
        return Visible([gpu.index for gpu in gpus])
    found = Visible()
    words = [word.strip() for word in value.split(",")] if value.strip() else []
    taken: set[str] = set()
    for word in words:
        if word == "-1":  # the usual way to say "none", and no mistake
            break
        index = _index_of(word, gpus)
        if index is None:
            found.mistakes.append(f"{word!r}: {_reason(word, gpus)}")
            break
        key = word if word.startswith("MIG-") else str(index)
        if key in taken:
            return Visible([], [f"{word!r}: that GPU is there twice, and CUDA then takes none"])
        taken.add(key)
        found.gpus.append(index)
    return found


def _index_of(word: str, gpus: Sequence[Gpu]) -> int | None:
    if word.isdecimal():
        return int(word) if int(word) < len(gpus) else None
    if word.startswith("MIG-"):
        parts = [gpu.index for gpu in gpus for part in gpu.mig_devices if part.startswith(word)]
        return parts[0] if len(parts) == 1 else None
    alike = [gpu.index for gpu in gpus if word and (gpu.uuid or "").startswith(word)]
    return (
        alike[0] if len(alike) == 1 else None
    )  # the beginning of a UUID is enough, if no other has it


def _reason(word: str, gpus: Sequence[Gpu]) -> str:
    if word.lstrip("-").isdecimal():
        if not gpus:
            return "there is no GPU"
        return f"there {'is GPU 0 alone' if len(gpus) == 1 else f'are GPUs 0 to {len(gpus) - 1}'}"
    if word.startswith("MIG-"):
        return "no GPU has this MIG part"
    return "no GPU has this UUID" if word.startswith("GPU-") else "neither a number nor a UUID"
