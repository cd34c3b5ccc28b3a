"""Inputs that somebody could have written into a bucket: right bytes with damage, and right JSON with wrong values."""

from __future__ import annotations

import copy
import json

from hypothesis import strategies as st

TOKENS = (
    b"",
    b"\x00",
    b"\xff\xfe",
    b'"',
    b"\\ud800",
    b"[" * 2000,
    b'{"a":' * 500,
    b"9" * 5000,
    b"1e400",
    b"-1",
    b"NaN",
    b'"self":"',
    b"../",
    b"}",
    b'","signed_by":"',
)
"""What is put in between bytes."""

DEEP = json.loads("[" * 300 + "]" * 300)
VALUES = (
    *(None, True, False, 0, -1, 1, 255, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, -(10**999)),
    *(0.5, -0.0, 1e308, "", " ", "NaN", "Infinity", "0" * 64, "0" * 32, "\x00", "\ud800", "e\u0301", "\u202e", "$"),
    *("../../etc/passwd", "/etc/passwd", "data/0/../../x", "C:\\x", "log/000000000000.json", "x" * 5000),
    *("9" * 5000, "x.t" + "1" * 5000 + ".a0001." + "0" * 32, "step.t0001.a0001." + "f" * 32, "%00.t0001.a0001."),
    *([], {}, [[]], [None], [2**63], {"": {}}, {"$tuple": []}, {"root": True}, DEEP, list(range(300))),
)
"""What is put in the place of a value."""


@st.composite
def damaged(draw, bodies):
    """Draw one of `bodies` with a few of its bytes changed, cut out, copied elsewhere, or tokens in between."""
    body = bytearray(draw(st.sampled_from(bodies)))
    for _ in range(draw(st.integers(1, 4))):
        at, end = sorted(draw(st.tuples(*[st.integers(0, len(body))] * 2)))
        match draw(st.sampled_from(("flip", "cut", "tail", "copy", "token", "random"))):
            case "flip" if body:
                body[min(at, len(body) - 1)] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del body[at:end]
            case "tail":
                del body[end:]
            case "copy":
                body[at:at] = body[at : min(end, at + 4096)]
            case "token":
                body[at:at] = draw(st.sampled_from(TOKENS))
            case _:
                body[at : min(end, at + 16)] = draw(st.binary(max_size=16))
    return bytes(body)


def _places(value, parent=None, key=None):
    yield parent, key
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in inner:
        yield from _places(each, value, step)


@st.composite
def edited(draw, values):
    """Draw one of the JSON `values` with a few of its values replaced, left out, put twice, or called otherwise."""
    root = [copy.deepcopy(draw(st.sampled_from(values)))]
    for _ in range(draw(st.integers(1, 3))):
        places = [place for place in _places(root) if place[0] is not None]
        parent, key = draw(st.sampled_from(places)) if places else (root, 0)
        match draw(st.sampled_from(("replace", "replace", "near", "drop", "twice", "rename"))):
            case "near" if isinstance(parent[key], int):
                parent[key] += draw(st.sampled_from((-1, 1, 64, -64, 2**62)))
            case "drop" if parent is not root:
                del parent[key]
            case "twice" if isinstance(parent, list) and parent is not root:
                parent.insert(draw(st.integers(0, len(parent))), copy.deepcopy(parent[key]))
            case "rename" if isinstance(parent, dict):
                parent[draw(st.sampled_from(("", "$", "$set", "root", "format", "x" * 300, "-1", "9" * 5000)))] = (
                    parent.pop(key)
                )
            case _:
                parent[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return root[0]


def written(value):
    """Return JSON as whoever forges it would write it: compact, and with lone surrogates as escapes."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def each_edit(value):
    """Yield `value` with each of the wrong values at each of its places, and without each of them."""
    root = [value]
    for number in range(len(list(_places(root)))):
        for wrong in (..., *VALUES):
            changed = copy.deepcopy(root)
            parent, key = list(_places(changed))[number]
            if parent is None:
                continue
            if wrong is not ...:
                parent[key] = wrong
            elif parent is not changed:
                del parent[key]
            yield changed[0]
