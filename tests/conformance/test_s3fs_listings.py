"""s3:// through s3fs: listings of many pages come to an end, whatever the server says follows."""

from urllib.parse import parse_qs, urlsplit

import pytest
from scripted import BUCKET

from ckptstore.errors import UnavailableError
from ckptstore.objectstore import s3_pages
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions

ONCE = TransferOptions(retry=RetryOptions(attempts=1, stall_timeout_seconds=5))
LISTS = {"list": lambda store: store.list(""), "list_uploads": lambda store: store.list_uploads("")}


def serve(server, engine, pages):
    """Let a server answer listings: `pages` gets the marker that is asked for, and gives keys and the next marker."""

    def script(_method, path, _turn):
        query = parse_qs(urlsplit(path).query, keep_blank_values=True)
        marker = (query.get("continuation-token") or query.get("key-marker") or [None])[0]
        keys, following = pages(marker)
        return 200, page_of_uploads(keys, following) if "uploads" in query else page_of_objects(keys, following)

    server.script = script
    return open_store(BUCKET, engine=engine, storage_options=server.options, transfer=ONCE)


def page_of_objects(keys, following):
    held = "".join(f"<Contents><Key>run/{key}</Key><Size>1</Size></Contents>" for key in keys)
    return page("ListBucketResult", held, "NextContinuationToken", following)


def page_of_uploads(keys, following):
    held = "".join(f"<Upload><Key>run/{key}</Key><UploadId>u-{key}</UploadId></Upload>" for key in keys)
    return page("ListMultipartUploadsResult", f"<Bucket>bucket</Bucket>{held}", "NextKeyMarker", following)


def page(kind, held, name, following):
    marker = "" if following is None else f"<{name}>{following}</{name}>"
    return f"<{kind}><IsTruncated>{str(following is not None).lower()}</IsTruncated>{marker}{held}</{kind}>"


@pytest.fixture(params=[("list", "s3fs"), ("list_uploads", "s3fs"), ("list_uploads", "obstore")], ids=" ".join)
def listed(request, scripted):
    """List what a server of such pages holds."""
    call, engine = request.param

    def keys(pages):
        return [found.key for found in LISTS[call](serve(scripted, engine, pages))]

    return keys


ENDLESS = {
    "no marker": lambda _: (["a"], ""),
    "the same marker": lambda _: (["a"], "t"),
    "markers in turn": lambda marker: (["a"], "t1" if marker == "t0" else "t0"),
    "markers in turn, and no keys": lambda marker: ([], "t1" if marker == "t0" else "t0"),
    "markers in turn, and other keys": lambda marker: ([f"after-{marker}"], "t1" if marker == "t0" else "t0"),
    "new markers for what was there": lambda marker: (["a", "b"], f"{marker}t"),
    "new markers for nothing": lambda marker: ([], str(int(marker or 0) + 1)),
}


@pytest.mark.parametrize("pages", ENDLESS.values(), ids=ENDLESS)
def test_a_listing_that_would_never_end_is_refused(listed, scripted, monkeypatch, pages):
    monkeypatch.setattr(s3_pages, "_EMPTY_PAGES", 5)
    with pytest.raises(UnavailableError, match="not S3"):
        listed(pages)
    assert len(scripted.seen) <= 7


def test_the_pages_of_a_listing_need_not_be_sorted_nor_full(listed):
    """SeaweedFS names `a/b` before `a-b`, and incomplete uploads in no order; others send pages of what was deleted."""
    pages = {
        None: (["x/f", "x/g"], "1"),
        "1": ([], "2"),
        "2": ([], "3"),
        "3": (["x-1/f"], "4"),
        "4": (["x-1/f", "a"], None),  # and what is named twice is there once
    }
    assert listed(pages.get) == ["a", "x-1/f", "x/f", "x/g"]
