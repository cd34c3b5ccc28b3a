"""The one thing that each wrapper changes."""

import pytest

from ckptstore.errors import (
    AccessDeniedError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import PendingUpload, PutMode
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.objectstore.wrappers.observed import Call, Counts, ObservedStore
from ckptstore.objectstore.wrappers.prefixed import PrefixedStore
from ckptstore.objectstore.wrappers.readonly import ReadOnlyStore
from ckptstore.objectstore.wrappers.retrying import RetryingStore
from ckptstore.objectstore.wrappers.throttled import ThrottledStore
from ckptstore.options import RetryOptions


class WrittenTime:
    """A clock that goes on when somebody sleeps; it remembers for how long."""

    def __init__(self):
        self.slept = []

    def monotonic(self):
        return sum(self.slept)

    def sleep(self, seconds):
        self.slept.append(seconds)


class AlwaysHalf:
    def fraction(self):
        return 0.5


class Flaky(ForwardingStore):
    """The first calls fail."""

    def __init__(self, inner, failures):
        super().__init__(inner)
        self.failures = list(failures)
        self.calls = 0

    def _fail(self):
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)

    def get(self, key, *, max_bytes):
        self._fail()
        return super().get(key, max_bytes=max_bytes)

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        self._fail()
        return super().put(key, body, mode=mode)

    def list(self, prefix, *, after=None):
        yield from super().list(prefix, after=after)
        self._fail()  # after all was yielded: as a page that cannot be fetched


def retrying(inner, **options):
    clock = WrittenTime()
    return RetryingStore(inner, options=RetryOptions(**options), clock=clock, ids=AlwaysHalf()), clock


def test_a_prefix_cannot_be_left():
    inner = MemoryStore()
    inner.put("above", b"x")
    store = PrefixedStore(inner, "runs/a/")
    for call in (
        lambda: store.get("../above", max_bytes=1),
        lambda: store.delete("../../above"),
        lambda: list(store.list("../")),
    ):
        with pytest.raises(InvalidInputError):
            call()
    store.put("x", b"1")
    assert inner.get("runs/a/x", max_bytes=1) == b"1"
    assert store.url == "memory:///runs/a"


@pytest.mark.parametrize("prefix", ["runs", "runs//", "../", "/"])
def test_a_prefix_must_be_in_plain_form(prefix):
    with pytest.raises(InvalidInputError):
        PrefixedStore(MemoryStore(), prefix)


def test_nothing_is_written_to_a_read_only_store():
    inner = MemoryStore("memory://run")
    inner.put("a", b"x")
    store = ReadOnlyStore(inner)
    for call in (
        lambda: store.put("b", b""),
        lambda: store.put("b", b"", mode=PutMode.CREATE),
        lambda: store.delete("a"),
        lambda: store.open_upload("b", size=1),
        lambda: store.abort_upload(PendingUpload("b", "1")),
    ):
        with pytest.raises(UnsupportedError, match="memory://run was opened for reading"):
            call()
    assert [info.key for info in store.list("")] == ["a"]
    assert store.get("a", max_bytes=1) == store.get_range("a", start=0, length=1) == b"x"
    assert store.head("a").size == 1


def test_every_call_is_told_with_its_bytes():
    calls = []
    store = ObservedStore(MemoryStore(), calls.append)
    store.put("a", b"12345")
    store.get("a", max_bytes=5)
    store.get_range("a", start=2, length=3)
    store.head("a")
    list(store.list(""))
    with pytest.raises(NotFoundError):
        store.get("absent", max_bytes=5)
    with store.open_upload("b", size=4) as upload:
        upload.write(b"12")
        upload.write(b"34")
        upload.complete()
    store.delete("a")
    assert calls == [
        Call("put", "a", 5),
        Call("get", "a", 5),
        Call("get_range", "a", 3, start=2),
        Call("head", "a"),
        Call("list", "", 1),
        Call("get", "absent", failed=True),
        Call("open_upload", "b"),
        Call("write", "b", 2),
        Call("write", "b", 2),
        Call("complete", "b"),
        Call("abort", "b"),
        Call("delete", "a"),
    ]


