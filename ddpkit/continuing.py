"""How a rank begins an epoch and its batches where a checkpoint left them, and what it tells one of itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.checkpoints import Checkpointer, ckpt_recency
from ddpkit.dataloader import go_on_after_end, go_on_at, state_at, state_at_end, want_states
from ddpkit.distributed import run_on_main
from ddpkit.errors import CheckpointError
from ddpkit.hooks import Hooks
from ddpkit.launchers import find_launch
from ddpkit.logger import get_logger
from ddpkit.resuming import BRAIN_FILE, Pace, read_brain_file
from ddpkit.seed import RngState, global_seed, seed_epoch_streams
from ddpkit.storage import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpkit.rank_states import RankStates


logger = get_logger(__name__)

NEWEST, NEVER = "auto", "never"  # what the option `resume` says, or else a path


class Continuing(Hooks):
    """The half of the Brain that goes on with what every rank has of its own: random streams, losses, data.

    Ranks: collective.

    Example:
        >>> issubclass(Continuing, Hooks)
        True
    """

    _rank_states: RankStates | None = None
    _base_seed: int | None = None
    _own_stream: int | None = None
    _resumed_step = 0

    def begin_epoch(self, epoch: int) -> None:
        """Give this rank the random streams of an epoch; those of its beginning also where it goes on in the middle."""
        self.progress.epoch = epoch
        if not self.step:
            self.progress.began_at = self.optimizer_step
        self._own_stream = seed_epoch_streams(self._base_seed or 0, epoch, self.progress.began_at)

    def choose_seed(self) -> None:
        """Fix the run's seed when ``fit`` begins: that of ``seed_everything``, or what the script has given to torch.

        What a hook gives to torch afterwards is for the rest of that epoch.
        """
        seed = global_seed()
        if seed is None:
            seed = torch.initial_seed()
            seed = self._base_seed if self._base_seed is not None and seed == self._own_stream else seed
        self._base_seed = seed

    def begin_pass(self, loader: Any) -> tuple[int, Callable[[], object]]:
        """Put a training loader where a recovered checkpoint says, if one was recovered.

        Args:
            loader: of this rank.

        Returns:
            How many batches the loader yields again, to be left out; and what to call when those are behind.
        """
        self.progress.loader, self._resumed_step = loader, self.step
        if self.checkpointer is not None:
            want_states(loader)
        states = self._rank_states
        own: dict[str, Any] = {}
        if states is not None:
            states.forget()
            own, states.loaded = states.loaded or {}, None
            if states.is_complete:
                self.strategy.show_gradient_orders(self.modules, own.get("gradients", {}))
        if not self.step:
            go_on_after_end(loader, own.get("loader_end"))
            return go_on_at(loader, 0, None), bool
        if own.get("loss") is not None and states is not None and states.is_complete:
            self.progress.meter.load_state_dict(own["loss"])
        random = own.get("random")
        restore = self._seed_anew if random is None else RngState.from_state_dict(random).restore
        same = states is not None and states.is_of_as_many
        return go_on_at(loader, self.step, own.get("loader"), same_batches=same), restore

    def end_epoch(self) -> None:
        """Note that an epoch is over, its evaluation and its checkpoint too."""
        self.progress.trained, self.progress.closed = None, 0

    @contextlib.contextmanager
    def no_failure_saved(self) -> Iterator[None]:
        """Return a context for a hook: what it changes before it fails must not be changed again by a resumed run."""
        trained, self.progress.trained = self.progress.trained, None
        yield
        self.progress.trained = trained

    def end_streams(self) -> None:
        """Leave the random streams as any run leaves them that has come here, whether it was stopped before or not."""
        self._own_stream = seed_epoch_streams(self._base_seed or 0, 0, self.optimizer_step)

    def _seed_anew(self) -> None:
        """Go on in the middle of an epoch with other random numbers than at its beginning, where the true are lost."""
        self._own_stream = seed_epoch_streams(self._base_seed or 0, self.progress.epoch, self.optimizer_step)

    def end_pass(self) -> None:
        """Collect what a save after the epoch will need of every rank."""
        if self._rank_states is not None and self.checkpointer is not None:
            self._rank_states.gather()

    def collect_own_state(self) -> dict[str, Any]:
        """Return what a checkpoint needs of this rank by itself."""
        progress = self.progress
        return {
            "random": RngState.capture().state_dict(),
            "loss": progress.meter.state_dict(),
            "loader": state_at(progress.loader, progress.step),
            "loader_end": state_at_end(progress.loader),
            "gradients": self.strategy.gradient_orders(),
        }

    # ------------------------------------------------------------------ what a run goes on from

    def _pace_before(self) -> Pace | None:
        """Return, on the main process, what an optimizer step was made of in the checkpoint that will be resumed."""
        if self.resume == NEVER or not isinstance(self.checkpointer, Checkpointer):
            return None
        if self.resume != NEWEST:
            paths = [Path(self.resume)]
        else:
            found = sorted(self.checkpointer.list_checkpoints(), key=ckpt_recency, reverse=True)
            paths = [checkpoint.path for checkpoint in found]
        for path in paths:
            if not verify(path, "size") and not verify(path, "full", only=BRAIN_FILE):
                with contextlib.suppress(CheckpointError):  # who loads it will say what is wrong with it
                    state = read_brain_file(path)
                    asked = state.get("asked")  # not what it came to on some number of processes in between
                    return Pace.read(asked if isinstance(asked, Mapping) else state)
        return None

    @contextlib.contextmanager
    def choosing_start(self) -> Iterator[None]:
        """Have the checkpointer recover what the option ``resume`` says, whoever asks it to."""
        checkpointer = self.checkpointer
        if not isinstance(checkpointer, Checkpointer):
            yield
            return
        checkpointer.resume = run_on_main(self._start, args=(checkpointer,)) or NEWEST
        try:
            yield
        finally:
            checkpointer.resume = NEWEST

    def _start(self, checkpointer: Checkpointer) -> str:
        """Return what to start from; on the main process."""
        if self.resume == NEWEST:
            return NEWEST
        found = sorted(checkpointer.list_checkpoints(), key=ckpt_recency, reverse=True)
        launch = os.environ.get("TORCHELASTIC_RUN_ID")
        if find_launch().restart_count and launch not in {None, "none"}:
            for checkpoint in found:
                with contextlib.suppress(CheckpointError):
                    if read_brain_file(checkpoint.path).get("launch") == launch:
                        logger.info("The launcher has restarted this run: it goes on from %s.", checkpoint.path)
                        return NEWEST
        if found:
            logger.warning(
                "--resume=%s, and %s holds %d checkpoint(s) of another run: what is kept, and what evaluate finds "
                "best, is chosen among those too. Better give this run an output folder of its own.",
                self.resume,
                checkpointer.checkpoints_dir,
                len(found),
            )
        return self.resume
