"""Documents said of a save: bound to it, kept once for all ranks, refused before anything is sent."""

import pickle

import pytest
import torch
import torch.distributed as dist

import storage_writers as sw
from ckptstore import CheckpointStore, InvalidInputError
from ckptstore.format.documents import MAX_DOCUMENTS_BYTES
from ckptstore.objectstore.urls import open_store
from storage_writers.planning import Ticket

STATE = {"w": torch.arange(4.0)}


def documents_of(url, name):
    return CheckpointStore.open(url).get(name).documents()


def test_what_stands_behind_the_fingerprints_is_kept_with_the_save_and_not_with_the_next(url):
    writer = sw.CkptStoreWriter(url)
    writer.describe(fingerprints={"model": "blake3:1"}, documents={"model": {"layers": 2}, "state": [1, None]})
    sw.save(STATE, checkpoint_id="a", storage_writer=writer)
    sw.save(STATE, checkpoint_id="b", storage_writer=writer)
    assert documents_of(url, "a") == {"model": {"layers": 2}, "state": [1, None]}
    assert documents_of(url, "b") == {}


def test_each_background_save_keeps_its_own_documents_though_the_next_are_said_meanwhile(url):
    writer = sw.CkptStoreWriter(url)
    futures = []
    for number in range(3):
        writer.describe(documents={"n": number})
        futures.append(sw.async_save(STATE, checkpoint_id=f"x{number}", storage_writer=writer))
    futures[-1].result()
    assert [documents_of(url, f"x{number}") for number in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]
    writer.close()


@pytest.mark.parametrize("documents", [{"x": "y" * MAX_DOCUMENTS_BYTES}, {"x": {1: 2}}, ["x"]], ids=len)
def test_documents_that_cannot_be_kept_are_refused_before_anything_is_sent(url, documents):
    writer = sw.CkptStoreWriter(url)
    with pytest.raises(InvalidInputError, match="documents"):
        writer.describe(documents=documents)
    assert list(open_store(url).list("")) == []


def save_with_documents(url):
    writer = sw.CkptStoreWriter(url)
    writer.describe(documents={"of rank": dist.get_rank(), "much": "x" * 100_000})
    tickets = []
    right = writer.prepare_global_plan
    writer.prepare_global_plan = lambda plans: tickets.extend(right(plans)) or tickets
    sw.save({f"w{dist.get_rank()}": torch.ones(3)}, checkpoint_id="a", storage_writer=writer)
    return [len(pickle.dumps(each.storage_data)) for each in tickets if isinstance(each.storage_data, Ticket)]


def test_the_coordinators_documents_count_and_do_not_travel_to_the_ranks(gang, tmp_path):
    url = str(tmp_path)
    sizes, of_the_other = gang.values(2, save_with_documents, url)
    assert documents_of(url, "a") == {"of rank": 0, "much": "x" * 100_000}
    assert len(sizes) == 2
    assert max(sizes) < 1000
    assert of_the_other == []
