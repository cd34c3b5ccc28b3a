"""An upload to Google Cloud Storage through everything that can happen to its requests."""

import json
import os
import time

import pytest
from forks import end_after
from gcs_by_the_book import UNIT
from gcs_cases import QUICK, opened

from ckptstore.errors import AccessDeniedError, IntegrityError, InvalidInputError, OutcomeUnknownError, UnsupportedError
from ckptstore.options import TransferOptions
from ckptstore.units import MIB


@pytest.fixture
def store(gcs):
    return opened("gs://bucket/run")


def upload(store, body, key="data/0/shard"):
    with store.open_upload(key, size=len(body)) as one:
        for start in range(0, len(body), 3 * MIB):
            one.write(memoryview(body)[start : start + 3 * MIB])
        return one.complete()


# What an upload goes through. The last byte makes three chunks of 5 MiB, 5 MiB and 1 byte.
BODY = os.urandom(10 * MIB + 1)


@pytest.mark.parametrize(
    "faults",
    [
        [],
        ["503"],
        ["lost"],
        [None, "lost"],
        [None, "lost", "lost"],
        [None, "503", "503"],
        [None, "partly"],
        [None, "partly", "503"],
        [None, "short", "short", None],
        [None, "none"],
        [None, None, "partly"],
        [None, None, None, "lost"],
        [None, None, None, "lost", "lost"],
        [None, None, None, "503"],
        [None, None, None, "late"],
        [None, None, None, "lost", "late"],
        [None, "lost", None, "lost", None, "lost"],
    ],
    ids=str,
)
def test_whatever_happens_to_a_chunk_none_is_lost_shifted_or_doubled(gcs, store, faults):
    gcs.faults = list(faults)
    info = upload(store, BODY)
    assert gcs.objects == {"run/data/0/shard": BODY}
    assert not gcs.faults
    assert (info.key, info.size) == ("data/0/shard", len(BODY))


@pytest.mark.parametrize("faults", [[None, "410"], [None, None, "lost", "410"], [None, None, None, "410"]], ids=str)
def test_an_upload_that_the_server_forgot_fails_at_once(gcs, store, faults):
    gcs.faults = list(faults)
    with pytest.raises(OutcomeUnknownError, match="410"):
        upload(store, BODY)
    assert gcs.objects == {}
    assert len([1 for method, path, _ in gcs.seen if path.startswith("/upload/") and method != "DELETE"]) <= 4


def test_a_page_about_a_chunk_is_no_upload_that_was_forgotten(gcs, store):
    page = (b"<html></html>", {"Content-Type": "text/html"})
    pages = [(404, *page), (200, *page)]
    gcs.refuse = lambda _method, path: pages.pop() if pages and gcs.sessions and path.startswith("/upload") else None
    assert upload(store, BODY).size == len(BODY)
    assert not pages
    assert gcs.objects == {"run/data/0/shard": BODY}


@pytest.mark.parametrize("refusal", [(403, "forbidden"), (429, "rateLimitExceeded"), (401, "authError")], ids=str)
@pytest.mark.parametrize("looks", [True, False], ids=["seen", "unseen"])
@pytest.mark.parametrize("size", [10, len(BODY)])
def test_what_is_refused_after_an_answer_that_was_lost_proves_nothing(gcs, store, refusal, looks, size):
    gcs.faults = [None] * 3 * (size > 10) + ["lost"]

    def refuse(_method, path):
        lost = "run/data/0/shard" in gcs.objects
        return refusal if lost and (not looks or path.startswith("/upload/")) else None

    gcs.refuse = refuse
    if looks:
        assert upload(store, BODY[:size]).size == size
    else:
        with pytest.raises(OutcomeUnknownError, match=str(refusal[0])):
            upload(store, BODY[:size])
    assert gcs.objects == {"run/data/0/shard": BODY[:size]}


@pytest.mark.parametrize("faults", [["lost", "flipped"], [None, None, None, "503", None, "flipped"]], ids=str)
def test_wrong_bytes_are_found_out_also_after_an_answer_that_was_lost(gcs, store, faults):
    gcs.faults = list(faults)
    with pytest.raises(IntegrityError):
        upload(store, BODY[: 10 if faults[0] else len(BODY)])
    assert gcs.objects == {}


def test_a_refusal_of_the_first_try_is_what_it_is(gcs, store):
    gcs.refuse = lambda _method, path: (403, "forbidden") if path.startswith("/upload/") else None
    with pytest.raises(AccessDeniedError):
        upload(store, BODY[:10])


@pytest.mark.parametrize("size", [10, len(BODY)])
def test_an_upload_whose_last_answers_are_all_lost_is_looked_for(gcs, store, size):
    gcs.faults = [None] * 3 * (size > 10) + ["lost"] * QUICK.attempts
    assert upload(store, BODY[:size]).size == size
    assert gcs.objects == {"run/data/0/shard": BODY[:size]}


