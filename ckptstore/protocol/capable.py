"""What is asked before anything is appended: whether the store can be written to, and whether it will be believed."""

from __future__ import annotations

from ckptstore.clock import IdSource
from ckptstore.errors import InvalidInputError
from ckptstore.format.layout import PROBE_PREFIX, slot_key
from ckptstore.format.records import Claim, Known
from ckptstore.format.seal import signer_of
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.probe import probe_absence, probe_creation
from ckptstore.protocol.fold import Fold
from ckptstore.signing import KEY_FILE_VARIABLE, Signing

PROBED: set[tuple[str, ...]] = set()
"""The places that this process has found capable, see `place_of`; with `absence`, of that at least."""


def place_of(store: ObjectStore) -> tuple[str, ...]:
    """Return what tells this place from every other: who moves the bytes, where the service is, the URL."""
    return store.engine, store.endpoint or "", store.url


def require_capable(store: ObjectStore, ids: IdSource, *, single_writer: bool = False) -> None:
    """Return if `store` can be written to safely.

    Args:
        store: Where.
        ids: For the probe's own place.
        single_writer: It is promised that one process at a time appends. Then creating once is not asked for; that an
            absent key reads as absent no promise can replace.

    Raises:
        UnsupportedError: It cannot; what would be lost is said.
        CkptStoreError: The store could not be asked.

    If killed: small objects under `probe/`, which nobody reads.
    """
    place = place_of(store)
    if place in PROBED:
        return
    if (*place, "absence") not in PROBED:
        probe_absence(store, ids=ids, prefix=PROBE_PREFIX)
        PROBED.add((*place, "absence"))
    if not single_writer:
        probe_creation(store, ids=ids, prefix=PROBE_PREFIX)
        PROBED.add(place)


def signing_for(record: Known, last: bytes, below: Fold, signing: Signing | None) -> Signing | None:
    """Return who signs a record: whoever requires signatures, goes on with signed ones, or begins with a claim.

    A job that has a key signs from its claim on. What an operator with a key appends to a run without signatures is
    not signed: else nobody without a key could append there any more.

    Args:
        record: To be appended.
        last: The record that stands last, or `run.json`.
        below: The fold of all that stands.
        signing: The keys that there are.

    Raises:
        InvalidInputError: See `check_signs`.
    """
    check_signs(last, below, signing)
    begins = isinstance(record, Claim) or not below.end
    return signing if begins or signer_of(last) is not None or (signing is not None and signing.trusted) else None


def check_signs(last: bytes, below: Fold, signing: Signing | None) -> None:
    """Check that what is appended will be believed by whoever believes what stands below.

    Args:
        last: The record that stands last, or `run.json`.
        below: The fold of all that stands.
        signing: The keys that there are.

    Raises:
        InvalidInputError: It must be signed, or the last record is, and there is no key to sign with, or another one.
    """
    signer = signer_of(last) if below.end else None
    if signing is not None and signing.public is not None:
        if signer in (None, signing.public.hex()) or signing.trusted:
            return
        raise InvalidInputError(
            f"{slot_key(below.end - 1)} is signed by {signer}, and the key here is that of {signing.public.hex()}: who "
            "trusts the first may not trust the second, and could read nothing of this run any more. No record was "
            "appended.",
            hint="Name all keys that are trusted: Signing.read(key=..., trusted=[...]), or --require-signature KEYFILE "
            "for each.",
            seq=below.end,
        )
    required = signing is not None and signing.requires(below.end)
    if required or signer is not None:
        what = "Signatures are required" if required else f"{slot_key(below.end - 1)} is signed"
        raise InvalidInputError(
            f"{what}, and there is no key to sign with: whoever requires signatures could read nothing of this run any "
            "more. No record was appended.",
            hint=f"Set {KEY_FILE_VARIABLE}, or pass LogOptions(signing=Signing.read(key=...)); or begin another run, "
            "without signatures, from a checkpoint of this one.",
            seq=below.end,
        )
