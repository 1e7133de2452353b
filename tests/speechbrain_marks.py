"""What SpeechBrain leaves on classes and in modules, for tests without it: its marks and its
main-only calls.

The attributes and the behaviour are those of ``speechbrain.utils.checkpoints`` and
``speechbrain.utils.distributed``, versions 1.0.3 to 1.1.2.
"""

from __future__ import annotations

import types

import torch

CHECKPOINTS = "speechbrain.utils.checkpoints"
DISTRIBUTED = "speechbrain.utils.distributed"
_SOURCE = """
import os
from functools import wraps

import torch.distributed as dist

MAIN_PROC_ONLY = 0


def main_process_only(function):
    @wraps(function)
    def wrapped(*args, **kwargs):
        global MAIN_PROC_ONLY
        MAIN_PROC_ONLY += 1
        try:
            is_main = not dist.is_initialized() or os.environ.get("RANK") == "0"
            result = function(*args, **kwargs) if is_main else None
        finally:
            MAIN_PROC_ONLY -= 1
        return broadcast(result)

    return wrapped


def broadcast(value):
    if MAIN_PROC_ONLY >= 1 or not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
"""


def main_only_module():
    """Make a module with SpeechBrain's ``main_process_only``, to be put where SpeechBrain has
    it.
    """
    module = types.ModuleType(DISTRIBUTED)
    exec(compile(_SOURCE, DISTRIBUTED, "exec"), module.__dict__)
    return module


def mark(role):
    """Mark a method as SpeechBrain's ``mark_as_saver``, ``mark_as_loader`` and ``mark_as_transfer``
    do.
    """

    def decorate(method):
        setattr(method, f"_speechbrain_{role}", True)
        return method

    return decorate


class Normalization(torch.nn.Module):
    """As SpeechBrain's InputNormalization: a module that keeps statistics which its ``state_dict``
    does not hold.
    """

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, inputs):
        if self.training:
            self.count += len(inputs)
        return inputs

    @mark("saver")
    def _save(self, path):
        torch.save({"count": self.count}, path)

    @mark("transfer")
    @mark("loader")
    def _load(self, path, end_of_epoch=False):
        self.count = torch.load(path)["count"]


class Scheduler:
    """As SpeechBrain's NewBobScheduler: no module, and no ``state_dict``."""

    def __init__(self, rate=1.0):
        self.rate = rate

    @mark("saver")
    def save(self, path):
        path.write_text(str(self.rate))

    @mark("loader")
    def load(self, path, end_of_epoch):
        self.rate = float(path.read_text())
