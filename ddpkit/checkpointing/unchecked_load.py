"""A load whose last check is still to be made. It compares the base weights that a file names with
those of the module, and it communicates, because the module may be divided over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpkit.checkpointing.base_weights import other_base
from ddpkit.checkpointing.misfits import MOST_MISFITS
from ddpkit.checkpointing.weights_by_name import Misfits
from ddpkit.errors import CheckpointUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

OTHER_BASE = (
    "{} holds what was trained of this {}, and its base weights by fingerprint. This module does "
    "not fit:\n{}\nLoad the base with which this was trained: before fit, or with --init_from at "
    "every start."
)


@dataclass(frozen=True, eq=False)
class UncheckedLoad:
    """What was loaded into a module, before its base is compared.

    A rank may fail to load. So the ranks tell each other first whether they have loaded, and
    compare then: nobody waits in a collective for a rank that has failed.

    Attributes:
        module: without wrappers.
        base: fingerprints by name, as the file has them.
        misfits: of what was loaded.
        path: of the file.

    Ranks: local, but for :meth:`finish`.
    """

    module: nn.Module
    base: Mapping[str, str]
    misfits: Misfits
    path: Path

    def finish(self) -> None:
        """Compare the base.

        Raises:
            CheckpointError: it is another one, or something does not fit.

        Ranks: all, where parameters are divided; else local.
        """
        misfits = self.misfits | Misfits(based=other_base(self.module, self.base))
        if misfits:
            name = type(self.module).__name__
            lines = "\n".join(f"  {line}" for line in misfits.lines(MOST_MISFITS))
            raise CheckpointUsageError(OTHER_BASE.format(self.path, name, lines))


def finish(loaded: object) -> None:
    """Finish a load, if a hook has left that to its caller.

    Args:
        loaded: what the hook has returned.

    Ranks: as :meth:`UncheckedLoad.finish`.

    Example:
        >>> finish(None)
    """
    if isinstance(loaded, UncheckedLoad):
        loaded.finish()
