"""A process's way to Google Cloud Storage: gcsfs's credentials, endpoint and session, and each request sent once.

gcsfs's own calls try six times, lose the server's name for an error, and ask about the bucket by gRPC first, which
costs a minute where nobody answers. So its session is used, and none of its calls.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
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
from ckptstore.objectstore.gcs_errors import answer_of_credentials, answer_of_failure, answer_of_reply
from ckptstore.objectstore.gcs_options import METHODS, GcsOptions
from ckptstore.units import KIB, MIB

CONNECT_SECONDS = 5.0
LONGEST_SECONDS = 24 * 3600.0
MAX_REFUSAL_BYTES = 64 * KIB
_SLICE_BYTES = 256 * KIB
_CLOSE_SECONDS = 1.0
_OK, _NOT_FOUND = (200, 201, 204, 206), 404


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
        missing: What is missing if the answer is 404, by the name of `answers.py`; by default the object.
    """

    method: str
    path: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: tuple[bytes, ...] = ()
    max_bytes: int = MIB
    accepted: tuple[int, ...] = _OK
    missing: str | None = None


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
        self._options = options
        self._pace = pace if options.timeout is None else replace(pace, seconds=options.timeout)
        self._connection: _Connection | None = None
        self._locks: dict[int, threading.Lock] = {}  # by process: a fork may copy one while it is held

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
        if reply.status in call.accepted:
            return reply
        answer = answer_of_reply(reply.status, reply.headers, reply.body or b"")
        if answer.status == _NOT_FOUND:
            answer = replace(answer, code=call.missing)
        raise error_for(answer, request)

    def _ready(self, request: Request) -> tuple[_Connection, dict[str, str]]:
        """Return the connection and who we are, renewed if need be; in this thread, because Google's library blocks."""
        try:
            with self._locks.setdefault(os.getpid(), threading.Lock()):
                if self._connection is None or self._connection.loop is not loop.current():
                    if self._connection is not None:
                        _left.append(self._connection)
                    self._connection = _Connection(self._options)
                connection = self._connection
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
        self._session = loop.run(self._own_session(options), timeout=CONNECT_SECONDS)
        weakref.finalize(self, _close_later, self.loop, self._session).atexit = False
        _open.add(self)

    async def _own_session(self, options: GcsOptions) -> aiohttp.ClientSession:
        """Return gcsfs's session as ours: it would close its own from any thread, and in a forked child."""
        made = await self._gcsfs._set_session()  # noqa: SLF001  (it knows of client certificates)
        connector = made.connector
        made.detach()
        return aiohttp.ClientSession(**{**options.session_kwargs, "connector": connector})

    def headers(self) -> dict[str, str]:
        """Return who we are. May ask Google for new credentials."""
        headers: dict[str, str] = self._gcsfs._get_headers({})  # noqa: SLF001  (as above)
        return headers

    async def exchange(self, call: Call, headers: Mapping[str, str], pace: Pace) -> Reply:
        """Send one request and read its answer, in the loop."""
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
        """Close the session."""
        await self._session.close()


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


_left: list[_Connection] = []  # of a parent; kept, so that nothing in them is ever collected, and closed, here
_open: weakref.WeakSet[_Connection] = weakref.WeakSet()


def _close_later(served: asyncio.AbstractEventLoop, session: aiohttp.ClientSession) -> None:
    loop.spawn(served, session.close())


def _close_all() -> None:
    """Close what is open while its loop still runs: aiohttp complains otherwise."""
    for connection in list(_open):
        with contextlib.suppress(CkptStoreError, TimeoutError, RuntimeError):
            if connection.loop is loop.current():
                loop.run(connection.close(), timeout=_CLOSE_SECONDS)


atexit.register(_close_all)  # after `loop` has registered its own end, so before that
