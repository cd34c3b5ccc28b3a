"""s3:// through s3fs where the thread that does the work is stuck: nobody waits for a week."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from scripted import BUCKET, CALLS, upload

from ckptstore.errors import OutcomeUnknownError, StalledError
from ckptstore.objectstore import loop, s3_requests, s3_upload
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.units import MIB

WRITES = ("create", "put", "delete", "upload")
WORK = {
    **CALLS,
    "head": lambda store: store.head("a"),
    "list_uploads": lambda store: list(store.list_uploads("")),
    "upload": lambda store: upload(store, 1),
}


def test_a_thread_that_is_stuck_hangs_no_call(scripted, monkeypatch):
    """Whatever blocks it: each call ends when the limits of its requests are over."""
    monkeypatch.setattr(s3_requests, "OPEN_SECONDS", 0.1)
    monkeypatch.setattr(s3_upload, "_ABORT_SECONDS", 0.1)
    retry = RetryOptions(attempts=1, deadline_seconds=0.5, stall_timeout_seconds=0.2)
    store = open_store(
        BUCKET,
        engine="s3fs",
        storage_options=scripted.options,
        transfer=TransferOptions(part_bytes=5 * MIB, retry=retry),
    )
    stop = threading.Event()
    loop.current().call_soon_threadsafe(stop.wait, 120)
    began = time.monotonic()
    with ThreadPoolExecutor(len(WORK)) as threads:
        try:
            begun = {name: threads.submit(work, store) for name, work in WORK.items()}
            for name, call in begun.items():
                expected = OutcomeUnknownError if name in WRITES else StalledError
                assert type(call.exception(timeout=60)) is expected, name
            assert time.monotonic() - began < 60
        finally:
            stop.set()
    with pytest.raises(StalledError, match="no answer in time"):
        raise begun["get"].exception()
    assert scripted.seen == []
