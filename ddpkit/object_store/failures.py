"""What an error of a store means: whether it may pass, and what to say of it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from http import HTTPStatus

from ddpkit.errors import ObjectStoreError, ObjectStoreUsageError
from ddpkit.object_store.filesystem import kind_of
from ddpkit.object_store.url import protocol_of, shown_url, without_passwords

# Whose errors are about requests. Those of Python itself about arguments are mistakes of code.
_PACKAGES = frozenset(
    {"botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "requests"}
)
_LASTING = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)
_LASTING_NUMBERS = {
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.ENOSPC,
    errno.EROFS,
    errno.EDQUOT,
}
_PASSING_CODES = frozenset({"BadDigest", "IncompleteBody", "ConditionalRequestConflict"})
_PASSING_STATUSES = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS}
_NO_CREDENTIALS = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "SSOTokenLoadError",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
    }
)
_UNREACHABLE = frozenset(
    {
        "EndpointConnectionError",
        "ConnectTimeoutError",
        "ClientConnectorError",
        "ClientConnectorDNSError",
        "ServiceRequestError",
        "NoRegionError",
    }
)
_CREDENTIALS_OF = {
    "s3fs": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, run `aws configure`, or give the "
    "machine a role",
    "gcsfs": "Set GOOGLE_APPLICATION_CREDENTIALS, run `gcloud auth application-default login`, or "
    "give the machine a service account",
    "adlfs": "Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY",
}


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error and those that it comes from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_of_store(error: BaseException) -> bool:
    """Say whether an error is about a request, and no mistake of this code."""
    package = type(error).__module__.partition(".")[0]
    # gcsfs has no type of its own for a request that is refused as a bad one
    is_bad_request = isinstance(error, ValueError) and str(error).startswith("Bad Request:")
    is_system = isinstance(error, (OSError, EOFError, TimeoutError))
    return is_system or is_bad_request or package in _PACKAGES


def may_pass(error: BaseException) -> bool:
    """Say whether the same request may succeed later."""
    if codes_of(error) & _PASSING_CODES:
        return True
    if isinstance(error, (*_LASTING, ValueError)) or is_refused(error) or lacks_credentials(error):
        return False
    status = _status_of(error)
    is_lasting = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
    if is_lasting and status not in _PASSING_STATUSES:
        return False
    return is_of_store(error) and getattr(error, "errno", None) not in _LASTING_NUMBERS


def is_refused(error: BaseException) -> bool:
    """Say whether a permission is missing; gcsfs has no type of its own for it."""
    return isinstance(error, PermissionError) or str(error).startswith("Forbidden:")


def _status_of(error: BaseException) -> int:
    """Return the status of an answer, as the packages of Google and Azure note it; 0 if unknown."""
    for name in ("code", "status_code"):
        value = getattr(error, name, None)
        if str(value).isdecimal():
            return int(str(value))
    return 0


def codes_of(error: BaseException) -> set[str]:
    """Return what S3 calls an error and those that it comes from."""
    responses = [getattr(each, "response", None) for each in chain(error)]
    return {
        str(response.get("Error", {}).get("Code"))
        for response in responses
        if isinstance(response, dict)
    }


def lacks_credentials(error: BaseException) -> bool:
    """Say whether no credentials were found."""
    names = {type(each).__name__ for each in chain(error)}
    # botocore has several of the kind: a part of its files of settings that is not there
    not_found = any(name.endswith("NotFound") for name in names) and _is_of_botocore(error)
    return not_found or bool(names & _NO_CREDENTIALS)


def _is_of_botocore(error: BaseException) -> bool:
    return type(error).__module__.startswith("botocore")


def explained(url: str, doing: str, error: BaseException) -> ObjectStoreError:
    """Say why a request failed, and what to do.

    Args:
        url: of the folder.
        doing: what was tried, such as ``"write save/CKPT+a/manifest.json"``.
        error: how it ended.

    Returns:
        The error to raise: an :class:`ObjectStoreUsageError` where something has to be set up.
    """
    reason = first_line(error)
    start = f"{shown_url(url)}: cannot {doing}"
    advice = _advice(url, error)
    if advice:
        return ObjectStoreUsageError(f"{start}: {reason}. {advice}.")
    return ObjectStoreError(f"{start}: {reason}.")


def first_line(error: BaseException) -> str:
    """Return an error in one line, for messages."""
    text = without_passwords(" ".join(str(error).split())) or "no reason given"
    return f"{type(error).__name__}: {text[:300]}".rstrip(".")


def _advice(url: str, error: BaseException) -> str:
    names = {type(each).__name__ for each in chain(error)}
    if lacks_credentials(error):
        return _CREDENTIALS_OF.get(
            kind_of(url).package, "Give it credentials, as its package reads them"
        )
    if isinstance(error, FileNotFoundError) or _status_of(error) == HTTPStatus.NOT_FOUND:
        return "Its bucket must be there: make it, or correct the URL"
    if is_refused(error):
        return "The credentials that were found must allow to list, read, write and delete there"
    if names & _UNREACHABLE:
        return (
            f"No {protocol_of(url)} server answers: see whether this machine has a network, and "
            "which endpoint is set (such as AWS_ENDPOINT_URL)"
        )
    return ""
