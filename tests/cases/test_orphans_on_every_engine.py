"""Parts of no object: a failure leaves none; a killed process's are told with their age, and forgotten one by one."""

import base64
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import EVERY, on
from states import blank, same
from torch.distributed.checkpoint.api import CheckpointException

import storage_writers as sw
from ckptstore.errors import CkptStoreError, UnsupportedError
from ckptstore.options import TransferOptions
from ckptstore.testing.tapped import TappedStore
from ckptstore.units import MIB

TESTS = str(Path(__file__).parents[1])
PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2)
MINUTE = 60.0

on_what_tells = on("files", "obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto")
"""Google, Azure and fsspec tell nobody of uploads that are not complete; the first two forget them after a week."""

KILLED = """
    import base64, os, pickle, signal, sys
    sys.path.insert(0, sys.argv[2])
    from ckptstore.options import TransferOptions
    place, keys = pickle.loads(base64.b64decode(sys.argv[1]))
    store = place.store(transfer=TransferOptions(part_bytes=5 << 20, parts_in_flight=2))
    uploads = [store.open_upload(key, size=20 << 20) for key in keys]
    for upload in uploads:
        for _ in range(12):
            upload.write(bytes(1 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def upload_and_die(place, *keys):
    given = base64.b64encode(pickle.dumps((place, keys))).decode()
    words = [sys.executable, "-c", textwrap.dedent(KILLED), given, TESTS]
    assert subprocess.run(words, timeout=120, check=False).returncode == -signal.SIGKILL


def pending(place):
    """Return what uploads are under way in a run, by the directory where they will be; None where nobody tells."""
    try:
        return {upload.key.rpartition("/")[0]: upload for upload in place.store().list_uploads("")}
    except UnsupportedError:
        return None


def state(value):
    return {"w": torch.full((20 * MIB // 4,), float(value))}


@on_what_tells
def test_what_a_killed_process_left_is_listed_with_its_age_and_exactly_what_is_named_is_forgotten(place):
    neighbours = [replace(place, url=f"{place.url}{more}") for more in ("2", "-x")]
    for each in (place, *neighbours):
        upload_and_die(each, "data/0/a/rank-0", "data/1/a/rank-1")
    found = pending(place)
    assert sorted(found) == ["data/0/a", "data/1/a"]
    if place.server is None or place.server.name != "moto":  # which says 2010 of each
        assert all(abs(time.time() - upload.began) < MINUTE for upload in found.values())
    assert [upload.key for upload in place.store().list_uploads("data/1/")] == [found["data/1/a"].key]
    assert list(place.store().list_uploads("log/")) == []
    place.store().abort_upload(found["data/0/a"])
    place.store().abort_upload(found["data/0/a"])  # nobody minds
    assert pending(place) == {"data/1/a": found["data/1/a"]}
    assert list(place.store().list("")) == []
    for each in neighbours:
        assert sorted(pending(each)) == ["data/0/a", "data/1/a"]
    place.store().abort_upload(found["data/1/a"])
    assert pending(place) == {}


@on_what_tells
def test_a_run_with_orphans_is_saved_to_and_read_like_any_other(place):
    upload_and_die(place, "data/0/a/rank-0")
    sw.save(state(1), checkpoint_id="a", storage_writer=place.probed().writer(transfer=PARTS))
    found = blank(state(1))
    sw.load(found, storage_reader=place.reader())
    assert same(found, state(1))
    assert sorted(pending(place)) == ["data/0/a"]


@on(*EVERY)
@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_save_that_fails_when_parts_are_on_their_way_leaves_none_of_them(place, fault):
    writes = []

    def fail(call, act):
        if call.operation == "write":
            writes.append(call)
            if len(writes) == 4:  # an engine may be given pieces or parts: two parts are under way by then
                raise fault
        return act()

    pieces = {f"w{number}": torch.ones(4 * MIB // 4) for number in range(6)}
    store = TappedStore(place.probed().store(transfer=PARTS), fail)
    raised = KeyboardInterrupt if isinstance(fault, KeyboardInterrupt) else (CkptStoreError, CheckpointException)
    with pytest.raises(raised, match=str(fault)[-12:] or None):
        sw.save(pieces, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store, transfer=PARTS))
    assert len(writes) == 4
    assert list(place.store().list("data/")) == []
    assert pending(place) in ({}, None)
    sw.save(pieces, checkpoint_id="a", storage_writer=place.writer(transfer=PARTS))
    assert place.opened().verify(place.opened().latest(), level="full").ok
