"""What a store can do is found out by doing it, and nothing is left behind."""

from datetime import UTC, datetime, timedelta

import pytest
from odd_stores import (
    CutsUploads,
    Denies,
    IgnoresTheCondition,
    KeepsTheDeleted,
    ListsLate,
    MixesUpRanges,
    NamesNoUploads,
    ReadsStale,
    ShowsUploadsEarly,
)

from ckptstore.clock import SystemClock
from ckptstore.errors import AccessDeniedError, InvalidInputError, UnavailableError
from ckptstore.maintenance.behaviour import PART_BYTES
from ckptstore.maintenance.doctor import Scope, examine
from ckptstore.maintenance.report import Began, Check
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.objectstore.wrappers.observed import ObservedStore
from ckptstore.objectstore.wrappers.readonly import ReadOnlyStore
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated
from ckptstore.testing.faults import Fault, FaultyStore

QUICK = Scope(multipart=False, network=False)
ALL_BUT_SPEED = Scope(network=False)
STORE_CHECKS = [
    "absent key",
    "create once",
    "create once in a race",
    "read back",
    "overwrite",
    "list after write",
    "list by another client",
    "ranged read",
    "multipart upload",
    "abort upload",
    "delete",
]


def impatient(url, **options):
    transfer = TransferOptions(part_bytes=PART_BYTES, retry=RetryOptions(attempts=2, first_pause_seconds=0.01))
    return open_store(url, transfer=transfer, storage_options=options)


def verdicts(report, group):
    return {check.name: check.verdict for check in report.checks if check.group == group}


def left_in(store):
    return [info.key for info in store.list("")]


def examine_sound(url):
    store = impatient(url)
    calls = []
    report = examine(ObservedStore(store, calls.append), again=lambda: impatient(url))
    assert left_in(store) == []
    assert {call.key.split("/")[0] for call in calls if call.operation not in ("get", "list")} == {"probe"}
    assert report.failed == []
    assert [check.name for check in report.checks if check.group == "store"] == STORE_CHECKS
    return report


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_sound_store_has_every_check_and_nothing_is_left(kind, tmp_path):
    report = examine_sound(f"memory://{tmp_path.name}-doctor" if kind == "memory" else str(tmp_path / "run"))
    assert set(verdicts(report, "store").values()) == set(verdicts(report, "permission").values()) == {"ok"}
    assert dict(report.roles) == {"reader": True, "trainer": True, "collector": True}
    assert report.bytes_sent > 12 * 2**20


@pytest.mark.servers
def test_a_real_object_store_has_every_check_and_nothing_is_left(s3_url, seaweedfs):
    report = examine_sound(s3_url)
    found = verdicts(report, "store")
    assert {name for name, verdict in found.items() if verdict != "ok"} <= {"abort upload"}
    assert report.roles["trainer"] is True
    assert report.find("clock", "offset").verdict == "ok"
    prefix = s3_url.partition("/tests/")[2]
    place = {"Bucket": seaweedfs.bucket, "Prefix": f"tests/{prefix}"}
    assert "Contents" not in seaweedfs.client().list_objects_v2(**place)
    assert "Uploads" not in seaweedfs.client().list_multipart_uploads(**place)


def test_a_run_that_is_there_is_told_and_stays_as_it_is():
    store = MemoryStore()
    log, job = RunLog.create(store), Incarnation.new(job="gpt", host="node-1")
    simulated.save(log, job, "a")
    before = {info.key: info.etag for info in store.list("")}
    report = examine(store, scope=QUICK)
    assert {info.key: info.etag for info in store.list("")} == before
    assert verdicts(report, "run") == {"log": "ok", "claim": "ok", "signature": "ok"}
    assert report.find("run", "log").value == 2
    claim(log, Incarnation.new(job="gpt-2", host="node-9"))
    check = examine(store, scope=QUICK).find("run", "claim")
    assert (check.verdict, check.facts["job"], check.facts["host"], check.facts["term"]) == (
        "warning",
        "gpt-2",
        "node-9",
        2,
    )
    assert "claimed, no commit since" in check.message
    assert check.hint


