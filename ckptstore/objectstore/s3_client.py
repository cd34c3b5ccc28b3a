"""An S3 client of aiobotocore for threads: opened when it is first used, closed when nobody uses it any longer.

It sends each request once: nothing below it tries again, so that an answer is the answer to what was asked.

All that it uses is imported with this module, and not first in the loop's thread: a process that is forked while
another thread imports has that module locked for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from typing import Any, TypeVar

import aiobotocore.config
import aiobotocore.session
import botocore

from ckptstore.errors import CkptStoreError
from ckptstore.objectstore import credentials, loop
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.endpoint import is_private
from ckptstore.objectstore.s3_endpoint import check_private_key
from ckptstore.objectstore.s3_errors import (
    NoAnswerError,
    NotOpenedError,
    is_refusal,
    refuse_absence_of_another,
    refuse_foreign,
    translating,
)
from ckptstore.objectstore.s3_http import OnceSession
from ckptstore.objectstore.s3_options import S3Options
from ckptstore.options import MAX_SECONDS

Result = TypeVar("Result")
Opened = tuple[Any, Callable[[], Awaitable[object]]]
"""A client, and what closes it."""

OPEN_SECONDS = 30.0
"""How long it may take to find credentials."""
_CONNECT_SECONDS = 5.0
_SILENCE_SECONDS = 600.0  # each request has its own, shorter limit
_CONNECTIONS = 64


class S3Client:
    """A client that any thread may use. It belongs to this process: a forked child opens another.

    Credentials that were looked up and are refused are looked up anew for the next request; where the new ones are
    refused, too, not more often than `credentials.LOOK_AGAIN_SECONDS` says.

    Args:
        options: The settings that travel with the requests.
        open_: Opens the client, in the loop.
    """

    def __init__(self, options: S3Options, open_: Callable[[], Awaitable[Opened]]) -> None:
        self._extras, self._cell = _extras(options), _Cell(partial(_opened, open_, options))
        self._looks_up = options.key is None and not options.anon
        weakref.finalize(self, _close, self._cell).atexit = False  # the loop does it then

    def run(self, request: Request, work: Callable[[], Awaitable[Result]], *, seconds: float) -> Result:
        """Return what `work` returns, run in the loop.

        Args:
            request: What is being asked for.
            work: Its own calls of `send` have limits.
            seconds: What these limits come to together. If it takes longer, the loop's thread is stuck.

        Raises:
            CkptStoreError: What went wrong, as ours.
        """
        with translating(request):
            return loop.run(_coroutine(work), timeout=min(seconds, MAX_SECONDS))

    async def send(self, operation: str, *, seconds: float, **parameters: Any) -> Any:
        """Send one request, once, and return the server's answer. In the loop.

        Args:
            operation: botocore's name for it: `put_object`.
            seconds: How long it may take.
            parameters: botocore's. What the options say of every request is added.

        Raises:
            Exception: Whatever aiobotocore raises; see `translating`.
        """
        try:
            async with within(OPEN_SECONDS):
                client = await self._cell.client()
        except CkptStoreError:
            raise
        except Exception as error:
            raise NotOpenedError(error) from error
        model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
        extras = {name: value for name, value in self._extras.items() if name in model.input_shape.members}
        try:
            async with within(seconds):
                answer = await getattr(client, operation)(**extras, **parameters)
        except Exception as error:
            if self._looks_up and is_refusal(error):
                self._cell.refused = client
            refuse_absence_of_another(error, parameters.get("Key"))
            raise
        refuse_foreign(operation, answer)
        return answer


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Give the block so much time.

    Raises:
        NoAnswerError: It took longer.
    """
    try:
        async with asyncio.timeout(min(seconds, MAX_SECONDS)):
            yield
    except TimeoutError as error:
        raise NoAnswerError(seconds) from error


def open_client(options: S3Options) -> S3Client:
    """Return a client of aiobotocore's own session. Nothing is sent, and nothing is looked up yet."""

    async def open_() -> Opened:
        stack = AsyncExitStack()
        arguments = client_arguments(options)
        config = aiobotocore.config.AioConfig(**config_arguments(options))
        session = new_session(options.profile)
        return await stack.enter_async_context(session.create_client("s3", config=config, **arguments)), stack.aclose

    return S3Client(options, open_)


def new_session(profile: str | None) -> Any:
    """Return a session of aiobotocore, which reads the descriptions of services once per process."""
    session = aiobotocore.session.AioSession(profile=profile)
    session.register_component("data_loader", _loader())
    return session


@cache
def _loader() -> Any:
    return aiobotocore.session.AioSession().get_component("data_loader")


def client_arguments(options: S3Options) -> dict[str, Any]:
    """Return what `create_client` is told, apart from the configuration."""
    said = {
        "aws_access_key_id": options.key,
        "aws_secret_access_key": options.secret,
        "aws_session_token": options.token,
        "endpoint_url": options.endpoint_url,
        "region_name": options.region_name,
        "use_ssl": options.use_ssl,
        "verify": options.verify,
    }
    return {name: value for name, value in said.items() if value is not None}