def test_counts_add_up():
    counts = Counts()
    store = ObservedStore(MemoryStore(), counts)
    for number in range(3):
        store.put(f"{number}", b"12345")
        store.get_range(f"{number}", start=1, length=2)
    assert counts.requests == {"put": 3, "get_range": 3}
    assert counts.bytes == {"put": 15, "get_range": 6}


def test_a_read_that_did_not_happen_is_tried_again_with_growing_pauses():
    inner = MemoryStore()
    inner.put("a", b"x")
    store, clock = retrying(Flaky(inner, [UnavailableError("down")] * 3), attempts=4, longest_pause_seconds=0.2)
    assert store.get("a", max_bytes=1) == b"x"
    assert clock.slept == [0.05, 0.1, 0.1]


def test_a_listing_that_breaks_off_is_begun_again_and_yields_nothing_twice():
    inner = MemoryStore()
    for key in ("a", "b"):
        inner.put(key, b"")
    store, _ = retrying(Flaky(inner, [UnavailableError("down")]))
    assert [info.key for info in store.list("")] == ["a", "b"]


def test_retrying_ends():
    flaky = Flaky(MemoryStore(), [UnavailableError("down")] * 100)
    store, _ = retrying(flaky, attempts=4)
    with pytest.raises(UnavailableError):
        store.get("a", max_bytes=1)
    assert flaky.calls == 4


def test_no_attempt_begins_after_the_deadline():
    store, clock = retrying(Flaky(MemoryStore(), [UnavailableError("down")] * 100), attempts=100, deadline_seconds=1.0)
    with pytest.raises(UnavailableError):
        store.get("a", max_bytes=1)
    assert 0.5 < clock.monotonic() <= 1.0


@pytest.mark.parametrize("error", [NotFoundError("absent"), OutcomeUnknownError("?"), ValueError("a bug")])
def test_only_what_did_not_happen_is_tried_again(error):
    flaky = Flaky(MemoryStore(), [error])
    with pytest.raises(type(error)):
        retrying(flaky)[0].get("a", max_bytes=1)
    assert flaky.calls == 1


@pytest.mark.parametrize("error", [UnavailableError("down"), OutcomeUnknownError("?")])
def test_a_create_is_sent_once(error):
    flaky = Flaky(MemoryStore(), [error])
    with pytest.raises(type(error)):
        retrying(flaky)[0].put("a", b"x", mode=PutMode.CREATE)
    assert flaky.calls == 1


@pytest.mark.parametrize("error", [UnavailableError("down"), OutcomeUnknownError("?")])
def test_overwriting_has_the_same_effect_twice(error):
    flaky = Flaky(MemoryStore(), [error] * 2)
    retrying(flaky)[0].put("a", b"x")
    assert flaky.calls == 3


def test_what_is_refused_after_a_try_that_may_have_landed_is_unknown():
    flaky = Flaky(MemoryStore(), [OutcomeUnknownError("?"), AccessDeniedError("403")])
    with pytest.raises(OutcomeUnknownError, match="403"):
        retrying(flaky)[0].put("a", b"x")


def test_a_server_that_asks_for_a_pause_gets_it_within_bounds():
    inner = MemoryStore()
    inner.put("a", b"x")
    asked = [UnavailableError("429", retry_after_seconds=seconds) for seconds in (3.0, 1e9, -1.0)]
    store, clock = retrying(Flaky(inner, asked), longest_pause_seconds=7.0)
    assert store.get("a", max_bytes=1) == b"x"
    assert clock.slept == [3.0, 7.0, 0.2]


def test_requests_and_bytes_take_their_time():
    clock = WrittenTime()
    store = ThrottledStore(MemoryStore(), seconds_per_request=1.0, bytes_per_second=100, clock=clock)
    store.put("a", bytes(200))
    store.get_range("a", start=0, length=50)
    store.head("a")
    with store.open_upload("b", size=300) as upload:
        upload.write(bytes(300))
        upload.complete()
    assert clock.slept == [3.0, 1.5, 1.0, 1.0, 4.0, 1.0]


def test_what_was_found_out_after_a_try_that_may_have_landed_is_no_guess():
    flaky = Flaky(MemoryStore(), [OutcomeUnknownError("?"), IntegrityError("other bytes")])
    with pytest.raises(IntegrityError):
        retrying(flaky)[0].put("a", b"x")
