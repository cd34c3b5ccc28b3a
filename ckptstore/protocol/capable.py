"""Whether a store can create only-if-absent: probed once per process and URL, not configured."""

from __future__ import annotations

from ckptstore.clock import IdSource
from ckptstore.objectstore.port import ObjectStore


def require_capable(store: ObjectStore, ids: IdSource) -> None:
    """Refuse a store that cannot be written to safely."""
