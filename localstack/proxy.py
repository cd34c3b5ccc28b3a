"""A proxy in front of a server, which loses answers, waits, resets, and answers in the server's place.

It runs in threads of this process, one per connection, and holds no body: bytes are passed on as they come. The `Host`
header stays as it is, because it is signed. TLS ends here; the server is always asked in the clear.

    with Proxy(server.endpoint) as proxy, proxy.rule(DropReply(), method="PUT", path="/log/", times=1) as dropped:
        ...
    assert dropped.hits == 1
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from localstack.faults import Action, Answer, Delay, DropReply, Reset, ResetMidBody, RuleInForce, Seen, Stall, Wanted
from localstack.wire import Body, Head, Wire, WireError, ready

PIECE_BYTES = 65_536
BUFFER_BYTES = 262_144
PIECE_SECONDS = 0.05  # with a limit, a piece is what may pass in so long
CONNECTIONS = 512
HANDSHAKE_SECONDS = 10.0
SILENCE_SECONDS = 300.0  # either side may be silent so long
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0


class Proxy:
    """A proxy on a free port of the loopback, used as a context manager. Thread-safe.

    Args:
        endpoint: The server's URL, `http://host:port`.
        tls: What to be a TLS server with; None: plain HTTP.
        seed: What a rule's `share` is drawn with: the same requests one after the other meet the same fate.

    Attributes:
        endpoint: The proxy's own URL, once it runs.
        bytes_per_second: How fast bodies move, in both directions and all connections together. May be set at any time.
        seen: Every request, in the order in which they came.
    """

    def __init__(self, endpoint: str, *, tls: ssl.SSLContext | None = None, seed: int = 0) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise ValueError("The server's endpoint must be http://host:port.")
        self._server, self.tls, self._seed = (parts.hostname, parts.port), tls, seed
        self.endpoint = ""
        self.bytes_per_second: float | None = None
        self.seen: list[Seen] = []
        self._rules: list[RuleInForce] = []
        self._rules_made = 0
        self._lock = threading.Lock()
        self._turn = 0.0  # when the next byte may pass
        self._ended = threading.Event()
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        self._listener: socket.socket | None = None
        self._threads: set[threading.Thread] = set()
        self._open: set[Wire] = set()

    @contextlib.contextmanager
    def rule(  # noqa: PLR0913  (written-out keywords)
        self,
        action: Action,
        *,
        method: str | None = None,
        path: str | None = None,
        query: str | None = None,
        headers: Mapping[str, str] | None = None,
        times: int | None = None,
        share: float = 1.0,
        seconds: float | None = None,
        after: int = 0,
    ) -> Iterator[RuleInForce]:
        """Do `action` to these requests while the block runs. See `Wanted`. Of two rules the newer one goes first."""
        wanted = Wanted(method, path, query, headers or {}, after=after, times=times, share=share, seconds=seconds)
        with self._lock:
            rule = RuleInForce(action, wanted, seed=f"{self._seed}:{self._rules_made}")
            self._rules_made += 1
            self._rules.append(rule)
        try:
            yield rule
        finally:
            with self._lock:
                self._rules.remove(rule)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS)
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # what lies in one has passed already, for who sent it
            self._listener.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
        self.endpoint = f"http{'s' if self.tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept, self._listener)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts; closing alone does not
            self._listener.close()
        with self._lock:
            for wire in self._open:
                wire.interrupt()
            threads = list(self._threads)
        deadline = time.monotonic() + STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def look_at(self, head: Head) -> Seen:
        """Note a request, and what is to be done to it."""
        method, target, *_ = head.start
        path, _, query = target.partition("?")
        seen = Seen(method, path, query, head.headers, time.monotonic())
        with self._lock:
            self.seen.append(seen)
            seen.action = next((rule.action for rule in reversed(self._rules) if rule.acts_on(seen)), None)
        return seen

    def connect(self) -> Wire:
        """Return a new connection to the server.

        Raises:
            OSError: There is none.
        """
        connection = socket.create_connection(self._server, SILENCE_SECONDS)
        return self.kept(Wire(connection))

    def kept(self, wire: Wire) -> Wire:
        """Remember a connection, so that it ends with the proxy, and return it."""
        with self._lock:
            self._open.add(wire)
        if self._ended.is_set():
            wire.interrupt()
        return wire

    def forget(self, wire: Wire) -> None:
        """Forget a connection that was closed."""
        with self._lock:
            self._open.discard(wire)

    def piece_bytes(self) -> int:
        """Return how many bytes of a body to move at a time."""
        limit = self.bytes_per_second
        return PIECE_BYTES if limit is None else max(1, min(PIECE_BYTES, int(limit * PIECE_SECONDS)))

    def wait_for_turn(self, size: int) -> None:
        """Wait until so many more bytes may pass."""
        limit = self.bytes_per_second
        if limit is None:
            return
        with self._lock:
            now = time.monotonic()
            self._turn = max(self._turn, now) + size / limit
            pause = self._turn - now
        self.pause(pause)

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond the proxy's end.

        Raises:
            WireError: The proxy ends.
        """
        if self._ended.wait(seconds):
            raise WireError("The proxy ends.")

    def _start(self, does: Callable[[socket.socket], None], connection: socket.socket) -> None:
        thread = threading.Thread(target=does, args=(connection,), daemon=True, name="proxy")
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the proxy ends
                return
            if self._places.acquire(blocking=False):
                self._start(self._serve, connection)
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
            connection.settimeout(SILENCE_SECONDS)
            _Connection(self, self.kept(Wire(connection))).run()
        except OSError:  # a client that does not trust us, for example
            connection.close()
        finally:
            self._places.release()
            with self._lock:
                self._threads.discard(threading.current_thread())


