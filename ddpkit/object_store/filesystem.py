"""The filesystem of ``fsspec`` behind a URL, and how each kind of store is asked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError, MissingExtraError
from ddpkit.object_store.url import has_password, protocol_of, shown_url, without_passwords

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

NOTHING: Mapping[str, Any] = MappingProxyType({})

PART_BYTES = 8 << 20
MOST_PARTS = 9_000  # S3 has 10000 for a file
PARTS_AT_ONCE = 4

# Without these s3fs and botocore make 25 attempts for one of ours, and the end of a run whose store
# does not answer takes an hour. The second is for a part of a large file.
ATTEMPTS_OF_S3FS = 2
SETTINGS_OF_BOTOCORE = {"retries": {"mode": "standard", "total_max_attempts": 1}}


def _parts_of_s3(size: int) -> dict[str, Any]:
    """Return how a file is cut; s3fs would have 500 MB of it in memory."""
    return {
        "chunksize": max(PART_BYTES, -(-size // MOST_PARTS)),
        "max_concurrency": PARTS_AT_ONCE,
    }


def _parts_of_google(_: int) -> dict[str, Any]:
    return {"chunksize": PART_BYTES}


def _parts_of_azure(_: int) -> dict[str, Any]:
    return {"max_concurrency": PARTS_AT_ONCE}


def _as_it_is(_: int) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Kind:
    """One kind of store.

    Attributes:
        package: that has its filesystem; empty where fsspec itself has it.
        creates: whether an object can be made on the condition that there is none.
        options: given to its filesystem, below those of the user.
        send_options: for a file of so many bytes.
        parts_stay: whether the parts of an upload that did not end stay there, unlisted, and cost.
    """

    package: str = ""
    creates: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    send_options: Callable[[int], dict[str, Any]] = _as_it_is
    parts_stay: bool = False


@functools.cache
def kinds() -> dict[str, Kind]:
    """Return the kinds of stores, by the protocols of their URLs."""
    no_cache = {"use_listings_cache": False}
    for_s3 = {**no_cache, "config_kwargs": SETTINGS_OF_BOTOCORE}
    s3 = Kind("s3fs", True, for_s3, _parts_of_s3, parts_stay=True)
    google = Kind("gcsfs", True, no_cache, _parts_of_google)
    azure = Kind("adlfs", True, no_cache, _parts_of_azure)
    disk = Kind(creates=True, options={"auto_mkdir": True})
    return {
        "s3": s3,
        "s3a": s3,
        "gs": google,
        "gcs": google,
        "az": azure,
        "abfs": azure,
        "abfss": azure,
        "memory": Kind(creates=True),
        "file": disk,
        "local": disk,
    }


def kind_of(url: str) -> Kind:
    """Return how a store is asked; one that is not known is asked for what all have."""
    return kinds().get(protocol_of(url), Kind())


def open_filesystem(
    url: str,
    storage_options: Mapping[str, Any] = NOTHING,
) -> tuple[AbstractFileSystem, str]:
    """Return the filesystem behind a URL, and the folder in it. Asks the store nothing yet.

    Args:
        url: of the folder.
        storage_options: for the filesystem; credentials are found as its package finds them.

    Raises:
        MissingExtraError: fsspec, or the package of this kind of store, is not installed.
        ConfigError: no filesystem has this protocol, or refuses the options; the URL names no
            bucket, or holds a password.
    """
    _require_folder(url)
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError(
            f"{shown_url(url)} needs the package fsspec, which is not installed: run "
            "`pip install fsspec`."
        ) from error
    kind = kind_of(url)
    try:
        filesystem, folder = fsspec.core.url_to_fs(url, **{**kind.options, **storage_options})
    except ImportError as error:
        raise MissingExtraError(
            f"{shown_url(url)} needs a package that is not installed or cannot be imported "
            f"({error}): run `pip install {kind.package or 'fsspec'}`."
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{shown_url(url)} cannot be opened: {without_passwords(str(error))}. "
            "Give a folder of a store that fsspec knows, such as s3://BUCKET/FOLDER, "
            "gs://BUCKET/FOLDER or az://CONTAINER/FOLDER."
        ) from error
    if kind.package == "s3fs":
        filesystem.retries = ATTEMPTS_OF_S3FS
    return filesystem, str(folder).rstrip("/")


def _require_folder(url: str) -> None:
    """Refuse a URL without a bucket, and one with a password where credentials come otherwise."""
    kind = kind_of(url)
    rest = url.partition("://")[2]
    if not rest.strip("/") or (kind.package and rest.startswith("/")):
        raise ConfigError(
            f"{without_passwords(url)!r} names no bucket, perhaps because a variable in it is not "
            "set. Give a folder of a store, such as s3://BUCKET/FOLDER."
        )
    if kind.package and has_password(url):
        raise ConfigError(
            f"the URL of {shown_url(url)} holds a user and a password, which would stand in logs "
            "and in the list of processes. Give the URL without them, and the credentials as "
            f"{kind.package} finds them, such as by environment variables."
        )
