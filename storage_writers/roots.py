"""Where a run is: a URL or a path, or a store that is open already."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions


def open_root(
    url: str | os.PathLike[str] | ObjectStore,
    *,
    engine: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    transfer: TransferOptions | None = None,
) -> ObjectStore:
    """Return the store at a run's root, or `url` itself if it is one.

    Raises:
        InvalidInputError: It is no root.
    """
    if isinstance(url, str | os.PathLike):
        return open_store(url, engine=engine, storage_options=storage_options, transfer=transfer)
    if not hasattr(url, "open_upload"):
        raise InvalidInputError(
            f"A run's root must be a path, a URL or an open store, not {url!r:.80}.",
            hint="Pass 's3://bucket/run', say.",
        )
    if storage_options or engine is not None:
        raise InvalidInputError(
            "engine and storage_options belong to a URL, not to an open store.", hint="Leave them out."
        )
    return url
