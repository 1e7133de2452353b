"""One owner of repetitions and of limits: what lies below a request does not multiply them."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ddpkit.errors import ObjectStoreError
from ddpkit.object_store import Objects, limits, repetition
from ddpkit.object_store.filesystem import ATTEMPTS_OF_S3FS
from tests.s3_server import needs_s3

pytestmark = needs_s3

BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@pytest.fixture
def busy_store():
    """The address of a server that is always busy, and the requests that it has got."""
    requests = []

    class Busy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which says whether a body is wanted

        def do_PUT(self):
            requests.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(503)
            self.send_header("Content-Length", str(len(BUSY)))
            self.end_headers()
            self.wfile.write(BUSY)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", requests
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_store_that_is_busy_is_asked_as_often_as_is_said(busy_store, monkeypatch):
    endpoint, requests = busy_store
    monkeypatch.setattr(repetition, "FIRST_PAUSE_SECONDS", 0.0)
    options = {"endpoint_url": endpoint, "key": "key", "secret": "secret"}
    objects = Objects("s3://bucket/run", options)
    with pytest.raises(ObjectStoreError):
        objects.write("log.txt", b"1")
    assert len(requests) == repetition.ATTEMPTS * ATTEMPTS_OF_S3FS


@pytest.fixture
def silent_store():
    """The objects of a server that takes connections and answers nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = {"endpoint_url": endpoint, "key": "key", "secret": "secret"}
        yield Objects("s3://silent/run", options)


REQUESTS = {
    "write": lambda objects, _: objects.write("log.txt", b"1"),
    "create": lambda objects, _: objects.create("lock", b"1"),
    "read": lambda objects, _: objects.read("log.txt"),
    "read_range": lambda objects, _: objects.read_range("model", 0, 8),
    "size": lambda objects, _: objects.size("model"),
    "sizes": lambda objects, _: objects.sizes(),
    "delete": lambda objects, _: objects.delete("model"),
    "unfinished": lambda objects, _: objects.unfinished(),
    "abort": lambda objects, _: objects.abort("model", "upload"),
    "send": lambda objects, path: objects.send(path, "model"),
}


@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_store_that_never_answers_ends_no_request_late(
    silent_store, request_name, monkeypatch, tmp_path
):
    monkeypatch.setattr(repetition, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(limits, "ANSWER_SECONDS", 0.05)
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    with pytest.raises(ObjectStoreError, match="the store has not answered in"):
        REQUESTS[request_name](silent_store, file)


def test_a_large_file_has_more_time_than_a_small_one():
    assert limits.longest_seconds(10 << 30) > 10 * limits.longest_seconds(1 << 20)
