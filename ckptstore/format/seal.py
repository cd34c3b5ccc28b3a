"""The seal: the last key of a JSON object, `self`, holds the BLAKE3 of all bytes before it."""

from __future__ import annotations

from blake3 import blake3


def seal(head: bytes) -> bytes:
    """Return what closes the object that `head` begins: its last key, the brace and a newline."""
    return b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n'


SEAL_BYTES = len(seal(b""))


def unsealed(body: bytes) -> bytes | None:
    """Return the object without its seal, as JSON; None if the seal is broken."""
    head = body[:-SEAL_BYTES]
    return head + b"}" if body[len(head) :] == seal(head) else None
