"""HTTP/1.1 as it is on the wire: heads, and bodies piece by piece, all bytes as they came."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

MAX_HEAD_BYTES = 65_536
RESET = struct.pack("ii", 1, 0)  # linger for no second: closing sends RST
LINGER_SECONDS = 2.0

Body = int | Literal["chunked", "until closed"]


class WireError(ConnectionError):
    """The other end closed in the middle, or does not speak HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class Head:
    """The start line and the headers of one message.

    Attributes:
        raw: The bytes as they came, with the empty line.
        start: The words of the start line: three of a request, two or three of an answer.
        headers: By lower-case name; of a name that comes twice the last.
    """

    raw: bytes
    start: tuple[str, ...]
    headers: dict[str, str]

    @classmethod
    def parsed(cls, raw: bytes) -> Head:
        """Return the head that `raw` holds.

        Raises:
            WireError: It is none.
        """
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        start = tuple(first.split(" ", 2))
        if len(start) < 2:  # noqa: PLR2004  (`HTTP/1.1 200`)
            raise WireError("This is no HTTP.")
        return cls(raw, start, {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)})

    @property
    def status(self) -> int:
        """Of an answer: its status."""
        return int(self.start[1])

    @property
    def wants_close(self) -> bool:
        """Whether the connection ends with this message."""
        tokens = {token.strip().lower() for token in self.headers.get("connection", "").split(",")}
        old = "HTTP/1.0" in (self.start[0], self.start[-1])
        return "close" in tokens or (old and "keep-alive" not in tokens)

    @property
    def body_of_request(self) -> Body:
        """How long the body of this request is."""
        return self._announced(otherwise=0)

    def body_of_answer_to(self, method: str) -> Body:
        """How long the body of this answer is, given what was asked."""
        if method == "HEAD" or self.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            return 0
        return self._announced(otherwise="until closed")

    def _announced(self, *, otherwise: Body) -> Body:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return "chunked"
        length = self.headers.get("content-length")
        if length is None:
            return otherwise
        if not length.isdecimal():
            raise WireError("This is no Content-Length.")
        return int(length)


class Wire:
    """One connection, read through a buffer."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def head(self) -> Head | None:
        """Return the next message's head, or None if the other end closed before it.

        Raises:
            OSError: It broke, or closed in the middle.
        """
        while b"\r\n\r\n" not in self._buffer:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise WireError("The head is too long.")
            if not self._fill():
                if not self._buffer.strip():
                    return None
                raise WireError("The other end closed in the middle of a head.")
        raw, _, self._buffer = self._buffer.lstrip(b"\r\n").partition(b"\r\n\r\n")
        return Head.parsed(raw + b"\r\n\r\n")

    def body(self, body: Body, piece_bytes: Callable[[], int]) -> Iterator[bytes]:
        """Yield a body as it comes, with the framing of its chunks, at most `piece_bytes` at a time.

        Raises:
            OSError: It broke, or closed in the middle.
        """
        if body == "chunked":
            while size := _chunk_bytes(line := self._line()):
                yield line
                yield from self._exactly(size + 2, piece_bytes)  # and the end of its line
            last = [line]
            while last[-1] != b"\r\n":  # what may trail the last chunk
                last.append(self._line())
            yield b"".join(last)
        elif body == "until closed":
            while piece := self._some(piece_bytes()):
                yield piece
        else:
            yield from self._exactly(body, piece_bytes)

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        self._socket.sendall(data)

    def is_readable(self, seconds: float = 0.0) -> bool:
        """Return whether there is something to read, or the end, within so many seconds."""
        if self._buffer or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return True
        return bool(ready([self], seconds))

    def has_hung_up(self) -> bool:
        """Return whether the other end has closed, though what it sent before lies here unread."""
        poll = select.poll()
        poll.register(self.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
        return bool(poll.poll(0))

    def fileno(self) -> int:
        """Return the socket's number."""
        return self._socket.fileno()

    def reset(self) -> None:
        """Close at once with a TCP RST; what is still on its way is thrown away."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.close()

    def say_goodbye(self) -> None:
        """Close such that what was sent arrives, though the other end still sends.

        Closing with unread bytes would be a reset, which makes the other end forget what it has not read.
        """
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while ready([self], LINGER_SECONDS) and self._socket.recv(MAX_HEAD_BYTES):
                pass
        self.close()

    def interrupt(self) -> None:
        """End what another thread does with this connection: it sees the end, or an error."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not TLS's own, which is not for two threads

    def close(self) -> None:
        """Close without a word."""
        self._socket.close()

    def _fill(self) -> bool:
        data = self._socket.recv(MAX_HEAD_BYTES)
        self._buffer += data
        return bool(data)

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            if len(self._buffer) > MAX_HEAD_BYTES or not self._fill():
                raise WireError("The other end closed in the middle of a chunk's head.")
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line + b"\r\n"

    def _exactly(self, size: int, piece_bytes: Callable[[], int]) -> Iterator[bytes]:
        while size:
            piece = self._some(min(size, piece_bytes()))
            if not piece:
                raise WireError("The other end closed in the middle of a body.")
            size -= len(piece)
            yield piece

    def _some(self, at_most: int) -> bytes:
        if not self._buffer:
            return self._socket.recv(at_most)
        piece, self._buffer = self._buffer[:at_most], self._buffer[at_most:]
        return piece


def ready(wires: list[Wire], seconds: float) -> list[Wire]:
    """Return those of `wires` whose sockets have something to read, waiting for one of them so long."""
    poll = select.poll()
    for wire in wires:
        poll.register(wire.fileno(), select.POLLIN)
    numbers = {number for number, _ in poll.poll(seconds * 1000)}
    return [wire for wire in wires if wire.fileno() in numbers]


def _chunk_bytes(line: bytes) -> int:
    try:
        return int(line.split(b";")[0], 16)
    except ValueError as error:
        raise WireError("This is no chunk.") from error
