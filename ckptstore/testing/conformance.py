"""The suite that every engine passes whole.

An engine's test subclasses `StoreConformance` and gives it two fixtures:

```python
class TestMyEngine(StoreConformance):
    @pytest.fixture
    def open_again(self, tmp_path) -> Callable[[], ObjectStore]:
        return lambda: MyStore(tmp_path / "run")          # each call: another object at the same, empty place
```

`BytesConformance` is what reading and `assume_single_writer` need; `CreateConformance` is what the log needs.
"""

# ruff: noqa: D102  (a test's name is its sentence)

from __future__ import annotations

import pickle
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
)
from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload, PutMode
from ckptstore.units import MIB

ODD_SEGMENTS = ["run[lr=1e-4]", "a*", "q?x", "{x}", "step#5", "a b+c", "p%20q", "café", "~", "=&;,@!$'()", ".hidden"]
BAD_KEYS = ["", "/a", "a/", "a//b", "a/./b", "../a", "a/..", "a\nb", "a\x00"]

MINUTE = 60.0

OpenAgain = Callable[[], ObjectStore]


class _Conformance:
    """The fixtures that both parts share."""

    @pytest.fixture
    def open_again(self) -> OpenAgain:
        """A function that returns another store object at the same place, which is empty when the test begins."""
        raise NotImplementedError("Give the suite a fixture `open_again`.")

    @pytest.fixture
    def store(self, open_again: OpenAgain) -> ObjectStore:
        """The store under test."""
        return open_again()


