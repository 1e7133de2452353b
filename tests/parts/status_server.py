"""A server such as Kubeflow Trainer's controller has, at a port of this machine, with TLS."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

#: Of this server alone, for 127.0.0.1: whoever has the key can listen to these tests.
CERTIFICATE = Path(__file__).with_name("status_server.pem")
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/train/status"


class StatusServer(ThreadingHTTPServer):
    """Keeps what was posted.

    Attributes:
        posts: pairs of headers and documents.
        answers: status of each answer; the last one stays. None: the connection is closed without
            any. ``"never"``: there is no answer before the end of the server.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts = []
        self.answers = [200]
        self.is_over = threading.Event()
        self.news = threading.Condition()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        # each connection shakes hands in its own thread
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )

    @property
    def url(self):
        return f"https://127.0.0.1:{self.server_address[1]}{PATH}"

    def handle_error(self, request, address):
        """Say nothing of a client that does not trust the certificate."""

    def wait_for_posts(self, number):
        with self.news:
            assert self.news.wait_for(lambda: len(self.posts) >= number, timeout=30)

    @property
    def documents(self):
        return [document["trainerStatus"] for _, document in self.posts]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        with server.news:
            server.posts.append(({**self.headers, "path": self.path}, json.loads(body)))
            server.news.notify_all()
            answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        if answer == "never":
            server.is_over.wait()
        if answer in {None, "never"}:
            self.close_connection = True
            return
        text = b"{}" if answer == 200 else b'{"kind": "Status", "message": "Forbidden"}'
        self.send_response(answer)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words):
        """Stay quiet."""


@contextlib.contextmanager
def serving():
    """Run a server in a thread."""
    server = StatusServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()
