"""Where something tells of a run and no record does, none is begun; what is new is begun at once."""

import pytest

from ckptstore import AccessDeniedError, CheckpointStore, IntegrityError
from ckptstore.format.layout import LATEST_KEY, RUN_KEY, Stem, slot_key
from ckptstore.maintenance.collect_plan import plan_collection
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated
from ckptstore.testing.tapped import TappedStore


def saved(store):
    log = RunLog.create(store)
    simulated.save(log, Incarnation.new(job="gpt", host="node"), "a")
    return log


def keys(store):
    return [info.key for info in store.list("")]


def without(store, *prefixes):
    for key in keys(store):
        if key.startswith(prefixes):
            store.delete(key)
    return keys(store)


def begin(store):
    claim(RunLog.create(store), Incarnation.new(job="gpt", host="node"))


@pytest.mark.parametrize(
    "gone",
    [
        ("log/", RUN_KEY),
        ("log/", RUN_KEY, LATEST_KEY),
        ("log/",),
        ("log/", LATEST_KEY),
        ("log/", RUN_KEY, "data/"),
        ("log/", "data/"),
        (slot_key(1),),
        (slot_key(1), "data/"),
        (slot_key(1), LATEST_KEY),
    ],
    ids="+".join,
)
def test_where_something_tells_of_a_lost_commit_nothing_is_begun_and_none_is_not_the_answer(gone):
    store = MemoryStore()
    saved(store)
    left = without(store, *gone)
    with pytest.raises(IntegrityError, match=r"the log was lost\. Nothing was written") as lost:
        begin(store)
    assert "`ckptstore repair URL --rebuild-log`" in lost.value.hint
    with pytest.raises(IntegrityError, match="the log was lost"):
        Catalog(RunLog.open(store)).latest()
    assert keys(store) == left


def test_what_is_left_of_a_first_save_that_was_never_committed_hinders_nobody():
    store = MemoryStore()
    saved(store)
    for key in keys(store):
        if key in (slot_key(1), LATEST_KEY) or key.endswith("/COMMITTED"):
            store.delete(key)
    assert any(key.startswith("data/") for key in keys(store))
    assert Catalog(RunLog.open(store)).latest() is None
    begin(store)
    assert RunLog.open(store).fold.term == 2


def test_a_latest_json_that_cannot_be_read_fails_no_first_save_and_hides_no_lost_log():
    """I10."""

    def tap(call, act):
        if call.key == LATEST_KEY:
            raise AccessDeniedError("403")
        return act()

    begin(TappedStore(MemoryStore(), tap))
    store = MemoryStore()
    saved(store)
    without(store, "log/", RUN_KEY)
    with pytest.raises(IntegrityError, match="the log was lost"):
        begin(TappedStore(store, tap))


@pytest.mark.parametrize(
    "strange", [LATEST_KEY, "data/0/readme.txt", "data/train.bin", f"data/1/{Stem('a', 1, 1, 'f' * 32)}/notes"]
)
def test_files_of_others_do_not_hinder_a_new_run(strange):
    store = MemoryStore()
    store.put(strange, b"{}")
    begin(store)
    assert RunLog.open(store).fold.term == 1


@pytest.mark.parametrize(
    "ask",
    [
        Catalog.checkpoints,
        Catalog.in_progress,
        Catalog.verify,
        Catalog.verify_kept,
        lambda catalog: list(CheckpointStore(catalog.log, TransferOptions(), again=MemoryStore).records()),
        lambda catalog: catalog.find("a"),
        lambda catalog: catalog.find(seq=1),
        lambda catalog: catalog.pin(1, holder="me", reason=""),
        lambda catalog: plan_collection(catalog.log, grace_seconds=0),
    ],
)
@pytest.mark.parametrize("gone", [("log/", RUN_KEY), ("log/",), (slot_key(1),)], ids="+".join)
def test_no_question_is_answered_by_what_is_left_of_a_lost_log(ask, gone):
    store = MemoryStore()
    saved(store)
    without(store, *gone)
    with pytest.raises(IntegrityError, match="the log was lost"):
        ask(Catalog(RunLog.open(store)))


def without_the_tail():
    store = MemoryStore()
    saved(store)
    simulated.save(RunLog.open(store), Incarnation.new(job="gpt", host="node"), "b")
    store.delete(slot_key(3))
    return store


def test_where_the_tail_was_lost_nothing_is_appended_if_the_options_say_so_and_a_job_goes_on():
    store, job = without_the_tail(), Incarnation.new(job="gpt", host="node")
    left = keys(store)
    catalog = Catalog(RunLog.open(store, options=LogOptions(refuse_lost_tail=True)))
    with pytest.raises(IntegrityError, match=r"names slot 3, .* ends before slot 3.*Nothing was written") as refused:
        catalog.pin(1, holder="me", reason="")
    assert (refused.value.facts["slot"], refused.value.facts["end"]) == (3, 3)
    assert "`ckptstore repair URL --rebuild-log`" in refused.value.hint
    assert (keys(store), catalog.latest().seq) == (left, 1)  # it is read all the same (I10)
    simulated.save(RunLog.open(store), job, "c")
    assert Catalog(RunLog.open(store)).latest().commit.checkpoint_id == "c"


class ListsLate(ForwardingStore):
    """A file system on a network, of which a listing lacks what was stored last."""

    def list(self, prefix, *, after=None):
        return (info for info in super().list(prefix, after=after) if info.key != slot_key(3))


def test_what_a_late_listing_lacks_is_not_lost():
    store = MemoryStore()
    saved(store)
    simulated.save(RunLog.open(store), Incarnation.new(job="gpt", host="node"), "b")
    log = RunLog.open(ListsLate(store), options=LogOptions(refuse_lost_tail=True))
    assert log.lost_from is None
    Catalog(log).pin(3, holder="me", reason="")


def test_who_has_the_log_open_appends_again_when_the_lost_records_are_restored():
    store = MemoryStore()
    saved(store)
    simulated.save(RunLog.open(store), Incarnation.new(job="gpt", host="node"), "b")
    record = store.get(slot_key(3), max_bytes=1 << 20)
    store.delete(slot_key(3))
    catalog = Catalog(RunLog.open(store, options=LogOptions(refuse_lost_tail=True)))
    store.put(slot_key(3), record)
    catalog.pin(3, holder="me", reason="")
    assert catalog.find("b").pins


MOMENTS = [("get", RUN_KEY), ("get", LATEST_KEY), ("list", "data/0/"), ("get", slot_key(0))]


@pytest.mark.parametrize("how_far", ["uploaded", "committed"])
@pytest.mark.parametrize("moment", MOMENTS, ids=" ".join)
def test_who_begins_a_run_that_somebody_else_begins_at_that_very_moment_goes_on_with_it(moment, how_far):
    inner = MemoryStore()
    once = iter([inner])

    def tap(call, act):
        if (call.operation, call.key) == moment:
            for store in once:
                saved(store)
                if how_far == "uploaded":
                    store.delete(slot_key(1))
                    for key in keys(store):
                        if key == LATEST_KEY or key.endswith("/COMMITTED"):
                            store.delete(key)
        return act()

    begin(TappedStore(inner, tap))
    fold = RunLog.open(inner).fold
    assert (fold.term, fold.ever_committed) == (2, int(how_far == "committed"))
