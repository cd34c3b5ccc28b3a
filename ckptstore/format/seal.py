"""The end of a record: perhaps a signature, and the seal, whose `self` holds the BLAKE3 of all bytes before it.

Both have a fixed length, so that they are checked on the bytes, before any JSON is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from blake3 import blake3

from ckptstore.errors import IntegrityError
from ckptstore.signing import KEY_BYTES, RECORD, SIGNATURE_BYTES, Signing, is_signed

_SIGNATURE = re.compile(
    rb',"signature":"([0-9a-f]{%d})","signed_by":"([0-9a-f]{%d})"' % (2 * SIGNATURE_BYTES, 2 * KEY_BYTES)
)


def seal(head: bytes) -> bytes:
    """Return what closes the object that `head` begins: its last key, the brace and a newline."""
    return b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n'


SEAL_BYTES = len(seal(b""))


def unsealed(body: bytes) -> bytes | None:
    """Return what the seal closes, without the brace; None if the seal is broken."""
    head = body[:-SEAL_BYTES]
    return head if body[len(head) :] == seal(head) else None


@dataclass(frozen=True, slots=True)
class Signature:
    """Who signed a record, by public key, and the signature."""

    signed_by: bytes
    signature: bytes


def signed(head: bytes, signing: Signing | None, *, domain: bytes = RECORD) -> bytes:
    """Return `head` with its signature, or as it is if nobody signs."""
    public = signing.public if signing is not None else None
    if signing is None or public is None:
        return head
    return head + _suffix(Signature(public, signing.sign(head, domain=domain)))


def split_signature(head: bytes) -> tuple[bytes, Signature | None]:
    """Return what was signed, and the signature at its end; None if there is none. Nothing is checked."""
    found = _SIGNATURE.fullmatch(head[-_SUFFIX_BYTES:])
    if found is None:
        return head, None
    return head[:-_SUFFIX_BYTES], Signature(bytes.fromhex(found[2].decode()), bytes.fromhex(found[1].decode()))


def signer_of(body: bytes) -> str | None:
    """Return the public key, in hexadecimal, that a whole record names as its signer's; it may be a lie."""
    signature = split_signature(body[:-SEAL_BYTES])[1]
    return None if signature is None else signature.signed_by.hex()


def check_signed(
    head: bytes, signature: Signature | None, signing: Signing, *, key: str, domain: bytes = RECORD
) -> None:
    """Check that a trusted key signed `head`.

    Raises:
        IntegrityError: It is not signed, by a key that is not trusted, or the signature is of other bytes.
    """
    if signature is None:
        raise _refused(key, "is not signed, and signatures are required", None)
    if signature.signed_by not in signing.trusted:
        raise _refused(key, f"is signed by {signature.signed_by.hex()}, which is not trusted", signature)
    if not is_signed(head, domain=domain, signature=signature.signature, public=signature.signed_by):
        raise _refused(key, f"has a signature that {signature.signed_by.hex()} did not make for it", signature)


def _suffix(signature: Signature) -> bytes:
    values = signature.signature.hex().encode(), signature.signed_by.hex().encode()
    return b',"signature":"%s","signed_by":"%s"' % values


_SUFFIX_BYTES = len(_suffix(Signature(bytes(KEY_BYTES), bytes(SIGNATURE_BYTES))))


def _refused(key: str, what: str, signature: Signature | None) -> IntegrityError:
    return IntegrityError(
        f"{key} {what}.",
        hint="Find out who wrote it: `ckptstore log URL` shows what stands before it. A run that began without "
        "signatures is read with signed_from (--signed-from).",
        key=key,
        signed_by=None if signature is None else signature.signed_by.hex(),
    )
