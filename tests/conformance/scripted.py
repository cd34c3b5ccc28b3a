"""An S3 server that answers as it is told, and what is asked of it."""

import contextlib
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.units import MIB

HUSH = "hush-hush-this-is-the-secret"
BUCKET = "s3://bucket/run"
# Nothing is tried more often than once again, and nothing takes long.
QUICK = RetryOptions(
    attempts=2, first_pause_seconds=0.01, longest_pause_seconds=0.05, deadline_seconds=5.0, stall_timeout_seconds=5.0
)
PARTS = TransferOptions(part_bytes=5 * MIB, retry=QUICK)
THERE = (
    200,
    "",
    ("Content-Length", str(6 * MIB)),
    ("ETag", '"e-2"'),
    ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT"),
)
COMPLETED = (200, "<CompleteMultipartUploadResult><ETag>e-2</ETag></CompleteMultipartUploadResult>")
CALLS = {
    "get": lambda store: store.get("a", max_bytes=10),
    "get_range": lambda store: store.get_range("a", start=0, length=5),
    "list": lambda store: list(store.list("")),
    "create": lambda store: store.put("a", b"x", mode=PutMode.CREATE),
    "put": lambda store: store.put("a", b"x"),
    "delete": lambda store: store.delete("a"),
}


def opened(url=BUCKET, *, transfer=PARTS, **rest):
    """Return the store at a URL, with little patience."""
    return open_store(url, transfer=transfer, **rest)


class Scripted(ThreadingHTTPServer):
    """A server that answers as it is told: `(status, error code)`, or None to hang up without an answer.

    With a status of success, or a header `Raw`, the text is the body; pieces of bytes are sent as they come.
    """

    daemon_threads = True

    def __init__(self, *, tls=None):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.script, self.seen, self.bodies = lambda _method, _path, _turn: (404, "NoSuchKey"), [], []
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.server_address[1]}"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def options(self):
        return {"key": "known", "secret": HUSH, "endpoint_url": self.endpoint}

    @contextlib.contextmanager
    def serving(self):
        with self:
            thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield self
            finally:
                self.shutdown()
                thread.join(10)

    def handle_error(self, *_):
        pass  # a client that goes away in the middle is what is tested


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self):
        self.server.bodies.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        turn = len(self.server.seen)
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        said = self.server.script(self.command, self.path, turn)
        if said is None:
            self.close_connection = True
            return
        status, text, *headers = said
        plain = status < 300 or ("Raw", "") in headers
        body = text if plain else f"<Error><Code>{text}</Code><Message>{HUSH}</Message></Error>"
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name == "Content-Length" for name, _ in headers):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for piece in [body.encode()] if isinstance(body, str) else body:
                self.wfile.write(piece if self.command != "HEAD" else b"")
        self.close_connection = not isinstance(body, str)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815  (http.server's names)

    def log_message(self, *_):
        pass


def answers(*said):
    return lambda _method, _path, _turn: said


def md5(body):
    """Return what S3 calls a body that was put in one request."""
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def multipart(method, path, completes):
    """Answer like a server that takes parts; `completes` says what a completion is told."""
    if method == "POST" and "uploads" in path:
        return 200, "<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>"
    if method == "PUT":
        return 200, "", ("ETag", '"part"')
    if method == "DELETE":
        return 204, ""
    return completes(method)


def sized(size):
    """Answer like a server that holds an object of so many bytes."""
    return (*THERE[:2], ("Content-Length", str(size)), *THERE[3:])


def upload(store, size):
    with store.open_upload("shard", size=size) as begun:
        begun.write(bytes(size))
        return begun.complete()
