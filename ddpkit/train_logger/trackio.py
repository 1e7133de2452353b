"""Logs to Trackio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.train_logger.tracker import TrackerLogger

if TYPE_CHECKING:
    from collections.abc import Mapping


class TrackioLogger(TrackerLogger):
    """Writes statistics to a run of Trackio, on this machine or elsewhere. Needs ``pip install
    trackio``.

    Values have names such as ``train/loss`` and stand at the optimizer step. A run that is started
    again goes on in the same run of Trackio. Steps after its checkpoint are then written twice,
    since Trackio keeps both.

    Args:
        project: of Trackio.
        name: of a new run; None: Trackio makes one up.
        kwargs: further arguments of ``trackio.init``, such as ``space_id``.

    Attributes:
        run: Trackio's run; None before it is opened, and on the other ranks.
        run_id: its name.

    Raises:
        MissingExtraError: Trackio is not installed.

    Ranks: all, or the main process alone; only it writes.

    State: saves ``run_id``.

    Example:
        >>> import importlib.util
        >>> if importlib.util.find_spec("trackio"):
        ...     TrackioLogger("digits").run
    """

    tracker = "Trackio"
    package = "trackio"

    def __init__(self, project: str, name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.require_package()
        self.run: Any = None
        self._init = {"project": project, "name": name, "embed": False, **kwargs}

    def open_run(self) -> str:
        """Begin a run, or go on in the run of the checkpoint."""
        import trackio

        resumed = {} if self.run_id is None else {"name": self.run_id, "resume": "allow"}
        self.run = trackio.init(**{**self._init, **resumed})
        return str(self.run.name)

    def write(self, values: Mapping[str, Any], step: int | None) -> None:
        """Hand values over to Trackio's own thread."""
        self.run.log(dict(values), step=step)
