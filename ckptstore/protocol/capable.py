"""Whether a store can be written to: asked of it once per process and place, not configured."""

from __future__ import annotations

from ckptstore.clock import IdSource
from ckptstore.format.layout import PROBE_PREFIX
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.probe import probe_absence, probe_creation

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
