"""Whether a store can create only-if-absent: asked of it once per process and place, not configured."""

from __future__ import annotations

from ckptstore.clock import IdSource
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.probe import probe

PROBED: set[tuple[str, str]] = set()
"""Engine and URL of the stores that this process has found capable."""


def require_capable(store: ObjectStore, ids: IdSource) -> None:
    """Return if `store` can be written to safely.

    Raises:
        UnsupportedError: It cannot; what would be lost is said.
        CkptStoreError: The store could not be asked.

    If killed: small objects under `probe/`, which nobody reads.
    """
    place = (store.engine, store.url)
    if place not in PROBED:
        probe(store, ids=ids)
        PROBED.add(place)
