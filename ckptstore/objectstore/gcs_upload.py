"""One object on its way to Google Cloud Storage, in chunks.

A chunk whose answer was lost is never just sent again: the server is asked how much it holds, and gets what it lacks.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import google_crc32c

from ckptstore.errors import CkptStoreError, IntegrityError, OutcomeUnknownError, UnavailableError
from ckptstore.objectstore.announced import Announced
from ckptstore.objectstore.answers import Answer, Request, error_for
from ckptstore.objectstore.gcs_client import ABSENT, Call, Reply
from ckptstore.objectstore.gcs_errors import NONSENSE
from ckptstore.objectstore.gcs_objects import begin_call, encoded_crc32c, info_of, put_call
from ckptstore.objectstore.patience import Patience, tried
from ckptstore.objectstore.port import ObjectInfo
from ckptstore.options import RetryOptions
from ckptstore.units import KIB

CHUNK_UNIT = 256 * KIB
"""Every chunk but the last is a multiple of this."""

_DONE, _MORE, _NOT_FOUND, _GONE, _CANCELLED = (200, 201), 308, 404, 410, 499
_HELD = re.compile(r"bytes=0-(\d{1,18})")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Target:
    """An object that is to be, and the ways to it.

    Args:
        bucket: The bucket's name.
        name: The object's whole name in it.
        request: What is being asked for, for messages.
        send: Sends a request once.
        head: Asks for the object.
        delete: Deletes it.
    """

    bucket: str
    name: str
    request: Request
    send: Callable[[Call, Request], Reply]
    head: Callable[[], ObjectInfo]
    delete: Callable[[], None]


class GcsUpload(Announced):
    """An object streamed in chunks, one after the other. See `port.Upload`.

    What fits into one chunk is sent in one request, when it is complete. Two chunks at most are held in memory.

    Args:
        target: Where to.
        size: How many bytes were announced.
        chunk_bytes: The size of the chunks, a multiple of `CHUNK_UNIT`.
        retry: How often and how long each chunk is tried.
    """

    def __init__(self, target: Target, *, size: int, chunk_bytes: int, retry: RetryOptions) -> None:
        super().__init__(target.request, size=size)
        self._target, self._retry, self._chunk_bytes = target, retry, chunk_bytes
        self._kept = bytearray()
        self._session: str | None = None
        self._held, self._in_doubt, self._checksum = 0, False, 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`, which is copied. Waits until each chunk that is full has arrived."""
        view = self._admitted(data)
        try:
            while view:
                if len(self._kept) == self._chunk_bytes:  # and it is not the last one: more is at hand
                    self._send_chunk()
                piece = view[: self._chunk_bytes - len(self._kept)]
                self._kept += piece
                self._written += len(piece)
                view = view[len(piece) :]
        except BaseException:
            self.abort()  # a part of `data` was taken: nothing can follow it
            raise

    def complete(self) -> ObjectInfo:
        """Publish what was written.

        Raises:
            InvalidInputError: The bytes written are not as many as were announced.
            IntegrityError: The server holds other bytes. They were deleted, if that could be done.
            OutcomeUnknownError: The object may or may not be there.

        If killed: the whole object, or none under its key; perhaps an incomplete upload.
        """
        self._check_whole()
        try:
            return self._send_last() if self._session else self._tried(self._put, Patience(self._retry, writes=True))
        except (UnavailableError, OutcomeUnknownError) as failure:
            return self._confirmed(failure)
        finally:
            self.abort()

    def abort(self) -> None:
        """Give the upload up, and let the server forget it. Never raises."""
        if not self._end():
            return
        self._kept = bytearray()
        if self._session is not None:
            call = Call("DELETE", self._session, accepted=(204, _CANCELLED, *_DONE, _NOT_FOUND, _GONE))
            with contextlib.suppress(CkptStoreError):  # an unreachable server forgets it after a week
                self._target.send(call, self._request)

    def _put(self) -> ObjectInfo:
        body = bytes(self._kept)
        self._checksum = google_crc32c.value(body)
        reply = self._target.send(put_call(self._target.bucket, self._target.name, body), self._request)
        return self._published(reply)

    def _send_chunk(self) -> None:
        chunk = self._take()
        end, patience = self._held + len(chunk), Patience(self._retry, writes=True)
        while self._held < end:
            if self._tried(lambda: self._advance(chunk, end), patience) is not None:
                raise self._refused("was published before it was complete")

    def _send_last(self) -> ObjectInfo:
        chunk, patience = self._take(), Patience(self._retry, writes=True)
        while True:
            info = self._tried(lambda: self._advance(chunk, self._size), patience)
            if info is not None:
                self._session = None  # it has ended
                return info

    def _take(self) -> bytes:
        chunk = bytes(self._kept)
        self._kept.clear()
        self._checksum = google_crc32c.extend(self._checksum, chunk)
        if self._session is None:
            self._session = self._tried(self._begin, Patience(self._retry, writes=True))
        return chunk

    def _begin(self) -> str:
        target = self._target
        reply = target.send(begin_call(target.bucket, target.name, self._size), target.request)
        parts = urlsplit(reply.headers.get("Location", ""))
        if not parts.query:
            raise error_for(Answer(reason="no session was named"), target.request)
        # At our endpoint, whatever host is named: who we are is told to nobody else.
        return f"{parts.path}?{parts.query}"

    def _advance(self, chunk: bytes, end: int) -> ObjectInfo | None:
        """Bring what the server holds nearer to `end`, where `chunk` ends; return the object once it is published."""
        asking, self._in_doubt = self._in_doubt, True
        reply = self._asked() if asking else self._posted(chunk[len(chunk) - (end - self._held) :], end)
        if reply.status in _DONE:
            return self._published(reply)
        match = _HELD.fullmatch(reply.headers.get("Range", ""))
        before, held = self._held, int(match[1]) + 1 if match else 0
        if not before <= held <= end:
            raise self._refused(f"is held by the server up to byte {held}, where {before} to {end} were sent")
        self._held, self._in_doubt = held, held == self._size
        if self._in_doubt or (held == before and not asking):
            # Nothing was taken; or all was, and is not published yet: after a pause it is asked about.
            raise error_for(Answer(status=reply.status, kind=OutcomeUnknownError), self._request)
        return None

    def _posted(self, piece: bytes, end: int) -> Reply:
        headers = {"Content-Range": f"bytes {end - len(piece)}-{end - 1}/{self._size}"}
        if end == self._size:
            headers["X-Goog-Hash"] = f"crc32c={encoded_crc32c(self._checksum)}"
        # POST, and not the PUT of the manual: aiohttp would send that again by itself. gcsfs posts, too.
        call = Call("POST", self._session or "", {}, headers, (piece,), accepted=(*_DONE, _MORE))
        return self._target.send(call, self._request)

    def _asked(self) -> Reply:
        headers = {"Content-Range": f"bytes */{self._size}"}
        call = Call("PUT", self._session or "", {}, headers, accepted=(*_DONE, _MORE))
        return self._target.send(call, self._request)

    def _published(self, reply: Reply) -> ObjectInfo:
        try:
            described: Any = json.loads(reply.body or b"")
            info = info_of(described, self._request.key)
            name, checksum = described.get("name"), described.get("crc32c")
        except (LookupError, ValueError, TypeError):
            raise error_for(NONSENSE, self._request) from None
        if name != self._target.name:  # another request's answer, which says nothing of ours
            raise OutcomeUnknownError(
                f"{self._request.url}: what was called stored is something else.", key=self._request.key
            )
        if info.size != self._size:
            raise self._refused(f"was stored with {info.size} bytes, {self._size} were announced")
        if checksum not in (None, encoded_crc32c(self._checksum)):
            raise self._refused("was stored with other bytes than were sent")
        return info

    def _confirmed(self, failure: CkptStoreError) -> ObjectInfo:
        # The answer may be lost. Nobody else ever writes this key (I6): ask for it.
        try:
            info = self._target.head()
        except CkptStoreError:
            raise failure from None
        if info.size != self._size:
            raise self._refused(f"was stored with {info.size} bytes, {self._size} were announced")
        return info

    def _refused(self, fault: str) -> IntegrityError:
        """Return what is to be raised. What stands under the key is ours and wrong: it is deleted."""
        with contextlib.suppress(CkptStoreError):  # no commit names it; it takes its space
            self._target.delete()
        return IntegrityError(f"{self._request.url} {fault}.", hint="Save again.", key=self._request.key)

    def _tried(self, act: Callable[[], Result], patience: Patience) -> Result:
        return tried(act, patience, hopeless=_is_gone)


def _is_gone(error: CkptStoreError) -> bool:
    """Return whether the server has forgotten the upload; it will not recall it."""
    return error.facts.get("status") == _GONE or error.facts.get("server_code") == ABSENT
