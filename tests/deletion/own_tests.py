"""A plugin of pytest for the delete test: leaves out the own tests of what was deleted.

It is told by the environment, so that processes of pytest-xdist know it too.
"""

from __future__ import annotations

import os
from pathlib import Path

from .features import Feature, features, goes_with

#: The path of the file that was deleted, from the root.
VARIABLE = "DDPKIT_TEST_DELETED"


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """Leave whole files out before they are imported: such a file may import what is deleted."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    is_gone = any(path == feature.path or feature.owns_file(path) for feature in _deleted())
    return True if is_gone else None


def pytest_collection_modifyitems(config, items) -> None:
    deleted = _deleted()
    own = [item for item in items if any(feature.owns_test(item) for feature in deleted)]
    if own:
        left_out = {id(item) for item in own}
        items[:] = [item for item in items if id(item) not in left_out]
        config.hook.pytest_deselected(items=own)


def _deleted() -> list[Feature]:
    every = features()
    chosen = next(feature for feature in every if feature.path == os.environ[VARIABLE])
    return goes_with(chosen, every)