class _Connection:
    """A client's connection, and the one to the server that goes with it."""

    def __init__(self, proxy: Proxy, client: Wire) -> None:
        self._proxy, self._client = proxy, client
        self._server: Wire | None = None

    def run(self) -> None:
        """Serve request after request until one side closes, or is closed."""
        try:
            while self._serve_one():
                pass
        except OSError:
            pass  # one side broke: closing both is all that the other one can be told
        finally:
            for wire in (self._client, self._server):
                if wire is not None:
                    self._proxy.forget(wire)
                    wire.close()

    def _serve_one(self) -> bool:
        """Serve the next request; return whether another one may follow on this connection."""
        request = self._client.head()
        if request is None:
            return False
        seen = self._proxy.look_at(request)
        match seen.action:
            case Reset():
                self._client.reset()
                return False
            case Stall():
                self._stall()
                return False
            case Answer() as answer:
                return self._answer(request, seen, answer)
            case Delay(seconds, before=True):
                self._proxy.pause(seconds)
        server = self._server = self._connected()
        reply, sent_whole = self._ask(server, request, seen)
        goes_on = self._pass_on(server, reply, request, seen)
        if not sent_whole:
            self._client.say_goodbye()
        return goes_on and sent_whole

    def _stall(self) -> None:
        while not self._client.has_hung_up():
            self._proxy.pause(POLL_SECONDS)

    def _answer(self, request: Head, seen: Seen, answer: Answer) -> bool:
        waits = "expect" in request.headers
        if not waits:  # else it does not send its body now
            for piece in self._client.body(request.body_of_request, self._proxy.piece_bytes):
                self._proxy.wait_for_turn(len(piece))
        headers = {"Content-Length": str(len(answer.body)), "Connection": "close" if waits else "keep-alive"}
        headers |= answer.headers
        bodiless = answer.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
        if bodiless:
            del headers["Content-Length"]
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {answer.status} {_phrase(answer.status)}\r\n{lines}\r\n".encode("latin-1")
        seen.status = answer.status
        self._client.send(head if bodiless or seen.method == "HEAD" else head + answer.body)
        if waits:
            self._client.say_goodbye()
        return not (waits or request.wants_close)

    def _connected(self) -> Wire:
        if self._server is not None:
            if not self._server.is_readable():
                return self._server
            self._proxy.forget(self._server)  # it closed between two requests
            self._server.close()
        return self._proxy.connect()

    def _ask(self, server: Wire, request: Head, seen: Seen) -> tuple[Head, bool]:
        """Pass the request on; return the answer's head, and whether the whole request was wanted for it."""
        raw = request.raw
        if self._proxy.tls is not None:  # so that the addresses in the server's answers are right
            raw = raw[:-2] + b"X-Forwarded-Proto: https\r\n\r\n"
        server.send(raw)
        body = request.body_of_request
        if "expect" in request.headers:
            # Whichever is first: the server says go on, or no; or the client is tired of waiting, and sends.
            ready([server, self._client], SILENCE_SECONDS)
            reply = self._head_of_reply(server) if server.is_readable() else None
            if reply is not None:
                return reply, False
        pieces = self._client.body(body, self._proxy.piece_bytes)
        if isinstance(seen.action, ResetMidBody) and body != 0:
            self._break_off(server, pieces, seen.action.after_bytes)
        for piece in pieces:
            self._proxy.wait_for_turn(len(piece))
            reply = self._head_of_reply(server) if server.is_readable() else None
            if reply is not None:  # it does not want the rest
                return reply, False
            try:
                server.send(piece)
            except OSError:  # it may have answered before it closed
                return self._next_reply(server), False
        return self._next_reply(server), True

    def _break_off(self, server: Wire, pieces: Iterator[bytes], after_bytes: int) -> None:
        left, held = after_bytes, b""
        for piece in pieces:
            self._proxy.wait_for_turn(len(piece))
            server.send(held)
            if left < len(piece):
                server.send(piece[:left])
                break
            left, held = left - len(piece), piece
        else:
            server.send(held[:-1])
        self._reset_both(server)

    def _next_reply(self, server: Wire) -> Head:
        while (reply := self._head_of_reply(server)) is None:
            pass
        return reply

    def _head_of_reply(self, server: Wire) -> Head | None:
        """Return the answer's head; None if this one was only an interim one, which was passed on."""
        reply = server.head()
        if reply is None:
            raise WireError("The server closed without an answer.")
        if reply.status >= HTTPStatus.OK:
            return reply
        self._client.send(reply.raw)
        return None

    def _pass_on(self, server: Wire, reply: Head, request: Head, seen: Seen) -> bool:
        """Pass the answer on; return whether both connections may be used again."""
        body: Body = reply.body_of_answer_to(seen.method)
        pieces = server.body(body, self._proxy.piece_bytes)
        match seen.action:
            case DropReply():
                for _ in pieces:  # the server has done all that it does
                    pass
                return False
            case Delay(seconds, before=False):
                self._proxy.pause(seconds)
        seen.status = reply.status
        self._client.send(reply.raw)
        left = seen.action.after_bytes if isinstance(seen.action, ResetMidBody) else None
        for piece in pieces:
            self._proxy.wait_for_turn(len(piece))
            self._client.send(piece if left is None else piece[:left])
            if left is not None:
                left -= len(piece)
                if left <= 0:
                    break
        if left is not None:
            self._reset_both(server)
        return not (reply.wants_close or request.wants_close or body == "until closed")

    def _reset_both(self, server: Wire) -> None:
        self._client.reset()
        server.reset()
        raise WireError("Reset, as was asked for.")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
