"""The pages of a listing of S3, until the last one, and no longer than the server brings something new."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeVar

from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.s3_errors import NotS3Error
from ckptstore.objectstore.s3_requests import S3Place

Name = TypeVar("Name", bound=Hashable)
Item = TypeVar("Item")

_EMPTY_PAGES = 1000  # in a row; a server that skips what was deleted may send some


def all_pages(
    place: S3Place,
    request: Request,
    ask: Callable[[Mapping[str, Any]], Awaitable[tuple[Mapping[Name, Item], Mapping[str, Any]]]],
) -> dict[Name, Item]:
    """Return what all pages hold, by name.

    Servers differ in how they sort, and some do not sort incomplete uploads at all. So that it ends, a page must not be
    asked for twice, and must bring a name that no page before it has brought.

    Args:
        place: The bucket.
        request: What is being asked for, for messages.
        ask: Returns what is on the page that the parameters name, and the parameters of the next one; none: it is the
            last. It is given none for the first.

    Raises:
        UnavailableError: The listing would never end.
        CkptStoreError: What went wrong.
    """
    found: dict[Name, Item] = {}
    asked: set[tuple[tuple[str, Any], ...]] = set()
    empty = 0

    async def page(after: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal empty
        here, following = await ask(after)
        empty = 0 if here else empty + 1
        marker = tuple(sorted(following.items()))
        stands_still = here.keys() <= found.keys() if here else empty > _EMPTY_PAGES
        found.update(here)
        if following and (stands_still or marker in asked or not all(following.values())):
            raise NotS3Error
        asked.add(marker)
        return following

    following = place.run(request, partial(page, {}), requests=1)
    while following:
        following = place.run(request, partial(page, following), requests=1)
    return found
