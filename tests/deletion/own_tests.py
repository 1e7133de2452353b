"""A plugin of pytest for the delete test: leaves out the own tests of what was deleted.

It is told by the environment, so that processes of pytest-xdist know it too.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from .features import Feature, features, goes_with

#: The paths of the files that were deleted, from the root.
DELETED = "DDPKIT_TEST_DELETED"
#: Where only tests run that are of these features, and of no other: their paths.
OWNERS = "DDPKIT_TEST_OWNERS"
#: Where no test runs, but is listed with the features that it is of: a file.
LISTED = "DDPKIT_TEST_LISTED"


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """Leave whole files out before they are imported: such a file may import what is deleted."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    is_gone = any(path == feature.path or feature.owns_file(path) for feature in _deleted())
    return True if is_gone else None


@pytest.hookimpl(trylast=True)  # once the marks have left out what does not run
def pytest_collection_modifyitems(config, items) -> None:
    if LISTED in os.environ:
        Path(os.environ[LISTED]).write_text(json.dumps(_listed(config, items)), encoding="utf-8")
        return
    if OWNERS in os.environ:
        wanted = tuple(filter(None, os.environ[OWNERS].split(os.pathsep)))
        others = [item for item in items if owners_of(item, _file_of(item, config)) != wanted]
    else:
        deleted = _deleted()
        others = [item for item in items if any(feature.owns_test(item) for feature in deleted)]
    if others:
        left_out = {id(item) for item in others}
        items[:] = [item for item in items if id(item) not in left_out]
        config.hook.pytest_deselected(items=others)


def owners_of(item, path: str) -> tuple[str, ...]:
    """Return the features that a test is left out for, in the order of the table.

    Args:
        item: as pytest has collected it.
        path: of its file, from the root.
    """
    every = features()
    own = {
        feature.path
        for feature in every
        if path == feature.path or feature.owns_file(path) or feature.owns_test(item)
    }
    return tuple(
        feature.path
        for feature in every
        if own & {other.path for other in goes_with(feature, every)}
    )


def _listed(config, items) -> list[tuple[tuple[str, ...], list[str], int]]:
    """The features, the files and the number of their tests."""
    found: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for item in items:
        path = _file_of(item, config)
        found[owners_of(item, path)][path] += 1
    return [(owners, sorted(files), files.total()) for owners, files in found.items()]


def _file_of(item, config) -> str:
    return item.path.relative_to(config.rootpath).as_posix()


def _deleted() -> list[Feature]:
    every = features()
    gone = set(os.environ.get(DELETED, "").split(os.pathsep))
    chosen = [feature for feature in every if feature.path in gone]
    return list({other.path: other for one in chosen for other in goes_with(one, every)}.values())
