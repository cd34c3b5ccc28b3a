"""Scrubbing: what each damage is called at each level, who reads what, and what follows from a verdict."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import on
from scrubbed import MANY, SMALL, FlippingStore, Run, body_of, contents, flip, note_of, opened, stored_in

from ckptstore.errors import InvalidInputError, NotFoundError
from ckptstore.events import DamageFound
from ckptstore.format.layout import RUN_KEY
from ckptstore.format.records import Retire
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.protocol.shares import Share
from ckptstore.testing.simulated import ManualClock
from ckptstore.testing.tapped import TappedStore

SHARD, OTHER = 1, 2


@pytest.fixture
def run():
    return Run(MemoryStore(clock=ManualClock()))


def keys_of(committed):
    commit = committed.commit
    return {
        "shard": commit.stem.shard_key(SHARD),
        "other": commit.stem.shard_key(OTHER),
        "part": commit.parts[0].path,
        "documents": commit.documents.path,
    }


def in_item(store, committed, name):
    """Return a position inside of a tensor's bytes in the shard."""
    stored = stored_in(store, committed)[SHARD]
    return next(item.position for item in stored.items if item.chunk.tensor.name == name) + 7


def spoil(damage, store, committed):
    """Do one damage to a checkpoint."""
    keys = keys_of(committed)
    shard, part, documents = keys["shard"], keys["part"], keys["documents"]
    match damage:
        case "a bit of w" | "a bit of bias":
            flip(store, shard, in_item(store, committed, damage.rpartition(" ")[2]))
        case "a bit of the header":
            flip(store, shard, 30)
        case "a bit of the leaf table":
            flip(store, shard, store.head(shard).size - 3)
        case "cut":
            store.put(shard, body_of(store, shard)[:-1])
        case "longer":
            store.put(shard, body_of(store, shard) + b"x")
        case "another's":
            store.put(shard, body_of(store, keys["other"]))
        case "a bit of the part":
            flip(store, part, 40)
        case "a bit of the documents":
            flip(store, documents, 20)
        case _:
            store.delete({"no shard": shard, "no part": part, "no documents": documents}[damage])


BOTH = ("bias", "w")
FULL_ONLY = {
    "a bit of w": ("w",),
    "a bit of bias": ("bias",),
    "a bit of the header": BOTH,
    "a bit of the leaf table": BOTH,
    "another's": BOTH,
}
FROM_EXISTS_ON = {
    "cut": ("size", "shard", BOTH),
    "longer": ("size", "shard", BOTH),
    "no shard": ("missing", "shard", BOTH),
    "a bit of the part": ("damaged", "part", ()),
    "no part": ("missing", "part", ()),
    "a bit of the documents": ("damaged", "documents", ()),
    "no documents": ("missing", "documents", ()),
}


def right(damage, level, *, etags):
    """Return what is found: kind, object, tensors."""
    if level == "chain":
        return []
    if damage in FROM_EXISTS_ON:
        return [FROM_EXISTS_ON[damage]]
    rewritten = [("rewritten", "shard", ())] if etags and level != "exists" else []
    return rewritten + ([("damaged", "shard", FULL_ONLY[damage])] if level == "full" else [])


@pytest.mark.parametrize("options", [SMALL, MANY], ids=["one thread", "four"])
@on("memory", "files", "obstore-seaweedfs")
def test_every_damage_is_called_what_it_is_at_each_level_and_read_twice(place, options):
    """I4, I13."""
    run = Run(place.probed().store())
    for step, damage in enumerate([*FULL_ONLY, *FROM_EXISTS_ON]):
        committed = run.save(step)
        keys = keys_of(committed)
        etags = stored_in(run.store, committed)[SHARD].shard.etag is not None
        assert run.scrub(options=options).verify(committed, level="full").passed
        spoil(damage, run.store, committed)
        for level in ("chain", "exists", "etag", "full"):
            verdict = run.scrub(again=place.store(), options=options).verify(committed, level=level)
            found = [(each.kind, each.key, each.tensors, each.confirmed) for each in verdict.findings]
            expected = right(damage, level, etags=etags)
            assert found == [(kind, keys[what], hit, kind != "rewritten") for kind, what, hit in expected], damage


