"""A real S3 server for tests: that of moto, a process of its own on a free port."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass

import pytest

START_SECONDS = 120
NEEDED = ("s3fs", "moto", "flask", "flask_cors")
MISSING = [package for package in NEEDED if importlib.util.find_spec(package) is None]

needs_s3 = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"{', '.join(MISSING)}: in the extra `ecosystem`, pip install -e '.[ecosystem]'",
    ),
]


@dataclass(frozen=True)
class S3Server:
    """A server that is up, with a bucket.

    Attributes:
        endpoint: where it listens.
        bucket: that is there.
    """

    endpoint: str
    bucket: str = "bucket"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach it, as users set it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "not-so-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def options(self) -> dict[str, str]:
        """The same as ``storage_options``."""
        return {"endpoint_url": self.endpoint, "key": "key", "secret": "not-so-secret"}

    def folder(self) -> str:
        """The URL of a new folder."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(url: str, method: str) -> bool:
    request = urllib.request.Request(url, method=method)
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def s3_server():
    """Start a server with a bucket, and end it."""
    port = _free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
        server = S3Server(f"http://127.0.0.1:{port}")
        try:
            end = time.monotonic() + START_SECONDS
            while not _answers(f"{server.endpoint}/{server.bucket}", "PUT"):
                if process.poll() is not None or time.monotonic() > end:
                    output.seek(0)
                    raise AssertionError(f"the S3 server did not start: {output.read().decode()}")
                time.sleep(0.1)
            yield server
        finally:
            process.kill()
            process.wait()
