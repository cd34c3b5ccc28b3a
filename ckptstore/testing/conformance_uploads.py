"""The part of the conformance suite that is about uploads, and what all parts share. See `conformance`."""

# ruff: noqa: D102  (a test's name is its sentence)

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from ckptstore.errors import CkptStoreError, InvalidInputError, NotFoundError, UnsupportedError
from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload
from ckptstore.units import MIB

MINUTE = 60.0

OpenAgain = Callable[[], ObjectStore]


class EmptyPlace:
    """The fixtures that all parts share."""

    @pytest.fixture
    def open_again(self) -> OpenAgain:
        """A function that returns another store object at the same place, which is empty when the test begins."""
        raise NotImplementedError("Give the suite a fixture `open_again`.")

    @pytest.fixture
    def store(self, open_again: OpenAgain) -> ObjectStore:
        """The store under test."""
        return open_again()


class UploadConformance(EmptyPlace):
    """An object that is streamed is whole or absent."""

    upload_bytes: ClassVar[int] = 12 * MIB + 1
    """The size of a large upload: at least two of the engine's parts."""
    tells_uploads: ClassVar[bool] = True
    """Whether the service tells which uploads are incomplete."""

    def pending_uploads(self, store: ObjectStore) -> Sequence[PendingUpload]:
        """Return what incomplete uploads there are under the store's root, where the service tells."""
        return list(store.list_uploads("")) if self.tells_uploads else ()

    def test_an_upload_is_seen_when_it_is_complete_and_not_before(self, store: ObjectStore) -> None:
        body = secrets.token_bytes(self.upload_bytes)
        with store.open_upload("data/0/shard", size=len(body)) as upload:
            for start in range(0, len(body), 3 * MIB):
                upload.write(memoryview(body)[start : start + 3 * MIB])
                assert list(store.list("")) == []
                with pytest.raises(NotFoundError):
                    store.head("data/0/shard")
            info = upload.complete()
        assert store.get("data/0/shard", max_bytes=len(body)) == body
        assert _identity(info) == _identity(store.head("data/0/shard")) == _identity(next(iter(store.list(""))))
        assert not self.pending_uploads(store)

    @pytest.mark.parametrize("size", [0, 1])
    def test_an_upload_may_be_small(self, store: ObjectStore, size: int) -> None:
        with store.open_upload("a", size=size) as upload:
            upload.write(b"x" * size)
            upload.complete()
        assert store.get("a", max_bytes=size) == b"x" * size

    def test_what_was_written_may_be_reused_at_once(self, store: ObjectStore) -> None:
        buffer = bytearray(self.upload_bytes)
        with store.open_upload("a", size=3 * len(buffer)) as upload:
            for value in (1, 2, 3):
                buffer[:] = bytes([value]) * len(buffer)
                upload.write(buffer)
            buffer[:] = bytes(len(buffer))
            upload.complete()
        body = store.get("a", max_bytes=3 * len(buffer))
        assert body == b"".join(bytes([value]) * len(buffer) for value in (1, 2, 3))

    @pytest.mark.parametrize("size", [1, upload_bytes], ids=["small", "large"])
    @pytest.mark.parametrize("how", ["exception", "left", "abort", "interrupt"])
    def test_an_abandoned_upload_leaves_nothing(self, store: ObjectStore, size: int, how: str) -> None:
        """Nothing is published by an exception, an interrupt, or by doing nothing."""
        upload = store.open_upload("data/0/shard", size=size)
        kinds = {"exception": RuntimeError, "interrupt": KeyboardInterrupt}
        if how in kinds:
            with pytest.raises(kinds[how]), upload:  # noqa: PT012  (how the block is left is the point)
                upload.write(b"x" * size)
                raise kinds[how]
        elif how == "left":
            with upload:
                upload.write(b"x" * size)
        else:
            upload.write(b"x" * size)
            upload.abort()
        upload.abort()  # harmless, however often
        with pytest.raises(NotFoundError):
            store.head("data/0/shard")
        assert list(store.list("")) == []
        assert not self.pending_uploads(store)

    def test_an_incomplete_upload_is_listed_and_can_be_forgotten(
        self, store: ObjectStore, open_again: OpenAgain
    ) -> None:
        """By anybody, and exactly that one."""
        if not self.tells_uploads:
            with pytest.raises(UnsupportedError):
                list(store.list_uploads(""))
            pytest.skip("This service tells nobody of incomplete uploads; nothing can be done here.")
        other, size = open_again(), self.upload_bytes
        with store.open_upload("data/0/kept", size=size) as kept:
            kept.write(bytes(size - 1))
            assert self._pending_soon(other, 1)
            (first,) = other.list_uploads("data/")
            with store.open_upload("data/0/left", size=size) as left:
                left.write(bytes(size - 1))
                assert self._pending_soon(other, 2)
                assert list(other.list_uploads("log/")) == []
                (second,) = [upload for upload in other.list_uploads("data/0/") if upload != first]
                other.abort_upload(second)
                other.abort_upload(second)
                assert list(other.list_uploads("")) == [first]
                with pytest.raises(CkptStoreError):  # noqa: PT012  (the last byte, or what follows it)
                    left.write(b"x")
                    left.complete()
            assert first.began is None or second.began is None or abs(second.began - first.began) < MINUTE
            kept.write(b"x")
            kept.complete()
        assert [info.key for info in store.list("")] == ["data/0/kept"]
        assert not self.pending_uploads(store)

    def _pending_soon(self, store: ObjectStore, count: int) -> bool:
        """Say whether so many are listed; what was written may still be on its way."""
        deadline = time.monotonic() + MINUTE
        while len(list(store.list_uploads(""))) != count and time.monotonic() < deadline:
            time.sleep(0.01)
        return time.monotonic() < deadline

    @pytest.mark.parametrize("announced", [upload_bytes - 1, upload_bytes + 1, 0], ids=["longer", "shorter", "empty"])
    def test_an_upload_of_another_size_than_announced_is_refused(self, store: ObjectStore, announced: int) -> None:
        with pytest.raises(InvalidInputError), store.open_upload("a", size=announced) as upload:  # noqa: PT012  (either)
            upload.write(bytes(self.upload_bytes))
            upload.complete()
        assert list(store.list("")) == []
        assert not self.pending_uploads(store)

    def test_an_upload_that_has_ended_takes_nothing_more(self, store: ObjectStore) -> None:
        upload = store.open_upload("a", size=1)
        upload.write(b"x")
        upload.complete()
        for call in (lambda: upload.write(b"y"), upload.complete):
            with pytest.raises(InvalidInputError):
                call()
        upload.abort()
        assert store.get("a", max_bytes=1) == b"x"


def _identity(info: ObjectInfo) -> tuple[str, int, str | None]:
    return info.key, info.size, info.etag
