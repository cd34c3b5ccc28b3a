"""A store that would lose checkpoints is found out before anything is written to it (I1, I15)."""

import threading
import time

import pytest

from ckptstore.clock import SystemIds
from ckptstore.errors import AccessDeniedError, NotFoundError, OutcomeUnknownError, UnavailableError, UnsupportedError
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.probe import check_race, check_second_create, probe
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.objectstore.wrappers.observed import ObservedStore
from ckptstore.protocol.capable import require_capable
from ckptstore.testing.faults import Fault, FaultyStore


class IgnoresTheCondition(ForwardingStore):
    """Answers 200 to a create, and overwrites: `rclone serve s3`, an old MinIO."""

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        del mode
        return super().put(key, body)


class OverwritesAndComplains(ForwardingStore):
    """Refuses a second create after having carried it out."""

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        try:
            return super().put(key, body, mode=mode)
        finally:
            super().put(key, body)


class LooksThenWrites(ForwardingStore):
    """Honours the condition, but not in a race: exists-then-write."""

    def __init__(self, inner):
        super().__init__(inner)
        self.together = threading.Barrier(8)

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        if mode is PutMode.CREATE and key.endswith("race"):
            self.together.wait(10)
            return super().put(key, body)
        return super().put(key, body, mode=mode)


class DeniesWhatIsAbsent(ForwardingStore):
    """S3 without the right to list."""

    def get(self, key, *, max_bytes):
        try:
            return super().get(key, max_bytes=max_bytes)
        except NotFoundError:
            raise AccessDeniedError("403") from None


class LosesReplies(ForwardingStore):
    """Carries every create out, and the answer never arrives."""

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        try:
            super().put(key, body, mode=mode)
        finally:
            raise OutcomeUnknownError("no answer")


class Unreachable(ForwardingStore):
    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        del key, body, mode
        raise OutcomeUnknownError("no answer")


def test_a_sound_store_passes_and_nothing_is_left():
    calls = []
    store = MemoryStore()
    probe(ObservedStore(store, calls.append), ids=SystemIds(), prefix="probe/")
    assert list(store.list("")) == []
    assert {call.key.split("/")[0] for call in calls} == {"probe"}


def test_files_pass(tmp_path):
    probe(open_store(tmp_path), ids=SystemIds(), prefix="probe/")
    assert list(open_store(tmp_path).list("")) == []


@pytest.mark.servers
def test_a_real_object_store_passes(s3_url):
    probe(open_store(s3_url), ids=SystemIds(), prefix="probe/")
    assert list(open_store(s3_url).list("")) == []


@pytest.mark.parametrize("kind", [IgnoresTheCondition, OverwritesAndComplains, LooksThenWrites])
def test_a_store_that_does_not_keep_the_first_is_refused(kind):
    store = MemoryStore()
    with pytest.raises(UnsupportedError, match=r"both believe that they committed.*assume_single_writer"):
        probe(kind(store), ids=SystemIds(), prefix="probe/")
    assert list(store.list("")) == []


def test_a_store_that_denies_what_is_absent_is_refused():
    with pytest.raises(UnsupportedError, match=r"could be overlooked.*s3:ListBucket"):
        probe(DeniesWhatIsAbsent(MemoryStore()), ids=SystemIds(), prefix="probe/")


def test_lost_replies_do_not_make_a_store_unfit():
    probe(LosesReplies(MemoryStore()), ids=SystemIds(), prefix="probe/")


@pytest.mark.parametrize("fault", [Fault.UNSENT, Fault.LATE])
@pytest.mark.parametrize("which", range(2))
def test_a_create_that_never_arrived_does_not_make_a_store_unfit(fault, which):
    creates = []

    def plan(call):
        creates.extend([call] if call.creates else [])
        return fault if call.creates and len(creates) == which + 1 else None

    try:
        probe(FaultyStore(MemoryStore(), plan), ids=SystemIds(), prefix="probe/")
    except UnavailableError:
        assert which == 0  # it may be asked again


class TakesOneWritePerObject(ForwardingStore):
    """Google's storage: the writes of one object must lie `seconds` apart."""

    def __init__(self, inner, *, seconds=0.2, keeps=True):
        super().__init__(inner)
        self.seconds, self.keeps, self.at, self.lock = seconds, keeps, {}, threading.Lock()

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        with self.lock:
            now = time.monotonic()
            if now - self.at.get(key, -1e9) < self.seconds:
                raise UnavailableError("429", status=429, retry_after_seconds=self.seconds)
            self.at[key] = now
        return super().put(key, body, mode=mode if self.keeps else PutMode.OVERWRITE)


class RemembersAbsence(ForwardingStore):
    """What answers from a cache that a key is absent, once it was."""

    def __init__(self, inner):
        super().__init__(inner)
        self.absent = set()

    def get(self, key, *, max_bytes):
        if key in self.absent:
            raise NotFoundError("absent")
        try:
            return super().get(key, max_bytes=max_bytes)
        except NotFoundError:
            self.absent.add(key)
            raise


def test_a_cache_that_remembers_what_was_absent_is_noticed():
    with pytest.raises(UnavailableError, match="caches answers"):
        probe(RemembersAbsence(MemoryStore()), ids=SystemIds(), prefix="probe/")


def test_a_store_that_takes_one_write_of_an_object_in_a_while_is_asked_until_it_answers():
    store = MemoryStore()
    probe(TakesOneWritePerObject(store), ids=SystemIds(), prefix="probe/")
    assert list(store.list("")) == []


def test_such_a_store_that_ignores_the_condition_is_refused_all_the_same():
    for check in (check_second_create, check_race):
        with pytest.raises(UnsupportedError):
            check(TakesOneWritePerObject(MemoryStore(), keeps=False), "probe/key")


def test_what_one_server_is_capable_of_says_nothing_of_another_at_the_same_url():
    class Elsewhere(IgnoresTheCondition):
        endpoint = "http://elsewhere"

    store, ids = MemoryStore("memory://same"), SystemIds()
    require_capable(store, ids)
    require_capable(store, ids)
    with pytest.raises(UnsupportedError):
        require_capable(Elsewhere(store), ids)


def test_an_unreachable_store_is_not_called_unfit():
    with pytest.raises(UnavailableError):
        probe(Unreachable(MemoryStore()), ids=SystemIds(), prefix="probe/")
