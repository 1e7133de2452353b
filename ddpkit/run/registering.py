"""What the Brain gives to a checkpointer, so that a checkpoint has its place; and several Brains with one."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.checkpointing.rank_states import RankStates
from ddpkit.checkpoints import Checkpointer
from ddpkit.config.options import OPTION_BY_NAME
from ddpkit.distributed import run_on_main
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.run.continuing import Continuing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

logger = get_logger(__name__)

RANKS = "ranks"  # the recoverable with what every rank has of its own


class Registering(Continuing):
    """The half of the Brain that stands in a checkpointer, under the names ``brain``, ``ranks``, ``scaler``, ``ema``.

    Of several Brains with one checkpointer the one whose ``fit`` or ``evaluate`` runs stands there.

    Ranks: local, but for :meth:`_register_with`.

    Example:
        >>> issubclass(Registering, Continuing)
        True
    """

    _saving_inside: Callable[[], AbstractContextManager[None]]
    _fitting: bool
    _takes_place = True
    _is_between_batches = False
    _trainers: list[tuple[weakref.ref[Any], Path | None]]  # the first to end fit in each folder

    def _register_with(self, checkpointer: Any) -> None:
        """Give the checkpointer what the loop needs to continue; when debugging, a temporary folder as well."""
        if self.debug and not self.debug_persistently and hasattr(checkpointer, "checkpoints_dir"):
            folder = run_on_main(tempfile.mkdtemp, kwargs={"prefix": "ddpkit-debug-"}) or ""
            checkpointer.checkpoints_dir = Path(folder)
            if self.rank == 0:
                weakref.finalize(checkpointer, shutil.rmtree, folder, ignore_errors=True)
        # The checkpointer may outlive the Brain, and the Brain holds the checkpointer.
        host = weakref.ref(self)
        self._rank_states = RankStates(lambda: _own_state(host()))
        self._trainers = []
        self._add_to(checkpointer, self._rank_states)
        self._follow_options()

    def _take_checkpointer(self) -> None:
        """Register once more, where another Brain has put itself in the place of this one.

        Raises:
            ConfigError: that one trains now; or the recipe has put something else there.
        """
        states = self._rank_states
        if states is None:
            return
        taken = getattr(self.checkpointer, "recoverables", {})
        other = taken.get("brain")
        if taken.get("brain", self) is self and taken.get(RANKS, states) is states:
            return
        if other is not self and isinstance(other, Registering) and other._fitting:
            raise ConfigError(
                "fit, evaluate or predict was called inside fit of another Brain with the same Checkpointer: it "
                "recovers a checkpoint, which would replace what is being trained. Call it after that fit, or make "
                "this Brain without a checkpointer."
            )
        self._add_to(self.checkpointer, states)
        self._follow_options()

    def _note_trainer(self) -> None:
        """Note that this Brain has come to the end of a call of ``fit``."""
        if self._rank_states is not None and all(known != self._saves_in for _, known in self._trainers):
            self._trainers.append((weakref.ref(self), self._saves_in))

    def _require_no_other(self) -> None:
        """Refuse to train with a checkpointer with which another Brain has trained in the same folder.

        Raises:
            ConfigError: there was another; on every rank.
        """
        if self._rank_states is None:
            return
        if any(known == self._saves_in and trainer() is not self for trainer, known in self._trainers):
            raise ConfigError(
                "another Brain has trained with this Checkpointer. This one would go on from the other's checkpoint, "
                "and the script, started again, would take this one's for the other's. Give each Brain a Checkpointer "
                "of its own, with a folder of its own. To train on with the same one, as in a notebook, call fit of "
                "that Brain again, or make the Checkpointer anew."
            )

    @property
    def _saves_in(self) -> Path | None:
        return getattr(self.checkpointer, "checkpoints_dir", None)

    def _add_to(self, checkpointer: Any, states: RankStates) -> None:
        taken = getattr(checkpointer, "recoverables", {})
        require_free(taken, "brain", Registering, "the place of the training")
        require_free(taken, RANKS, RankStates, "what the Brain saves of every rank")
        if self.scaler.is_enabled():
            require_free(taken, "scaler", torch.amp.GradScaler, f"the gradient scaler of precision={self.precision!r}")
        if "brain" in taken:
            self._trainers = taken["brain"]._trainers
        host = weakref.ref(self)
        checkpointer.add_recoverable("brain", self)
        checkpointer.add_recoverable(
            RANKS, states, custom_load_hook=lambda *where: _load_ranks(host(), *where), optional_load=True
        )
        if self.scaler.is_enabled():
            checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)
        if self.ema is not None:
            self.ema.add_to(checkpointer)
        if isinstance(checkpointer, Checkpointer):
            checkpointer.around_save = lambda end_of_epoch: _around_save(host(), end_of_epoch)
            checkpointer.tell_epoch = lambda: _epoch_of(host())

    def _follow_options(self) -> None:
        """Give the checkpointer what the options say of it; what is left at its default is left alone there, too."""
        checkpointer, options = self.checkpointer, self.run_opts
        if not isinstance(checkpointer, Checkpointer):
            return
        attributes = {"ckpt_verify": "verify_mode", "ckpt_load": "load_mode", "ckpt_errors": "on_error"}
        for option, attribute in attributes.items():
            if options[option] != OPTION_BY_NAME[option].default:
                setattr(checkpointer, attribute, options[option])


def require_free(taken: Mapping[str, Any], name: str, kind: type, what: str) -> None:
    """Refuse to save something under a name that a recipe has given to something of its own.

    Args:
        taken: the recoverables, by name.
        name: that is needed.
        kind: what may be replaced: that of another Brain.
        what: shall be saved under this name, in words.

    Raises:
        ConfigError: something of another kind has it.

    Ranks: local.

    Example:
        >>> require_free({"scaler": 3}, "scaler", float, "the gradient scaler")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: a recoverable of the recipe, of type int, is named 'scaler', and so is ...
    """
    other = taken.get(name)
    if other is not None and not isinstance(other, kind):
        raise ConfigError(
            f"a recoverable of the recipe, of type {type(other).__name__}, is named {name!r}, and so is {what} in "
            "every checkpoint. Give yours another name."
        )


def _own_state(host: Registering | None) -> dict[str, Any]:
    return {} if host is None else host._collect_own_state()


def _epoch_of(host: Registering | None) -> int | None:
    """Return the epoch that is trained, or was trained last; None where nothing has been trained yet."""
    return (host.progress.epoch or None) if host is not None else None


@contextlib.contextmanager
def _around_save(host: Registering | None, end_of_epoch: bool) -> Iterator[None]:
    """Return a context for every save of a checkpointer; it does something for those inside of a training batch."""
    is_in_pass = host is not None and host.progress.is_in_pass
    if end_of_epoch and is_in_pass:
        logger.warning_once(
            "A checkpoint of the end of an epoch is made in the middle of one (end_of_epoch=True is the default): who "
            "goes on from it leaves out the rest of this epoch's data. Save with end_of_epoch=False."
        )
    is_inside = host is not None and not end_of_epoch and is_in_pass and not host._is_between_batches
    with host._saving_inside() if host is not None and is_inside else contextlib.nullcontext():
        yield


def _load_ranks(host: Registering | None, states: RankStates, path: Path, end_of_epoch: bool) -> None:
    if host is not None and host._fitting and host._takes_place:
        states.load(path, end_of_epoch)
