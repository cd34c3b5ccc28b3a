"""What the requests of S3 share: where they go, how long they may take, and how a body is read."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from ckptstore.errors import CkptStoreError, IntegrityError, OutcomeUnknownError, UnsupportedError
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.patience import Patience
from ckptstore.objectstore.port import ObjectInfo
from ckptstore.objectstore.s3_client import OPEN_SECONDS, S3Client, within
from ckptstore.objectstore.s3_errors import ContradictionError, NotS3Error, is_signed, translating
from ckptstore.options import RetryOptions
from ckptstore.units import MIB

Result = TypeVar("Result")

_SLOWEST_BYTES_PER_SECOND = MIB  # what moves more slowly than this is given up
_READ_BYTES = MIB
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class S3Place:
    """A key of a bucket, or the bucket.

    Args:
        client: Asks the server.
        bucket: The bucket's name.
        path: The whole key, or None.
        stall_seconds: How long a request may be without an answer, beyond what its bytes need.
        together: How many requests share the line.
    """

    client: S3Client
    bucket: str
    path: str | None
    stall_seconds: float
    together: int = 1

    def seconds_for(self, size: int) -> float:
        """Return how long it may take to move so many bytes, and as many for each request that shares the line."""
        return self.stall_seconds + self.together * size / _SLOWEST_BYTES_PER_SECOND

    def run(
        self,
        request: Request,
        work: Callable[[], Awaitable[Result]],
        *,
        requests: int,
        size: int = 0,
        more_seconds: float = 0.0,
    ) -> Result:
        """Return what `work` returns, run in the loop of the client. See `S3Client.run`.

        Args:
            request: What is being asked for.
            work: What asks for it.
            requests: How many it sends at most, one after the other.
            size: How many bytes these move.
            more_seconds: What else it takes, such as pauses.
        """
        seconds = (
            requests * (OPEN_SECONDS + self.stall_seconds)
            + self.together * size / _SLOWEST_BYTES_PER_SECOND
            + more_seconds
        )
        return self.client.run(request, work, seconds=seconds)

    async def send(self, operation: str, *, size: int = 0, more_seconds: float = 0.0, **parameters: Any) -> Any:
        """Send one request, once. See `S3Client.send`.

        Args:
            operation: botocore's name for it.
            size: That of its body, for which it gets time.
            more_seconds: What else it gets.
            parameters: botocore's, beyond the bucket and the key.
        """
        at = {"Bucket": self.bucket} | ({"Key": self.path} if self.path is not None else {})
        return await self.client.send(operation, seconds=self.seconds_for(size) + more_seconds, **at, **parameters)


async def read_body(place: S3Place, body: Any, *, size: int | None, at_most: int) -> bytes:
    """Return a body, which is closed then.

    Args:
        place: Where it comes from.
        body: aiobotocore's.
        size: How long it says it is.
        at_most: No more than one byte above this is held.

    Raises:
        NoAnswerError: It takes too long.
        ConnectionError: It ended early.
    """
    pieces, held, limit = [], 0, at_most + 1
    try:
        async with within(place.seconds_for(at_most if size is None else size)):
            while held < limit and (piece := await body.read(min(_READ_BYTES, limit - held))):
                pieces.append(piece)
                held += len(piece)
    finally:
        body.close()
    if size is not None and held < min(size, limit):
        raise ConnectionError
    return b"".join(pieces)


async def check_stored(place: S3Place, request: Request, body: bytes, etag: str | None) -> None:
    """Check that what is called stored is: on a connection that is out of step the answer is another request's.

    An ETag that is the body's MD5 is proof. Where the server encrypts with a key of KMS or of ours, and with some other
    servers, it never is: there the object is read back, and each put is two requests.

    Args:
        place: The object's.
        request: What was asked for.
        body: What was sent.
        etag: What the answer calls it, without quotes.

    Raises:
        OutcomeUnknownError: Something else is there, or nothing, or that cannot be told.
    """
    if etag is not None and etag.lower() == hashlib.md5(body, usedforsecurity=False).hexdigest():
        return
    doubt = f"{request.doing} {request.url}: it was called stored, and may or may not be there."
    try:
        answer = await place.send("get_object")
        there = await read_body(place, answer["Body"], size=answer.get("ContentLength"), at_most=len(body))
    except Exception:  # noqa: BLE001  (whatever hinders it, nothing is proved)
        # `from None`: a foreign error is not shown.
        raise OutcomeUnknownError(doubt, key=request.key) from None
    if there != body:
        raise OutcomeUnknownError(doubt, key=request.key)


async def range_of(place: S3Place, request: Request, start: int, end: int) -> bytes:
    """Return the bytes of an object from `start` up to `end`, or fewer if it ends before.

    What comes is judged by the range that it says to be, not by its status: some servers call it the whole object.

    Raises:
        IntegrityError: The object ends before `end`.
        UnsupportedError: The server sent the whole object.
        Exception: Whatever aiobotocore raises; see `translating`.
    """
    answer = await place.send("get_object", Range=f"bytes={start}-{end - 1}")
    size, said = answer.get("ContentLength"), answer.get("ContentRange")
    fault: Exception | None = None
    if said is None and (start, size) != (0, end):
        fault = UnsupportedError(f"{request.url} is not served in parts.", key=request.key)
        if size is not None and end > size:
            fault = IntegrityError(f"{request.key} ends before {end}.", key=request.key)
    elif said is not None and not said.startswith(f"bytes {start}-"):
        fault = NotS3Error()
    if fault is not None:
        answer["Body"].close()
        raise fault
    return await read_body(place, answer["Body"], size=size, at_most=end - start)


async def head_of(place: S3Place, key: str) -> ObjectInfo:
    """Return what the server knows of an object.

    A HEAD is refused without a reason: a missing bucket looks like a missing key. Then the first byte is asked for,
    because to a GET the server says why.

    Raises:
        Exception: Whatever aiobotocore raises; see `translating`.
    """
    try:
        return info_of(await place.send("head_object"), key)
    except ClientError:
        try:
            (await place.send("get_object", Range="bytes=0-0"))["Body"].close()
        except ClientError as error:
            if code_of(error) != "InvalidRange":  # it is there, and empty
                raise
        try:
            return info_of(await place.send("head_object"), key)
        except ClientError as error:
            if error.response["ResponseMetadata"].get("HTTPStatusCode") == _NOT_FOUND:  # it has just been there
                raise ContradictionError from error
            raise


async def remove(act: Callable[[], Awaitable[Any]], look: Callable[[], Awaitable[object]], absent: str) -> None:
    """Remove something. Where nothing in the answer is S3's own, look: a bare success may be anybody's.

    Args:
        act: Removes it.
        look: Looks whether it is there.
        absent: What the server says to either where it is not.

    Raises:
        NotS3Error: It is still there, or that cannot be told.
        Exception: Whatever aiobotocore raises; see `translating`.
    """
    try:
        if is_signed(await act()):
            return
    except ClientError as error:
        if code_of(error) != absent:
            raise
        return
    try:
        await look()
    except ClientError as error:
        if code_of(error) == absent:
            return
    raise NotS3Error


def code_of(error: ClientError) -> str | None:
    """Return the server's own name for an error."""
    code: str | None = error.response["Error"].get("Code")
    return code


def info_of(said: Mapping[str, Any], key: str) -> ObjectInfo:
    """Return what a HEAD or a line of a listing says."""
    modified = said.get("LastModified")
    size = said["Size"] if "Size" in said else said["ContentLength"]
    return ObjectInfo(key, size, plain_etag(said.get("ETag")), modified.timestamp() if modified else None)


async def tried(
    act: Callable[[], Awaitable[Result]], request: Request, retry: RetryOptions, *, final_code: str | None = None
) -> Result:
    """Return what `act` returns, tried again while that may help. For requests that have the same effect twice.

    Args:
        act: Sends one.
        request: What is being asked for.
        retry: How often and how long.
        final_code: What the server says where another try cannot help.

    Raises:
        CkptStoreError: What the tries have come to; see `Patience.pause_or_raise`.
    """
    patience = Patience(retry, writes=request.writes)
    while True:
        try:
            with translating(request):
                return await act()
        except CkptStoreError as error:
            final = final_code is not None and error.facts.get("server_code") == final_code
            pause = patience.pause_or_raise(error, is_final=final)
        await asyncio.sleep(pause)


def plain_etag(etag: str | None) -> str | None:
    """Return an ETag without its quotes."""
    return etag.strip('"') if etag else None
