"""What was begun and never ended is told apart by the log: dead, perhaps living, or not ours (I7)."""

from datetime import UTC, datetime, timedelta

import pytest
from odd_stores import Denies

from ckptstore.clock import SystemClock
from ckptstore.errors import AccessDeniedError, IntegrityError, UnavailableError, UnsupportedError
from ckptstore.maintenance.uploads import abort, find_uploads
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated

DAY = 24 * 3600


class Clock(SystemClock):
    """A clock that may be set."""

    ahead = 0.0

    def now(self):
        return datetime.now(UTC) + timedelta(seconds=self.ahead)


class Scene:
    """A run with every kind of upload in it, in a store whose clock may be set."""

    def __init__(self, store, clock):
        self.store, self.clock = store, clock
        self.old, self.new = Incarnation.new(job="gpt"), Incarnation.new(job="gpt")
        self.log = RunLog.create(store)
        simulated.save(self.log, self.old, "a")
        self.begun = {}
        self.start("fenced", self.attempt(self.old, "x"))
        claim(self.log, self.new)
        self.start("overtaken", self.attempt(self.new, "y"))
        simulated.save(self.log, self.new, "b")
        committed = self.log.fold.newest.commit.stem
        self.start("committed", committed)
        self.start("living", self.attempt(self.new, "z"))

    def attempt(self, job, name):
        return begin(self.log, job, checkpoint_id=name, world_size=2).stem

    def start(self, what, stem):
        upload = self.store.open_upload(stem.shard_key(1), size=10)
        upload.write(b"12345")
        self.begun[what] = (str(stem), upload)


@pytest.fixture(params=["memory", "file"])
def scene(request, tmp_path):
    clock = Clock()
    store = MemoryStore(clock=clock) if request.param == "memory" else open_store(tmp_path / "run")
    scene = Scene(store, clock)
    yield scene
    for _, upload in scene.begun.values():
        upload.abort()


def states(found):
    return {str(each.stem): each.state for each in found}


def test_what_the_log_says_can_never_commit_is_dead_and_the_newest_attempts_may_be_living(scene):  # I7
    found = find_uploads(scene.store).found
    assert states(found) == {
        stem: "may be living" if what == "living" else "dead" for what, (stem, _) in scene.begun.items()
    }
    reasons = {str(each.stem): each.why for each in found}
    assert "claimed" in reasons[scene.begun["fenced"][0]]
    assert "later attempt" in reasons[scene.begun["overtaken"][0]]
    assert "committed without it" in reasons[scene.begun["committed"][0]]


def test_only_what_is_dead_and_old_enough_may_be_aborted(scene):
    uploads = find_uploads(scene.store)
    assert uploads.abortable(older_than_seconds=DAY) == []
    dead = uploads.abortable(older_than_seconds=0)
    living = scene.begun["living"][0]
    assert living not in states(dead)
    assert len(dead) == 3
    assert living in states(uploads.abortable(older_than_seconds=0, living=True))
    assert [error for _, error in abort(scene.store, dead)] == [None] * 3
    assert list(states(find_uploads(scene.store).found)) == [living]


def test_a_writer_whose_upload_was_not_aborted_goes_on(scene):
    abort(scene.store, find_uploads(scene.store).abortable(older_than_seconds=0))
    _, upload = scene.begun["living"]
    upload.write(b"67890")
    assert upload.complete().size == 10


def test_the_age_is_by_the_clock_of_the_store():
    scene = Scene(MemoryStore(clock=(clock := Clock())), clock)
    clock.ahead = 3 * DAY  # the store's; this machine's stays
    uploads = find_uploads(scene.store)
    assert uploads.by_store
    assert [each.age_seconds for each in uploads.found] == [pytest.approx(3 * DAY, abs=5)] * 4
    assert len(uploads.abortable(older_than_seconds=2 * DAY)) == 3
    assert uploads.abortable(older_than_seconds=4 * DAY) == []
    assert [info.key for info in scene.store.list("probe/")] == []
    by_machine = find_uploads(Denies(scene.store, "overwrite"))
    assert not by_machine.by_store
    assert max(each.age_seconds for each in by_machine.found) < 60


def test_what_is_not_this_run_s_is_never_aborted():
    store = MemoryStore()
    RunLog.create(store)
    kept = [
        store.open_upload(key, size=1)
        for key in (
            "nested/data/0/x/rank-00000.safetensors",
            "mine.bin",
            "data/zz/x/y",
            "log/b/data/0/x/rank-00000.safetensors",
            "log/b/log/000000000000.json",
            "log/run.json",
            "probe/x/data/0/x/rank-00000.safetensors",
        )
    ]
    uploads = find_uploads(store)
    assert [each.state for each in uploads.found] == ["foreign"] * len(kept)
    assert uploads.abortable(older_than_seconds=0, living=True) == []
    del kept


