"""Documents of a commit are held to what its parts are: created once, verified, never half there."""

from __future__ import annotations

import dataclasses

import pytest
from run_samples import Job, body_of, carried, opened

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import IntegrityError, InvalidInputError, UnavailableError
from ckptstore.format.codec import PartRef
from ckptstore.format.documents import MAX_DOCUMENTS_BYTES, encode_documents
from ckptstore.format.layout import slot_key
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol.attempt import Description, begin
from ckptstore.protocol.commit import commit
from ckptstore.testing import simulated
from ckptstore.testing.faults import Fault, FaultyStore

DOCUMENTS = {"model": {"layers": 2, "vocabulary": 11}, "data": ["a", "b"]}
LEVELS = ("exists", "etag", "full")


def begun(job, documents=DOCUMENTS):
    said = Description(global_step=1, documents=encode_documents(documents))
    attempt = begin(job.log, job.incarnation, checkpoint_id="x", world_size=1, description=said)
    return attempt, [simulated.upload(job.store, attempt, 0)]


def saved(store=None):
    """Return a job whose only checkpoint has documents, and its commit."""
    job = Job(store or MemoryStore())
    attempt, shards = begun(job)
    return job, commit(job.log, job.incarnation, attempt, shards)


def documents_of(log, committed):
    return Checkpoint(log, committed, TransferOptions()).documents()


def test_documents_are_read_back_by_who_opens_the_run():
    job, _ = saved()
    latest = opened(job.store).latest()
    assert latest.commit.documents.path == latest.commit.stem.fingerprints_key
    assert documents_of(job.log, latest) == DOCUMENTS


def test_a_checkpoint_without_documents_has_none_and_asks_for_nothing():
    store = FaultyStore(MemoryStore(), lambda _: None)
    job = Job(store)
    committed = job.save("x")
    del store.calls[:]
    assert committed.commit.documents is None
    assert documents_of(job.log, committed) == {}
    assert store.calls == []


def test_an_attempt_that_travelled_commits_its_documents():
    job = Job(MemoryStore())
    attempt, shards = begun(job)
    assert documents_of(job.log, commit(job.log, job.incarnation, carried(attempt), shards)) == DOCUMENTS


def test_documents_that_were_not_encoded_are_refused():
    with pytest.raises(InvalidInputError, match="documents"):
        Description(documents={"model": 1})


def of_documents(call):
    return call.key.endswith("fingerprints.json.gz")


def test_documents_whose_reply_was_lost_are_read_back_and_committed():
    """I5, I6: created once, ours by reading them back."""
    store = FaultyStore(
        MemoryStore(), lambda call: Fault.LOST_REPLY if of_documents(call) and call.operation == "put" else None
    )
    job, committed = saved(store)
    assert documents_of(job.log, committed) == DOCUMENTS
    assert [call.operation for call in store.calls if of_documents(call)][:2] == ["put", "get"]


def test_documents_that_cannot_be_stored_are_not_committed():
    store = FaultyStore(MemoryStore(), lambda call: Fault.REFUSED if of_documents(call) else None)
    job = Job(store, options=LogOptions(deadline_seconds=5))
    attempt, shards = begun(job)
    with pytest.raises(UnavailableError):
        commit(job.log, job.incarnation, attempt, shards)
    assert opened(store.inner).latest() is None


def test_other_bytes_in_their_place_are_not_committed():
    """I6."""
    job = Job(MemoryStore())
    attempt, shards = begun(job)
    job.store.put(attempt.stem.fingerprints_key, b"other")
    with pytest.raises(IntegrityError, match="other bytes") as caught:
        commit(job.log, job.incarnation, attempt, shards)
    assert caught.value.facts["key"] == attempt.stem.fingerprints_key
    assert opened(job.store).latest() is None


def test_documents_that_the_listing_lacks_are_not_committed():
    """I4."""
    job = Job(MemoryStore())
    attempt, shards = begun(job)
    put = job.store.put

    def put_and_lose(key, body, **given):
        info = put(key, body, **given)
        if key == attempt.stem.fingerprints_key:
            job.store.delete(key)
        return info

    job.store.put = put_and_lose
    with pytest.raises(IntegrityError, match="is missing") as caught:
        commit(job.log, job.incarnation, attempt, shards)
    assert caught.value.facts["key"] == attempt.stem.fingerprints_key
    assert opened(job.store).latest() is None


def test_an_attempt_that_is_committed_again_finds_its_documents_there():
    """I16."""
    job = Job(MemoryStore())
    attempt, shards = begun(job)
    first = commit(job.log, job.incarnation, attempt, shards)
    assert commit(job.log, job.incarnation, attempt, shards) == first


def test_each_flipped_bit_in_the_documents_is_found_and_a_load_does_not_care():
    """I13."""
    job, committed = saved()
    key, catalog = committed.commit.documents.path, opened(job.store)
    body = body_of(job.store, key)
    for position in range(8 * len(body)):
        changed = bytearray(body)
        changed[position // 8] ^= 1 << position % 8
        job.store.put(key, bytes(changed))
        with pytest.raises(IntegrityError) as caught:
            documents_of(job.log, committed)
        assert caught.value.facts["key"] == key
    for level in LEVELS:
        (finding,) = catalog.verify(committed, level=level).findings
        assert (finding.kind, finding.key) == ("damaged", key)
    assert simulated.load(catalog, committed).tolist() == simulated.values(0, 0).tolist()
    job.store.put(key, body)
    assert catalog.verify(committed, level="full").ok


@pytest.mark.parametrize("harm", ["missing", "shorter", "longer", "another's"])
def test_documents_that_are_not_what_was_committed_are_found_and_named(harm):
    """I4."""
    job, committed = saved()
    key, catalog = committed.commit.documents.path, opened(job.store)
    body = body_of(job.store, key)
    job.store.delete(key)
    changed = {"shorter": body[:-1], "longer": body + b"\0", "another's": encode_documents({"model": 1}).body}
    if harm != "missing":
        job.store.put(key, changed[harm])
    with pytest.raises(IntegrityError) as caught:
        documents_of(job.log, committed)
    assert caught.value.facts["key"] == key
    (finding,) = catalog.verify(committed, level="exists").findings
    assert (finding.kind, finding.key) == ("missing" if harm == "missing" else "damaged", key)


@pytest.mark.parametrize(
    "change",
    [
        {"path": f"data/0/y.t0001.a0001.{'0' * 32}/fingerprints.json.gz"},
        {"inflated": MAX_DOCUMENTS_BYTES + 1},
        {"size": MAX_DOCUMENTS_BYTES + 2**20 + 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_commit_that_names_what_cannot_be_is_refused_before_anything_is_asked_for(change):
    store = FaultyStore(MemoryStore(), lambda _: None)
    job, committed = saved(store)
    wrong = dataclasses.replace(committed.commit, documents=dataclasses.replace(committed.commit.documents, **change))
    del store.calls[:]
    with pytest.raises(IntegrityError):
        documents_of(job.log, dataclasses.replace(committed, commit=wrong))
    assert [call.key for call in store.calls] == [slot_key(2)]  # whether it was retired meanwhile
    assert isinstance(wrong.documents, PartRef)
