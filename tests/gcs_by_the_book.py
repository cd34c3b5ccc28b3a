"""Google's resumable uploads as their manual has them, with faults: fake-gcs-server takes a question for the end.

Answers what the engine asks (buckets, objects, listings, uploads of the types `multipart` and `resumable`), and keeps
everything in memory. `refuse` decides about each request before it is looked at; `faults` are for the requests of an
upload, one after the other.
"""

import base64
import hashlib
import json
import math
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c

UNIT = 256 * 1024


class Gcs(ThreadingHTTPServer):
    """The server, used as a context manager.

    Attributes:
        bucket: What it says of its only bucket, or None: there is none.
        layout: What it says of that one's layout.
        objects: The bytes by name.
        refuse: From a method and a path to None, or to (status, reason, headers); bytes instead of a reason are the
            whole body; a status of 0 hangs up.
        faults: The next requests' fates: `lost` (done, not answered), `503`, `410`, `partly` (a unit is taken, not
            answered), `short` (a unit is taken and confirmed), `none` (nothing is taken), `less` (all but a unit is
            forgotten, also what was confirmed), `flipped` (stored with a wrong bit), `early` (published at once),
            `late` (all is taken, and not yet published).
        seen: Method, path and Content-Range of all requests.
        wrong: The Content-Range of chunks that do not follow the last one, or have a size that none may have.
        said_to_be: The credentials of all requests.
        paid_by: The projects that all requests are to be paid by.
        page_keys: How many objects a page of a listing has at most.
        listing: From a query to what is answered, instead of what is there; or None.
        seconds_between_writes: How long after a write the same object takes no other one; the service says: a second.
        too_soon: The names of the objects whose writes were refused for that.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.bucket, self.layout, self.objects, self.sessions = {"locationType": "region"}, None, {}, {}
        self.refuse, self.faults, self.seen, self.wrong = lambda _method, _path: None, [], [], []
        self.said_to_be, self.paid_by = set(), set()
        self.page_keys, self.listing = 1000, None
        self.seconds_between_writes, self.too_soon, self._written = 0.0, [], {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self._thread.join(10)
        self.server_close()

    def takes_writes_of(self, name):
        with self._lock:
            now = time.monotonic()
            if now - self._written.get(name, -math.inf) < self.seconds_between_writes:
                self.too_soon.append(name)
                return False
            self._written[name] = now
            return True

    def store(self, name, body, *, create=False):
        """Store an object, and return whether it was; `create`: unless there is one."""
        with self._lock:
            if create and name in self.objects:
                return False
            self.objects[name] = body
            return True

    def described(self, name):
        body = self.objects[name]
        return {
            "name": name,
            "size": str(len(body)),
            "md5Hash": base64.b64encode(hashlib.md5(body).digest()).decode(),  # noqa: S324  (as the service does)
            "crc32c": base64.b64encode(google_crc32c.value(bytes(body)).to_bytes(4, "big")).decode(),
            "timeCreated": "2026-01-02T03:04:05.678Z",
        }


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _exchange(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        content_range = self.headers.get("Content-Range", "")
        self.server.seen.append((self.command, parts.path, content_range))
        self.server.said_to_be.add(self.headers.get("Authorization"))
        self.server.paid_by.add(self.query.get("userProject"))
        refused = self.server.refuse(self.command, parts.path)
        if refused is not None:
            return self._refused(*refused)
        if parts.path.startswith("/upload/"):
            return self._upload(content_range) if "upload_id" in self.query else self._begin()
        _, _, _, _, bucket, *rest = parts.path.split("/")
        if self.server.bucket is None or bucket != "bucket":
            return self._refused(404, "notFound")
        return self._bucket(rest)

    do_GET = do_PUT = do_POST = do_DELETE = _exchange  # noqa: N815  (http.server's names)

    def _bucket(self, rest):
        if not rest:
            return self._say(200, self.server.bucket)
        if rest == ["storageLayout"] and self.server.layout is not None:
            return self._say(200, self.server.layout)
        if rest == ["o"]:
            return self._list()
        return self._object(unquote(rest[1])) if len(rest) > 1 else self._refused(404, "notFound")

    def _object(self, name):
        if name not in self.server.objects:
            if self.query.get("alt") == "media":
                return self._refused(404, b"No such object: bucket/hush-hush", {"Content-Type": "text/html"})
            return self._refused(404, "notFound")
        if self.command == "DELETE":
            del self.server.objects[name]
            return self._say(204)
        if self.query.get("alt") != "media":
            return self._say(200, self.server.described(name))
        body, wanted = bytes(self.server.objects[name]), self.headers.get("Range")
        if wanted is None:
            return self._say(200, body)
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups())
        return self._say(206, body[first : last + 1]) if first < len(body) else self._refused(416, "invalid")

    def _list(self):
        names = sorted(name for name in list(self.server.objects) if name.startswith(self.query.get("prefix", "")))
        after = [name for name in names if name >= self.query.get("startOffset", "")]
        if self.server.listing is not None:
            return self._say(200, self.server.listing(self.query))
        first = int(self.query.get("pageToken", 0))
        page, more = after[first : first + self.server.page_keys], len(after) > first + self.server.page_keys
        # What is not asked for is not said, nor is what is empty.
        said = {"items": [self.server.described(name) for name in page]} if page else {}
        said |= {"kind": "storage#objects"} if "kind" in self.query.get("fields", "kind") else {}
        return self._say(200, said | ({"nextPageToken": str(first + self.server.page_keys)} if more else {}))

    def _begin(self):
        fault = self._fault()
        if fault == "503":
            return self._refused(503, "backendError", {"Retry-After": "0"})
        if self.query["uploadType"] == "multipart":
            boundary = self.headers["Content-Type"].partition("boundary=")[2].encode()
            _, described, body, _ = self.body.split(b"--" + boundary)
            name = json.loads(described.partition(b"\r\n\r\n")[2])["name"]
            body = body.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
            if not self.server.takes_writes_of(name):
                return self._refused(429, "rateLimitExceeded")
            create = self.query.get("ifGenerationMatch") == "0"
            if not self.server.store(name, _flipped(body) if fault == "flipped" else body, create=create):
                return self._refused(412, "conditionNotMet")
            return self._hang_up() if fault == "lost" else self._say(200, self.server.described(name))
        upload_id = str(len(self.server.sessions))
        self.server.sessions[upload_id] = (json.loads(self.body)["name"], bytearray())
        if fault == "lost":
            return self._hang_up()
        # Another host: who we are must not be told there.
        location = f"http://elsewhere.invalid/upload/b/bucket/o?uploadType=resumable&upload_id={upload_id}"
        return self._say(200, {}, {"Location": location})

    def _upload(self, content_range):
        upload_id, fault = self.query["upload_id"], self._fault() if self.command != "DELETE" else None
        if fault == "410" or upload_id not in self.server.sessions:
            self.server.sessions.pop(upload_id, None)
            return self._refused(410, "gone")
        if self.command == "DELETE":
            del self.server.sessions[upload_id]
            return self._refused(499, "cancelled")
        name, held = self.server.sessions[upload_id]
        if fault == "503":
            return self._refused(503, "backendError", {"Retry-After": "0"})
        first, total = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", content_range).groups()
        if first is not None:
            if int(first) != len(held) or (len(self.body) % UNIT and int(first) + len(self.body) != int(total)):
                self.server.wrong.append(content_range)
            held += self.body[: {"partly": UNIT, "short": UNIT, "none": 0}.get(fault)]
        if (len(held) == int(total) and fault != "late") or fault == "early":
            self.server.objects[name] = _flipped(held) if fault == "flipped" else bytes(held)
        if fault in ("lost", "partly"):
            return self._hang_up()
        if name in self.server.objects:
            return self._say(200, self.server.described(name))
        if fault == "less":
            del held[UNIT:]
        return self._say(308, None, {"Range": f"bytes=0-{len(held) - 1}"} if held else {})

    def _fault(self):
        return self.server.faults.pop(0) if self.server.faults else None

    def _refused(self, status, reason="", headers=None):
        if not status:
            return self._hang_up()
        if isinstance(reason, bytes):
            return self._say(status, reason, headers)
        error = {"code": status, "message": "hush-hush", "errors": [{"reason": reason, "message": "hush-hush"}]}
        return self._say(status, {"error": error}, headers)

    def _hang_up(self):
        self.close_connection = True

    def _say(self, status, said=None, headers=None):
        body = b"" if said is None else said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def _flipped(body):
    return bytes([body[0] ^ 1]) + bytes(body[1:])