@pytest.mark.parametrize(
    ("sound", "fault"), [(0, "503"), (1, "503"), (2, "503"), (3, "503"), (1, "none"), (3, "none"), (3, "late")]
)
def test_a_server_that_does_not_take_a_chunk_ends_an_upload_soon(gcs, store, sound, fault):
    gcs.faults = [None] * sound + [fault] * 20
    began = time.monotonic()
    with pytest.raises(OutcomeUnknownError, match=r"503|308"):
        upload(store, BODY)
    assert time.monotonic() - began < 20
    assert (gcs.objects, gcs.sessions) == ({}, {})
    assert len(gcs.faults) >= 20 - 2 * QUICK.attempts


@pytest.mark.parametrize(
    ("size", "faults"),
    [
        (10, ["flipped"]),
        (len(BODY), [None, None, None, "flipped"]),
        (len(BODY), [None, "early"]),
        (len(BODY), [None, None, "less"]),
    ],
    ids=["small and changed", "large and changed", "published too early", "forgotten in part"],
)
def test_what_a_server_holds_wrongly_is_found_out_and_deleted(gcs, store, size, faults):
    gcs.faults = list(faults)
    with pytest.raises(IntegrityError):
        upload(store, BODY[:size])
    assert (gcs.objects, gcs.sessions) == ({}, {})


def test_an_upload_tells_who_we_are_to_no_other_host_and_leaves_no_session(gcs, store):
    with pytest.raises(RuntimeError), store.open_upload("a", size=len(BODY)) as one:  # noqa: PT012  (either)
        one.write(BODY)  # the server named a host that does not exist
        raise RuntimeError
    assert (gcs.objects, gcs.sessions) == ({}, {})


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("how", ["abort", "leave", "write", "complete"])
def test_a_forked_child_leaves_its_parents_upload_alone(gcs, store, how):
    ways = {
        "abort": lambda one: one.abort(),
        "leave": lambda one: one.__exit__(None, None, None),
        "write": lambda one: one.write(BODY[7 * MIB :]),
        "complete": lambda one: one.complete(),
    }
    with store.open_upload("data/0/shard", size=len(BODY)) as one:
        one.write(memoryview(BODY)[: 7 * MIB])
        before = len(gcs.seen)
        pid = os.fork()
        if not pid:
            end_after(20)
            try:
                ways[how](one)
            except UnsupportedError:
                os._exit(1)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (how in ("write", "complete"))
        assert gcs.seen[before:] == []
        one.write(memoryview(BODY)[7 * MIB :])
        one.complete()
    assert gcs.objects == {"run/data/0/shard": BODY}


def test_an_upload_that_failed_takes_nothing_more(gcs, store):
    gcs.faults = ["503"] * 3
    one = store.open_upload("a", size=len(BODY))
    with pytest.raises(OutcomeUnknownError):
        one.write(BODY)
    for call in (lambda: one.write(b"x"), one.complete):
        with pytest.raises(InvalidInputError, match="has ended"):
            call()


def test_a_chunk_is_a_multiple_of_the_unit_of_the_service(gcs):
    part_bytes = 5 * MIB + 1
    body = BODY[: part_bytes + UNIT]
    upload(opened("gs://bucket", transfer=TransferOptions(part_bytes=part_bytes)), body)
    assert gcs.objects == {"data/0/shard": body}


@pytest.mark.servers
def test_an_upload_that_a_server_publishes_when_it_is_asked_about_is_taken_back(gs_url, fake_gcs):
    """fake-gcs-server takes the question how much it holds for the end of the upload."""
    store = opened(gs_url)
    one = store.open_upload("data/0/shard", size=len(BODY))
    one.write(BODY)
    one._in_doubt = True  # as after an answer that was lost
    with pytest.raises(IntegrityError, match="was stored with 10485760 bytes"):
        one.complete()
    assert list(store.list("")) == []


@pytest.mark.parametrize("size", [6, len(BODY)], ids=["one request", "chunks"])
def test_an_upload_that_is_answered_with_another_object_is_not_called_stored(gcs, store, size):
    """On a kept connection that is out of step, this is the answer to another request."""
    gcs.objects["run/other"] = BODY[:size]
    another = (200, json.dumps(gcs.described("run/other")).encode(), {"Content-Type": "application/json"})
    ends = iter([None] * 3 if size > 6 else [])
    store._check_bucket(store._request("GET", "a"))
    gcs.refuse = lambda method, path: (
        next(ends, another) if path.startswith("/upload/") and method != "DELETE" else None
    )
    with pytest.raises(OutcomeUnknownError, match="something else"):
        upload(store, BODY[:size])
    assert "run/data/0/shard" not in gcs.objects