def test_a_small_write_has_an_hour_before_it_is_called_dead():
    store = MemoryStore(clock=(clock := Clock()))
    kept = store.open_upload("probe/0123/upload", size=1)
    assert [each.state for each in find_uploads(store).found] == ["may be living"]
    clock.ahead = 3601
    assert [each.state for each in find_uploads(store).found] == ["dead"]
    del kept


def test_the_temporary_of_a_killed_writer_of_records_is_found_on_files(tmp_path):
    store = open_store(tmp_path / "run")
    RunLog.create(store)
    for place in ("", "log/", "elsewhere/"):
        (tmp_path / "run" / place).mkdir(exist_ok=True)
        (tmp_path / "run" / f"{place}.ckptstore-tmp-dead").write_bytes(b"half")
    found = {each.upload.key: each.state for each in find_uploads(store).found}
    assert found == {
        ".ckptstore-tmp-dead": "may be living",
        "log/.ckptstore-tmp-dead": "may be living",
        "elsewhere/.ckptstore-tmp-dead": "foreign",
    }


def test_where_there_is_no_run_nothing_of_an_attempt_is_called_dead():
    scene = Scene(MemoryStore(), Clock())
    empty = MemoryStore()
    kept = empty.open_upload(f"data/1/{scene.begun['fenced'][0]}/rank-00001.safetensors", size=1)
    assert [each.state for each in find_uploads(empty).found] == ["may be living"]
    del kept


def test_with_a_damaged_log_nothing_is_called_dead(scene):
    scene.store.put("log/000000000001.json", b"?")
    with pytest.raises(IntegrityError):
        find_uploads(scene.store)


def test_an_engine_that_cannot_tell_says_what_removes_them():
    class Silent(ForwardingStore):
        def list_uploads(self, prefix):
            del prefix
            raise UnsupportedError("no", hint="A rule of the bucket removes them.")

    with pytest.raises(UnsupportedError, match="rule"):
        find_uploads(Silent(MemoryStore()))


def test_one_that_cannot_be_aborted_does_not_keep_the_others(scene):
    class Stubborn(ForwardingStore):
        def abort_upload(self, upload):
            if scene.begun["fenced"][0] in upload.key:
                raise AccessDeniedError("403")
            super().abort_upload(upload)

    store = Stubborn(scene.store)
    ended = abort(store, find_uploads(store).abortable(older_than_seconds=0))
    assert sorted(error is None for _, error in ended) == [False, True, True]


@pytest.mark.servers
def test_on_an_object_store_the_dead_are_aborted_and_the_living_are_not(s3_url, seaweedfs):
    store = open_store(s3_url, engine="s3fs")
    scene = Scene(store, Clock())
    client, prefix = seaweedfs.client(), s3_url.partition(f"{seaweedfs.bucket}/")[2]
    for what in ("fenced", "living"):  # as a killed process leaves them
        key = f"{prefix}/data/1/{scene.begun[what][0]}/rank-00017.safetensors"
        client.create_multipart_upload(Bucket=seaweedfs.bucket, Key=key)
    uploads = find_uploads(store)
    assert uploads.by_store
    assert {each.state for each in uploads.found if each.stem == uploads.found[0].stem} == {uploads.found[0].state}
    dead = uploads.abortable(older_than_seconds=0)
    assert {str(each.stem) for each in dead} >= {scene.begun["fenced"][0]}
    assert scene.begun["living"][0] not in {str(each.stem) for each in dead}
    assert all(error is None for _, error in abort(store, dead))
    left = {str(each.stem) for each in find_uploads(store).found}
    assert left == {scene.begun["living"][0]}
    for _, upload in scene.begun.values():
        upload.abort()


def test_who_still_writes_an_upload_that_a_collection_aborted_is_told_that_it_is_gone():
    """As S3 tells it: the save fails, and nobody is blamed for a misuse."""
    store = MemoryStore()
    with store.open_upload("data/0/late", size=2) as upload:
        upload.write(b"x")
        store.abort_upload(*store.list_uploads(""))
        with pytest.raises(UnavailableError, match="aborted by somebody else"):
            upload.write(b"x")
        with pytest.raises(UnavailableError, match="aborted by somebody else"):
            upload.complete()
    assert not [*store.list("")]
