"""A process's way to Google Cloud Storage: gcsfs's credentials, endpoint and session, and each request sent once.

gcsfs's own calls try six times, lose the server's name for an error, and ask about the bucket by gRPC first, which
costs a minute where nobody answers. So its session is used, and none of its calls.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from gcsfs.core import GCSFileSystem
from google.oauth2.credentials import Credentials
from yarl import URL

from ckptstore.errors import CkptStoreError
from ckptstore.objectstore import loop
from ckptstore.objectstore.answers import Request, error_for
from ckptstore.objectstore.gcs_errors import (
    answer_of_credentials,
    answer_of_failure,
    answer_of_foreign,
    answer_of_reply,
    is_foreign,
)
from ckptstore.objectstore.gcs_options import METHODS, GcsOptions
from ckptstore.units import KIB, MIB

CONNECT_SECONDS = 5.0
LONGEST_SECONDS = 24 * 3600.0
MAX_REFUSAL_BYTES = 64 * KIB
_SLICE_BYTES = 256 * KIB
_OK, _NOT_FOUND = (200, 201, 204, 206), 404
ABSENT = "notFound"
"""What the server calls what is not there, or not any longer."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request.

    Args:
        method: `GET`, say. `POST` is sent once; aiohttp may send others again if an idle connection turns out dead.
        path: What follows the endpoint, with its first `/`, quoted.
        parameters: The query's.
        headers: Besides those that say who we are.
        body: In pieces, none of which is copied.
        max_bytes: How much of an answer's body is read.
        accepted: Statuses that are answers, not refusals.
        missing: What is missing if the answer is 404, by a name of `answers.py`; by default the object.
    """

    method: str
    path: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: tuple[bytes, ...] = ()
    max_bytes: int = MIB
    accepted: tuple[int, ...] = _OK
    missing: str = ABSENT


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a request may take.

    Args:
        seconds: How long it may be without an answer, and its answer without an end, beyond what the bytes need.
        bytes_per_second: What moves more slowly is given up.
    """

    seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Args:
        status: The HTTP status, one of those that were accepted.
        headers: Their names are compared without case.
        size: How many bytes the body has, if the server said so.
        body: None if it has more bytes than were to be read.
    """

    status: int
    headers: Mapping[str, str]
    size: int | None
    body: bytes | None


class GcsClient:
    """Sends requests. Thread-safe; connects anew in a forked child.

    Args:
        options: Who we are and where the store is.
        pace: How long a request may take.
    """

    def __init__(self, options: GcsOptions, *, pace: Pace) -> None:
        self._pace = pace if options.timeout is None else replace(pace, seconds=options.timeout)
        self._cell = _Cell(options)
        weakref.finalize(self, _close, self._cell).atexit = False  # the loop does it then

    def send(self, call: Call, request: Request) -> Reply:
        """Send `call` once and return the answer.

        Args:
            call: What is sent.
            request: What is being asked for, for messages.

        Raises:
            CkptStoreError: The server refused, or gave no answer.
        """
        connection, headers = self._ready(request)
        try:
            reply = loop.run(connection.exchange(call, headers, self._pace), timeout=LONGEST_SECONDS)
        except CkptStoreError:
            raise
        except Exception as error:  # noqa: BLE001  (aiohttp raises its own, OSError and ValueError; the table has a default)
            answer = answer_of_failure(error)
            if call.method in ("PUT", "DELETE"):
                answer = replace(answer, sent=True)  # aiohttp may have sent it before, on a connection that then died
            raise error_for(answer, request) from None  # its text may hold URLs that let others write
        if is_foreign(reply.status, reply.headers, reply.body or b""):
            raise error_for(answer_of_foreign(reply.status, writes=request.writes), request)
        if reply.status in call.accepted:
            return reply
        answer = answer_of_reply(reply.status, reply.headers, reply.body or b"")
        if answer.status == _NOT_FOUND:
            answer = replace(answer, code=call.missing)
        raise error_for(answer, request)

    def _ready(self, request: Request) -> tuple[_Connection, dict[str, str]]:
        """Return the connection and who we are, renewed if need be; in this thread, because Google's library blocks."""
        try:
            connection = self._cell.connection()
            return connection, connection.headers()
        except CkptStoreError:
            raise
        except Exception as error:  # noqa: BLE001  (Google's library and gcsfs raise many kinds)
            # `from None`: the text may hold parts of a token.
            raise error_for(answer_of_credentials(error), request) from None


