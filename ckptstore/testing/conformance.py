"""The suite that every engine passes whole.

An engine's test subclasses `StoreConformance` and gives it two fixtures:

```python
class TestMyEngine(StoreConformance):
    @pytest.fixture
    def open_again(self, tmp_path) -> Callable[[], ObjectStore]:
        return lambda: MyStore(tmp_path / "run")          # each call: another object at the same, empty place
```

`BytesConformance` is what reading and `assume_single_writer` need; `CreateConformance` is what the log needs. A
store that has only the first is refused for writing, and its test subclasses `RefusedConformance`.
"""

# ruff: noqa: D102  (a test's name is its sentence)

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from ckptstore.clock import SystemIds
from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
)
from ckptstore.objectstore.port import ObjectStore, PutMode
from ckptstore.objectstore.probe import probe
from ckptstore.testing.conformance_uploads import EmptyPlace, OpenAgain, UploadConformance
from ckptstore.units import MIB

ODD_SEGMENTS = ["run[lr=1e-4]", "a*", "q?x", "{x}", "step#5", "a b+c", "p%20q", "café", "~", "=&;,@!$'()", ".hidden"]
BAD_KEYS = ["", "/a", "a/", "a//b", "a/./b", "../a", "a/..", "a\nb", "a\x00"]


class BytesConformance(UploadConformance):
    """Bytes go in and come out; names are exact; nothing unfinished is seen."""

    picklable: ClassVar[bool] = True
    """Whether the engine claims that its stores may be pickled."""
    many_keys: ClassVar[int] = 1_050
    """More than one page of a listing."""
    keeps_etags: ClassVar[bool] = True
    """Whether the service still tells of an object, later, what it called its bytes when they were stored."""
    knows_folders: ClassVar[bool] = False
    """Whether the service, asked to delete `a` where only `a/b` is, refuses that instead of calling it absent."""

    @pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 4096], ids=["empty", "one", "1 MiB"])
    def test_what_was_put_is_read_back(self, store: ObjectStore, body: bytes) -> None:
        info = store.put("log/a.json", body)
        assert store.get("log/a.json", max_bytes=len(body)) == body
        assert (info.key, info.size) == ("log/a.json", len(body))

    def test_put_head_and_list_say_the_same(self, store: ObjectStore) -> None:
        put = store.put("data/0/a", b"four")
        head = store.head("data/0/a")
        (listed,) = store.list("")
        etag = put.etag if self.keeps_etags else None
        assert (head.key, head.size, head.etag) == (listed.key, listed.size, listed.etag) == ("data/0/a", 4, etag)
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
        for key in ("exp[12]", "a/b", "absent", "a/absent"):
            store.delete(key)
        with pytest.raises(CkptStoreError) if self.knows_folders else contextlib.nullcontext():
            store.delete("a")
        assert [info.key for info in store.list("")] == ["a/bc", "exp1", "exp2"]

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


class CreateConformance(EmptyPlace):
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

    def test_writing_is_allowed(self, store: ObjectStore) -> None:
        probe(store, ids=SystemIds(), prefix="probe/")
        assert list(store.list("")) == []


class RefusedConformance(BytesConformance):
    """A store that does not create once: it can be read, and written to by a single writer only."""

    def test_writing_is_refused_and_what_would_be_lost_is_said(self, store: ObjectStore) -> None:
        with pytest.raises(UnsupportedError, match=r"one checkpoint would be lost.*assume_single_writer=True"):
            probe(store, ids=SystemIds(), prefix="probe/")
        assert list(store.list("")) == []