def config_arguments(options: S3Options, *, connections: int = _CONNECTIONS) -> dict[str, Any]:
    """Return what botocore's configuration is told.

    Args:
        options: The settings of s3://.
        connections: How many there may be at once.
    """
    said: dict[str, Any] = {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": options.connect_timeout_seconds or _CONNECT_SECONDS,
        "read_timeout": options.read_timeout_seconds or _SILENCE_SECONDS,
        "max_pool_connections": max(connections, _CONNECTIONS),
        # Where a checksum is wanted it is given, and then no chunked encoding is needed, which some servers refuse.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": options.response_checksum_validation or "when_required",
        "http_session_cls": OnceSession,
    }
    if options.addressing_style != "auto":
        said["s3"] = {"addressing_style": options.addressing_style}
    if options.anon:
        said["signature_version"] = botocore.UNSIGNED
    elif options.signature_version is not None:
        said["signature_version"] = options.signature_version
    return said


async def _opened(open_: Callable[[], Awaitable[Opened]], options: S3Options) -> Opened:
    client, close = await open_()
    try:
        check_private_key(options, client.meta.endpoint_url)  # also one that only ~/.aws/config names
    except CkptStoreError:
        await close()
        raise
    client.meta.events.register("before-call.s3.HeadBucket", _not_elsewhere)
    if is_private(client.meta.endpoint_url, verify=options.verify):
        # Else every body would be hashed a second time, for the signature.
        client.meta.config.s3 = {**(client.meta.config.s3 or {}), "payload_signing_enabled": False}
    return client, close


def _not_elsewhere(context: dict[str, Any], **_: Any) -> None:
    """Where a bucket is asked for because a request was sent elsewhere, do not ask that again, and again."""
    context.setdefault("s3_redirect", {})["redirected"] = True


def _extras(options: S3Options) -> dict[str, Any]:
    """Return the parameters that travel with every request that knows them."""
    customer = options.sse_customer_key
    said = {
        "ACL": options.acl,
        "StorageClass": options.storage_class,
        "ServerSideEncryption": options.server_side_encryption,
        "SSEKMSKeyId": options.sse_kms_key_id,
        "BucketKeyEnabled": options.bucket_key_enabled,
        "SSECustomerAlgorithm": "AES256" if customer else None,
        "SSECustomerKey": customer,
        "RequestPayer": "requester" if options.requester_pays else None,
    }
    return {name: value for name, value in said.items() if value is not None}


class _Cell:
    """What an S3Client holds, without the S3Client, so that it can be closed when that is gone.

    Only the loop's thread touches `held`: no lock that a fork could copy while it is held.
    """

    def __init__(self, open_: Callable[[], Awaitable[Opened]]) -> None:
        self.open = open_
        self.held: tuple[asyncio.AbstractEventLoop, asyncio.Task[Opened]] | None = None
        self.refused: Any = None  # the client whose credentials the server did not take
        self.rests_until = 0.0

    async def client(self) -> Any:
        here = asyncio.get_running_loop()
        if self.held is None or self.held[0] is not here:
            if self.held is not None:
                _left.append(self.held)
            self.held = here, here.create_task(_coroutine(self.open))
            loop.at_end(self.close)
        opening = self.held[1]
        try:
            # A caller that gives up does not take the client from the others.
            client, close = await asyncio.shield(opening)
        except BaseException:
            if opening.done() and self.held is not None and self.held[1] is opening:
                self.held = None  # the next one tries again
                loop.not_at_end(self.close)
            raise
        is_held = self.held is not None and self.held[1] is opening
        if client is self.refused and is_held and here.time() >= self.rests_until:
            self.rests_until = here.time() + credentials.LOOK_AGAIN_SECONDS
            self.held = self.refused = None
            loop.not_at_end(self.close)
            _close_later(here, close)  # what is under way goes on with it
            return await self.client()
        return client

    async def close(self) -> None:
        held, self.held = self.held, None
        loop.not_at_end(self.close)
        if held is not None:
            with contextlib.suppress(Exception):  # it could not be opened
                _, close = await held[1]
                await close()


_left: list[object] = []
"""Clients of a parent process. Kept, so that they are not collected: that would close the parent's connections."""


def _close(cell: _Cell) -> None:
    held = cell.held
    if held is not None and not loop.spawn(held[0], cell.close()):
        _left.append(held)


def _close_later(here: asyncio.AbstractEventLoop, close: Callable[[], Awaitable[object]]) -> None:
    """Close a client when what is under way with it has ended, or the loop ends."""

    async def end() -> None:
        loop.not_at_end(end)
        with contextlib.suppress(Exception):
            await close()

    loop.at_end(end)
    here.call_later(_SILENCE_SECONDS, lambda: loop.spawn(here, end()))


async def _coroutine(work: Callable[[], Awaitable[Result]]) -> Result:
    return await work()
