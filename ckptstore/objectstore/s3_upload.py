"""One object on its way to S3, several of its parts at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from ckptstore.errors import (
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore import loop
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.port import ObjectInfo
from ckptstore.objectstore.s3_checksum import checksum
from ckptstore.objectstore.s3_errors import translating
from ckptstore.objectstore.s3_requests import S3Place, head_of, tried
from ckptstore.options import MAX_PARTS, RetryOptions, TransferOptions
from ckptstore.units import GIB, format_bytes

Result = TypeVar("Result")

MAX_PART_BYTES = 5 * GIB
_NO_UPLOAD = "NoSuchUpload"
_ABORT_SECONDS = 15.0
_SECONDS_PER_PART = 0.05  # a server may take its time to put many parts together


class S3Upload:
    """An object streamed in parts, each of which carries its checksum and is tried again by itself.

    What fits into one part is sent in one request, when it is complete. At most `parts_at_once` parts and the one
    that is being filled are held. Used by one thread at a time. See `port.Upload`.

    Args:
        place: The object's.
        request: What is being asked for, for messages.
        size: How many bytes were announced.
        transfer: How large parts are, how many go at once, and how patiently.
        checksum_algorithm: What the server checks each part with, or None.

    Raises:
        InvalidInputError: No object may be so large.
    """

    def __init__(
        self,
        place: S3Place,
        request: Request,
        *,
        size: int,
        transfer: TransferOptions,
        checksum_algorithm: str | None,
    ) -> None:
        self._part_bytes = part_bytes_for(size, transfer, request)
        self._request, self._algorithm, self._retry = request, checksum_algorithm, transfer.retry
        self._parts = _Parts(place, request, transfer, checksum_algorithm, at_once=transfer.parts_at_once(size))
        self._size, self._written = size, 0
        self._filling = bytearray()
        self._has_ended, self._is_whole = False, True
        self._process = os.getpid()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`, which is copied. Waits while as many parts as allowed are on their way.

        Raises:
            InvalidInputError: It is more than was announced, or the upload has ended.
            UnavailableError: A part could not be sent, however often it was tried. Nothing is published.
            StalledError: A part was not answered in time, however often it was tried.
        """
        view = memoryview(data).cast("B")
        self._check(self._written + len(view) <= self._size, self._written + len(view))
        while len(view):
            taken = view[: self._part_bytes - len(self._filling)]
            self._filling += taken
            self._written += len(taken)
            view = view[len(taken) :]
            if len(self._filling) == self._part_bytes and self._size > self._part_bytes:
                self._send()

    def complete(self) -> ObjectInfo:
        """Publish what was written.

        Raises:
            InvalidInputError: The bytes written are not as many as were announced.
            OutcomeUnknownError: The object may or may not be there.
            UnavailableError: A part could not be sent. Nothing is published.
            StalledError: A part was not answered in time, however often it was tried.

        If killed: the whole object, or none under its key; perhaps an incomplete upload.
        """
        try:
            self._check(self._written == self._size, self._written)
            if self._size <= self._part_bytes:
                self._run(lambda: self._parts.put_whole(self._filling))
            else:
                if self._filling:
                    self._send()
                self._run(self._parts.complete)
        except CkptStoreError:
            self.abort()
            raise
        self._has_ended = True
        self._filling = bytearray()
        return self._confirmed()

    def abort(self) -> None:
        """Give the upload up, and let the server forget its parts. Never raises."""
        if self._has_ended or os.getpid() != self._process:  # a forked child leaves its parent's upload alone
            return
        self._has_ended = True
        self._filling = bytearray()
        with contextlib.suppress(Exception):  # an unreachable server keeps the parts; they are under no key
            loop.run(self._parts.abort(), timeout=_ABORT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _send(self) -> None:
        part, self._filling = self._filling, bytearray()
        self._is_whole = False  # until the part is on its way: it could be lost by an interrupt
        said = checksum(self._algorithm, part)
        self._run(lambda: self._parts.admit(part, said))
        self._is_whole = True

    def _run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        # At most: the parts under way, the publication, and a look at it; each is tried until its deadline, and once.
        pauses = 3 * self._retry.deadline_seconds + _SECONDS_PER_PART * -(-self._size // self._part_bytes)
        return self._parts.place.run(self._request, work, requests=5, size=self._part_bytes, more_seconds=pauses)

    def _confirmed(self) -> ObjectInfo:
        # What is published is looked at once: nobody else ever writes this key (I6).
        try:
            info = self._run(self._parts.head)
        except NotFoundError as absent:
            raise OutcomeUnknownError(
                f"{self._request.url} was stored, and cannot be seen.", key=self._request.key
            ) from absent
        except CkptStoreError as error:
            raise OutcomeUnknownError(
                f"{self._request.url} may or may not have been stored.", key=self._request.key
            ) from error
        if info.size != self._size:
            raise IntegrityError(
                f"{self._request.url} has {info.size} bytes, {self._size} were written.", key=self._request.key
            )
        return info

    def _check(self, fits: bool, written: int) -> None:  # noqa: FBT001  (private, and it reads well)
        if os.getpid() != self._process:
            raise UnsupportedError(
                f"The upload of {self._request.key} was begun before this process was forked.",
                hint="Go on with it where it was begun.",
            )
        if self._has_ended:
            raise InvalidInputError(f"The upload of {self._request.key} has ended.", key=self._request.key)
        if not self._is_whole:
            raise UnavailableError(
                f"A part of {self._request.url} was not sent.", hint="Begin this upload again.", key=self._request.key
            )
        if not fits:
            raise InvalidInputError(
                f"The upload of {self._request.key} was announced with {self._size} bytes and has {written}.",
                key=self._request.key,
            )


def part_bytes_for(size: int, transfer: TransferOptions, request: Request) -> int:
    """Return the size of the parts of an object, so that it has no more of them than are allowed.

    Raises:
        InvalidInputError: No object may be so large.
    """
    part_bytes = transfer.part_bytes_of(size)
    if part_bytes > MAX_PART_BYTES:
        raise InvalidInputError(
            f"{request.url} would have {format_bytes(size)} in parts of {format_bytes(part_bytes)}; "
            f"S3 takes {MAX_PARTS} parts of at most {format_bytes(MAX_PART_BYTES)}.",
            hint="Write smaller shards: use more ranks, or split the largest tensors.",
            key=request.key,
        )
    return part_bytes


class _Parts:
    """The parts of one upload. All of it runs in the loop's thread."""

    def __init__(
        self,
        place: S3Place,
        request: Request,
        transfer: TransferOptions,
        checksum_algorithm: str | None,
        *,
        at_once: int,
    ) -> None:
        self.place, self._request = place, request
        self._retry: RetryOptions = transfer.retry
        self._algorithm = checksum_algorithm
        self._room = asyncio.Semaphore(at_once)
        # A part shows nothing under the key: whether it landed does not matter, it may always be sent again.
        self._unseen = replace(request, writes=False)
        self._id: str | None = None
        self._tasks: list[asyncio.Task[dict[str, Any]]] = []
        self._failure: BaseException | None = None

    async def admit(self, part: bytearray, said: dict[str, Any]) -> None:
        """Begin to send the next part as soon as there is room."""
        if self._id is None:
            self._id = await tried(self._begin, self._unseen, self._retry)
        await self._room.acquire()
        if self._failure is not None:
            raise self._failure
        number = len(self._tasks) + 1
        task = asyncio.get_running_loop().create_task(self._send(number, part, said))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # an abandoned upload is not told
        self._tasks.append(task)

    async def put_whole(self, body: bytearray) -> None:
        """Send the object in one request."""
        said: dict[str, Any] = checksum(self._algorithm, body)
        await self._published(lambda: self.place.send("put_object", size=len(body), Body=body, **said), len(body))

    async def complete(self) -> None:
        """Wait for all parts, and make the object of them."""
        parts = await asyncio.gather(*self._tasks)
        size = sum(part.pop("size") for part in parts)
        await self._published(
            lambda: self.place.send(
                "complete_multipart_upload",
                more_seconds=_SECONDS_PER_PART * len(parts),
                UploadId=self._id,
                MultipartUpload={"Parts": parts},
            ),
            size,
        )

    async def head(self) -> ObjectInfo:
        """Return what the server knows of the object."""
        request = Request("HEAD", self._request.url, self._request.key)
        return await tried(lambda: head_of(self.place, request.key), request, self._retry)

    async def abort(self) -> None:
        """End what is on its way, and let the server forget the parts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._id is not None:
            await tried(lambda: self.place.send("abort_multipart_upload", UploadId=self._id), self._unseen, self._retry)

    async def _begin(self) -> str:
        said: dict[str, Any] = {"ChecksumAlgorithm": self._algorithm} if self._algorithm else {}
        answer = await self.place.send("create_multipart_upload", **said)
        return str(answer["UploadId"])

    async def _send(self, number: int, part: bytearray, said: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await tried(
                lambda: self.place.send(
                    "upload_part", size=len(part), UploadId=self._id, PartNumber=number, Body=part, **said
                ),
                self._unseen,
                self._retry,
            )
        except NotFoundError as error:
            self._failure = UnavailableError(
                f"The upload of {self._request.url} was aborted by somebody else.",
                hint="Nothing is published. Save again.",
                **error.facts,
            )
            raise self._failure from error
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            self._room.release()
        return {"PartNumber": number, "ETag": answer["ETag"], "size": len(part), **said}

    async def _published(self, act: Callable[[], Awaitable[Any]], size: int) -> None:
        """Do what makes the object visible, and where its answer is lost, look whether it has been done."""
        in_doubt = False

        async def act_or_look() -> None:
            nonlocal in_doubt
            try:
                with translating(self._request):
                    await act()
            except CkptStoreError as error:
                in_doubt = in_doubt or isinstance(error, OutcomeUnknownError)
                if not (in_doubt and await self._is_there(size)):
                    raise

        await tried(act_or_look, self._request, self._retry, final_code=_NO_UPLOAD)

    async def _is_there(self, size: int) -> bool:
        """Return whether the object is there. Nobody else ever writes this key (I6)."""
        try:
            return (await self.head()).size == size
        except CkptStoreError:  # it is not known to be there, for whatever reason
            return False