@pytest.mark.parametrize("run_file", [True, False])
def test_a_log_that_was_lost_is_a_failure_and_not_a_place_where_there_is_no_run_yet(run_file):
    store = MemoryStore()
    simulated.save(RunLog.create(store), Incarnation.new(job="gpt", host="node"), "a")
    for info in list(store.list("")):
        if not info.key.startswith("data/") and not (run_file and info.key == "run.json"):
            store.delete(info.key)
    found = examine(store, scope=QUICK).find("run", "log")
    assert (found.verdict, found.error.code) == ("failed", "integrity")
    assert "the log was lost" in found.message


def test_a_lost_tail_and_a_damaged_log_are_failures():
    store = MemoryStore()
    log, job = RunLog.create(store), Incarnation.new(job="gpt")
    for name in "ab":
        simulated.save(log, job, name)
    store.delete("log/000000000002.json")
    found = examine(store, scope=QUICK).find("run", "log")
    assert (found.verdict, found.error.code) == ("failed", "integrity")
    assert "slot 2" in found.message
    store.put("log/000000000001.json", b"no record\n")
    found = examine(store, scope=QUICK).find("run", "log")
    assert (found.verdict, found.error.code) == ("failed", "integrity")


@pytest.mark.parametrize(
    ("kind", "failing"),
    [
        (IgnoresTheCondition, {"create once", "create once in a race"}),
        (ListsLate, {"list after write", "list by another client"}),
        (ReadsStale, {"overwrite", "ranged read", "delete"}),
        (MixesUpRanges, {"ranged read", "multipart upload"}),
        (CutsUploads, {"multipart upload"}),
        (ShowsUploadsEarly, {"multipart upload"}),
        (KeepsTheDeleted, {"delete"}),
    ],
)
def test_a_store_that_would_lose_checkpoints_is_found_out(kind, failing):
    report = examine(kind(MemoryStore("memory://odd")), scope=ALL_BUT_SPEED)
    assert {check.name for check in report.failed} == failing
    assert report.refuses_writing
    assert all(check.hint and check.error.code == "unsupported" for check in report.failed)


def test_what_could_not_be_deleted_is_named():
    store = MemoryStore()
    report = examine(Denies(store, "delete"), scope=QUICK)
    assert set(report.left_behind) == set(left_in(store)) != set()
    assert {key.split("/")[0] for key in report.left_behind} == {"probe"}
    assert report.find("permission", "delete").verdict == "warning"
    assert report.find("store", "delete").verdict == "unknown"


def test_a_store_that_denies_what_is_absent_refuses_writing():
    report = examine(Denies(MemoryStore(), "absent"), scope=QUICK)
    assert [check.name for check in report.failed] == ["absent key"]
    assert report.refuses_writing
    assert "s3:ListBucket" in report.find("store", "absent key").hint


@pytest.mark.parametrize(
    ("denied", "role", "verdict"),
    [
        ("list", "reader", "failed"),
        ("list", "trainer", "failed"),
        ("read", "trainer", "failed"),
        ("create", "trainer", "failed"),
        ("overwrite", "trainer", "warning"),
        ("delete", "trainer", "warning"),
        ("delete", "collector", "failed"),
        ("multipart", "trainer", "failed"),
        ("multipart", "collector", "warning"),
        ("abort", "trainer", "warning"),
        ("abort", "collector", "failed"),
        ("list uploads", "trainer", "warning"),
        ("list uploads", "collector", "failed"),
    ],
)
def test_a_missing_permission_is_told_alone_with_what_will_not_work(denied, role, verdict):
    report = examine(Denies(MemoryStore("s3://bucket/run"), denied), scope=Scope(role=role, network=False))
    check = report.find("permission", denied)
    assert check.verdict == verdict
    assert "without it" in check.message
    assert str(check.facts["right"]) in check.hint
    assert str(check.facts["right"]).startswith("s3:")
    others = {name: found for name, found in verdicts(report, "permission").items() if name != denied}
    assert set(others.values()) <= {"ok", "unknown"}
    assert report.lacks_permission is (verdict == "failed")
    assert not report.refuses_writing
    assert report.roles[role] is (verdict != "failed")