class BytesConformance(_Conformance):
    """Bytes go in and come out; names are exact; nothing unfinished is seen."""

    picklable: ClassVar[bool] = True
    """Whether the engine claims that its stores may be pickled."""
    upload_bytes: ClassVar[int] = 12 * MIB + 1
    """The size of a large upload: at least two of the engine's parts."""
    many_keys: ClassVar[int] = 1_050
    """More than one page of a listing."""

    tells_uploads: ClassVar[bool] = True
    """Whether the service tells which uploads are incomplete."""

    def pending_uploads(self, store: ObjectStore) -> Sequence[PendingUpload]:
        """Return what incomplete uploads there are under the store's root, where the service tells."""
        return list(store.list_uploads("")) if self.tells_uploads else ()

    @pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 4096], ids=["empty", "one", "1 MiB"])
    def test_what_was_put_is_read_back(self, store: ObjectStore, body: bytes) -> None:
        info = store.put("log/a.json", body)
        assert store.get("log/a.json", max_bytes=len(body)) == body
        assert (info.key, info.size) == ("log/a.json", len(body))

    def test_put_head_and_list_say_the_same(self, store: ObjectStore) -> None:
        put = store.put("data/0/a", b"four")
        head = store.head("data/0/a")
        (listed,) = store.list("")
        assert (head.key, head.size, head.etag) == (listed.key, listed.size, listed.etag) == ("data/0/a", 4, put.etag)
        assert listed.modified == pytest.approx(head.modified, abs=1)
        assert head.etag is None or '"' not in head.etag

    def test_a_put_replaces(self, store: ObjectStore) -> None:
        first = store.put("a", b"first")
        second = store.put("a", b"second, and longer")
        assert store.get("a", max_bytes=100) == b"second, and longer"
        assert first.etag is None or first.etag != second.etag

    def test_what_is_absent_is_said_to_be_absent(self, store: ObjectStore) -> None:
        for key in ("a", "log/000000000000.json"):
            with pytest.raises(NotFoundError):
                store.get(key, max_bytes=10)
            with pytest.raises(NotFoundError):
                store.get_range(key, start=0, length=1)
            with pytest.raises(NotFoundError):
                store.head(key)
        assert list(store.list("")) == list(store.list("log/")) == []

    def test_more_than_is_allowed_is_not_read(self, store: ObjectStore) -> None:
        store.put("a", b"12345")
        with pytest.raises(IntegrityError):
            store.get("a", max_bytes=4)
        assert store.get("a", max_bytes=5) == b"12345"

    def test_no_room_is_made_for_what_is_only_claimed(self, store: ObjectStore) -> None:
        store.put("a", b"12345")
        for claimed in (10**12, 2**62, 2**63 - 1):
            assert store.get("a", max_bytes=claimed) == b"12345"
            for start in (0, 3, 2**60):
                with pytest.raises(IntegrityError):
                    store.get_range("a", start=start, length=claimed)

    def test_ranges_are_exact(self, store: ObjectStore) -> None:
        store.put("a", b"0123456789")
        assert store.get_range("a", start=0, length=10) == b"0123456789"
        assert store.get_range("a", start=3, length=4) == b"3456"
        assert store.get_range("a", start=9, length=1) == b"9"

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (9, 2), (10, 1), (100, 5)])
    def test_a_range_past_the_end_is_never_short(self, store: ObjectStore, start: int, length: int) -> None:
        store.put("a", b"0123456789")
        with pytest.raises(IntegrityError):
            store.get_range("a", start=start, length=length)

    def test_an_empty_object_has_no_range(self, store: ObjectStore) -> None:
        store.put("a", b"")
        with pytest.raises(IntegrityError):
            store.get_range("a", start=0, length=1)

    @pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 0), (0, -1)])
    def test_a_range_that_makes_no_sense_is_refused(self, store: ObjectStore, start: int, length: int) -> None:
        store.put("a", b"0123456789")
        with pytest.raises(InvalidInputError):
            store.get_range("a", start=start, length=length)

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_key_that_is_not_in_plain_form_is_refused(self, store: ObjectStore, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.put(key, b""),
            lambda: store.get(key, max_bytes=1),
            lambda: store.get_range(key, start=0, length=1),
            lambda: store.head(key),
            lambda: store.delete(key),
            lambda: store.open_upload(key, size=1),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError):
                call()

    @pytest.mark.parametrize("prefix", ["a", "/", "/a/", "a//", "../", "./"])
    def test_a_prefix_that_is_not_in_plain_form_is_refused(self, store: ObjectStore, prefix: str) -> None:
        with pytest.raises(InvalidInputError):
            list(store.list(prefix))

    def test_a_listing_is_recursive_and_sorted_by_the_whole_key(self, store: ObjectStore) -> None:
        keys = ["a-b", "a.b", "a/b", "a/c/d/e", "a0", "ab/c", "b", "A", "ä/b", "z~", "a b"]
        for key in reversed(keys):
            store.put(key, key.encode())
        assert [info.key for info in store.list("")] == sorted(keys)

    def test_a_prefix_is_a_folder_and_nothing_else(self, store: ObjectStore) -> None:
        for key in ("a/1", "a/b/2", "ab/3", "a-b", "aa", "b/a/4"):
            store.put(key, b"")
        assert [info.key for info in store.list("a/")] == ["a/1", "a/b/2"]
        assert [info.key for info in store.list("a/b/")] == ["a/b/2"]
        assert list(store.list("a/1/")) == list(store.list("c/")) == []

    def test_a_listing_can_begin_after_a_key(self, store: ObjectStore) -> None:
        keys = sorted(["a-b", "a/b", "a/c", "ab", "b/c/d", "b/c/e", "b/d"])
        for key in keys:
            store.put(key, b"")
        for after in [*keys, "a", "a/", "b/c/", "", "zz", "b/c/dd"]:
            assert [info.key for info in store.list("", after=after)] == [key for key in keys if key > after], after
        assert [info.key for info in store.list("b/", after="b/c/d")] == ["b/c/e", "b/d"]

    def test_a_listing_of_many_keys_is_whole(self, store: ObjectStore) -> None:
        keys = [f"log/{seq:012d}.json" for seq in range(self.many_keys)]
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(lambda key: store.put(key, key.encode()), keys))
        assert [info.key for info in store.list("log/")] == keys
        assert [info.key for info in store.list("log/", after=keys[999])] == keys[1000:]

    def test_names_are_taken_literally(self, store: ObjectStore) -> None:
        keys = sorted(f"{segment}/{segment}" for segment in ODD_SEGMENTS)
        for key in keys:
            store.put(key, key.encode())
        assert [info.key for info in store.list("")] == keys
        for segment in ODD_SEGMENTS:
            assert [info.key for info in store.list(f"{segment}/")] == [f"{segment}/{segment}"]
            assert store.get(f"{segment}/{segment}", max_bytes=100) == f"{segment}/{segment}".encode()

    def test_deleting_takes_exactly_one_key(self, store: ObjectStore) -> None:
        for key in ("exp[12]", "exp1", "exp2", "a/b", "a/bc"):
            store.put(key, b"")
        for key in ("exp[12]", "a/b", "absent", "a/absent", "a"):
            store.delete(key)
        assert [info.key for info in store.list("")] == ["a/bc", "exp1", "exp2"]

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
            return
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

    def test_another_store_sees_every_change_at_once(self, store: ObjectStore, open_again: OpenAgain) -> None:
        """No listing and no absence is ever remembered."""
        other = open_again()
        for seq in range(5):
            key = f"log/{seq}"
            with pytest.raises(NotFoundError):
                other.head(key)
            assert len(list(other.list("log/"))) == seq
            store.put(key, b"x")
            assert other.get(key, max_bytes=1) == b"x"
            assert len(list(other.list("log/"))) == seq + 1
        store.delete("log/0")
        assert [info.key for info in other.list("")] == ["log/1", "log/2", "log/3", "log/4"]

    def test_threads_do_not_disturb_each_other(self, store: ObjectStore) -> None:
        def work(thread: int) -> None:
            for turn in range(8):
                key, body = f"t/{thread}/{turn}", f"{thread}.{turn}".encode() * 100
                store.put(key, body)
                assert store.get(key, max_bytes=len(body)) == body
                assert store.get_range(key, start=1, length=2) == body[1:3]
                assert key in [info.key for info in store.list(f"t/{thread}/")]
            with store.open_upload(f"t/{thread}/u", size=MIB) as upload:
                upload.write(bytes([thread]) * MIB)
                upload.complete()
            assert store.get(f"t/{thread}/u", max_bytes=MIB) == bytes([thread]) * MIB

        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(work, thread) for thread in range(8)]:
                done.result(timeout=120)

    def test_a_store_survives_pickling(self, store: ObjectStore) -> None:
        if not self.picklable:
            with pytest.raises(TypeError):
                pickle.dumps(store)
            return
        store.put("a", b"x")
        again: ObjectStore = pickle.loads(pickle.dumps(store))  # noqa: S301  (our own bytes)
        assert again.get("a", max_bytes=1) == b"x"
        assert (again.url, again.engine) == (store.url, store.engine)


