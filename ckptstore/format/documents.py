"""Documents: what stands behind a commit's digests, JSON by name in one small gzip object beside the parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.format.canonical import MAX_DEPTH, canonical_json, check_written
from ckptstore.format.codec import PartRef, bad, deflate, inflate
from ckptstore.format.version import FORMAT
from ckptstore.units import MIB

MAX_DOCUMENTS_BYTES = 16 * MIB
"""Of all documents of a commit together, as JSON."""
MAX_OBJECT_BYTES = MAX_DOCUMENTS_BYTES + MIB
"""Of the gzip object: what does not shrink grows by less than a thousandth."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents as they are stored. Made by `encode_documents`.

    Args:
        body: The gzip object.
        inflated: Size of the JSON in it, in bytes.
    """

    body: bytes
    inflated: int


def encode_documents(documents: Mapping[str, Any]) -> Documents:
    """Return the object that holds `documents`: the same bytes for the same documents, always.

    Args:
        documents: JSON values by name. A float that is not finite is written as text, and comes back as text.

    Raises:
        InvalidInputError: A value is no JSON (where is named) or is nested more than 62 deep, or all together take more
            than 16 MiB.
    """
    if not isinstance(documents, Mapping):
        raise InvalidInputError(
            f"documents must be a table with text for keys, not {type(documents).__name__}.",
            hint="Pass JSON values by name.",
            field="documents",
        )
    said = canonical_json(dict(documents), what="documents", max_depth=MAX_DEPTH - 2)  # it stands in a table itself
    text = b'{"documents":%b,"format":%d,"kind":"documents"}\n' % (said, FORMAT)
    if len(text) > MAX_DOCUMENTS_BYTES:
        raise InvalidInputError(
            f"The documents take {len(text)} bytes, {MAX_DOCUMENTS_BYTES} are allowed.",
            hint="Give a digest in place of the largest, or save it as a value of the state.",
            size=len(text),
        )
    return Documents(deflate(text), len(text))


def decode_documents(body: bytes, ref: PartRef) -> dict[str, Any]:
    """Return the documents in `body`, after the same checks as of a part.

    Raises:
        IntegrityError: Anything differs from what the commit says. Nothing larger than `ref.inflated` is ever held.
        UnsupportedError: A newer version wrote it.
    """
    check_ref(ref)
    value = inflate(body, ref, kind="documents")
    documents = value.get("documents")
    if not isinstance(documents, dict):
        raise bad(ref, "has no table of documents")
    try:
        check_written(value)
    except InvalidInputError as error:
        raise bad(ref, f"holds what is not written: {error.message}") from error
    return documents


def check_ref(ref: PartRef) -> None:
    """Check that what a commit says of its documents can be, before anything is asked for.

    Raises:
        IntegrityError: It is larger than any that is written.
    """
    if ref.size > MAX_OBJECT_BYTES or ref.inflated > MAX_DOCUMENTS_BYTES:
        raise bad(ref, f"is said to have {ref.size} bytes that hold {ref.inflated}, {MAX_DOCUMENTS_BYTES} may be held")
