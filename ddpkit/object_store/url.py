"""URLs of object stores: which texts are URLs, and how a URL is shown."""

from __future__ import annotations

import re

_PROTOCOL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://")
# to the last "@": a password may hold some, and slashes
_PASSWORD = re.compile(r"//[^/@:\s]*:.*@", re.DOTALL)
_PASSWORD_IN_TEXT = re.compile(r"//[^/@:\s]*:\S*@")


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


def has_password(url: str) -> bool:
    """Say whether a URL holds a password.

    Example:
        >>> has_password("s3://key:secret@bucket/run"), has_password("abfss://box@account/run")
        (True, False)
    """
    return _PASSWORD.search(url) is not None


def without_passwords(text: str) -> str:
    """Return a text as it may stand in a log: without the passwords of URLs in it.

    Example:
        >>> without_passwords("cannot open s3://key:se/c@ret@bucket/run now")
        'cannot open s3://bucket/run now'
    """
    return _PASSWORD_IN_TEXT.sub("//", text)


def joined(url: str, *names: str) -> str:
    """Return the URL of something in a folder.

    Example:
        >>> joined("s3://bucket/run/", "save")
        's3://bucket/run/save'
    """
    return "/".join([url.rstrip("/"), *names])
