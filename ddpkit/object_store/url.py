"""URLs of object stores: which text is one, and how it is shown."""

from __future__ import annotations

import re

_PROTOCOL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://")
_PASSWORD = re.compile(r"//[^/@:]*:[^/@]*@")


def is_url(text: object) -> bool:
    """Say whether a text names a folder of an object store, and not one of a disk.

    Args:
        text: what was given as a folder; paths and None are no URLs.

    Ranks: local.

    Example:
        >>> is_url("s3://bucket/run"), is_url("results/1234"), is_url(None)
        (True, False, False)
    """
    return isinstance(text, str) and _PROTOCOL.match(text) is not None


def protocol_of(url: str) -> str:
    """Return what stands before ``://``; empty where the text is no URL.

    Example:
        >>> protocol_of("s3://bucket/run")
        's3'
    """
    found = _PROTOCOL.match(url)
    return found["protocol"].lower() if found else ""


def shown_url(url: str) -> str:
    """Return a URL as it may stand in a log: without a password.

    Example:
        >>> shown_url("ftp://me:secret@host/run")
        'ftp://host/run'
    """
    return _PASSWORD.sub("//", url).rstrip("/")


def joined(url: str, *names: str) -> str:
    """Return the URL of something in a folder.

    Example:
        >>> joined("s3://bucket/run/", "save")
        's3://bucket/run/save'
    """
    return "/".join([url.rstrip("/"), *names])
