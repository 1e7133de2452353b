"""Errors of stores: which are worth another attempt, and what is said of the others."""

from __future__ import annotations

import errno
import sys

import pytest

from ddpkit.errors import ConfigError, MissingExtraError, ObjectStoreError, ObjectStoreUsageError
from ddpkit.object_store import Objects, StoreLock, is_url, repetition
from ddpkit.object_store.failures import explained, may_pass
from tests.s3_server import needs_s3


def of_package(name, package, **attributes):
    """An error as a package has it that need not be installed."""
    kind = type(name, (Exception,), {"__module__": f"{package}.exceptions"})
    error = kind("words of the store")
    vars(error).update(attributes)
    return error


def from_s3(code, kind=OSError, number=errno.EINVAL):
    error = kind(number, "words of the store")
    response = {"Error": {"Code": code}}
    error.__cause__ = of_package("ClientError", "botocore", response=response)
    return error


PASSING = [
    OSError(errno.EBUSY, "SlowDown"),
    OSError(121, "InternalError"),
    ConnectionResetError(),
    TimeoutError(),
    EOFError("3 bytes instead of 4"),
    of_package("EndpointConnectionError", "botocore"),
    of_package("ClientPayloadError", "aiohttp"),
    of_package("HttpError", "gcsfs", code=503),
    of_package("HttpError", "gcsfs", code=429),
    of_package("HttpResponseError", "azure.core", status_code=500),
    from_s3("BadDigest"),
]
LASTING = [
    PermissionError("AccessDenied"),
    FileNotFoundError("NoSuchBucket"),
    OSError(errno.EINVAL, "InvalidArgument"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError("Forbidden: b/o/.lock\nno permission"),
    ValueError("Bad Request: b/o\ninvalid"),
    of_package("NoCredentialsError", "botocore"),
    of_package("ProfileNotFound", "botocore"),
    of_package("HttpError", "gcsfs", code=401),
    of_package("ResourceNotFoundError", "azure.core", status_code=404),
    KeyError("a mistake of code"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_these_may_pass(error):
    assert may_pass(error)


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_these_last(error):
    assert not may_pass(error)


@pytest.mark.parametrize(
    ("url", "error", "advice"),
    [
        ("s3://b/a", of_package("NoCredentialsError", "botocore"), "Set AWS_ACCESS_KEY_ID"),
        ("gs://b/a", of_package("DefaultCredentialsError", "google.auth"), "GOOGLE_APPLICATION"),
        ("az://b/a", of_package("ClientAuthenticationError", "azure.core"), "Set AZURE_STORAGE"),
        ("s3://b/a", FileNotFoundError("NoSuchBucket"), "Its bucket must be there"),
        ("az://b/a", of_package("NotFound", "azure.core", status_code=404), "Its bucket must be"),
        ("s3://b/a", PermissionError("AccessDenied"), "must allow to list, read, write and delete"),
        ("gs://b/a", OSError("Forbidden: b/a"), "must allow to list, read, write and delete"),
        ("s3://b/a", of_package("EndpointConnectionError", "botocore"), "No s3 server answers"),
    ],
)
def test_what_has_to_be_set_up_is_said(url, error, advice):
    said = explained(url, "create .lock", error)
    assert isinstance(said, ObjectStoreUsageError)
    assert isinstance(said, ConfigError)
    assert str(said).startswith(f"{url}: cannot create .lock: ")
    assert advice in str(said)


def test_what_passes_is_no_mistake_of_the_user():
    said = explained("s3://b/a", "read x", OSError(errno.EBUSY, "SlowDown"))
    assert isinstance(said, ObjectStoreError)
    assert not isinstance(said, ConfigError)


def test_a_mistake_of_code_comes_out_as_it_is():
    with pytest.raises(KeyError):
        repetition.repeated(lambda: {}["a"], "s3://b/a", "read x")


def test_pauses_get_longer_and_end():
    pauses = [repetition.pause_after(attempt) for attempt in range(1, 20)]
    assert 0.25 <= pauses[0] <= 0.5
    assert max(pauses) <= repetition.LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/run", True),
        ("file:///tmp/run", True),
        ("results/1234", False),
        ("C:/results", False),
        ("a/s3://b", False),
        (None, False),
        ({}, False),
    ],
)
def test_which_text_is_a_url(text, expected):
    assert is_url(text) is expected


def test_a_password_is_not_shown():
    assert Objects("memory://me:secret@place/run").url == "memory://place/run"


def test_a_protocol_that_nobody_knows():
    with pytest.raises(ConfigError, match=r"s4://b/run cannot be opened: .*Give a folder of a sto"):
        Objects("s4://b/run")


def test_a_package_that_is_missing(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] in {"s3fs", "gcsfs"}:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtraError, match=r"gs://b/run needs .*`pip install gcsfs`"):
        Objects("gs://b/run")


def test_a_store_that_does_not_exclude_is_told(monkeypatch, caplog):
    monkeypatch.setattr(Objects, "create", lambda self, *args: self.write(*args))
    lock = StoreLock("memory://careless/run")
    with lock.hold():
        assert not lock.excludes
        assert "Nothing stops a second run." in caplog.text


class TestOnS3:
    """What a real server answers."""

    pytestmark = needs_s3

    def test_no_such_bucket(self, s3):
        with pytest.raises(ObjectStoreUsageError, match="Its bucket must be there"):
            StoreLock("s3://no-such-bucket/run", storage_options=s3.options).acquire()
        with pytest.raises(ObjectStoreUsageError, match="Its bucket must be there"):
            Objects("s3://no-such-bucket/run", s3.options).sizes()

    def test_nobody_answers(self, monkeypatch):
        monkeypatch.setattr(repetition, "FIRST_PAUSE_SECONDS", 0.01)
        options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "not-shown"}
        with pytest.raises(ObjectStoreUsageError, match="No s3 server answers") as raised:
            StoreLock("s3://bucket/run", storage_options=options).acquire()
        assert "not-shown" not in str(raised.value)

    def test_no_credentials(self, s3, monkeypatch, tmp_path):
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        options = {"endpoint_url": s3.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
        with pytest.raises(ObjectStoreUsageError, match="Set AWS_ACCESS_KEY_ID and AWS_SECRET"):
            StoreLock("s3://bucket/run", storage_options=options).acquire()

    def test_one_of_two_creates(self, s3):
        objects = Objects(s3.folder(), s3.options)
        objects.create("a", b"1")
        with pytest.raises(FileExistsError):
            objects.create("a", b"2")
        assert objects.read("a") == b"1"

    def test_a_file_in_many_parts(self, s3, tmp_path):
        objects = Objects(s3.folder(), s3.options)
        data = bytes(range(256)) * (80 << 10)  # 20 MB: three parts
        (tmp_path / "a").write_bytes(data)
        objects.send(tmp_path / "a", "deep/a+b")
        assert objects.size("deep/a+b") == len(data)
        assert objects.read_range("deep/a+b", 9 << 20, 17 << 20) == data[9 << 20 : 17 << 20]
        assert objects.sizes("deep") == objects.sizes() == {"deep/a+b": len(data)}

    def test_parts_of_an_upload_that_did_not_end(self, s3):
        objects = Objects(s3.folder(), s3.options)
        bucket, key, _ = objects._filesystem.split_path(objects._path("CKPT+a/model.ckpt"))
        objects._filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        ((name, upload),) = objects.unfinished()
        assert name == "CKPT+a/model.ckpt"
        objects.abort(name, upload)
        objects.abort(name, upload)
        assert objects.unfinished() == []
