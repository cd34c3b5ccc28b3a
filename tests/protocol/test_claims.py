"""Who reigns, and who is fenced."""

from __future__ import annotations

import pytest
from run_samples import Job, a_run, carried, opened

from ckptstore.errors import CommitUnknownError, ConflictError, FencedError, InvalidInputError
from ckptstore.events import Claimed
from ckptstore.format.layout import slot_key
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.testing import simulated
from ckptstore.testing.faults import Fault, FaultyStore


def records(store):
    return [(entry.seq, entry.record.KIND) for entry in opened(store).log.records()]


def test_opening_claims_nothing_and_the_first_save_claims_once():
    store = MemoryStore()
    job = Job(store)
    opened(store)
    assert records(store) == []
    job.save("a")
    job.save("b")
    assert records(store) == [(0, "CLAIM"), (1, "COMMIT"), (2, "COMMIT")]


def test_a_job_that_is_started_again_takes_over():
    events = []
    store, _ = a_run(saves=1)
    again = Job(store, observer=events.append)
    committed = again.save("b")
    assert committed.commit.term == 2
    assert [(event.term, event.took_over_from) for event in events if isinstance(event, Claimed)] == [(2, "job")]


def test_a_ghost_is_fenced_before_it_uploads_and_for_good():
    """I3, I15."""
    store, ghost = a_run(saves=1)
    Job(store, job="other").save("theirs", seed=9)
    objects = len(list(store.list("")))
    for _ in range(2):
        with pytest.raises(FencedError) as caught:
            ghost.save("mine")
        assert caught.value.facts["term"] == 2
        assert caught.value.facts["job"] == "other"
    assert ghost.incarnation.fenced
    assert len(list(store.list(""))) == objects
    assert opened(store).latest().commit.checkpoint_id == "theirs"


def test_a_ghost_that_has_uploaded_already_is_fenced_at_the_commit():
    """I3, I11: its data lie under its own prefix and are never loaded."""
    store, ghost = a_run(saves=1)
    attempt = begin(ghost.log, ghost.incarnation, checkpoint_id="mine", world_size=1)
    shard = simulated.upload(store, attempt, 0)
    Job(store, job="other").save("theirs", seed=9)
    with pytest.raises(FencedError):
        commit(ghost.log, ghost.incarnation, attempt, [shard])
    with pytest.raises(FencedError):
        ghost.save("mine")
    assert opened(store).latest().commit.checkpoint_id == "theirs"


def test_a_fenced_incarnation_stays_fenced_in_every_pickled_copy():
    """Also in a copy from before its claim, as the child of an async save may carry it."""
    store = MemoryStore()
    job = Job(store)
    early = carried(job.incarnation)
    job.save("a")
    Job(store, job="other").save("b")
    for copy in (early, carried(job.incarnation)):
        child = Job(store)
        child.incarnation = copy
        with pytest.raises(FencedError):
            child.save("c")
    with pytest.raises(FencedError):
        job.save("c")
    assert carried(job.incarnation).fenced


def test_writer_objects_of_one_incarnation_share_its_term():
    """I15: no incarnation fences itself."""
    store = MemoryStore()
    first, second = Job(store), Job(store)
    second.incarnation = carried(first.incarnation)
    names = []
    for number in range(3):
        names += [first.save(f"a{number}"), second.save(f"b{number}")]
    assert {each.commit.term for each in names} == {1}
    assert [each.commit.attempt for each in names] == [1, 2, 3, 4, 5, 6]


def test_an_attempt_that_failed_keeps_its_number():
    """I7: numbers are taken in the order in which commits are tried."""
    _, job = a_run(saves=1)
    for number in (2, 3):
        assert begin(job.log, job.incarnation, checkpoint_id="x", world_size=1).stem.attempt == number
    assert job.save("x").commit.attempt == 4


def test_a_claim_of_unknown_outcome_is_found_again():
    """I15: the incarnation does not claim twice."""
    how = []

    def plan(call):
        if how and call.key == slot_key(2):
            how.append(call)
            return Fault.LOST_REPLY if call.operation == "put" else Fault.REFUSED if len(how) > 2 else None
        return None

    store, _ = a_run(saves=1)
    again = Job(FaultyStore(store, plan), options=LogOptions(deadline_seconds=2))
    how.append(True)
    with pytest.raises(CommitUnknownError) as caught:
        again.save("x")
    assert caught.value.facts["kind"] == "CLAIM"
    how.clear()
    assert again.save("x").commit.term == 2
    assert [kind for _, kind in records(store)] == ["CLAIM", "COMMIT", "CLAIM", "COMMIT"]


def test_same_job_refuses_the_run_of_another_job_and_names_it():
    store, _ = a_run(saves=2)
    stranger = Job(store, job="stranger")
    with pytest.raises(ConflictError) as caught:
        begin(stranger.log, stranger.incarnation, checkpoint_id="x", world_size=1, takeover="same_job")
    assert caught.value.facts == {"job": "job", "host": "host", "term": 1, "last_commit": 2}
    assert not stranger.incarnation.fenced


def test_same_job_takes_over_from_an_earlier_start_of_itself():
    store, _ = a_run(saves=1)
    again = Job(store)
    assert begin(again.log, again.incarnation, checkpoint_id="x", world_size=1, takeover="same_job").stem.term == 2


def test_the_parent_is_the_last_own_commit_or_else_what_was_loaded():
    store, _ = a_run(saves=3)
    again = Job(store)
    again.incarnation.loaded = 2
    assert [again.save("x").commit.parent, again.save("y").commit.parent] == [2, 5]
    third = Job(store)
    assert third.save("z").commit.parent is None


def test_a_process_that_cannot_be_named_is_refused():
    with pytest.raises(InvalidInputError):
        Incarnation("0" * 32, job="", host="host")
    with pytest.raises(InvalidInputError):
        Incarnation("0" * 32, job="j" * 2000, host="host")
