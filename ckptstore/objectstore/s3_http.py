"""How an S3 request goes out: once, to whom it was meant for, and in small pieces.

The HTTP client below aiobotocore helps in ways that are harmful here. It sends a PUT again by itself when a kept
connection turns out to be dead, and then nobody knows which of the two the answer is for. It follows redirects, so that
the login page of a proxy becomes the body of an object. And of a large body it makes copies.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession
from aiohttp import ClientPayloadError

from ckptstore.errors import UnsupportedError
from ckptstore.units import KIB, MIB

MAX_ANSWER_BYTES = 16 * MIB
_SLICE_BYTES = 256 * KIB


class OnceSession(AIOHTTPSession):  # type: ignore[misc]  # it has no types
    """aiobotocore's HTTP session, which sends each request exactly once."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        # There is no public name for it. aiohttp's own test client sets it, too.
        if not hasattr(session, "_retry_connection"):
            raise _unfit("aiohttp")
        session._retry_connection = False  # noqa: SLF001  (as said)
        self._is_once = True
        return SimpleNamespace(request=partial(_answered, session))

    async def send(self, request: Any) -> Any:
        """Send a prepared request.

        Raises:
            UnsupportedError: aiobotocore or aiohttp has changed, and it could be sent more than once.
        """
        request.headers.pop("Expect", None)  # not signed; not every server answers it, and the body would wait
        request.body = _in_slices(request.body)
        answer = await super().send(request)
        if not getattr(self, "_is_once", False):
            raise _unfit("aiobotocore")
        return answer


async def _answered(session: Any, *args: Any, **said: Any) -> Any:
    answer = await session.request(*args, allow_redirects=False, **said)
    # What is read at once is an error or a listing. The body of an object comes in pieces, by another way.
    answer.read = partial(_read_whole, answer)
    return answer


async def _read_whole(answer: Any) -> bytes:
    """Return a body, which must not be large.

    Raises:
        ClientPayloadError: It is: nothing of S3's is, and memory has an end.
    """
    pieces, held = [], 0
    try:
        while piece := await answer.content.readany():
            held += len(piece)
            if held > MAX_ANSWER_BYTES:
                raise ClientPayloadError  # noqa: TRY301  (closed below, as at every other end)
            pieces.append(piece)
    except BaseException:
        answer.close()  # what is left of it is nobody's
        raise
    return b"".join(pieces)


def _unfit(package: str) -> UnsupportedError:
    return UnsupportedError(
        f"This release of {package} cannot be kept from sending a request twice.",
        hint=f"Install the release of {package} that stands in constraints.txt.",
    )


def _in_slices(body: object) -> object:
    """Return `body`, in pieces if it is large: else the transport would hold a second copy of it."""
    if isinstance(body, io.BytesIO):
        body = body.getvalue()  # no copy, as long as nobody wrote into it
    if isinstance(body, bytes | bytearray | memoryview) and len(body) > _SLICE_BYTES:
        return _slices(memoryview(body))
    return body


async def _slices(view: memoryview) -> AsyncIterator[memoryview]:
    for start in range(0, len(view), _SLICE_BYTES):
        yield view[start : start + _SLICE_BYTES]