@pytest.mark.parametrize("scope", [Scope(network=False), QUICK, Scope(role="collector", network=False)])
def test_what_the_service_cannot_do_is_nothing_to_do_and_nothing_that_is_missing(scope):
    report = examine(NamesNoUploads(MemoryStore()), scope=scope)
    assert report.failed == []
    assert [check for check in report.checks if check.hint and check.verdict != "ok"] == []
    assert not {"list uploads", "abort"} & verdicts(report, "permission").keys()
    assert report.roles["collector"] is True
    if scope.multipart:
        assert report.find("store", "abort upload").message == "It does not tell. They expire."


def fit(report):
    return [role for role, known in report.roles.items() if known]


@pytest.mark.parametrize("role", ["trainer", "collector"])
@pytest.mark.parametrize(
    ("store", "fits"),
    [
        (MemoryStore(), ["reader", "trainer", "collector"]),
        (NamesNoUploads(MemoryStore()), ["reader", "trainer", "collector"]),
        (IgnoresTheCondition(MemoryStore()), ["reader"]),
        (KeepsTheDeleted(MemoryStore()), ["reader"]),
        (CutsUploads(MemoryStore()), ["reader"]),
        (ReadOnlyStore(MemoryStore()), []),  # not known of a reader: there is nothing to read
        (MixesUpRanges(MemoryStore()), []),
        (ListsLate(MemoryStore()), []),
        (Denies(MemoryStore(), "absent"), []),
        (Denies(MemoryStore(), "read"), []),
        (Denies(MemoryStore(), "delete"), ["reader", "trainer"]),
        (Denies(MemoryStore(), "create"), ["reader"]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_no_role_is_called_fit_where_something_fails_that_it_needs(store, fits, role):
    report = examine(store, scope=Scope(role=role, network=False))
    assert fit(report) == fits
    assert (report.roles[role] is False) is bool(report.failed)
    assert (report.roles[role] is None) is bool(report.untried and not report.failed)


def test_a_reader_is_called_unfit_where_its_own_examination_fails_and_only_there():
    for calls in (["absent"], ["list"], ["create", "delete", "multipart"], []):
        store = MemoryStore()
        simulated.save(RunLog.create(store), Incarnation.new(job="gpt"), "a")
        asked = examine(Denies(store, *calls), scope=Scope(role="reader"))
        assert (asked.roles["reader"] is False) is bool(asked.failed) is bool({"absent", "list"} & set(calls))
        assert examine(Denies(store, *calls), scope=QUICK).roles["reader"] is asked.roles["reader"]


def test_what_was_not_tried_is_named_and_not_called_fit():
    report = examine(MemoryStore(), scope=QUICK)
    assert (report.failed, report.untried, report.roles["trainer"]) == ([], ["multipart"], None)
    report = examine(MemoryStore(), scope=Scope(role="reader"))
    assert (report.failed, report.untried, report.roles["reader"]) == ([], ["read"], None)


def test_a_reader_writes_nothing_and_needs_no_more_than_to_list_and_read():
    store, calls = MemoryStore(), []
    simulated.save(RunLog.create(store), Incarnation.new(job="gpt"), "a")
    denies = Denies(store, "create", "overwrite", "delete", "multipart", "abort", "list uploads")
    report = examine(ObservedStore(denies, calls.append), scope=Scope(role="reader"))
    assert {call.operation for call in calls} <= {"get", "list", "head", "get_range"}
    assert (report.failed, report.roles["reader"]) == ([], True)
    assert verdicts(report, "permission") == {"list": "ok", "read": "ok"}


def test_a_run_that_may_be_listed_and_not_read_is_a_missing_permission():
    store = MemoryStore()
    simulated.save(RunLog.create(store), Incarnation.new(job="gpt"), "a")
    report = examine(Denies(store, "read"), scope=Scope(role="reader"))
    assert report.find("permission", "read").verdict == "failed"
    assert report.find("run", "log").verdict == "unknown"


def test_a_store_opened_for_reading_refuses_writing():
    report = examine(ReadOnlyStore(MemoryStore()), scope=QUICK)
    assert report.refuses_writing
    assert report.left_behind == ()


def test_nothing_allowed_at_all_is_one_error():
    with pytest.raises(AccessDeniedError, match="absent"):
        examine(Denies(MemoryStore(), "absent", "list", "create", "overwrite"))
    with pytest.raises(AccessDeniedError):
        examine(Denies(MemoryStore(), "absent", "list"), scope=Scope(role="reader"))


@pytest.mark.servers
@pytest.mark.parametrize("wrong", [{"key": "AKIANOBODY", "secret": "x" * 40}, {"anon": True}])
def test_wrong_credentials_and_a_missing_bucket_are_one_error_at_once(s3_url, wrong):
    with pytest.raises(AccessDeniedError):
        examine(impatient(s3_url, **wrong))
    with pytest.raises(InvalidInputError, match="no-such-bucket"):
        examine(impatient("s3://no-such-bucket/run"))


class Interrupted(ForwardingStore):
    """The operator presses Ctrl-C in the middle of call number `at`, which is carried out."""

    def __init__(self, inner, at):
        super().__init__(inner)
        self.left = at

    def _tick(self):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def put(self, key, body, **more):
        info = super().put(key, body, **more)
        self._tick()
        return info

    def get(self, key, *, max_bytes):
        self._tick()
        return super().get(key, max_bytes=max_bytes)

    def list(self, prefix, *, after=None):
        self._tick()
        return super().list(prefix, after=after)

    def open_upload(self, key, *, size):
        upload = super().open_upload(key, size=size)
        self._tick()
        return upload


def test_after_an_interrupt_anywhere_nothing_is_left():
    for at in range(1, 200):
        store = MemoryStore()
        try:
            examine(Interrupted(store, at), scope=ALL_BUT_SPEED)
        except KeyboardInterrupt:
            assert left_in(store) == []
            assert list(store.list_uploads("")) == []
        else:
            break
    assert 20 < at < 199


def test_a_store_that_goes_away_ends_it_soon():
    for at in range(41):
        store, calls = MemoryStore(), []
        faulty = FaultyStore(store, lambda call, at=at: Fault.REFUSED if call.index >= at else None)
        try:
            report = examine(ObservedStore(faulty, calls.append), scope=QUICK)
        except UnavailableError:
            assert len(calls) < at + 20
        else:  # it went away at the end
            assert at > 25
            assert [check.error.code for check in report.failed] in ([], ["unavailable"])
            assert set(report.left_behind) >= set(left_in(store))


@pytest.mark.parametrize(
    ("ahead", "verdict"), [(0, "ok"), (-200, "ok"), (299, "ok"), (302, "warning"), (-4000, "warning")]
)
def test_the_clock_s_offset_is_told_and_warned_of_above_five_minutes(ahead, verdict):
    class Wrong(SystemClock):
        def now(self):
            return datetime.now(UTC) + timedelta(seconds=ahead)

    check = examine(MemoryStore(clock=Wrong()), scope=QUICK).find("clock", "offset")
    assert check.verdict == verdict
    assert check.value == pytest.approx(ahead, abs=1)
    assert check.facts["uncertainty_seconds"] < 1
    assert bool(check.hint) is (verdict == "warning")


def test_every_check_is_told_when_it_begins_and_ends():
    events = []
    report = examine(MemoryStore(), watch=events.append, scope=QUICK)
    assert tuple(event for event in events if isinstance(event, Check)) == report.checks
    assert {(event.group, event.name) for event in events if isinstance(event, Began)} >= {
        ("store", "create once"),
        ("clock", "offset"),
    }


def test_a_scope_that_makes_no_sense_is_refused():
    with pytest.raises(InvalidInputError, match="no role"):
        Scope(role="king")
    with pytest.raises(InvalidInputError, match="network"):
        Scope(network="yes")
