"""Checkpoints that hold only what is trained. They name the base weights by their fingerprints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import is_sharded, unwrap
from ddpkit.checkpointing.base_weights import BASE
from ddpkit.checkpointing.file_loading import safe_load
from ddpkit.checkpointing.fingerprinting import fingerprints
from ddpkit.checkpointing.hooks import recover
from ddpkit.checkpointing.state_names import plain_key, unwrapped_state
from ddpkit.compat import version_of
from ddpkit.distributed import if_main_process

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from ddpkit.checkpointing.unchecked_load import UncheckedLoad

Mark = tuple[int, int]  # of a tensor: which it is, and how often it was written to


class TrainedOnly:
    """What is saved of a module: buffers, and parameters that are trained or once were.

    A parameter is of the base as long as it is frozen, no file of the run has held it, and nobody
    has written to it since the training began. So what was trained and then frozen is saved, too.

    Args:
        module: wrapped or not; its parameters may be divided over the ranks.

    Attributes:
        module: as given.
        base: fingerprints of the base's parameters, by name, as :meth:`refresh` has found them.
        by_id: the same, by the ids of the parameters.

    Ranks: as the methods.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.base: dict[str, str] = {}
        self.by_id: dict[int, str] = {}
        self._own: set[str] = set()  # names of what is, or was, trained
        self._begun: dict[str, Mark] = {}  # of frozen parameters as the training began
        self._known: dict[str, tuple[Mark, str]] = {}  # fingerprints that are still right

    def _parameters(self) -> dict[str, nn.Parameter]:
        inner = unwrap(self.module)
        named = inner.named_parameters(remove_duplicate=False)
        return {plain_key(inner, name): parameter for name, parameter in named}

    def begin(self) -> None:
        """Note what is frozen as the training begins; what was noted before stays.

        Ranks: local.
        """
        for name, parameter in self._parameters().items():
            if parameter.requires_grad:
                self._own.add(name)
            else:
                self._begun.setdefault(name, _mark(parameter))

    def refresh(self) -> None:
        """Find out what of the module is of the base, before a save.

        Ranks: all, where parameters are divided; else the main process, and others do nothing.
        """
        parameters = self._parameters()
        is_divided = any(map(is_sharded, parameters.values()))
        if not (is_divided or if_main_process()):
            return
        self.begin()
        frozen = [name for name in parameters if name not in self._own]
        written = [_mark(parameters[name]) != self._begun[name] for name in frozen]
        if is_divided and frozen:
            written = _on_any_rank(written, parameters)
        self._own |= {name for name, is_written in zip(frozen, written, strict=True) if is_written}
        base = {name: parameters[name] for name in frozen if name not in self._own}
        self.base = self._fingerprints(base)
        self.by_id = {id(base[name]): text for name, text in self.base.items()}

    def _fingerprints(self, base: Mapping[str, nn.Parameter]) -> dict[str, str]:
        known = {
            name: self._known[name][1]
            for name, parameter in base.items()
            if name in self._known and self._known[name][0] == _mark(parameter)
        }
        found = known | fingerprints({name: base[name] for name in base if name not in known})
        self._known = {name: (_mark(base[name]), found[name]) for name in base}
        return {name: found[name] for name in base}

    def state_dict(self) -> Any:
        """Return what is saved: the state without the base, and the base's fingerprints.

        Ranks: local, after :meth:`refresh`.
        """
        state = unwrapped_state(self.module)
        saved = OrderedDict((name, value) for name, value in state.items() if name not in self.base)
        vars(saved).update(vars(state))
        if self.base:
            saved[BASE] = dict(self.base)
        return saved

    def load(self, module: nn.Module, path: Path, end_of_epoch: bool) -> UncheckedLoad | None:
        """Load a file, with the base or without it; what is in it is the run's own from now on.

        Args:
            module: as was given.
            path: of the file.
            end_of_epoch: not needed here.

        Returns:
            A load whose base is still to be compared, if the file leaves one out.

        Raises:
            CheckpointError: as for :func:`~ddpkit.checkpointing.hooks.torch_recovery`.

        Ranks: local.
        """
        loaded = recover(module, path, end_of_epoch)
        names = safe_load(path, "meta")
        if isinstance(names, Mapping):
            self._own |= set(names) & self._parameters().keys()
        self._begun = {}
        self.begin()
        return loaded


def _mark(parameter: torch.Tensor) -> Mark:
    return id(parameter), version_of(parameter)


def _on_any_rank(flags: list[bool], parameters: Mapping[str, torch.Tensor]) -> list[bool]:
    sharded: Any = next(filter(is_sharded, parameters.values()))
    mesh = sharded.device_mesh
    counts = torch.tensor(flags, dtype=torch.int32, device=mesh.device_type)
    dist.all_reduce(counts, group=mesh.get_group())
    return [bool(count) for count in counts.tolist()]
