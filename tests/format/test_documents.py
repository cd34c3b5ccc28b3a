"""Documents: JSON by name, in one small object that is bounded, canonical and read without trust."""

import gzip
import json
import math
import zlib

import pytest

from ckptstore.errors import IntegrityError, InvalidInputError, UnsupportedError
from ckptstore.format.checksum import hexdigest
from ckptstore.format.codec import PartRef
from ckptstore.format.documents import MAX_DOCUMENTS_BYTES, decode_documents, encode_documents

KEY = "data/0/x/fingerprints.json.gz"


def ref_of(body, inflated):
    return PartRef(KEY, len(body), hexdigest(body), inflated, (0, 0))


def back(documents):
    """Return what is read of what is written."""
    written = encode_documents(documents)
    return decode_documents(written.body, ref_of(written.body, written.inflated))


def nested(depth):
    return [nested(depth - 1)] if depth else "x"


def test_documents_come_back_by_name():
    documents = {"model": {"layers": 2, "tied": True, "none": None, "rope": 1e4}, "ñ": ["a", 0.1], "big": 10**40}
    assert back(documents) == documents


def test_what_json_has_not_comes_back_as_text_and_a_tuple_as_a_list():
    assert back({"x": (math.inf, -math.inf, math.nan)}) == {"x": ["Infinity", "-Infinity", "NaN"]}


def test_documents_are_spelled_one_way_only_and_any_gzip_reads_them():
    body = encode_documents({"b": {"y": 1, "x": 2}, "a": 0}).body
    assert encode_documents({"a": 0, "b": {"x": 2, "y": 1}}).body == body
    assert gzip.decompress(body) == b'{"documents":{"a":0,"b":{"x":2,"y":1}},"format":1,"kind":"documents"}\n'
    assert body[4:8] == bytes(4)  # RFC 1952: the time


@pytest.mark.parametrize(
    ("documents", "named"),
    [
        ({"a": {"b": [1, {2}]}}, r"documents\['a'\]\['b'\]\[1\] is a set"),
        ({"a": {1: 2}}, r"documents\['a'\] has the key 1"),
        ({7: 1}, "documents has the key 7"),
        ({"a": "\ud800"}, r"documents\['a'\] is text that UTF-8 cannot hold"),
        ({"a": nested(63)}, "is nested too deeply"),
        ({"a": object}, r"documents\['a'\] is a type"),
        ([1], "must be a table"),
    ],
)
def test_what_is_no_json_is_refused_and_named(documents, named):
    with pytest.raises(InvalidInputError, match=named):
        encode_documents(documents)


def test_what_is_nested_as_deeply_as_is_allowed_comes_back():
    assert back({"a": nested(62)}) == {"a": nested(62)}


def test_documents_fill_their_room_to_the_byte_and_no_further():
    room = MAX_DOCUMENTS_BYTES - encode_documents({"a": ""}).inflated
    largest = encode_documents({"a": "x" * room})
    assert largest.inflated == MAX_DOCUMENTS_BYTES == 16 * 2**20
    assert len(decode_documents(largest.body, ref_of(largest.body, largest.inflated))["a"]) == room
    with pytest.raises(InvalidInputError) as caught:
        encode_documents({"a": "x" * (room + 1)})
    assert caught.value.facts == {"size": MAX_DOCUMENTS_BYTES + 1}


@pytest.mark.parametrize(
    "value",
    [
        [1],
        {"format": 1, "kind": "documents"},
        {"format": 1, "kind": "documents", "documents": [1]},
        {"format": 1, "kind": "part", "documents": {}},
        {"format": 0, "kind": "documents", "documents": {}},
        {"format": True, "kind": "documents", "documents": {}},
        {"format": 1, "kind": "documents", "documents": {"a": nested(63)}},
        {"format": 1, "kind": "documents", "documents": {"a": "\ud800"}},
        {"format": 1, "kind": "documents", "documents": {"a": math.inf}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_what_is_written_is_refused(value):
    text = json.dumps(value).encode()
    body = gzip.compress(text)
    with pytest.raises(IntegrityError) as caught:
        decode_documents(body, ref_of(body, len(text)))
    assert KEY in str(caught.value)


def test_a_later_format_says_what_to_install():
    text = b'{"documents":{},"format":2,"kind":"documents"}'
    body = gzip.compress(text)
    with pytest.raises(UnsupportedError, match="pip install") as caught:
        decode_documents(body, ref_of(body, len(text)))
    assert caught.value.facts == {"path": KEY, "format": 2}


def test_no_more_is_held_than_the_commit_states_and_no_commit_may_state_more_than_the_limit():
    text = b"\0" * (64 * 2**20)
    bomb = zlib.compress(text, wbits=16 + zlib.MAX_WBITS)
    for inflated in (1000, MAX_DOCUMENTS_BYTES, MAX_DOCUMENTS_BYTES + 1, len(text)):
        with pytest.raises(IntegrityError, match=r"does not hold|may be held"):
            decode_documents(bomb, ref_of(bomb, inflated))
