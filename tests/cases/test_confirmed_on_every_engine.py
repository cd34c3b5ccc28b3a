"""A save returns when all of it is there, seen by whoever looks; what is not there whole is never committed."""

from pathlib import Path

import pytest
import torch
from places import EVERY, on
from refusals import command, told
from states import blank, same

import storage_writers as sw
from ckptstore.errors import CkptStoreError, IntegrityError, OutcomeUnknownError, UnavailableError
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol import commit
from ckptstore.testing.tapped import TappedStore
from ckptstore.units import MIB

PARTS = TransferOptions(part_bytes=5 * MIB)


def state(value):
    return {"w": torch.full((12 * MIB // 4,), float(value)), "step": value}


def read_by_another_client(place, key):
    """Return an object as a client that knows nothing of us reads it, right now."""
    path = f"{place.url}/{key}"
    if place.server is None and place.url.startswith("memory://"):
        return place.store().get(key, max_bytes=1 << 30)  # it is in this process, and nobody else can look
    if place.server is None:
        return Path(path).read_bytes()
    client, bucket = place.server.client(), place.server.bucket
    name = path.removeprefix(place.server.url(""))
    if place.server.scheme == "s3":
        return client.get_object(Bucket=bucket, Key=name)["Body"].read()
    if place.server.scheme == "gs":
        return client.bucket(bucket).blob(name).download_as_bytes()
    return client.send("GET", f"{bucket}/{name}").body


def saving(place, tap):
    """Return a writer every call of which goes through `tap`."""
    store = TappedStore(place.probed().store(transfer=PARTS), tap)
    return sw.CkptStoreWriter(store, transfer=PARTS, log=LogOptions(deadline_seconds=1))


def check_only_the_first_is_there(place):
    assert [each.checkpoint_id for each in place.opened().checkpoints()] == ["a"]
    found = blank(state(1))
    sw.load(found, storage_reader=place.reader())
    assert same(found, state(1))
    sw.save(state(3), checkpoint_id="c", storage_writer=place.writer(transfer=PARTS))
    assert [each.checkpoint_id for each in place.opened().checkpoints()] == ["c", "a"]


@pytest.fixture
def saved(place):
    """A place with one checkpoint."""
    sw.save(state(1), checkpoint_id="a", storage_writer=place.probed().writer(transfer=PARTS))
    return place


@on(*EVERY)
def test_when_a_save_returns_any_client_reads_every_byte_of_it(saved):
    store = saved.store()
    for info in store.list(""):
        assert read_by_another_client(saved, info.key) == store.get(info.key, max_bytes=1 << 30)
    assert len([info for info in store.list("data/") if info.size > 12 * MIB]) == 1
    assert command("verify", saved.url, "--level", "full", *saved.arguments)[0] == 0


@on(*EVERY)
@pytest.mark.parametrize("wrong", ["shorter", "gone", "other bytes"])
def test_a_shard_that_does_not_stay_what_it_was_is_not_committed(saved, wrong, monkeypatch):
    """I4: what a store called stored is looked at before it is named."""
    monkeypatch.setattr(commit, "LISTING_SECONDS", 1.0)

    def spoil(call, act):
        result = act()
        if call.operation == "complete":
            store = saved.store()
            body = store.get(call.key, max_bytes=1 << 30)
            if wrong == "gone":
                store.delete(call.key)
            else:
                store.put(call.key, body[:-1] if wrong == "shorter" else bytes(len(body)))
        return result

    if wrong == "other bytes" and saved.store().head("run.json").etag is None:
        pytest.skip("This store has no name for the bytes of an object; `verify --level full` finds them out.")
    told(
        lambda: sw.save(state(2), checkpoint_id="b", storage_writer=saving(saved, spoil)),
        IntegrityError,
        "rank-00000.safetensors",
    )
    check_only_the_first_is_there(saved)


@on(*EVERY)
@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), OutcomeUnknownError("No answer."), UnavailableError("It was refused.")],
    ids=["foreign", "unknown", "unavailable"],
)
def test_a_shard_whose_completion_raises_is_not_committed_and_the_save_raises(saved, error):
    """I5: that nothing was committed is known in each case, whatever became of the shard."""

    def fail(call, act):
        if call.operation == "complete":
            raise error
        return act()

    with pytest.raises(CkptStoreError, match=error.args[-1]) as caught:
        sw.save(state(2), checkpoint_id="b", storage_writer=saving(saved, fail))
    assert isinstance(error, OSError) or type(caught.value) is UnavailableError
    check_only_the_first_is_there(saved)