@given(st.lists(st.text(min_size=1, max_size=30), unique=True, max_size=60), st.integers(1, 40), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_all_shares_together_have_every_object_exactly_once(keys, count, ranks):
    shares = [Share(index, count).split(rank, ranks) for index in range(1, count + 1) for rank in range(ranks)]
    assert Counter(key for share in shares for key in keys if share.holds(key)) == Counter(keys)
    for index in range(1, count + 1):
        mine = {key for key in keys if Share(index, count).holds(key)}
        assert mine == {
            key for key in keys for rank in range(ranks) if Share(index, count).split(rank, ranks).holds(key)
        }


@given(st.integers(1, 12))
@settings(deadline=None, max_examples=12)
def test_so_many_runs_verify_every_object_of_a_run_exactly_once(count):
    run = Run(MemoryStore(clock=ManualClock()))
    for step in (1, 2):
        run.save(step)

    def judged(share):
        return [key for verdict in run.scrub(share=share).verify_kept(level="full") for key in verdict.objects]

    everything = judged(Share())
    data = {key for key in contents(run.store, "data/") if not key.endswith("COMMITTED")}
    assert sorted(everything) == sorted({*data, RUN_KEY})
    shared = Counter(key for index in range(1, count + 1) for key in judged(Share(index, count)))
    assert shared == Counter(everything)


def test_damage_is_found_by_the_share_that_has_the_object_and_by_no_other(run):
    committed = run.save(1)
    key = keys_of(committed)["shard"]
    flip(run.store, key, 400)
    verdicts = [run.scrub(share=Share(index, 5)).verify(committed, level="full") for index in range(1, 6)]
    assert [bool(each.findings) for each in verdicts] == [key in each.objects for each in verdicts]
    assert sum(bool(each.findings) for each in verdicts) == 1
    assert not any(each.passed for each in verdicts)


@pytest.mark.parametrize("given_", [(0, 3), (4, 3), (1, 0), (-1, 2), (True, 2), (1, 1 << 30)])
def test_a_share_that_is_none_is_refused(given_):
    with pytest.raises(InvalidInputError):
        Share(*given_)


def test_what_is_damaged_in_two_readings_is_quarantined_with_what_was_seen(run):
    committed = run.save(1)
    key = keys_of(committed)["shard"]
    flip(run.store, key, in_item(run.store, committed, "w"))
    scrub = run.scrub()
    verdict = scrub.verify(committed, level="full")
    assert scrub.quarantine(verdict) is True
    assert run.catalog.find(seq=committed.seq).set_aside == "quarantined"
    assert "read twice" in note_of(run.log, committed.seq)
    assert key in note_of(run.log, committed.seq)
    assert scrub.quarantine(verdict) is False


@pytest.mark.parametrize("options", [SMALL, MANY], ids=["one thread", "four"])
def test_a_bit_that_flips_on_the_way_quarantines_nothing_and_is_told(run, options):
    committed = run.save(1)
    clean = run.store
    run.log.store = FlippingStore(clean, keys_of(committed)["shard"])
    scrub = run.scrub(again=clean, options=options)
    verdict = scrub.verify(committed, level="full")
    assert [(each.kind, each.confirmed) for each in verdict.findings] == [("damaged", False)]
    assert not verdict.ok
    assert scrub.quarantine(verdict) is False
    assert run.catalog.find(seq=committed.seq).set_aside is None
    with pytest.raises(InvalidInputError):
        scrub.record(verdict)


@pytest.mark.parametrize("level", ["exists", "etag", "full"])
def test_what_a_late_listing_lacks_is_asked_for_before_it_is_called_missing(run, level):
    committed = run.save(1)
    clean, key = run.store, keys_of(committed)["shard"]

    class Late(ForwardingStore):
        def list(self, prefix, *, after=None):
            return (info for info in super().list(prefix, after=after) if info.key != key)

    run.log.store = Late(clean)
    assert run.scrub(again=run.log.store).verify(committed, level=level).passed
    clean.delete(key)
    (found,) = run.scrub(again=run.log.store).verify(committed, level=level).findings
    assert (found.kind, found.key, found.confirmed) == ("missing", key, True)


def test_an_observer_is_told_once_of_each_object_that_two_readings_found_damaged(run):
    committed = run.save(1)
    keys, told = keys_of(committed), []
    run.log.observer = lambda event: told.append(event.key) if isinstance(event, DamageFound) else None
    run.scrub(again=FlippingStore(run.store, keys["other"])).verify(committed, level="full")
    run.log.store = FlippingStore(run.store, keys["other"])
    run.scrub(again=run.store).verify(committed, level="full")
    assert told == []  # one reading is no proof
    run.log.store = run.store
    flip(run.store, keys["shard"], 400)
    run.store.delete(keys["documents"])
    scrub = run.scrub()
    for level in ("exists", "full", "full"):
        scrub.verify(committed, level=level)
    assert sorted(told) == sorted([keys["documents"], keys["shard"]])


def test_what_was_only_rewritten_is_never_quarantined(run):
    committed = run.save(1)
    flip(run.store, keys_of(committed)["shard"], 400)
    scrub = run.scrub()
    verdict = scrub.verify(committed, level="etag")
    assert [each.kind for each in verdict.findings] == ["rewritten"]
    assert scrub.quarantine(verdict) is False
    assert run.catalog.find(seq=committed.seq).set_aside is None


@pytest.mark.parametrize("level", ["exists", "etag", "full"])
@pytest.mark.parametrize("listed", [1, 2, 9])
def test_a_checkpoint_that_is_retired_meanwhile_is_gone_and_not_damaged(run, level, listed):
    """I8: a collector takes its bytes while it is read."""
    committed = run.save(1)
    for step in (2, 3):
        run.save(step)
    inner, collector, calls = run.store, opened(run.store), []

    def collect(call, act):
        if call.key.startswith("data/"):
            calls.append(call)
            if len(calls) == listed:
                collector.log.append(lambda fold: Retire((committed.seq,), "old") if fold.commits else None)
                for key in contents(inner, "data/"):
                    if committed.commit.prefix in key:
                        inner.delete(key)
        return act()

    run.log.store = TappedStore(inner, collect)
    verdicts = [*run.scrub(again=inner).verify_kept(level=level)]
    assert [each.ok for each in verdicts] == [True] * 4
    if len(calls) >= listed and verdicts[-1].retired:
        assert not verdicts[-1].passed
    gone = run.scrub(again=inner).verify(committed, level=level)
    assert (gone.retired, gone.findings) == (True, ())
    with pytest.raises(InvalidInputError):
        run.scrub().record(gone)


def test_a_whole_checkpoint_that_passed_is_recorded_once_and_a_weaker_level_adds_nothing(run):
    committed = run.save(1)
    scrub = run.scrub()

    def recorded(level):
        done = scrub.record(scrub.verify(committed, level=level))
        return done, run.catalog.find(seq=committed.seq).verified

    assert recorded("exists") == (True, "exists")
    assert recorded("full") == (True, "full")
    assert recorded("full") == (False, "full")
    assert recorded("etag") == (False, "full")


def test_a_share_a_log_and_what_is_damaged_are_never_recorded(run):
    committed = run.save(1)
    for verdict in (
        run.scrub(share=Share(1, 2)).verify(committed, level="full"),
        run.scrub().verify(committed, level="chain"),
        run.scrub().verify(None, level="chain"),
    ):
        with pytest.raises(InvalidInputError):
            run.scrub().record(verdict)
    passed = run.scrub().verify(committed, level="full")
    for step in (2, 3):
        run.save(step)
    run.log.append(lambda _: Retire((committed.seq,), "old"))
    with pytest.raises(NotFoundError):
        run.scrub().record(passed)


def test_what_a_resume_loses_is_said_with_the_newest_older_one_that_is_whole(run):
    old, middle, new = (run.save(step) for step in (10, 30, 70))
    for each in (middle, new):
        flip(run.store, each.commit.stem.shard_key(0), 400)
    scrub = run.scrub()
    verdict = scrub.verify(new, level="full")
    scrub.quarantine(verdict)  # it is no longer the newest; what was lost is what was selectable when it began
    loss = scrub.loss(level="full")
    assert (loss.newest.seq, loss.instead.seq, loss.complete, loss.steps) == (new.seq, old.seq, True, 60)
    assert loss.seconds == pytest.approx(200, abs=1)
    flip(run.store, old.commit.stem.shard_key(0), 400)
    scrub = run.scrub()
    scrub.verify(middle, level="full")
    assert scrub.loss(level="full").instead is None


def test_nothing_is_lost_where_the_newest_is_whole(run):
    old, new = run.save(1), run.save(2)
    flip(run.store, old.commit.stem.shard_key(0), 400)
    scrub = run.scrub()
    assert [each.ok for each in scrub.verify_kept(level="full")] == [True, True, False]
    assert scrub.loss(level="full") is None
    assert new.seq > old.seq


def test_many_threads_find_what_one_finds(run):
    committed = run.save(1)
    for rank in (0, 2):
        flip(run.store, committed.commit.stem.shard_key(rank), 400)
    one, many = (run.scrub(options=options).verify(committed, level="full") for options in (SMALL, MANY))
    assert one == many
    assert len([each for each in one.findings if each.is_damage]) == 2


@pytest.mark.parametrize("options", [SMALL, MANY], ids=["one thread", "four"])
def test_a_store_that_cannot_be_read_gives_no_verdict(run, options):
    from ckptstore.errors import UnavailableError  # noqa: PLC0415  (of this test alone)

    committed = run.save(1)

    def broken(call, act):
        if call.operation == "get_range":
            raise UnavailableError("The network is down.")
        return act()

    run.log.store = TappedStore(run.store, broken)
    with pytest.raises(UnavailableError):
        run.scrub(options=options).verify(committed, level="full")