class _Connection:
    """gcsfs in one loop."""

    def __init__(self, options: GcsOptions) -> None:
        self.loop = loop.current()
        # The class itself, not what `gcsfs.GCSFileSystem` names: that one asks by gRPC what kind of bucket it is.
        self._gcsfs = GCSFileSystem(
            project=options.project or "",
            access=options.access,
            token=_token(options),
            endpoint_url=options.endpoint_url,
            requester_pays=options.requester_pays,
            session_kwargs=dict(options.session_kwargs),
            asynchronous=True,
            loop=self.loop,
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        self._session_kwargs = options.session_kwargs
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Take gcsfs's session as ours, in the loop: it would close its own from any thread, and in a forked child."""
        made = await self._gcsfs._set_session()  # noqa: SLF001  (it knows of client certificates)
        connector = made.connector
        made.detach()
        self._session = aiohttp.ClientSession(**{**self._session_kwargs, "connector": connector})

    def headers(self) -> dict[str, str]:
        """Return who we are. May ask Google for new credentials."""
        headers: dict[str, str] = self._gcsfs._get_headers({})  # noqa: SLF001  (as above)
        return headers

    async def exchange(self, call: Call, headers: Mapping[str, str], pace: Pace) -> Reply:
        """Send one request and read its answer, in the loop."""
        assert self._session is not None  # noqa: S101  (it is open)
        parameters = self._gcsfs._get_params(dict(call.parameters))  # noqa: SLF001  (adds who pays)
        query = urlencode(parameters, quote_via=quote)
        joint = "&" if "?" in call.path else "?"
        url = f"{self._gcsfs._location}{call.path}{joint + query if query else ''}"  # noqa: SLF001  (the endpoint)
        length = sum(map(len, call.body))
        headers = {**headers, **call.headers} | ({} if call.method == "GET" else {"Content-Length": str(length)})
        async with (
            asyncio.timeout(pace.seconds + length / pace.bytes_per_second) as limit,
            self._session.request(
                call.method,
                URL(url, encoded=True),
                headers=headers,
                data=_slices(call.body) if length else None,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                allow_redirects=False,
            ) as response,
        ):
            most = call.max_bytes if response.status in call.accepted else MAX_REFUSAL_BYTES
            size = response.content_length
            awaited = min(most, most if size is None else size)
            limit.reschedule(self.loop.time() + pace.seconds + awaited / pace.bytes_per_second)
            return Reply(response.status, response.headers, size, await _read(response, most))

    async def close(self) -> None:
        """Close the session, in the loop."""
        if self._session is not None:
            await self._session.close()


class _Cell:
    """What a GcsClient holds, without the GcsClient, so that it can be closed when that is gone.

    Only the loop's thread changes `held`: no lock that a fork could copy while it is held.
    """

    def __init__(self, options: GcsOptions) -> None:
        self._options = options
        self.held: _Connection | None = None

    def connection(self) -> _Connection:
        """Return this process's connection. It is made in the thread that asks, because Google's library blocks."""
        held = self.held
        if held is None or held.loop is not loop.current():
            held = loop.run(self._first(_Connection(self._options)), timeout=CONNECT_SECONDS)
        return held

    async def _first(self, made: _Connection) -> _Connection:
        """Open and keep `made`, unless another thread was faster."""
        await made.open()
        held = self.held
        if held is not None and held.loop is made.loop:
            await made.close()
            return held
        if held is not None:
            _left.append(held)
        self.held = made
        loop.at_end(self.close)
        return made

    async def close(self) -> None:
        """Close what is open, in the loop."""
        held, self.held = self.held, None
        loop.not_at_end(self.close)
        if held is not None:
            await held.close()


async def _slices(body: tuple[bytes, ...]) -> AsyncIterator[memoryview]:
    """Yield `body` in pieces between which the loop can do something else."""
    for piece in body:
        for start in range(0, len(piece), _SLICE_BYTES):
            yield memoryview(piece)[start : start + _SLICE_BYTES]


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """Return the body, or None if it has more than `limit` bytes. Then the connection is not used again."""
    if response.content_length is not None and response.content_length > limit:
        response.close()
        return None
    pieces: list[bytes] = []
    held = 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        held += len(piece)
        if held > limit:
            response.close()
            return None
    return b"".join(pieces)


def _token(options: GcsOptions) -> Any:
    """Return `token` as gcsfs wants it."""
    token = options.token
    if isinstance(token, str) and token not in METHODS and not os.path.exists(token):  # noqa: PTH110  (as gcsfs asks)
        return Credentials(token)  # type: ignore[no-untyped-call]  # gcsfs would send it to Google to ask how old it is
    return dict(token) if isinstance(token, Mapping) else token


_left: list[_Connection] = []
"""Connections of a parent process. Kept, so that they are not collected: that would close the parent's."""


def _close(cell: _Cell) -> None:
    held = cell.held
    if held is not None and not loop.spawn(held.loop, cell.close()):
        _left.append(held)