class CreateConformance(_Conformance):
    """A key can be created once. The log stands on it (I1)."""

    def test_the_first_create_wins_and_stays(self, store: ObjectStore) -> None:
        store.put("log/0", b"first", mode=PutMode.CREATE)
        for body in (b"second", b"", b"first"):
            with pytest.raises(AlreadyExistsError):
                store.put("log/0", body, mode=PutMode.CREATE)
        assert store.get("log/0", max_bytes=10) == b"first"

    def test_an_empty_object_is_there_too(self, store: ObjectStore) -> None:
        store.put("log/0", b"", mode=PutMode.CREATE)
        with pytest.raises(AlreadyExistsError):
            store.put("log/0", b"x", mode=PutMode.CREATE)
        assert store.get("log/0", max_bytes=10) == b""

    def test_what_was_put_or_uploaded_cannot_be_created(self, store: ObjectStore) -> None:
        store.put("put", b"x")
        with store.open_upload("uploaded", size=1) as upload:
            upload.write(b"x")
            upload.complete()
        for key in ("put", "uploaded"):
            with pytest.raises(AlreadyExistsError):
                store.put(key, b"y", mode=PutMode.CREATE)
            assert store.get(key, max_bytes=1) == b"x"

    def test_what_was_deleted_can_be_created_again(self, store: ObjectStore) -> None:
        store.put("a", b"x", mode=PutMode.CREATE)
        store.delete("a")
        store.put("a", b"y", mode=PutMode.CREATE)
        assert store.get("a", max_bytes=1) == b"y"

    def test_of_racing_creates_exactly_one_wins(self, open_again: OpenAgain) -> None:
        racers = [open_again() for _ in range(8)]

        def race(store: ObjectStore, key: str, body: bytes, start: threading.Barrier) -> bool:
            start.wait(timeout=30)
            try:
                store.put(key, body, mode=PutMode.CREATE)
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(len(racers)) as threads:
            for turn in range(3):
                start = threading.Barrier(len(racers))
                bodies = [f"{turn}.{racer}".encode() for racer in range(len(racers))]
                running = [
                    threads.submit(race, store, f"log/{turn}", body, start)
                    for store, body in zip(racers, bodies, strict=True)
                ]
                won = [body for body, done in zip(bodies, running, strict=True) if done.result(timeout=60)]
                assert [racers[0].get(f"log/{turn}", max_bytes=10)] == won


class StoreConformance(BytesConformance, CreateConformance):
    """All that an engine must do to be written to."""


def _identity(info: ObjectInfo) -> tuple[str, int, str | None]:
    return info.key, info.size, info.etag
