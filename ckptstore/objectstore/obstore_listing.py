"""A listing through obstore, and whether it is whole.

obstore reads pages of a listing by itself, for ever if a server says that there is always another one; and of S3 it
takes a web page for the last page of a listing, so that what a proxy breaks off looks whole. So what comes is looked at
piece by piece, with a limit; and the end is asked for again, until nothing follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.errors import StalledError, UnavailableError
from ckptstore.objectstore import loop
from ckptstore.objectstore.answers import Request
from ckptstore.options import MAX_SECONDS

Found = dict[str, Mapping[str, Any]]
"""What obstore says of each object, by its path, as the server sorts them."""

_PIECE = 1000
_MOST_ENDS = 100
_HINT = "Something else answers some of the requests: check the endpoint, HTTPS_PROXY and NO_PROXY."


def listed(begin: Callable[..., Any], request: Request, *, seconds: float, ends_are_told: bool) -> Found:
    """Return all that is listed.

    Args:
        begin: Begins a listing: obstore's `list`, without `offset` and `chunk_size`.
        request: For messages.
        seconds: How long it may take to get the next thousand objects.
        ends_are_told: obstore tells the end of a listing from a web page.

    Raises:
        StalledError: It took longer.
        UnavailableError: The listing does not end, or is none.
        Exception: Whatever obstore raises.
    """
    found = _one(begin(chunk_size=_PIECE), request, seconds)
    if ends_are_told or not found:
        return found
    for _ in range(_MOST_ENDS):
        # A folder's marker comes without its slash, and could be listed after itself: better begin after another.
        last = next((path for path in reversed(found) if found[path]["size"]), next(reversed(found)))
        more = _one(begin(offset=last, chunk_size=_PIECE), request, seconds)
        if last in more and found[last]["size"]:
            raise UnavailableError(
                f"{request.doing} {request.url}: a listing that was to begin after {last} holds it.", hint=_HINT
            )
        if more.keys() <= found.keys():  # servers that sort `a-b` after `a/b` may tell of some of them twice
            return found
        found |= more
    raise UnavailableError(f"{request.doing} {request.url}: there is always more.", hint=_HINT)


def _one(stream: Any, request: Request, seconds: float) -> Found:
    """Return one listing, up to what obstore takes for its end."""

    async def collect() -> Found:
        found: Found = {}
        while True:
            async with asyncio.timeout(seconds):
                piece = await anext(stream, None)
            if piece is None:
                return found
            before = len(found)
            found |= {meta["path"]: meta for meta in piece}
            if len(found) == before:
                raise UnavailableError(f"{request.doing} {request.url}: the same comes again and again.", hint=_HINT)

    try:
        return loop.run(collect(), timeout=MAX_SECONDS)
    except TimeoutError as error:
        raise StalledError(
            f"{request.doing} {request.url}: not a thousand objects, and no end, in {seconds:g} s.", hint=_HINT
        ) from error
